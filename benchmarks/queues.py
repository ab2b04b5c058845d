"""What a change and a question of the tree of queues cost, against its depth and its size.

python benchmarks/queues.py [--json]
"""

import argparse
import json
import time
from collections.abc import Callable
from itertools import count

from cordee.events import Job, Queue
from cordee.ids import JobId
from cordee.schedule.quota.held import Held
from cordee.schedule.quota.quotas import Quotas

REPEATS = 5
CALLS = 4_000


def tree(depth: int, width: int) -> tuple[list[Queue], str]:
    """`width` chains of queues of that depth, each with a quota and a limit; and the name of one innermost queue."""
    queues = []
    for chain in range(width):
        parent = None
        for level in range(depth):
            name = f"q{chain}-{level}"
            queues.append(Queue(name=name, parent=parent, quota_gpus=8, limit_gpus=100_000, weight=1 + chain % 3))
            parent = name
    return queues, f"q0-{depth - 1}"


def cpu_us(call: Callable[[], object]) -> float:
    """The best of some rounds, for each call."""
    best = float("inf")
    for _ in range(REPEATS):
        began = time.process_time()
        for _ in range(CALLS):
            call()
        best = min(best, time.process_time() - began)
    return best / CALLS * 1e6


def measure(depth: int, width: int) -> dict[str, float]:
    """Microseconds of CPU for a put with its take, and for each question."""
    queues, name = tree(depth, width)
    quotas = Quotas(queues)
    quotas.resize(Held(gpu_milli=100_000_000), 0)
    job = Job(job_id=JobId("a"), name="a", owner="ann", gpus=8, queue=name)
    other = Job(job_id=JobId("b"), name="b", owner="bob", gpus=8, queue=f"q{width - 1}-{depth - 1}")
    held, times = Held(gpu_milli=8000, nano_usd_per_hour=1), count(1)
    quotas.put(other, held, 0)

    def change() -> None:
        at_us = next(times) * 1_000_000
        quotas.put(job, held, at_us)
        quotas.take(job, held, at_us)

    now_us = 10**12
    push = quotas.push(job)
    return {
        "depth": depth,
        "queues": len(queues),
        "put_and_take_us": cpu_us(change),
        "admits_us": cpu_us(lambda: quotas.admits(job, now_us)),
        "share_us": cpu_us(lambda: quotas.share(name, now_us)),
        "takes_us": cpu_us(lambda: push.takes(other, 8000, below=True)),
    }


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    rows = [measure(depth, width) for depth, width in ((1, 1), (2, 1), (4, 1), (8, 1), (2, 10), (2, 100), (2, 1000))]
    if asked.json:
        print(json.dumps(rows, indent=2))
        return
    heads = list(rows[0])
    print("  ".join(f"{head:>16}" for head in heads))
    for row in rows:
        print("  ".join(f"{row[head]:>16.2f}" if head.endswith("_us") else f"{row[head]:>16}" for head in heads))


if __name__ == "__main__":
    main()
