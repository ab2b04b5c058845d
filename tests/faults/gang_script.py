"""A gang of FSDP2 ranks for the fault tests: it saves every 4 steps, and goes only as far as a test allows.

Each rank writes to `<out>/diary<rank>.jsonl` who it is and what of the attempt before it still runs, then each step
that it begins; at the end its shard of the weights to `<out>/weights<rank>`. A step waits until `<out>/allowed` holds a
number above it. `<out>/kill_uploader<rank>` holds a point at which its uploaders die in the next attempt.
"""

import json
import os
import sys
import threading
from pathlib import Path
from typing import TextIO

from cordee.agent.process import find

OUT = Path(sys.argv[1])
STEPS, EVERY = int(sys.argv[2]), 4


def begin(diary: TextIO) -> None:
    job, epoch = os.environ["CORDEE_JOB"], int(os.environ["CORDEE_EPOCH"])
    left = [each.pid for each in find(f"{job}.{epoch - 1}")]
    diary.write(json.dumps({"start": epoch, "pid": os.getpid(), "left_of_the_one_before": left}) + "\n")
    kill_uploader = OUT / f"kill_uploader{os.environ['RANK']}"
    if kill_uploader.exists():
        os.environ["CORDEE_TEST_KILL_AT"] = kill_uploader.read_text()
        kill_uploader.unlink()


def wait_until_allowed(step: int) -> None:
    tick = threading.Event()
    while int((OUT / "allowed").read_text()) <= step:
        tick.wait(0.01)


def main() -> None:
    rank = int(os.environ["RANK"])
    with (OUT / f"diary{rank}.jsonl").open("a", buffering=1) as diary:
        begin(diary)
        train(rank, diary)


def train(rank: int, diary: TextIO) -> None:
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import cordee

    dist.init_process_group("gloo")
    torch.manual_seed(1786)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.Dropout(0.2), torch.nn.Linear(64, 4))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(rank)
    with cordee.job({"model": model, "optimizer": optimizer}, every=EVERY) as job:
        for step in job.steps(STEPS):
            diary.write(json.dumps({"epoch": int(os.environ["CORDEE_EPOCH"]), "step": step}) + "\n")
            wait_until_allowed(step)
            loss = model(torch.randn(8, 16)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            job.log(loss=loss, tokens=16)
    shards = [weight.to_local().detach().contiguous().numpy().tobytes() for weight in model.parameters()]
    (OUT / f"weights{rank}").write_bytes(b"".join(shards))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
