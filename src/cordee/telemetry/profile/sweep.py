"""The activity of a device over time, by a sweep over the starts and ends of its operations.

All figures of a rank come from here, so that they add up.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cordee.telemetry.profile.kernels import KINDS
from cordee.telemetry.profile.read import Longs, Ops

US = 1000.0
BIT = {kind: 1 << at for at, kind in enumerate(KINDS)}
COMPUTE = BIT["compute"] | BIT["memory"]
COMMUNICATION = BIT["transfer"] | BIT["waiting"]


@dataclass(frozen=True, slots=True)
class Breakdown:
    """A stretch of time by activity: unions over all streams, so no moment counts twice.

    Compute is all but communication, copies and fills (`memory_us`) included. Communication is hidden while the GPU
    also computes and exposed while nothing else runs; the GPU is idle while nothing runs at all.
    """

    span_us: float
    busy_us: float
    memory_us: float
    transfer_us: float
    waiting_us: float
    communication_us: float
    hidden_us: float
    exposed_transfer_us: float
    exposed_waiting_us: float

    @property
    def idle_us(self) -> float:
        """Time in which nothing runs."""
        return self.span_us - self.busy_us

    @property
    def compute_us(self) -> float:
        """Kernels that do not communicate, and copies."""
        return self.busy_us - self.exposed_us

    @property
    def exposed_us(self) -> float:
        """Time in which only communication runs."""
        return self.exposed_transfer_us + self.exposed_waiting_us

    @property
    def alone_us(self) -> float:
        """Compute without communication at the same time."""
        return self.busy_us - self.communication_us

    @property
    def hidden_fraction(self) -> float | None:
        """The fraction of communication that compute hides; None without communication."""
        return self.hidden_us / self.communication_us if self.communication_us else None

    @property
    def busy_fraction(self) -> float:
        """The part of the span in which something ran."""
        return self.fraction(self.busy_us)

    @property
    def idle_fraction(self) -> float:
        """The part of the span in which nothing ran."""
        return self.fraction(self.idle_us)

    @property
    def compute_fraction(self) -> float:
        """The part of the span in which something computed."""
        return self.fraction(self.compute_us)

    @property
    def communication_fraction(self) -> float:
        """The part of the span in which something communicated."""
        return self.fraction(self.communication_us)

    @property
    def exposed_fraction(self) -> float:
        """The part of the span in which only communication ran."""
        return self.fraction(self.exposed_us)

    def fraction(self, part_us: float) -> float:
        """Return the fraction of the span that a part is."""
        return part_us / self.span_us if self.span_us else 0.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """States between edges: `state[i]` has the bits of the kinds that run from `edge_ns[i]` to `edge_ns[i + 1]`."""

    edge_ns: Longs
    state: NDArray[np.uint8]

    @property
    def length_ns(self) -> Longs:
        """The length of each state."""
        return np.diff(self.edge_ns)

    def time(self, start_ns: int | None = None, end_ns: int | None = None) -> Breakdown:
        """Return the breakdown from one moment to another."""
        length = self.length_ns
        if start_ns is not None and end_ns is not None:
            low, high = (np.clip(self.edge_ns, start_ns, end_ns)[part] for part in (np.s_[:-1], np.s_[1:]))
            length = high - low

        def us(chosen: Any) -> float:
            return float(length[chosen].sum()) / US

        state = self.state
        alone = (state & COMMUNICATION != 0) & (state & COMPUTE == 0)
        moving = state & BIT["transfer"] != 0
        return Breakdown(
            span_us=float(length.sum()) / US,
            busy_us=us(state != 0),
            memory_us=us(state & BIT["memory"] != 0),
            transfer_us=us(moving),
            waiting_us=us(state & BIT["waiting"] != 0),
            communication_us=us(state & COMMUNICATION != 0),
            hidden_us=us((state & COMMUNICATION != 0) & (state & COMPUTE != 0)),
            exposed_transfer_us=us(alone & moving),
            exposed_waiting_us=us(alone & ~moving),
        )

    def within(self, chosen: Any, start_ns: Any, end_ns: Any) -> NDArray[np.float64]:
        """Return the nanoseconds of the chosen states from each start to each end."""
        past = np.concatenate([[0], np.cumsum(np.where(chosen, self.length_ns, 0))]).astype(np.float64)
        found: NDArray[np.float64] = np.interp(end_ns, self.edge_ns, past) - np.interp(start_ns, self.edge_ns, past)
        return found

    def exposed_ns(self, ops: Ops) -> NDArray[np.float64]:
        """Return the time of each operation during which nothing computed."""
        return ops.length_ns - self.within(self.state & COMPUTE != 0, ops.start_ns, ops.end_ns)


def union(start_ns: Longs, end_ns: Longs) -> tuple[Longs, Longs]:
    """Join intervals, ordered by their start, where they meet.

    >>> [edge.tolist() for edge in union(np.array([0, 5, 20]), np.array([10, 8, 30]))]
    [[0, 20], [10, 30]]
    """
    if not len(start_ns):
        return start_ns, end_ns
    reach = np.maximum.accumulate(end_ns)
    first = np.concatenate([[True], start_ns[1:] > reach[:-1]])
    return start_ns[first], reach[np.concatenate([np.flatnonzero(first)[1:] - 1, [len(reach) - 1]])]


def sweep(ops: Ops, bit: NDArray[np.uint8], span_ns: tuple[int, int] | None = None) -> Sweep:
    """Return the states of one device; `bit` is the kind of each operation, `span_ns` an interval around them."""
    joined = {}
    for each in BIT.values():
        chosen = bit == each
        joined[each] = union(ops.start_ns[chosen], ops.end_ns[chosen])
    ends = np.array(span_ns or (), np.int64)
    edges = np.unique(np.concatenate([ends, *(side for pair in joined.values() for side in pair)]))
    state = np.zeros(max(0, len(edges) - 1), np.uint8)
    for each, (start, end) in joined.items():
        begun = np.searchsorted(start, edges[:-1], side="right") - np.searchsorted(end, edges[:-1], side="right")
        state[begun > 0] |= each
    return Sweep(edges, state)
