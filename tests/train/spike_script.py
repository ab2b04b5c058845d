"""A small job whose loss jumps at one batch of its data, on one rank or more.

Batch number N of the order without detours is bad if `--bad N` says so: its loss is NaN, or with `--factor` so many
times what it would be. `--rank R` has it on that rank only. Writes a line for each step to `<out>/steps<rank>`: step,
sum of the samples of all ranks' global batch as this rank sees them, loss; at the end a digest of the weights.
"""

import argparse
import hashlib
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import cordee

BATCH, SAMPLES = 8, 400


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--to", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--bad", type=int, nargs="*", default=[])
    parser.add_argument("--factor", type=float, default=float("nan"))
    parser.add_argument("--rank", type=int)
    parser.add_argument("--die", type=int)
    parser.add_argument("--alone", type=int, help="rank that spoils its own weights in the last step")
    parser.add_argument("--on-spike", default="rollback")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        dist.init_process_group("gloo")
    rank = dist.get_rank() if world > 1 else 0
    torch.manual_seed(5)
    model = torch.nn.Sequential(torch.nn.Linear(2, 16), torch.nn.Dropout(0.2), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    torch.manual_seed(100 + rank)
    sampler = cordee.ElasticBatchSampler(range(SAMPLES), BATCH, seed=3)
    loader = DataLoader(torch.arange(SAMPLES), batch_sampler=sampler)
    state = {"model": model, "optimizer": optimizer, "data": sampler}
    trace = (args.out / f"steps{rank}").open("a", buffering=1)
    bad = {int(index) for number in args.bad for index in sampler.order.samples(number * BATCH, BATCH)}
    with trace, cordee.job(state, to=args.to, every=args.every, on_spike=args.on_spike) as job:
        batches = sampler.batches(loader)
        for step in job.steps(args.steps):
            if step == args.die and not (args.out / "died").exists() and (args.out / "went_back").exists():
                (args.out / "died").touch()
                os._exit(9)
            batch = next(batches)
            inputs = torch.stack([batch / SAMPLES, 1 - batch / SAMPLES], dim=1)
            loss = ((model(inputs).squeeze(1) - inputs[:, 0]) ** 2).mean() + 1.0
            if bad & set(batch.tolist()) and args.rank in (None, rank):
                loss = loss * args.factor
            optimizer.zero_grad()
            loss.backward()
            if world > 1:
                for weight in model.parameters():
                    dist.all_reduce(weight.grad)
            optimizer.step()
            if args.alone == rank and step == args.steps - 1:
                model[0].weight.data.fill_(float("nan"))
            trace.write(json.dumps([step, sorted(batch.tolist()), loss.item()]) + "\n")
            job.log(loss=loss)
            if job._timer.undone:
                (args.out / "went_back").touch()
        weights = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
        (args.out / f"end{rank}").write_text(hashlib.sha256(weights).hexdigest())
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
