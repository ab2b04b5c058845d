"""A job that changes its number of ranks: `elastic_rank.py <folder> [seed]` prints what each gang of it saw, as JSON.

With a seed the ranks are killed or told to leave by chance. FSDP2, micro-batches, batches that end in the next epoch,
no dropout. Each rank tells the samples of each step and one number of its own generator; rank 0 the loss of all.
"""

import json
import os
import random
import shutil
import signal
import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import cordee
from forked import gang
from forks import HEAVY

STEPS, GLOBAL_BATCH, SAMPLES = 18, 24, 100
# How many ranks, and the step in which one of them is told to leave.
LEGS = ((4, 4), (2, 8), (3, 13), (4, None))


def run(to: Path, leave_in: int | None, how: int, rank: int) -> list[list[Any]]:
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
        with cordee.job(state, to=to, every="1h" if how == signal.SIGTERM else 3) as job:
            batches = sampler.batches(loader)
            for step in job.steps(STEPS):
                if step == leave_in and rank == job.world_size - 1:
                    os.kill(os.getpid(), how)
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
    except Exception as error:
        if how == signal.SIGTERM:
            raise
        raise left_with(rows) from error  # its peer was killed
    rows.append([state["n"], schedule.get_last_lr(), scaler.state_dict()])
    dist.destroy_process_group()
    return rows


def left_with(rows: list[list[Any]]) -> SystemExit:
    left = SystemExit(1)
    left.answer = rows  # type: ignore[attr-defined]
    return left


def main(folder: Path) -> dict[str, Any]:
    def until(where: str, leave_in: int | None) -> Any:
        return partial(run, folder / where, leave_in, signal.SIGTERM)

    found: dict[str, Any] = {"whole": gang(4, until("whole", None)), "legs": []}
    for number, (world, leave_in) in enumerate(LEGS):
        found["legs"].append(gang(world, until("legs", leave_in)))
        if number == 0:
            shutil.copytree(folder / "legs", folder / "again")
            again = gang(2, until("again", LEGS[1][1]))
    return {**found, "again": again}


def by_chance(folder: Path, seed: int) -> dict[str, Any]:
    """Legs until one comes to the end, each with a number of ranks and an end of its own."""
    chance = random.Random(seed)
    legs: list[Any] = []
    while not legs or any(code for code, _ in legs[-1][1]):
        step = chance.randrange(STEPS) if len(legs) < 9 else None
        world, how = chance.choice((1, 2, 3, 4, 6)), chance.choice((signal.SIGTERM, signal.SIGKILL))
        legs.append([world, gang(world, partial(run, folder / "legs", step, how))])
    return {"whole": gang(4, partial(run, folder / "whole", None, signal.SIGTERM)), "legs": legs}


if __name__ == "__main__":
    for each in HEAVY:  # once here, and not in each rank
        import_module(each)
    where, *seeds = sys.argv[1:]
    print(json.dumps(by_chance(Path(where), int(seeds[0])) if seeds else main(Path(where))), flush=True)
