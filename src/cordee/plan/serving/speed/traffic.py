"""Seconds of the messages between the GPUs of one replica: sums of tensor parallelism, tokens on their way to experts.

The island's measured all-reduce where there is one, otherwise the alpha-beta model of `hardware/collectives.py`.
"""

from cordee.hardware.catalog import Gpu
from cordee.hardware.collectives import all_gather_s, all_reduce_s, island_link, near_gpus, network_link, send_s


def sum_s(gpu: Gpu, n_bytes: float, ranks: int) -> float:
    """Return the seconds of an all-reduce of so many bytes on each of the ranks."""
    if ranks <= 1 or n_bytes <= 0:
        return 0.0
    grid = gpu.kernels.find("all_reduce", "bf16")
    if grid is None or ranks > min(near_gpus(gpu), grid.axes[0][-1]):
        link = island_link(gpu) if ranks <= near_gpus(gpu) else network_link(gpu)
        return float(all_reduce_s(n_bytes, ranks, link))
    largest = grid.axes[1][-1]
    return grid.at(ranks, n_bytes) * 1e-6 * max(1.0, n_bytes / largest)


def scatter_s(gpu: Gpu, n_bytes: float, ranks: int) -> float:
    """Return the seconds in which each rank sends so many bytes, spread over all ranks (all-to-all)."""
    if ranks <= 1 or n_bytes <= 0:
        return 0.0
    link = island_link(gpu) if ranks <= near_gpus(gpu) else network_link(gpu)
    return float(link.alpha_s + (ranks - 1) / ranks * n_bytes / link.bytes_per_s)


def gather_s(gpu: Gpu, n_bytes: float, ranks: int) -> float:
    """Return the seconds of an all-gather to so many bytes in all."""
    if ranks <= 1 or n_bytes <= 0:
        return 0.0
    link = island_link(gpu) if ranks <= near_gpus(gpu) else network_link(gpu)
    return float(all_gather_s(n_bytes, ranks, link))


def handover_s(gpu: Gpu, n_bytes: float, replica_gpus: int) -> float:
    """Return the seconds of one message to the next pipeline stage."""
    link = island_link(gpu) if replica_gpus <= near_gpus(gpu) else network_link(gpu)
    return float(send_s(n_bytes, link))
