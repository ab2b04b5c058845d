"""Ranks over one or several nodes, which torchrun started: their collectives, and storage that all use at once."""

import os
import socket
import statistics
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from cordee.errors import InputError
from cordee.storage.speed import read_s, write_s
from cordee.train.calibration.collectives import among_nodes, among_ranks, beside_a_product
from cordee.train.calibration.timing import CudaDevice, Device

STORAGE_BYTES = 128 << 20  # a rank
REPEATS = 5
_BLOCK = 4 << 20


def measure_together(
    folder: Path | None, *, on_gpu: bool, storage_bytes: int = STORAGE_BYTES
) -> Iterator[dict[str, Any]]:
    """Yield what all ranks have measured together, on rank 0; nothing on the others.

    Args:
        folder: whose storage all ranks write at once, on every node; None: none.
        on_gpu: each rank has the GPU of its number on its node.
        storage_bytes: that a rank writes each time.

    Raises:
        InputError: nodes have unequal numbers of ranks, or a rank cannot write the folder.
    """
    device: Device = CudaDevice(int(os.environ["LOCAL_RANK"])) if on_gpu else Device(1)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    try:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
        if ranks % local:
            raise InputError(f"{ranks} ranks are not {local} on each node", hint="start as many on every node")
        found = [
            {"number": "ranks_together", "value": float(ranks)},
            {"number": "nodes_together", "value": float(ranks // local)},
            *(_storage(folder, local, storage_bytes) if folder is not None else ()),
            *among_ranks(device, local),
            *among_nodes(device, local),
            *beside_a_product(device, local),
        ]
    finally:
        dist.destroy_process_group()
    if rank == 0:
        yield from found


def _storage(folder: Path, local: int, size: int) -> Iterator[dict[str, Any]]:
    """Yield what a node writes and reads while all ranks do, by the median rank's time and by the 95th percentile.

    A save is over with its slowest rank, so the percentile is what a checkpoint waits for.
    """
    mine = _own_storage(folder, size)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if failed := next((each for each in every if isinstance(each, str)), None):
        raise InputError(f"{folder} cannot be measured by every rank", hint=failed)
    for way, at in (("write", 0), ("read", 1)):
        times = [each[at] for taken in every for each in taken]
        middle, late = statistics.median(times), statistics.quantiles(times, n=20, method="inclusive")[-1]
        yield {"number": f"node_{way}_bytes_per_s", "value": local * size / middle}
        yield {"number": f"node_{way}_p95_bytes_per_s", "value": local * size / late}


def _own_storage(folder: Path, size: int) -> list[tuple[float, float]] | str:
    """Return this rank's seconds of each write and read, begun with all others; or why it cannot."""
    path = folder / f".cordee-calibrate.{socket.gethostname()}.{os.getpid()}"
    block = os.urandom(min(_BLOCK, size))
    found, failed = [], ""
    for _ in range(REPEATS):
        times = []
        for act in (partial(write_s, path, block, size), partial(read_s, path)):
            dist.barrier()
            try:
                times.append(act() if not failed else 0.0)
            except OSError as error:  # the others still wait at the next barrier
                failed = f"{socket.gethostname()}: {error.strerror}"
                times.append(0.0)
        found.append((times[0], times[1]))
    with suppress(OSError):
        path.unlink()
    return failed or found
