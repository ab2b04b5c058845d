"""Collectives among the ranks of this machine, by size, and a gather beside a product; gloo on CPUs, NCCL on GPUs."""

import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cordee.train.calibration.timing import CudaDevice, Device

GPU_BYTES = tuple(1 << power for power in (13, 16, 18, 20, 22, 24, 26, 28, 30))
CPU_BYTES = tuple(1 << power for power in (13, 16, 18, 20, 22, 24))
RUNS, RUNS_GPU = 9, 20
SIDE, SIDE_GPU = 512, 8192

Run = Callable[[], object]


def measure_collectives(ranks: int, *, on_gpu: bool) -> Iterator[dict[str, Any]]:
    """Yield samples of each collective by size: the median of the slowest rank's seconds.

    Raises:
        SystemExit: a rank failed.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        workers = [context.Process(target=_rank, args=(rank, ranks, on_gpu, folder)) for rank in range(ranks)]
        for each in workers:
            each.start()
        for each in workers:
            each.join()
        if any(each.exitcode for each in workers):
            raise SystemExit("a rank of the collectives failed")
        yield from json.loads((Path(folder) / "found.json").read_text())


def _rank(rank: int, ranks: int, on_gpu: bool, folder: str) -> None:
    """Take part in all collectives; rank 0 writes what was found."""
    device: Device = CudaDevice(rank) if on_gpu else Device(1)
    store = dist.FileStore(f"{folder}/rendezvous", ranks)
    dist.init_process_group("nccl" if on_gpu else "gloo", store=store, rank=rank, world_size=ranks)
    try:
        found = [*_by_size(ranks, device), *_beside_a_product(ranks, device)]
        if rank == 0:
            (Path(folder) / "found.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


def _by_size(ranks: int, device: Device) -> Iterator[dict[str, Any]]:
    for size in GPU_BYTES if device.kind == "cuda" else CPU_BYTES:
        whole = torch.ones(size // 4, device=device.torch)
        part = torch.ones(size // 4 // ranks, device=device.torch)
        runs: dict[str, Run] = {
            "all-reduce": lambda whole=whole: dist.all_reduce(whole),  # type: ignore[misc]
            "all-gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),  # type: ignore[misc]
            "send": lambda whole=whole: _pass_on(whole, ranks),  # type: ignore[misc]
        }
        if device.kind == "cuda":
            runs["reduce-scatter"] = lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole)  # type: ignore[misc]
            runs["all-to-all"] = lambda whole=whole: dist.all_to_all_single(torch.empty_like(whole), whole)  # type: ignore[misc]
        for name, run in runs.items():
            times = _times(run, device)
            low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
            yield {
                "table": name, "at": [float(ranks), float(size)], "work": float(size), "seconds": middle,
                "p25_s": low, "p75_s": high, "runs": len(times),
            }  # fmt: skip


def _pass_on(whole: torch.Tensor, ranks: int) -> None:
    """Send to the next rank and receive from the one before."""
    rank = dist.get_rank()
    sent = dist.P2POp(dist.isend, whole, (rank + 1) % ranks)
    received = dist.P2POp(dist.irecv, torch.empty_like(whole), (rank - 1) % ranks)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()


def _times(run: Run, device: Device) -> list[float]:
    """Return the sorted wall seconds of a run, of the slowest rank each time."""
    run()
    found = []
    for _ in range(RUNS_GPU if device.kind == "cuda" else RUNS):
        device.wait()
        dist.barrier()
        start = time.perf_counter()
        run()
        device.wait()
        slowest = torch.tensor([time.perf_counter() - start], device=device.torch)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found.append(float(slowest))
    return sorted(found)


def _beside_a_product(ranks: int, device: Device) -> Iterator[dict[str, Any]]:
    """Yield the part of a gather's time by which a product that runs beside it is longer: `exposed_fraction`.

    Only on GPUs: on a CPU both are the same cores' work.
    """
    if device.kind != "cuda":
        return
    side = torch.ones(SIDE_GPU, SIDE_GPU, device=device.torch, dtype=torch.bfloat16)
    whole = torch.ones(GPU_BYTES[-2] // 4, device=device.torch)
    part = torch.ones(GPU_BYTES[-2] // 4 // ranks, device=device.torch)

    def product() -> None:
        for _ in range(8):
            torch.mm(side, side)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, part)

    def both() -> None:
        work = dist.all_gather_into_tensor(whole, part, async_op=True)
        product()
        work.wait()

    alone, traffic, together = (statistics.median(_times(run, device)) for run in (product, gather, both))
    hidden = min(alone, traffic)
    exposed = min(1.0, max(0.0, (together - max(alone, traffic)) / hidden))
    yield {"number": "exposed_fraction", "value": exposed}
