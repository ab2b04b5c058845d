"""What a collective costs by the alpha-beta model: each message pays a latency, each byte its share of a bandwidth.

Volumes: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH", section 4 (ring).
"""

import math
from dataclasses import dataclass

from cordee.hardware.catalog import Gpu

# Share of the nominal bandwidth that large NCCL rings reach: 193-227 of 300 GB/s measured on A100 NVSwitch (vTrain's
# tables), 0.67-0.74 of 900 GB/s on B200 (SimuMax); InfiniBand as calculon's A100 file has it.
ISLAND_SHARE = 0.70
NETWORK_SHARE = 0.90
ISLAND_ALPHA_S = 4e-6
NETWORK_ALPHA_S = 12e-6


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two GPUs: seconds per message, bytes per second per direction that are reached."""

    alpha_s: float
    bytes_per_s: float


def island_link(gpu: Gpu) -> Link:
    """The fast link inside an island."""
    return Link(ISLAND_ALPHA_S, gpu.link_bytes_per_s * ISLAND_SHARE)


def network_link(gpu: Gpu) -> Link:
    """The network between nodes, as one GPU's share of it."""
    return Link(NETWORK_ALPHA_S, gpu.network_bytes_per_s * NETWORK_SHARE)


def link_between(gpu: Gpu, span_gpus: int) -> Link:
    """The slowest link that a group crosses when its ranks stretch over `span_gpus` consecutive GPUs.

    Without a fast link (islands of one GPU) the ranks of one node meet over PCIe.
    """
    return island_link(gpu) if span_gpus <= _near_gpus(gpu) else network_link(gpu)


def _near_gpus(gpu: Gpu) -> int:
    """How many GPUs meet without the network."""
    return gpu.island_gpus if gpu.island_gpus > 1 else gpu.gpus_per_node


def all_gather_s(total_bytes: float, ranks: int, link: Link) -> float:
    """Ring all-gather of `total_bytes` over all ranks; a reduce-scatter costs the same.

    >>> all_gather_s(8e9, 8, Link(0.0, 1e9))
    7.0
    """
    if ranks == 1:
        return 0.0
    return (ranks - 1) * link.alpha_s + (ranks - 1) / ranks * total_bytes / link.bytes_per_s


def all_reduce_s(n_bytes: float, ranks: int, link: Link) -> float:
    """Ring all-reduce: a reduce-scatter and an all-gather, 2(N-1)/N of the bytes through each link.

    >>> all_reduce_s(8e9, 8, Link(0.0, 1e9))
    14.0
    """
    return 2 * all_gather_s(n_bytes, ranks, link)


def all_to_all_s(n_bytes: float, ranks: int, link: Link) -> float:
    """Each rank keeps 1/N of its `n_bytes` and sends the rest."""
    return all_gather_s(n_bytes, ranks, link)


def send_s(n_bytes: float, link: Link) -> float:
    """One point-to-point message."""
    return link.alpha_s + n_bytes / link.bytes_per_s


def data_gather_s(total_bytes: float, ranks: int, stride: int, gpu: Gpu) -> float:
    """All-gather (or reduce-scatter) over ranks that stand `stride` GPUs apart, in two levels where that is faster.

    Inside an island the members exchange over the fast link; between islands each member takes its own share of the
    bytes over its own network port, so the slow part shrinks by the members per island.
    """
    together = max(1, _near_gpus(gpu) // stride)
    inside = math.gcd(ranks, together)
    outside = ranks // inside
    slow = all_gather_s(total_bytes / inside, outside, network_link(gpu))
    return slow + all_gather_s(total_bytes, inside, island_link(gpu))
