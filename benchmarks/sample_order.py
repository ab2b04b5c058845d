"""From a checkpoint within an epoch to the next batch: `python benchmarks/sample_order.py [--json] [--samples N]`.

Rank 3 of 8 at global batches of 1,024: CPU seconds and memory until it has its next batch of indices, and microseconds
for each batch after it. Beside torch's and torchdata's samplers, in processes of their own; median and spread of 5.
"""

import argparse
import itertools
import json
import os
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler
from torch.utils.data.distributed import DistributedSampler

from cordee import ElasticBatchSampler

RANK, RANKS, SHARE, AFTER, REPETITIONS = 3, 8, 128, 200, 5


def cordee(samples: int) -> Iterator[list[int]]:
    sampler = ElasticBatchSampler(range(samples), RANKS * SHARE, dp=(RANK, RANKS))
    sampler.position = samples // 2 // (RANKS * SHARE) * RANKS * SHARE
    return iter(sampler)


def distributed_sampler(samples: int) -> Iterator[list[int]]:
    """Skipped, as its users do."""
    sampler = DistributedSampler(range(samples), RANKS, RANK)
    return itertools.islice(iter(BatchSampler(sampler, SHARE, True)), samples // 2 // (RANKS * SHARE), None)


def stateful_distributed_sampler(samples: int) -> Iterator[list[int]]:
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    sampler = StatefulDistributedSampler(range(samples), RANKS, RANK)
    sampler.load_state_dict({"yielded": samples // 2 // RANKS})
    return iter(BatchSampler(sampler, SHARE, True))


WAYS: dict[str, Callable[[int], Iterator[list[int]]]] = {
    "cordee.ElasticBatchSampler": cordee,
    "torch DistributedSampler, skipped": distributed_sampler,
    "torchdata StatefulDistributedSampler": stateful_distributed_sampler,
}


def measure(way: Callable[[int], Iterator[list[int]]], samples: int) -> tuple[float, float, float]:
    """(CPU seconds to the first batch, MB of memory, microseconds a batch after it)."""
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started_s = time.process_time()
    batches = way(samples)
    assert len(next(batches)) == SHARE
    first_s = time.process_time() - started_s
    started_s = time.process_time()
    for _ in itertools.islice(batches, AFTER):
        pass
    each_us = (time.process_time() - started_s) / AFTER * 1e6
    return first_s, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb) * 1024 / 1e6, each_us


def forked(way: Callable[[int], Iterator[list[int]]], samples: int) -> list[float]:
    """In a process of its own: memory is a peak, and cannot be measured twice."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        os.write(write, json.dumps(measure(way, samples)).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        told: list[float] = json.loads(pipe.read())
    os.waitpid(pid, 0)
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--samples", type=int, default=10_000_000)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = [(name, args.samples) for name in WAYS] + [("cordee.ElasticBatchSampler", 1000 * args.samples)]
    found: dict[tuple[str, int], list[list[float]]] = {case: [] for case in cases}
    for _ in range(REPETITIONS):
        for name, samples in cases:
            found[name, samples].append(forked(WAYS[name], samples))
    rows: list[dict[str, Any]] = []
    for (name, samples), runs in found.items():
        columns = list(zip(*runs, strict=True))
        rows.append(
            {
                "way": name,
                "samples": samples,
                **{
                    key: statistics.median(each)
                    for key, each in zip(("first_s", "memory_mb", "batch_us"), columns, strict=True)
                },
                "first_s_spread": [min(columns[0]), max(columns[0])],
                "batch_us_spread": [min(columns[2]), max(columns[2])],
            }
        )
    if args.json:
        print(json.dumps(rows))
        return
    print("| way | samples | CPU s to the next batch | spread | memory MB | µs a batch | spread |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        low, high = row["first_s_spread"]
        slow = row["batch_us_spread"]
        print(
            f"| {row['way']} | {row['samples']:,} | {row['first_s']:.4f} | {low:.4f} to {high:.4f}"
            f" | {row['memory_mb']:.0f} | {row['batch_us']:.0f} | {slow[0]:.0f} to {slow[1]:.0f} |"
        )


if __name__ == "__main__":
    main()
