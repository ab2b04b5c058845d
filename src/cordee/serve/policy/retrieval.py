"""Decisions of retrieval from partitions of which few fit into memory: what is loaded, searched, kept and given up.

Queries that wait share each load: a partition is searched once for all that want it, and a query that comes in the
middle of a scan joins it and wants the rest later. So loads a second do not grow with the queries, as with cooperative
scans of databases (Zukowski et al., VLDB 2007). Where every query wants every partition, a plain LRU gives up what is
wanted next; here a query takes first what is in memory, and nothing is given up that somebody waits for.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

PATIENCE_US = 30_000_000
"""Wait of the oldest query after which only what it wants is loaded."""
CHALLENGE = 1.25
"""Times the popularity of a pinned partition that another one needs to take its place."""
BUFFERS = 2
"""Partitions in memory beyond the pinned ones: one is searched while the next one is loaded."""


@dataclass(frozen=True, slots=True)
class WaitingQuery:
    """A query that waits: since when, and the partitions in which it is still to be searched."""

    since_us: int
    wants: frozenset[int]


@dataclass(frozen=True, slots=True)
class RetrievalRules:
    """The parts of retrieval, each of which can be left out to measure what it brings.

    Attributes:
        together: a search serves all queries that want the partition; else only the oldest one.
        pin: popular partitions stay; else the least recently used one goes.
        prefetch: the next partition is loaded while one is searched.
        join: a query joins a scan that goes on; else it waits for the end of it.
        order: what most queries are near to their end for is loaded first; else the lowest number.
    """

    together: bool = True
    pin: bool = True
    prefetch: bool = True
    join: bool = True
    order: bool = True


def weights(waiting: Collection[WaitingQuery]) -> dict[int, float]:
    """Return by partition how much a search brings: each query that wants it counts, more the nearer it is to its end.

    >>> weights([WaitingQuery(0, frozenset({1, 2})), WaitingQuery(5, frozenset({2}))])
    {1: 0.5, 2: 1.5}
    """
    found: dict[int, float] = {}
    for each in waiting:
        for partition in each.wants:
            found[partition] = found.get(partition, 0.0) + 1.0 / len(each.wants)
    return dict(sorted(found.items()))


def next_search(waiting: Collection[WaitingQuery], resident: Collection[int], pinned: Collection[int]) -> int | None:
    """Return the partition to search next; those that are not pinned go first, since they make room for a load."""
    wanted = weights(waiting)
    ready = [each for each in resident if each in wanted]
    return min(ready, key=lambda each: (each in pinned, -wanted[each], each), default=None)


def next_load(
    now_us: int, waiting: Collection[WaitingQuery], held: Collection[int], rules: RetrievalRules = RetrievalRules()
) -> int | None:
    """Return the partition to load next; None: all that are wanted are in memory or on their way.

    Args:
        now_us: the time.
        waiting: all queries, some perhaps without wants.
        held: partitions in memory, being loaded, or damaged.
        rules: the parts in use.
    """
    asking = [each for each in waiting if each.wants]
    oldest = min(asking, key=lambda each: each.since_us, default=None)
    if oldest is None:
        return None
    wanted = weights(asking if rules.together else [oldest])
    missing = [each for each in wanted if each not in held]
    if now_us - oldest.since_us > PATIENCE_US:
        missing = [each for each in missing if each in oldest.wants] or missing
    if not rules.order:
        return min(missing, default=None)
    return min(missing, key=lambda each: (-wanted[each], each), default=None)


def to_release(waiting: Collection[WaitingQuery], resident: Mapping[int, int], pinned: Collection[int]) -> int | None:
    """Return the partition that gives its memory to the next one: one that nobody wants, the longest unused first.

    Args:
        waiting: all queries.
        resident: partitions in memory that nothing uses at the moment, each with the time of its last search.
        pinned: those that stay.
    """
    wanted = weights(waiting)
    free = [each for each in resident if each not in pinned and each not in wanted]
    return min(free, key=lambda each: (resident[each], each), default=None)


def to_pin(
    sizes: Mapping[int, int],
    popularity: Mapping[int, float],
    budget_bytes: int,
    now: Collection[int] = (),
    buffers: int = BUFFERS,
) -> frozenset[int]:
    """Return the partitions that stay in memory: those wanted more than others, as many as fit beside the buffers.

    Where all are wanted as often, none is: a scan takes first what is in memory, whatever that is. One that is pinned
    keeps its place until another is wanted `CHALLENGE` times as often.

    >>> sorted(to_pin({1: 10, 2: 10, 3: 10, 4: 10}, {3: 2.0}, 39)), sorted(to_pin({1: 10, 2: 10}, {}, 20))
    ([3], [1, 2])
    >>> sorted(to_pin({1: 10, 2: 10, 3: 10, 4: 10}, {3: 2.0, 4: 2.1}, 30, now={3}))
    [3]
    """
    if sum(sizes.values()) <= budget_bytes:
        return frozenset(sizes)
    left = budget_bytes - buffers * max(sizes.values(), default=0)
    least = CHALLENGE * sum(popularity.get(each, 0.0) for each in sizes) / max(1, len(sizes))
    rank = {each: popularity.get(each, 0.0) * (CHALLENGE if each in now else 1.0) for each in sizes}
    kept = list[int]()
    for each in sorted(sizes, key=lambda each: (-rank[each], each not in now, each)):
        if rank[each] > least and sizes[each] <= left:
            left -= sizes[each]
            kept.append(each)
    return frozenset(kept)


def batch_of(waiting: Mapping[int, WaitingQuery], partition: int, most: int | None = None) -> list[int]:
    """Return the queries that are searched in a partition together, the oldest first."""
    wanting = [name for name, each in waiting.items() if partition in each.wants]
    return sorted(wanting, key=lambda name: (waiting[name].since_us, name))[:most]
