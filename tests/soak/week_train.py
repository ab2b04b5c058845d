"""The training script of the week: a small model, its steps in a diary, and a few ways to go wrong."""

import argparse
import os
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

import cordee


def main() -> None:
    """Train for so many steps, at the pace asked for."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--slow-until", type=Path, help="a file: until it is there, a step takes half a second")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--nan-at", type=int, default=-1, help="the batch that spoils the loss")
    parser.add_argument("--on-spike")
    parser.add_argument("--die", help="a file: rank 1 dies in the middle, once, and leaves it")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if world > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    sampler = cordee.ElasticBatchSampler(range(4096), 4, seed=1)
    loader = DataLoader(range(4096), batch_sampler=sampler)  # type: ignore[arg-type]
    with cordee.job({"model": model, "optimizer": optimizer, "data": sampler}, every=5, on_spike=args.on_spike) as job:
        batches = sampler.batches(loader)
        for step in job.steps(args.steps):
            samples = next(batches).tolist()
            inputs = torch.tensor([[((9 * each + k) % 17) / 17 for k in range(8)] for each in samples])
            loss = ((model(inputs) - inputs.sum(1, keepdim=True)) ** 2).mean()
            if args.nan_at in samples:
                loss = loss * float("nan")
            optimizer.zero_grad()
            loss.backward()
            if world > 1:
                for parameter in model.parameters():
                    torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
            job.log(loss=loss, tokens=len(samples))
            with (args.out / f"{args.name}.{rank}").open("a") as diary:
                diary.write(f"{step} {' '.join(map(str, samples))}\n")
            if args.slow_until and not args.slow_until.exists():
                time.sleep(0.5)
            if args.die and rank == 1 and step == args.steps // 2 and not Path(args.die).exists():
                Path(args.die).touch()
                os._exit(9)
    weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    (args.out / f"{args.name}.{rank}.weights").write_text(" ".join(each.hex() for each in weights.tolist()))


if __name__ == "__main__":
    main()
