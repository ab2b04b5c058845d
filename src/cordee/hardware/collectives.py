"""The cost of a collective by the alpha-beta model: a message pays a latency, a byte its part of a bandwidth.

Volumes: Thakur et al. 2005, "Optimization of Collective Communication Operations in MPICH", section 4 (ring); trees and
in-switch reduction as NCCL has them. Byte counts and rank counts may be NumPy arrays.
"""

from dataclasses import dataclass

import numpy as np

from cordee.hardware.arrays import Real
from cordee.hardware.catalog import Gpu


@dataclass(frozen=True, slots=True)
class Link:
    """A way between two GPUs: seconds per message, bytes per second per direction that are reached.

    `reduces`: its switch adds up what passes (NVLink SHARP). `decay`: its rate falls by this power of the islands that
    meet on it, from two on.
    """

    alpha_s: float
    bytes_per_s: float
    reduces: bool = False
    decay: float = 0.0


def island_link(gpu: Gpu) -> Link:
    """Return the fast link inside an island."""
    return Link(
        gpu.efficiency.island_alpha_s,
        gpu.link_bytes_per_s * gpu.efficiency.island_fraction,
        gpu.efficiency.switch_reduces,
    )


def network_link(gpu: Gpu) -> Link:
    """Return the network between nodes, as far as one GPU has it."""
    table = gpu.efficiency
    return Link(table.network_alpha_s, gpu.network_bytes_per_s * table.network_fraction, decay=table.network_decay)


def near_gpus(gpu: Gpu) -> int:
    """Return the number of GPUs that meet without the network: an island, or a node without a fast link."""
    return gpu.island_gpus if gpu.island_gpus > 1 else gpu.gpus_per_node


def all_gather_s(total_bytes: Real, ranks: Real, link: Link) -> Real:
    """Return the seconds of a ring all-gather of `total_bytes`; a reduce-scatter costs the same.

    >>> all_gather_s(8e9, 8, Link(0.0, 1e9))
    7.0
    """
    return (ranks - 1) * link.alpha_s + (ranks - 1) / ranks * total_bytes / link.bytes_per_s


def ring_all_reduce_s(n_bytes: Real, ranks: Real, link: Link) -> Real:
    """Return the seconds of a reduce-scatter and an all-gather: 2(N-1)/N of the bytes through each link.

    >>> ring_all_reduce_s(8e9, 8, Link(0.0, 1e9))
    14.0
    """
    return 2 * all_gather_s(n_bytes, ranks, link)


def tree_all_reduce_s(n_bytes: Real, ranks: Real, link: Link) -> Real:
    """Return the seconds up and down a binary tree: fewer messages in a row, but all bytes twice."""
    return 2 * np.ceil(np.log2(ranks)) * link.alpha_s + np.where(ranks > 1, 2.0, 0.0) * n_bytes / link.bytes_per_s


def switch_all_reduce_s(n_bytes: Real, ranks: Real, link: Link) -> Real:
    """Return the seconds of a sum in the switch: each rank sends its bytes once and receives S(1 + 1/N).

    >>> float(switch_all_reduce_s(8e9, 8, Link(0.0, 1e9)))
    9.0
    """
    return np.where(ranks > 1, 2 * link.alpha_s + (1 + 1 / ranks) * n_bytes / link.bytes_per_s, 0.0)


def all_reduce_s(n_bytes: Real, ranks: Real, link: Link) -> Real:
    """Return the seconds of the fastest all-reduce of this link, as NCCL's tuner picks it.

    >>> float(all_reduce_s(8e9, 8, Link(0.0, 1e9))), float(all_reduce_s(8e9, 8, Link(0.0, 1e9, reduces=True)))
    (14.0, 9.0)
    """
    fastest = np.minimum(ring_all_reduce_s(n_bytes, ranks, link), tree_all_reduce_s(n_bytes, ranks, link))
    return np.minimum(fastest, switch_all_reduce_s(n_bytes, ranks, link)) if link.reduces else fastest


