"""A small training job for the tests: dropout, random batches, a scheduler and a data position, on one rank or more.

It writes the steps it begins to `<out>/steps<rank>`, and at its end losses and weights to `<out>/end<rank>.json`.
`--hang RANK:STEP` sits in that step for ever; `--freeze RANK:STEP` stops the whole process, its watcher too;
`--die RANK:STEP` kills it; `--notice RANK:STEP` gives itself notice in that step, and hangs in it if it also says so.
`--hold RANK:STEP` waits in that step for a notice or for `<out>/go`.
"""

import argparse
import hashlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

import cordee


class Position:
    """Data of its own for each rank, drawn from a generator of its own."""

    def __init__(self, rank: int) -> None:
        self.at = 1000 * rank
        self.generator = torch.Generator().manual_seed(rank)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        self.generator.set_state(state["generator"])


def here(where: str | None, rank: int, step: int) -> bool:
    return where is not None and where == f"{rank}:{step}"


def digest_of(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(each.detach().numpy().tobytes() for each in tensors)).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--every", type=int, default=None)
    parser.add_argument("--ram", type=int, default=None)
    parser.add_argument("--grace", default="30s")
    parser.add_argument("--notice")
    parser.add_argument("--hang")
    parser.add_argument("--freeze")
    parser.add_argument("--die")
    parser.add_argument("--hold")
    args = parser.parse_args()
    torch.set_num_threads(1)
    noticed: list[int] = []
    for number in (signal.SIGTERM, signal.SIGUSR1) if args.hold else ():
        signal.signal(number, lambda number, _: noticed.append(number))  # the SDK goes on to call it
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    torch.manual_seed(5)
    layers = [torch.nn.Linear(8, 32), torch.nn.BatchNorm1d(32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [7, 30, 45], 0.9)
    position = Position(rank)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(100 + rank)
    losses = []
    trace = (args.out / f"steps{rank}").open("a", buffering=1)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "data": position, "seen": 0}
    with trace, cordee.job(state, to=args.to, every=args.every, ram=args.ram, grace=args.grace) as job:
        for step in job.steps(args.steps):
            trace.write(f"{step}\n")
            if here(args.notice, rank, step):
                os.kill(os.getpid(), signal.SIGTERM)
            if here(args.hang, rank, step):
                sys.stdout.reconfigure(write_through=False, line_buffering=False)
                sys.stdout.write("what waits in its buffer")
                threading.Event().wait()
            while here(args.hold, rank, step) and not noticed and not (args.out / "go").exists():
                threading.Event().wait(0.005)
            if here(args.freeze, rank, step):
                os.kill(os.getpid(), signal.SIGSTOP)
            if here(args.die, rank, step):
                os.kill(os.getpid(), signal.SIGKILL)
            position.at += 1
            state["seen"] += 1
            inputs = torch.randn(16, 8, generator=position.generator)
            noise = random.random() + np.random.rand() + position.at / 1000
            loss = ((model(inputs) - inputs.sum(1, keepdim=True) - noise) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            if world > 1:
                for weight in model.parameters():
                    dist.all_reduce(weight.grad)
            optimizer.step()
            scheduler.step()
            losses.append([step, loss.item()])
            job.log(loss=loss, tokens=16 * world)
        digest, buffers = digest_of(model.parameters()), digest_of(model.buffers())
        (args.out / f"weights{rank}").write_text(digest)
    end = {"weights": digest, "buffers": buffers, "losses": losses, "at": position.at, "seen": state["seen"]}
    (args.out / f"end{rank}.json").write_text(json.dumps(end))
    if world > 1:
        dist.barrier()  # without a destination nobody counts the ranks out, and gloo aborts who is left alone
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
