"""Collectives by size and by number of ranks and nodes, and a gather beside a product; gloo on CPUs, NCCL on GPUs.

Ranks of one node meet in groups of 2, 4, ... of it, all nodes at the same time. Across nodes the ranks with one number
on their node meet, all these groups at the same time, as data-parallel traffic does: each GPU has its part of the
network then. The slowest rank of all groups counts.
"""

import json
import multiprocessing
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from cordee.train.calibration.timing import CudaDevice, Device

GPU_BYTES = tuple(1 << power for power in (13, 16, 18, 20, 22, 24, 26, 28, 30))
CPU_BYTES = tuple(1 << power for power in (13, 16, 18, 20, 22, 24))
RUNS, RUNS_GPU = 9, 20
SIDE, SIDE_GPU = 512, 8192
PRODUCTS = 8

Run = Callable[[], object]

# torch 2.13 renames two collectives, and warns of the names that older versions have alone.
warnings.filterwarnings("ignore", message=r".*torch\.distributed\.\w+` is deprecated", category=FutureWarning)


def measure_collectives(ranks: int, *, on_gpu: bool) -> Iterator[dict[str, Any]]:
    """Yield samples of each collective by size among ranks of this machine: the median of the slowest rank's seconds.

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
        # On a CPU a product and a gather beside it are the same cores' work: it is not asked without several nodes.
        found = [*among_ranks(device, ranks), *(beside_a_product(device, ranks) if on_gpu else ())]
        if rank == 0:
            (Path(folder) / "found.json").write_text(json.dumps(found))
    finally:
        dist.destroy_process_group()


def among_ranks(device: Device, local: int) -> Iterator[dict[str, Any]]:
    """Yield samples of each collective by the ranks of one node that take part, of `local`, and by size."""
    nodes = dist.get_world_size() // local
    for count in counts(local):
        groups = [range(node * local, node * local + count) for node in range(nodes)]
        yield from _by_size(device, _own_group(groups), count, "")


def among_nodes(device: Device, local: int) -> Iterator[dict[str, Any]]:
    """Yield samples of each collective by the nodes that take part, and by size; nothing on one node."""
    for count in counts(dist.get_world_size() // local):
        groups = [range(number, count * local, local) for number in range(local)]
        yield from _by_size(device, _own_group(groups), count, " nodes")


def counts(most: int) -> tuple[int, ...]:
    """Return 2, 4, 8, ... and the most of them; nothing if there is one alone.

    >>> counts(6), counts(2), counts(1)
    ((2, 4, 6), (2,), ())
    """
    powers = (1 << power for power in range(1, most.bit_length()))
    return tuple(sorted({*powers, most})) if most > 1 else ()


def _own_group(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Make all groups, as every rank has to, and return this rank's; None: it is in none."""
    made = [dist.new_group(list(ranks)) for ranks in groups]
    rank = dist.get_rank()
    return next((group for group, ranks in zip(made, groups, strict=True) if rank in ranks), None)


def _by_size(device: Device, group: dist.ProcessGroup | None, count: int, among: str) -> Iterator[dict[str, Any]]:
    for size in GPU_BYTES if device.kind == "cuda" else CPU_BYTES:
        part = torch.ones(size // 4 // count, device=device.torch)
        whole = torch.ones(part.numel() * count, device=device.torch)
        other = torch.empty_like(whole)
        work = 4.0 * whole.numel()
        runs: dict[str, Run] = {
            "all-reduce": lambda whole=whole: dist.all_reduce(whole, group=group),  # type: ignore[misc]
            "all-gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part, group=group),  # type: ignore[misc]
            "reduce-scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole, group=group),  # type: ignore[misc]
            "all-to-all": lambda whole=whole, other=other: dist.all_to_all_single(other, whole, group=group),  # type: ignore[misc]
            "send": lambda whole=whole, other=other: _pass_on(whole, other, group),  # type: ignore[misc]
        }
        for name, run in runs.items():
            times = _times(None if group is None else run, device)
            low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
            yield {
                "table": name + among, "at": [float(count), float(size)], "work": work, "seconds": middle,
                "p25_s": low, "p75_s": high, "runs": len(times),
            }  # fmt: skip


def _pass_on(whole: torch.Tensor, other: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    """Send to the next rank of the group and receive from the one before."""
    assert group is not None, "it takes part"
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    following, before = (dist.get_global_rank(group, (rank + step) % ranks) for step in (1, -1))
    sent = dist.P2POp(dist.isend, whole, following, group)
    received = dist.P2POp(dist.irecv, other, before, group)
    for work in dist.batch_isend_irecv([sent, received]):
        work.wait()


def _times(run: Run | None, device: Device) -> list[float]:
    """Return the sorted wall seconds of a run, of the slowest rank each time; a rank without a run waits for others."""
    if run is not None:
        run()
    found = []
    for _ in range(RUNS_GPU if device.kind == "cuda" else RUNS):
        device.wait()
        dist.barrier()
        start = time.perf_counter()
        if run is not None:
            run()
            device.wait()
        took_s = time.perf_counter() - start if run is not None else 0.0
        slowest = torch.tensor([took_s], device=device.torch)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        found.append(float(slowest))
    return sorted(found)


def beside_a_product(device: Device, local: int) -> Iterator[dict[str, Any]]:
    """Yield `exposed_fraction`: of a gather and a product at once, the part of the shorter one that is not hidden.

    The gather is across nodes where there are several.
    """
    on_gpu, ranks = device.kind == "cuda", dist.get_world_size()
    groups = [range(number, ranks, local) for number in range(local)] if ranks > local else [range(ranks)]
    group, members = _own_group(groups), len(groups[0])
    side = SIDE_GPU if on_gpu else SIDE
    matrix = torch.ones(side, side, device=device.torch, dtype=torch.bfloat16 if on_gpu else torch.float32)
    part = torch.ones((GPU_BYTES[-2] if on_gpu else CPU_BYTES[-1]) // 4 // members, device=device.torch)
    whole = torch.ones(part.numel() * members, device=device.torch)

    def product() -> None:
        for _ in range(PRODUCTS):
            torch.mm(matrix, matrix)

    def gather() -> None:
        dist.all_gather_into_tensor(whole, part, group=group)

    def both() -> None:
        work = dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
        product()
        work.wait()

    alone, traffic, together = (statistics.median(_times(run, device)) for run in (product, gather, both))
    exposed = min(1.0, max(0.0, (together - max(alone, traffic)) / min(alone, traffic)))
    yield {"number": "exposed_fraction", "value": exposed}
