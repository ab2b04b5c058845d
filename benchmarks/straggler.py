"""Is a slow rank found, and none where there is none? `python benchmarks/straggler.py [--json] [--steps N] [--apart]`.

Four gloo ranks train with DistributedDataParallel; one of them gets a larger batch than the others, so that it
computes for that many times as long. With `--apart` computing is mostly waiting, as if each rank had a processor to
itself: where four ranks share two cores, who is slow computes faster as soon as the others wait for it. Reported: what
was told, and after how many seconds and steps.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS, SLOW_RANK, BATCH, WIDTH, APART_S = 4, 2, 64, 512, 0.2


def train(steps: int, slow: float, apart: bool) -> None:
    """One rank; writes the time of each step's beginning."""
    import torch
    import torch.distributed as dist

    import cordee

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [each for _ in range(6) for each in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    batch = round(BATCH * slow) if rank == SLOW_RANK else BATCH
    began = []
    with cordee.job({"model": model}) as job:
        for _ in job.steps(steps):
            began.append(time.time())
            optimizer.zero_grad()
            if apart:
                time.sleep(APART_S * (slow if rank == SLOW_RANK else 1.0))
            for _ in range(0 if apart else 3):  # micro-batches, of which only the last is synchronised
                with model.no_sync():
                    model(torch.randn(batch, WIDTH)).square().mean().backward()
            model(torch.randn(4 if apart else batch, WIDTH)).square().mean().backward()
            optimizer.step()
    if rank == 0:
        (Path(os.environ["CORDEE_SPOOL"]) / "began.json").write_text(json.dumps(began))
    dist.barrier()
    dist.destroy_process_group()


def run(steps: int, slow: float, apart: bool) -> dict[str, Any]:
    """One gang; what it told."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as folder:
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"}
        ours = {"CORDEE_JOB": "slow-abcdef", "CORDEE_EPOCH": "1", "CORDEE_SPOOL": folder, "CORDEE_QUIET": "1"}
        command = [sys.executable, __file__, "--steps", str(steps), "--slow", str(slow), *["--apart"] * apart]
        env = {**os.environ, **shared, **ours}
        ranks = [subprocess.Popen(command, env={**env, "RANK": str(rank)}) for rank in range(RANKS)]
        for rank in ranks:
            assert rank.wait(1800) == 0, "a rank failed"
        began = json.loads((Path(folder) / "began.json").read_text())
        lines = (Path(folder) / "rank0.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    behind = [event for event in events if event["kind"] == "RankBehind"]
    told = [
        {
            "rank": each["rank"],
            "how": each["how"],
            "waited": each["waited"],
            "after_s": each["at_us"] / 1e6 - began[0],
            "after_steps": sum(at < each["at_us"] / 1e6 for at in began),
        }
        for each in behind
    ]
    return {"slow": slow, "steps": steps, "step_ms": 1000 * (began[-1] - began[0]) / (steps - 1), "told": told}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--slow", type=float)
    parser.add_argument("--apart", action="store_true")
    args = parser.parse_args()
    if "RANK" in os.environ:
        train(args.steps, args.slow, args.apart)
        return
    rows = [run(args.steps, slow, args.apart) for slow in ([args.slow] if args.slow else [1.0, 1.2, 1.5, 2.0])]
    if args.json:
        print(json.dumps(rows))
        return
    print(f"rank {SLOW_RANK} of {RANKS} computes so many times as long; what was told:")
    for row in rows:
        said = "; ".join(
            f"rank {each['rank']} {each['how']}, the others wait {each['waited']:.0%}, after {each['after_s']:.0f} s"
            f" ({each['after_steps']} steps)"
            for each in row["told"]
        )
        print(f"{row['slow']:>5.1f} x  {row['steps']} steps of {row['step_ms']:.0f} ms: {said or 'nothing'}")


if __name__ == "__main__":
    main()
