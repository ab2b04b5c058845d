"""A job whose rank 2 is slow while `<out>/slow` is there, and whose rank 3 hangs once `<out>/hang` is."""

import argparse
import threading
from pathlib import Path

import torch
import torch.distributed as dist

import cordee

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
out = parser.parse_args().out
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 64))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
pause = threading.Event()


def next_batch() -> torch.Tensor:
    if rank == 3 and (out / "hang").exists():
        pause.wait()
    pause.wait(0.2 if rank == 2 and (out / "slow").exists() else 0.1)
    return torch.randn(16, 64)


with cordee.job({"model": model}) as job:
    for _ in job.steps(100_000):
        model(next_batch()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with (out / f"steps{rank}").open("a") as steps:
            steps.write(".")
