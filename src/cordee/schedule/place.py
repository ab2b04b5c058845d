"""Where a whole gang goes: the tightest part of the domain tree that holds it, then the one that it breaks up least.

A gang has one GPU name. It has one capacity too, unless the job takes any and neither on-demand nor spot alone has
room. Topology is a preference and not a condition: a gang fits whenever its pool has enough free GPUs, so a job never
waits for the shape of what is free.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from cordee.events import Capacity, Job, Lease
from cordee.schedule.free import Bucket, Domain, FreeIndex, Kind, gpus_of

Pool = tuple[Kind, ...]
"""Kinds that one gang may use together."""

Picks = tuple[tuple[str, int], ...]
"""Nodes, and how many GPUs of each."""

_ANYWHERE = 99  # the spread of a gang that no domain holds
_SOLD = (Capacity.ON_DEMAND, Capacity.SPOT)


def pools(job: Job, kinds: tuple[Kind, ...]) -> tuple[Pool, ...]:
    """What the job may use of the kinds there are, in the order in which it is tried.

    >>> from cordee.ids import JobId
    >>> job = Job(job_id=JobId("a"), name="a", owner="me", gpus=1)
    >>> pools(job, (("H100", Capacity.SPOT), ("H100", Capacity.ON_DEMAND)))[-1]
    (('H100', <Capacity.ON_DEMAND: 'on-demand'>), ('H100', <Capacity.SPOT: 'spot'>))
    """
    names = sorted({name for name, _ in kinds}) if job.gpu_name is None else [job.gpu_name]
    wanted = _SOLD if job.capacity is Capacity.ANY else (job.capacity,)
    single: list[Pool] = []
    mixed: list[Pool] = []
    for name in names:
        there = tuple((name, capacity) for capacity in wanted if (name, capacity) in kinds)
        single += [(kind,) for kind in there]
        if len(there) > 1:
            mixed.append(there)
    return (*single, *mixed)


@dataclass(frozen=True, slots=True, order=True)
class _Shape:
    """How a gang would lie in a domain; the least is the best, ties fall to the first in the order of names."""

    spread: int  # 0 one island, 1 one node, then how many levels the domain is above the nodes
    nodes: int
    micro_usd_per_hour: int
    left_over: int  # free GPUs that stay in the domain
    kind: Pool
    domain: Domain
    picks: Picks


def place(index: FreeIndex, candidates: tuple[Pool, ...], gpus: int) -> tuple[Lease, ...] | None:
    """The leases of a whole gang, in the order of node names, or None if no candidate pool has room."""
    shapes = [shape for pool in candidates if (shape := _best(index, pool, gpus)) is not None]
    if not shapes:
        return None
    picks = sorted(min(shapes).picks)
    return tuple(Lease(node=name, gpus=_choose(index, name, count)) for name, count in picks)


def _best(index: FreeIndex, pool: Pool, gpus: int) -> _Shape | None:
    if sum(index.free(kind) for kind in pool) < gpus:
        return None
    if len(pool) == 1:
        shape = _in_one_node(index, pool, gpus) or _in_one_domain(index, pool, gpus)
        if shape is not None:
            return shape
    buckets = [bucket for kind in pool for _, bucket in index.domains(kind, 0)]
    picks, left_over = _fill(buckets, gpus), sum(bucket.free for bucket in buckets) - gpus
    return _Shape(_ANYWHERE, len(picks), _price(index, picks), left_over, pool, (), picks)


def _in_one_node(index: FreeIndex, pool: Pool, gpus: int) -> _Shape | None:
    """The node with the fewest free GPUs that are enough; among several islands, one that has enough by itself."""
    top = next(index.domains(pool[0], 0))[1]
    counts = sorted(count for count in top.by_count if count >= gpus)
    if not counts:
        return None
    name = top.by_count[counts[0]][0]
    if top.split:
        names = (name for count in counts for name in top.by_count[count])
        name = next((each for each in names if _island_fits(index, each, gpus)), name)
    elif len(top.by_count[counts[0]]) > 1:
        name = _in_fullest_domain(index, pool[0], counts[0], name)
    left_over = index.entries[name].free.bit_count() - gpus
    spread, picks = 0 if _island_fits(index, name, gpus) else 1, ((name, gpus),)
    return _Shape(spread, 1, _price(index, picks), left_over, pool, (), picks)


def _in_fullest_domain(index: FreeIndex, kind: Kind, count: int, name: str) -> str:
    """Of equal nodes, one in the domain with the fewest free GPUs, so that empty domains stay whole."""
    depth = len(index.entries[name].node.domain)
    equal = [
        (bucket.free, bucket.by_count[count][0])
        for _, bucket in index.domains(kind, depth)
        if depth and count in bucket.by_count
    ]
    return min(equal)[1] if equal else name


def _in_one_domain(index: FreeIndex, pool: Pool, gpus: int) -> _Shape | None:
    """The lowest level of the tree that has a domain with room; in it the one that needs the fewest nodes."""
    deepest = max(len(domain) for domain in index.buckets[pool[0]])
    for depth in range(deepest, 0, -1):
        shapes = []
        for domain, bucket in index.domains(pool[0], depth):
            if bucket.free >= gpus:
                picks = _fill([bucket], gpus)
                spread, price = 2 + deepest - depth, _price(index, picks)
                shapes.append(_Shape(spread, len(picks), price, bucket.free - gpus, pool, domain, picks))
        if shapes:
            return min(shapes)
    return None


def _price(index: FreeIndex, picks: Picks) -> int:
    return sum(index.entries[name].node.micro_usd_per_gpu_hour * count for name, count in picks)


def _fill(buckets: list[Bucket], gpus: int) -> Picks:
    """The fewest nodes: the fullest first, and for the rest the one with the fewest free GPUs that are enough."""
    picks: list[tuple[str, int]] = []
    used: set[str] = set()
    for count, name in _fullest_first(buckets):
        if count >= gpus:
            break
        picks.append((name, count))
        used.add(name)
        gpus -= count
    last = min((count, name) for count, name in _enough(buckets, gpus) if name not in used)
    return (*picks, (last[1], gpus))


def _fullest_first(buckets: list[Bucket]) -> Iterator[tuple[int, str]]:
    counts = sorted({count for bucket in buckets for count in bucket.by_count}, reverse=True)
    for count in counts:
        for name in sorted(name for bucket in buckets for name in bucket.by_count.get(count, ())):
            yield count, name


def _enough(buckets: list[Bucket], gpus: int) -> Iterator[tuple[int, str]]:
    for bucket in buckets:
        for count, names in bucket.by_count.items():
            if count >= gpus:
                yield from ((count, name) for name in names)


def _islands(index: FreeIndex, name: str) -> list[int]:
    """Free GPUs of each NVLink island of a node, as masks."""
    entry = index.entries[name]
    size = entry.node.island_gpus or entry.node.gpus
    return [entry.free & ((1 << size) - 1) << first for first in range(0, entry.node.gpus, size)]


def _island_fits(index: FreeIndex, name: str, gpus: int) -> bool:
    return any(island.bit_count() >= gpus for island in _islands(index, name))


def _choose(index: FreeIndex, name: str, count: int) -> tuple[int, ...]:
    """GPUs of a node: in the island with the fewest free ones that are enough, else from the fullest islands."""
    islands = sorted(_islands(index, name), key=lambda island: (island.bit_count(), island))
    fitting = [island for island in islands if island.bit_count() >= count]
    if fitting:
        return gpus_of(fitting[0])[:count]
    chosen: list[int] = []
    for island in reversed(islands):
        chosen += gpus_of(island)[: count - len(chosen)]
    return tuple(sorted(chosen))
