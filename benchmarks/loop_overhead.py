"""What `job.steps` and `job.log` cost a loop that does nothing else: `python benchmarks/loop_overhead.py [--json]`.

Microseconds a step, alone and on 4 ranks, beside a bare `range`; median and spread of 5 repetitions on rank 0.
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

STEPS, REPETITIONS = 100_000, 5


def measure() -> dict[str, Any]:
    """On this rank, in microseconds a step."""
    import torch
    import torch.distributed as dist

    import cordee

    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo")
    bare, ours = [], []
    with tempfile.TemporaryDirectory() as own:
        to = os.environ.get("BENCHMARK_TO", own)
        with cordee.job({"seen": 0}, to=to, every="1h") as job:
            for repetition in range(1, REPETITIONS + 1):
                started = time.perf_counter()
                for _ in range(STEPS):
                    pass
                bare.append((time.perf_counter() - started) / STEPS * 1e6)
                last = 0.0
                started = time.perf_counter()
                for _ in job.steps(repetition * STEPS):
                    job.log(loss=2.5, tokens=1024)
                    last = time.perf_counter()  # the final checkpoint is not a step's cost
                ours.append((last - started) / STEPS * 1e6)
    return {"ranks": world, "bare_us": bare, "cordee_us": ours}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if "BENCHMARK_TO" in os.environ:
        told = measure()
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(told))
        return
    rows = [run(world) for world in (1, 4)]
    if args.json:
        print(json.dumps(rows))
        return
    print(f"{'ranks':>5}  {'bare loop us':>12}  {'with Cordee us':>14}  spread")
    for row in rows:
        ours = row["cordee_us"]
        bare, middle = statistics.median(row["bare_us"]), statistics.median(ours)
        print(f"{row['ranks']:>5}  {bare:>12.3f}  {middle:>14.2f}  {min(ours):.2f} to {max(ours):.2f}")


def run(world: int) -> dict[str, Any]:
    """The measurement in processes of their own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    with tempfile.TemporaryDirectory() as to:
        env = {**os.environ, "BENCHMARK_TO": to, "CORDEE_QUIET": "1", "OMP_NUM_THREADS": "1"}
        if world > 1:
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world)}
        command = [sys.executable, __file__]
        ranks = [
            subprocess.Popen(command, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        told = [rank.communicate(timeout=300)[0] for rank in ranks]
    result: dict[str, Any] = json.loads(told[0].splitlines()[-1])
    return result


if __name__ == "__main__":
    main()
