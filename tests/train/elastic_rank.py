"""A job that changes its number of ranks: `elastic_rank.py <folder>` prints what each gang of it saw, as JSON.

FSDP2, micro-batches, batches that end in the next epoch, no dropout. Each rank tells the samples of each step and one
number of its own generator; rank 0 the loss of the global batch.
"""

import json
import os
import shutil
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # an optimizer's first step imports it: once here, and not in each rank
import torch.distributed as dist
from forked import gang
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import cordee

STEPS, GLOBAL_BATCH, SAMPLES = 18, 24, 100
# How many ranks, and the step in which one of them is told to leave.
LEGS = ((4, 4), (2, 8), (3, 13), (4, None))


def run(to: Path, leave_in: int | None, rank: int) -> list[list[Any]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    inputs = torch.randn(SAMPLES, 7)
    dataset = TensorDataset(torch.arange(SAMPLES), inputs, inputs.sin().sum(1, keepdim=True))
    model = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 1))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)
    sampler = cordee.ElasticBatchSampler(dataset, GLOBAL_BATCH, micro_batch_max=3, seed=11, drop_last=False)
    loader = DataLoader(dataset, batch_sampler=sampler)
    torch.manual_seed(100 + rank)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule, "scaler": scaler, "data": sampler, "n": 0}
    rows: list[list[Any]] = []
    try:
        with cordee.job(state, to=to, every="1h") as job:
            batches = sampler.batches(loader)
            for step in job.steps(STEPS):
                if step == leave_in and rank == job.world_size - 1:
                    os.kill(os.getpid(), signal.SIGTERM)
                taken: list[int] = []
                total = torch.zeros(())
                for micro in range(sampler.micro_batches):
                    index, x, y = next(batches)
                    model.set_requires_gradient_sync(micro == sampler.micro_batches - 1)
                    loss = (model(x) - y).square().mean() / sampler.micro_batches
                    scaler.scale(loss).backward()
                    taken += index.tolist()
                    total += loss.detach()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step()
                state["n"] += 1
                dist.all_reduce(total)
                rows.append([step, taken, total.item() / job.world_size, torch.rand(1).item(), scaler.get_scale()])
    except SystemExit as left:
        left.answer = rows
        raise
    rows.append([state["n"], schedule.get_last_lr(), scaler.state_dict()])
    dist.destroy_process_group()
    return rows


def main(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"whole": gang(4, partial(run, folder / "whole", None)), "legs": []}
    for number, (world, leave_in) in enumerate(LEGS):
        found["legs"].append(gang(world, partial(run, folder / "legs", leave_in)))
        if number == 0:
            shutil.copytree(folder / "legs", folder / "again")
            again = gang(2, partial(run, folder / "again", LEGS[1][1]))
    return {**found, "again": again}


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]))), flush=True)
