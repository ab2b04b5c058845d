"""The order of waiting requests: strict priorities, then tenants by what they were served, then deadlines.

A tenant's counter is the cost of its requests so far, divided by its weight; the lowest goes next. This is the virtual
token counter of Sheng et al. (Fairness in Serving Large Language Models, OSDI '24, Algorithm 2): a tenant that comes
back is lifted to the least counter of those that wait, so no tenant saves up service. A request is charged when it
starts, with its expected answer, and the charge is corrected when it ends (the paper's variant with length prediction):
two tenants that both keep waiting differ by at most one request's cost over its weight, and by the corrections.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count

PATIENCE_US = 600_000_000
"""A request without a deadline stands in its tenant's order as if it had this one."""
SKIPS_MAX = 16
"""Later requests that may start before one that has no room; then all wait until it has."""
LOOK_AHEAD = 8
"""Tenants, after the first, whose requests are tried when the first has no room."""


@dataclass(slots=True, eq=False)
class Waiting:
    """A request in the queue.

    Attributes:
        tenant: that sent it.
        cost: expected, in any unit; see `Prices`.
        item: what the caller wants back.
        priority: a higher one goes first, whatever the counters say.
        deadline_us: latest time of its start; None: none.
        arrival_us: when it came.
        skips: later requests that started before it for lack of room.
    """

    tenant: str
    cost: int
    item: object
    priority: int = 0
    deadline_us: int | None = None
    arrival_us: int = 0
    skips: int = 0
    gone: bool = False


@dataclass(slots=True, eq=False)
class _Lane:
    """The waiting requests of one tenant in one priority."""

    heap: list[tuple[int, int, Waiting]] = field(default_factory=list)
    cost: int = 0
    size: int = 0

    def head(self) -> Waiting | None:
        while self.heap and self.heap[0][2].gone:
            heappop(self.heap)
        return self.heap[0][2] if self.heap else None


class FairQueue:
    """Waiting requests of several tenants."""

    def __init__(self) -> None:
        """Begin empty."""
        self.size = 0
        self.counters: dict[str, float] = {}
        self._weights: dict[str, float] = {}
        self._classes: dict[int, dict[str, _Lane]] = {}
        self._number = count()
        self._last = 0.0

    def set_weight(self, tenant: str, weight: float) -> None:
        """Set a tenant's weight; 1 by default."""
        self._weights[tenant] = weight

    def put(self, waiting: Waiting) -> None:
        """Add a request; a tenant with none waiting is lifted."""
        lanes = self._classes.setdefault(waiting.priority, {})
        lane = lanes.get(waiting.tenant)
        if lane is None:
            least = min((self.counters[each] for each in lanes), default=self._last)
            self.counters[waiting.tenant] = max(self.counters.get(waiting.tenant, 0.0), least)
            lane = lanes[waiting.tenant] = _Lane()
        at_us = waiting.arrival_us + PATIENCE_US if waiting.deadline_us is None else waiting.deadline_us
        heappush(lane.heap, (at_us, next(self._number), waiting))
        lane.cost += waiting.cost
        lane.size += 1
        self.size += 1

    def take(self, place: Callable[[Waiting], bool]) -> Waiting | None:
        """Remove and return the next request that `place` finds room for, and charge its tenant."""
        for priority in sorted(self._classes, reverse=True):
            lanes = self._classes[priority]
            order = sorted(lanes, key=self.counters.__getitem__)[: 1 + LOOK_AHEAD]
            passed: list[Waiting] = []
            for tenant in order:
                head = lanes[tenant].head()
                assert head is not None, "a lane without requests is removed"
                if place(head):
                    for each in passed:
                        each.skips += 1
                    self._remove(head)
                    self.charge(tenant, head.cost)
                    self._last = self.counters[tenant]
                    return head
                if head.skips >= SKIPS_MAX:
                    return None
                passed.append(head)
            if passed:
                return None
        return None

    def remove(self, waiting: Waiting) -> None:
        """Remove a request whose client is gone; a second call does nothing."""
        if not waiting.gone:
            self._remove(waiting)

    def charge(self, tenant: str, cost: float) -> None:
        """Add to a tenant's counter what it was served beyond the expected cost; negative to correct it down."""
        self.counters[tenant] = self.counters.get(tenant, 0.0) + cost / self._weights.get(tenant, 1.0)

    def __iter__(self) -> Iterator[Waiting]:
        """Yield the waiting requests in no particular order."""
        for lanes in self._classes.values():
            for lane in lanes.values():
                yield from (each for _, _, each in lane.heap if not each.gone)

    def _remove(self, waiting: Waiting) -> None:
        waiting.gone = True
        lanes = self._classes[waiting.priority]
        lane = lanes[waiting.tenant]
        lane.cost -= waiting.cost
        lane.size -= 1
        self.size -= 1
        if not lane.size:
            del lanes[waiting.tenant]
            if not lanes:
                del self._classes[waiting.priority]
        elif len(lane.heap) > 2 * lane.size + 16:
            lane.heap = [each for each in lane.heap if not each[2].gone]
            heapify(lane.heap)
