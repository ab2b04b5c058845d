"""The GPUs that are there and not leased, and what they cost while nothing runs on them."""

from collections.abc import Iterable

from cordee.account.split import MILLI
from cordee.events import GpusSampled, IdleGpusSampled, Lease, Node, NodeDown, NodeUp
from cordee.units import US_PER_DAY, US_PER_HOUR, month_start_us


class IdleGpus:
    """Idle GPUs of all nodes, summed over time. Its clock never goes back.

    `energy_mj` is what they drew, `integrated_mj` the part of it that no counter has counted.
    GPUs of a node that is down, and those that foreign processes use, count only while they are leased.
    """

    at_us: int
    nodes: dict[str, Node]
    _up: dict[str, bool]
    _leased: dict[str, dict[int, int]]  # node: thousandths of each GPU
    _idle: dict[str, tuple[int, int]]  # node: thousandths of GPUs, and the same times their price
    _milli: int
    _rate: int
    _milli_us: int
    _cost: int
    _months: dict[int, tuple[int, int]]  # by its start: thousandths of GPU-microseconds and cost until then
    energy_mj: int
    integrated_mj: int

    def __init__(self) -> None:
        self.at_us = 0
        self.nodes, self._up, self._leased, self._idle = {}, {}, {}, {}
        self._milli = self._rate = 0
        self._milli_us = self._cost = 0
        self._months = {}
        self.energy_mj = self.integrated_mj = 0

    def advance(self, at_us: int) -> None:
        """Let time pass until `at_us`."""
        while self.at_us < (month_us := month_start_us(month_start_us(self.at_us) + 32 * US_PER_DAY)) <= at_us:
            self._pass(month_us)
            if self.nodes:
                self._months[month_us] = (self._milli_us, self._cost)
        self._pass(at_us)

    def _pass(self, at_us: int) -> None:
        # Time begins with the log's first event: nothing was idle before it, since no node was up.
        self._milli_us += self._milli * (at_us - self.at_us)
        self._cost += self._rate * (at_us - self.at_us)
        self.at_us = at_us

    def until(self, now_us: int) -> tuple[int, int]:
        """Return GPU-microseconds and micro-dollars from the beginning until `now_us`."""
        ahead_us = now_us - self.at_us
        gpu_us = (self._milli_us + self._milli * ahead_us) // MILLI
        return gpu_us, (self._cost + self._rate * ahead_us) // (MILLI * US_PER_HOUR)

    def months(self, now_us: int) -> dict[int, tuple[int, int]]:
        """Return GPU-microseconds and micro-dollars of each month by its start; they sum to those of `until`."""
        marks = {
            start: (milli_us // MILLI, cost // (MILLI * US_PER_HOUR))
            for start, (milli_us, cost) in self._months.items()
        }
        start_us = month_start_us(self.at_us)
        while (start_us := month_start_us(start_us + 32 * US_PER_DAY)) <= now_us:
            marks[start_us] = self.until(start_us)
        found, before = dict[int, tuple[int, int]](), (0, 0)
        for start, sums in [*sorted(marks.items()), (now_us + 1, self.until(now_us))]:
            found[month_start_us(start - 1)] = (sums[0] - before[0], sums[1] - before[1])
            before = sums
        return found

    def draw(self, event: GpusSampled | IdleGpusSampled) -> None:
        """Count energy that no attempt's account takes."""
        self.energy_mj += max(0, event.energy_mj)
        self.integrated_mj += min(max(0, event.energy_mj), max(0, event.integrated_mj))

    def node_up(self, event: NodeUp) -> None:
        """Count a node from now on, or count it anew."""
        known = self.nodes.get(event.node.name)
        if known is None or event.node.epoch >= known.epoch:
            self.nodes[event.node.name], self._up[event.node.name] = event.node, True
            self._recount(event.node.name)

    def node_down(self, event: NodeDown) -> None:
        """Count a node no longer."""
        known = self.nodes.get(event.node)
        if known is not None and event.epoch >= known.epoch:
            self._up[event.node] = False
            self._recount(event.node)

    def take(self, leases: Iterable[Lease]) -> None:
        """Lease GPUs."""
        for lease in leases:
            self._add(lease, lease.milli)

    def give_back(self, lease: Lease) -> None:
        """End a lease."""
        self._add(lease, -lease.milli)

    def _add(self, lease: Lease, milli: int) -> None:
        leased = self._leased.setdefault(lease.node, {})
        for gpu in lease.gpus:
            leased[gpu] = leased.get(gpu, 0) + milli
        self._recount(lease.node)

    def _recount(self, name: str) -> None:
        node, milli = self.nodes[name], 0
        if self._up[name]:
            leased = self._leased.get(name, {})
            milli = MILLI * node.gpus - sum(leased.values())
            milli -= sum(MILLI - leased.get(gpu, 0) for gpu in node.unavailable)
        was_milli, was_rate = self._idle.get(name, (0, 0))
        rate = milli * node.micro_usd_per_gpu_hour
        self._idle[name] = (milli, rate)
        self._milli += milli - was_milli
        self._rate += rate - was_rate
