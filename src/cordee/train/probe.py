"""Short work for the doctor, in processes of its own: `python -m cordee.train.probe product|reduce --gpus 8`.

It prints one JSON object: FLOP/s of a matrix product on each GPU, or bytes a second of an all-reduce among all. Without
GPUs (`--gpus 0`) both run on the CPU.
"""

import argparse
import json
import multiprocessing
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

GPU_SIDE, CPU_SIDE = 8192, 512
GPU_BYTES, CPU_BYTES = 256 << 20, 4 << 20
REPEATS = 5
CPU_RANKS = 2
LIMIT = timedelta(seconds=30)


def main() -> None:
    """Do the work that is asked for, and print its speed."""
    parser = argparse.ArgumentParser(prog="python -m cordee.train.probe")
    parser.add_argument("work", choices=("product", "reduce"))
    parser.add_argument("--gpus", type=int, required=True)
    given = parser.parse_args()
    if given.work == "product":
        speeds = [_product(f"cuda:{gpu}") for gpu in range(given.gpus)] or [_product("cpu")]
        print(json.dumps({"flop_per_s": speeds}))
        return
    with tempfile.TemporaryDirectory() as folder:
        world = given.gpus or CPU_RANKS
        backend = "nccl" if given.gpus else "gloo"
        context = multiprocessing.get_context("spawn")
        ranks = [context.Process(target=_reduce, args=(rank, world, backend, folder)) for rank in range(world)]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        if any(each.exitcode for each in ranks):
            raise SystemExit(1)
        print(json.dumps({"bytes_per_s": float((Path(folder) / "speed").read_text())}))


def _product(device: str) -> float:
    """Return the FLOP/s of a product of square matrices: bf16 on a GPU, fp32 on the CPU."""
    on_gpu = device != "cpu"
    side = GPU_SIDE if on_gpu else CPU_SIDE
    one = torch.ones(side, side, device=device, dtype=torch.bfloat16 if on_gpu else torch.float32)
    seconds = _best(lambda: torch.mm(one, one), device)
    return 2 * side**3 / seconds


def _reduce(rank: int, world: int, backend: str, folder: str) -> None:
    """Take part in an all-reduce; rank 0 writes the bytes a second that each rank sends (bus bandwidth)."""
    device = f"cuda:{rank}" if backend == "nccl" else "cpu"
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world, timeout=LIMIT
    )
    size = GPU_BYTES if backend == "nccl" else CPU_BYTES
    data = torch.ones(size // 4, device=device)
    seconds = _best(lambda: dist.all_reduce(data), device)
    if rank == 0:
        (Path(folder) / "speed").write_text(str(2 * (world - 1) / world * size / seconds))
    dist.destroy_process_group()


def _best(work: Callable[[], object], device: str) -> float:
    """Return the shortest of a few times, in seconds."""
    work()
    times = []
    for _ in range(REPEATS):
        _wait(device)
        start_s = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - start_s)
    return min(times)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