def send_s(n_bytes: Real, link: Link) -> Real:
    """Return the seconds of one point-to-point message."""
    return link.alpha_s + n_bytes / link.bytes_per_s


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that stand `stride` GPUs apart on islands of so many GPUs, and the two links that join them."""

    ranks: Real
    stride: Real
    near: int
    island: Link
    network: Link

    @property
    def inside(self) -> Real:
        """Members in one island."""
        return np.minimum(self.ranks, np.maximum(1, self.near // self.stride))

    @property
    def outside(self) -> Real:
        """Islands that the group touches."""
        return np.ceil(self.ranks / self.inside)

    @property
    def network_bytes_per_s(self) -> Real:
        """Rate of the network for this group: what two islands reach, less what many lose to each other.

        >>> Group(16, 1, 8, Link(0, 8e9), Link(0, 1e9, decay=0.5)).network_bytes_per_s
        np.float64(1000000000.0)
        >>> Group(64, 1, 8, Link(0, 8e9), Link(0, 1e9, decay=0.5)).network_bytes_per_s
        np.float64(500000000.0)
        """
        return self.network.bytes_per_s * np.maximum(1.0, self.outside / 2) ** -self.network.decay

    def gather_s(self, total_bytes: Real, messages: Real = 1) -> Real:
        """Return the seconds of an all-gather or reduce-scatter, a ring over all ranks: each rail carries 1/inside.

        The two levels run as a pipeline: the slower decides, the latencies of each of the `messages` add up.
        """
        far = np.where(self.outside > 1, (self.ranks - 1) / self.ranks, 0.0) * total_bytes / self.inside
        near = (self.inside - 1) / self.inside * total_bytes / self.island.bytes_per_s
        hops = (self.inside - 1) * self.island.alpha_s + (self.outside - 1) * self.network.alpha_s
        return np.maximum(far / self.network_bytes_per_s, near) + messages * hops

    def reduce_s(self, n_bytes: Real, messages: Real = 1) -> Real:
        """Return the seconds of an all-reduce: by the fastest way in an island, hierarchically across them.

        `n_bytes` are cut into so many `messages`, and each has its latency.
        """
        inside = messages * all_reduce_s(n_bytes / messages, self.ranks, self.island)
        far = 2 * (self.outside - 1) / self.outside * n_bytes / self.inside / self.network_bytes_per_s
        near = 2 * (self.inside - 1) / self.inside * n_bytes / self.island.bytes_per_s
        hops = 2 * (self.inside - 1) * self.island.alpha_s
        # Across islands NCCL builds trees, so the latency grows with the logarithm.
        hops = hops + 2 * np.ceil(np.log2(self.outside)) * self.network.alpha_s
        return np.where(self.outside > 1, np.maximum(far, near) + messages * hops, inside)

    def exchange_s(self, n_bytes: Real) -> Real:
        """Return the seconds of an all-to-all of `n_bytes` a rank, side by side inside and across islands."""
        far = n_bytes * (self.ranks - self.inside) / self.ranks / self.network.bytes_per_s
        near = n_bytes * (self.inside - 1) / self.ranks / self.island.bytes_per_s
        hops = np.where(self.outside > 1, self.network.alpha_s, self.island.alpha_s)
        return np.maximum(far, near) + np.where(self.ranks > 1, hops, 0.0)

    def send_s(self, n_bytes: Real) -> Real:
        """Return the seconds of a message to the next rank, by network if any neighbours stand on two islands."""
        return np.where(self.outside > 1, send_s(n_bytes, self.network), send_s(n_bytes, self.island))


def group_of(gpu: Gpu, ranks: Real, stride: Real) -> Group:
    """Return the group of `ranks` GPUs that stand `stride` apart in the order of the cluster."""
    return Group(ranks, stride, near_gpus(gpu), island_link(gpu), network_link(gpu))
