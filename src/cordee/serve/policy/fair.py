"""The order of waiting requests: strict priorities, then tenants by what they were served, then deadlines.

A tenant's counter is the cost of its requests so far, divided by its weight; the lowest goes next. This is the virtual
token counter of Sheng et al. (Fairness in Serving Large Language Models, OSDI '24, Algorithm 2): a tenant that comes
back is lifted to the least counter of those that wait, so no tenant saves up service. A request is charged when it
starts, with its expected answer, and the charge is corrected when it ends (the paper's variant with length prediction):
two tenants that both keep waiting differ by at most one request's cost over its weight, and by the corrections.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from heapq import nsmallest
from itertools import count

PATIENCE_US = 600_000_000
"""A request without a deadline stands in its tenant's order as if it had this one."""
SKIPS_MAX = 16
"""Later requests that may start before one that waits for room; then it takes any room, and the others wait for it."""
TENANTS_TRIED = 4
REQUESTS_TRIED = 8
"""Of each of these tenants; they are tried in turn while the earlier ones have no room."""


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
        skips: later requests that started before it.
        order: its place among its tenant's requests; the queue sets it.
    """

    tenant: str
    cost: int
    item: object
    priority: int = 0
    deadline_us: int | None = None
    arrival_us: int = 0
    skips: int = 0
    order: tuple[int, int] = (0, 0)


@dataclass(slots=True, eq=False)
class _Lane:
    """The waiting requests of one tenant in one priority, in their order: (deadline, number, request)."""

    entries: list[tuple[int, int, Waiting]] = field(default_factory=list)
    cost: int = 0


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
        waiting.order = (at_us, next(self._number))
        insort(lane.entries, (*waiting.order, waiting))
        lane.cost += waiting.cost
        self.size += 1

    def take(self, place: Callable[[Waiting, bool], bool]) -> Waiting | None:
        """Remove and return the next request that can start, and charge its tenant.

        Args:
            place: finds room for a request and returns whether it did; its second argument is whether the request may
                wait for something better than what is free.
        """
        for priority in sorted(self._classes, reverse=True):
            passed: list[Waiting] = []
            for each in self._candidates(self._classes[priority]):
                late = each.skips >= SKIPS_MAX
                if place(each, not late):
                    for earlier in passed:
                        earlier.skips += 1
                    self.remove(each)
                    self.charge(each.tenant, each.cost)
                    self._last = self.counters[each.tenant]
                    return each
                if late:
                    return None
                passed.append(each)
            return None
        return None

    def waiting(self, tenant: str, priority: int) -> int:
        """Return the number of a tenant's waiting requests of one priority."""
        lane = self._classes.get(priority, {}).get(tenant)
        return len(lane.entries) if lane else 0

    def backlog(self, tenant: str, priority: int) -> float:
        """Return the cost that starts, of all tenants of a priority, until a tenant's waiting requests have started."""
        lanes = self._classes.get(priority, {})
        if tenant not in lanes:
            return 0.0
        weights = sum(self._weights.get(each, 1.0) for each in lanes)
        return lanes[tenant].cost * weights / self._weights.get(tenant, 1.0)

    def remove(self, waiting: Waiting) -> None:
        """Remove a request; a second call does nothing."""
        lanes = self._classes.get(waiting.priority, {})
        lane = lanes.get(waiting.tenant)
        if lane is None:
            return
        index = bisect_left(lane.entries, waiting.order, key=lambda each: each[:2])
        if index == len(lane.entries) or lane.entries[index][2] is not waiting:
            return
        del lane.entries[index]
        lane.cost -= waiting.cost
        self.size -= 1
        if not lane.entries:
            del lanes[waiting.tenant]
            if not lanes:
                del self._classes[waiting.priority]

    def charge(self, tenant: str, cost: float) -> None:
        """Add to a tenant's counter what it was served beyond the expected cost; negative to correct it down."""
        self.counters[tenant] = self.counters.get(tenant, 0.0) + cost / self._weights.get(tenant, 1.0)

    def __iter__(self) -> Iterator[Waiting]:
        """Yield the waiting requests: by priority class, tenant, and its order."""
        for lanes in self._classes.values():
            for lane in lanes.values():
                yield from (each for _, _, each in lane.entries)

    def _candidates(self, lanes: Mapping[str, _Lane]) -> list[Waiting]:
        """Return the requests to try, in order: those of the tenant with the lowest counter, then the next one's."""
        counters = self.counters
        order = nsmallest(TENANTS_TRIED, lanes, key=lambda each: (counters[each], len(lanes[each].entries)))
        return [each for tenant in order for _, _, each in lanes[tenant].entries[:REQUESTS_TRIED]]
