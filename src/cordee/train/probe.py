"""Short work for the doctor and for preflights, in processes of its own, by any interpreter that has torch.

    python -m cordee.train.probe product|reduce --gpus 8
    python probe.py ranks --gpus 8 --first 8 --world 16 --address 10.0.0.1 --port 20000

It prints one JSON object: FLOP/s of a matrix product on each GPU, bytes a second of an all-reduce among all of this
machine, or both, and of one among the ranks of all machines (`ranks`). Without GPUs (`--gpus 0`) it runs on the CPU.
"""

import argparse
import json
import multiprocessing
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cordee.imports import end_uncollected

GPU_SIDE, CPU_SIDE = 8192, 512
GPU_BYTES, CPU_BYTES = 256 << 20, 4 << 20
REPEATS = 5
CPU_RANKS = 2
LIMIT = timedelta(seconds=30)


def main() -> None:
    """Do the work that is asked for, and print its speed."""
    parser = argparse.ArgumentParser(prog="python -m cordee.train.probe")
    parser.add_argument("work", choices=("product", "reduce", "ranks"))
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--local", type=int, default=CPU_RANKS, help="ranks of this machine, without GPUs")
    parser.add_argument("--first", type=int, default=0, help="the first rank of this machine")
    parser.add_argument("--world", type=int, default=0, help="ranks of all machines")
    parser.add_argument("--address", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    given = parser.parse_args()
    if given.work == "product":
        speeds = [_product(f"cuda:{gpu}") for gpu in range(given.gpus)] or [_product("cpu")]
        print(json.dumps({"flop_per_s": speeds}))
    elif given.work == "ranks":
        print(json.dumps({"ranks": _ranks(given)}))
    else:
        with tempfile.TemporaryDirectory() as folder:
            _reduce_here(given.gpus, folder)
            print(json.dumps({"bytes_per_s": float((Path(folder) / "speed").read_text())}))


def _reduce_here(gpus: int, folder: str) -> None:
    """Run the ranks of an all-reduce on this machine; leave with 1 if one fails."""
    world = gpus or CPU_RANKS
    backend = "nccl" if gpus else "gloo"
    context = multiprocessing.get_context("spawn")
    ranks = [context.Process(target=_reduce, args=(rank, world, backend, folder)) for rank in range(world)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    if any(each.exitcode for each in ranks):
        raise SystemExit(1)


def _ranks(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the ranks of this machine; return what each has found, as far as it came."""
    local = given.gpus or given.local
    context = multiprocessing.get_context("spawn")
    gate = context.Barrier(local)
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            context.Process(target=_rank, args=(rank, local, vars(given), folder, gate), daemon=True)
            for rank in range(local)
        ]
        for each in ranks:
            each.start()
        for each in ranks:
            each.join()
        files = [Path(folder) / f"rank{rank}.json" for rank in range(local)]
        return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def _rank(local_rank: int, local: int, given: dict[str, Any], folder: str, gate: "threading.Barrier") -> None:
    """Do the work of one rank: a product, an all-reduce on its machine, and one among all machines.

    After each of them it writes what is known. A rank whose product fails keeps the others from waiting for it.
    """
    on_gpu = bool(given["gpus"])
    device, backend = (f"cuda:{local_rank}", "nccl") if on_gpu else ("cpu", "gloo")
    found: dict[str, Any] = {"cuda": torch.version.cuda is not None}

    def keep(name: str, work: Callable[[], float]) -> None:
        try:
            found[name] = work()
        except Exception as error:
            found["failed"] = name
            found["why"] = next(iter(str(error).splitlines()), "")[:200] or type(error).__name__
            raise SystemExit(0) from None
        finally:
            text = Path(folder) / f"rank{local_rank}.json.tmp"
            text.write_text(json.dumps(found))
            text.rename(Path(folder) / f"rank{local_rank}.json")

    if not on_gpu:
        torch.set_num_threads(1)
    try:
        keep("flop_per_s", lambda: _product(device))
    except SystemExit:
        gate.abort()
        raise
    with suppress(threading.BrokenBarrierError):
        gate.wait(LIMIT.total_seconds())
    if gate.broken:
        return
    if local > 1:
        there = dist.FileStore(f"{folder}/rendezvous", local)
        keep("local_bytes_per_s", lambda: _all_reduce(there, local_rank, local, backend, device))
    if given["world"] > local:
        keep("bytes_per_s", lambda: _between_machines(given["first"] + local_rank, given, backend, device))


def _between_machines(rank: int, given: dict[str, Any], backend: str, device: str) -> float:
    """Return the speed of an all-reduce among all ranks; the port is free again when it returns."""
    world = given["world"]
    store = dist.TCPStore(given["address"], given["port"], world, rank == 0, LIMIT, wait_for_workers=False)
    speed = _all_reduce(dist.PrefixStore("probe", store), rank, world, backend, device)
    if store.add("done", 1) == world:
        store.set("all", "done")
    store.wait(["all"], LIMIT)
    if rank:
        with suppress(dist.DistError):
            store.wait(["gone"], LIMIT)  # until the process of rank 0, which listens, has ended
    return speed


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
    speed = _all_reduce(dist.FileStore(f"{folder}/rendezvous", world), rank, world, backend, device)
    if rank == 0:
        (Path(folder) / "speed").write_text(str(speed))


def _all_reduce(store: dist.Store, rank: int, world: int, backend: str, device: str) -> float:
    """Return the bytes a second that each rank sends in an all-reduce (bus bandwidth)."""
    if backend == "nccl":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world, timeout=LIMIT)
    try:
        size = GPU_BYTES if backend == "nccl" else CPU_BYTES
        data = torch.ones(size // 4, device=device)
        return 2 * (world - 1) / world * size / _best(lambda: dist.all_reduce(data), device)
    finally:
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
    end_uncollected()
    main()
