"""Placement of a whole gang: the lowest domain that holds it, then the domain that it breaks up least.

A gang is made of units that are never divided: `unit_gpus` GPUs in one island (one node, where islands are smaller), or
without it the whole gang in one node, or as many whole nodes as it fills and one rest. It waits for that shape. Domains
above the unit are a preference, unless `within` makes one a condition. A gang has one GPU name, and one capacity unless
the job accepts any and neither alone has room.

    leases = place(index, job, pools(job, index.kinds), avoid=flaky)    None: no place
    fits(index, job, pool)                                              whether one pool has room, by counts
    lacks(index, job, pool)                                             units without a place; None: never
    lacks(index, job, pool, freed)                                      if some nodes were as in `freed`
    freed = {name: index.entries[name].plus([(lease, victim.job), ...])}
    with index.as_if(freed): place(...)                                 its place in that case
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from functools import lru_cache

from cordee.events import Capacity, Job, Lease, Node
from cordee.schedule.placement.entry import Entry, Kind, host_request
from cordee.schedule.placement.fill import choose, lacking, missing, search
from cordee.schedule.placement.fractional import find_instance, lacks_part
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.need import Arrangement, Need
from cordee.schedule.placement.view import Pool, View, holds
from cordee.schedule.policy import Packing

_NEEDS_MAX = 1 << 16

_SOLD = (Capacity.ON_DEMAND, Capacity.SPOT)


def pools(job: Job, kinds: Iterable[Kind]) -> tuple[Pool, ...]:
    """Return the pools of these kinds that a job may use, in the order in which they are tried.

    >>> from cordee.ids import JobId
    >>> job = Job(job_id=JobId("a"), name="a", owner="me", gpus=1)
    >>> [on_demand, spot] = pools(job, (("H100", Capacity.SPOT, ()), ("H100", Capacity.ON_DEMAND, ())))[-1]
    >>> [*map(str, on_demand[:2])], [*map(str, spot[:2])]
    (['H100', 'on-demand'], ['H100', 'spot'])
    """
    kinds = frozenset(kinds)
    reserved = _reserved(kinds)
    mine = tuple(whom for whom in reserved if is_for(job, whom)) if reserved else ()
    return _pools(job.gpu_name, job.capacity, kinds, mine)


def most_gpus(nodes: Iterable[Node], gpu_name: str | None, capacity: Capacity) -> int:
    """Return the GPUs of the largest pool that these nodes are to a job without unit: a larger gang never runs.

    >>> nodes = [Node(name=name, epoch=1, gpu_name=name, gpus=8) for name in ("L4", "H100")]
    >>> most_gpus(nodes, None, Capacity.ANY), most_gpus(nodes, "L4", Capacity.SPOT)
    (8, 0)
    """
    gpus = Counter[Kind]()
    for node in nodes:
        gpus[node.gpu_name, node.capacity, ()] += node.gpus
    return max(
        (sum(gpus[kind] for kind in pool) for pool in _pools(gpu_name, capacity, frozenset(gpus), ())), default=0
    )


def is_for(job: Job, whom: str) -> bool:
    """Return whether nodes that are reserved for a queue or a user are reserved for a job.

    >>> from cordee.ids import JobId
    >>> is_for(Job(job_id=JobId("a"), name="a", owner="me", gpus=1, queue="eval"), "queue eval")
    True
    """
    return whom in (f"queue {job.queue}", f"user {job.owner}")


@lru_cache(maxsize=1024)
def _reserved(kinds: frozenset[Kind]) -> tuple[str, ...]:
    """Return for whom nodes of these kinds are reserved."""
    return tuple(sorted({whom for _, _, reserved in kinds for whom in reserved}))


@lru_cache(maxsize=1024)
def _pools(gpu_name: str | None, capacity: Capacity, kinds: frozenset[Kind], mine: tuple[str, ...]) -> tuple[Pool, ...]:
    """Return pools: of nodes reserved for the job, of others, of both, and of both capacities."""
    names = sorted({name for name, _, _ in kinds}) if gpu_name is None else [gpu_name]
    wanted = _SOLD if capacity is Capacity.ANY else (capacity,)
    is_open = sorted((kind for kind in kinds if set(kind[2]) <= set(mine)), key=lambda kind: (not kind[2], kind[2]))
    single: list[Pool] = []
    mixed: list[Pool] = []
    for name in names:
        there = [tuple(kind for kind in is_open if kind[:2] == (name, capacity)) for capacity in wanted]
        single += [(kind,) for kinds in there for kind in kinds]
        mixed += [kinds for kinds in there if len(kinds) > 1]
        if sum(map(bool, there)) > 1:
            mixed.append(tuple(kind for kinds in there for kind in kinds))
    return (*sorted(single, key=lambda pool: not pool[0][2]), *mixed)


# -- units of a gang -----------------------------------------------------------------------------------------


def need_of(index: FreeIndex, job: Job, pool: Pool, gpus: int | None = None) -> Need | None:
    """Return the units of a gang in a pool; None if the nodes that are up could not hold it even without leases."""
    gpus = job.gpus if gpus is None else gpus
    host = host_request(job, 1)
    key = (pool, host, gpus, job.unit_gpus, job.within)
    if key not in index.needs:
        if len(index.needs) >= _NEEDS_MAX:
            index.needs.clear()
        index.needs[key] = _need(index.view(pool, *host, empty=True), gpus, job.unit_gpus, job.within)
    return index.needs[key]


def _need(empty: View, gpus: int, unit_gpus: int | None, within: str | None) -> Need | None:
    if unit_gpus is not None:
        units = [min(unit_gpus, gpus)]
    else:
        sizes = {min(cls[0], sum(cls[2])) for cls in empty.total}
        units = [gpus] if max(sizes, default=0) >= gpus else []
        units += sorted((size for size in sizes if size < gpus), reverse=True)
    for unit in units:
        need = Need(unit, gpus // unit, gpus % unit, unit_gpus is not None, within)
        if not missing(empty, need):
            return need
    return None


# -- counts --------------------------------------------------------------------------------------------------


def fits(index: FreeIndex, job: Job, pool: Pool, gpus: int | None = None) -> bool:
    """Return whether `place` would find a place in this pool now; only counts are read, not nodes."""
    return lacks(index, job, pool, gpus=gpus) == 0


def lacks(
    index: FreeIndex, job: Job, pool: Pool, freed: Mapping[str, Entry] | None = None, gpus: int | None = None
) -> int | None:
    """Return the number of units without a place; 0 if the gang fits, None if the nodes that are up can never hold it.

    Args:
        index: what is free.
        job: whose gang.
        pool: the kinds that it may use together.
        freed: nodes as they would be after the end of some attempts (`Entry.plus`).
        gpus: a size of an elastic job, instead of `job.gpus`.
    """
    if job.has_part or not job.gpus:
        return lacks_part(index, job, pool, freed or {})
    need = need_of(index, job, pool, gpus)
    if need is None:
        return None
    view = index.view(pool, *host_request(job, 1))
    if not freed:
        return missing(view, need)
    if need.within is not None:
        with index.as_if(freed):
            return missing(index.view(pool, *host_request(job, 1)), need)
    units = rests = 0
    for cls, nodes in view.total_if(freed).items():
        each, beside = holds(cls, need.unit, need.rest, need.in_island)
        units, rests = units + each * nodes, rests + beside * nodes
    return lacking(need, units, rests > 0)


# -- leases --------------------------------------------------------------------------------------------------


def place(
    index: FreeIndex,
    job: Job,
    candidates: tuple[Pool, ...],
    *,
    gpus: int | None = None,
    avoid: Collection[str] = (),
    spares: int = 0,
    packing: Packing = "mix",
) -> tuple[Lease, ...] | None:
    """Return the leases of a whole gang in the order of its ranks, or None if no candidate pool has room.

    Args:
        index: what is free.
        job: whose gang.
        candidates: `pools` of the job, or those of them that are open to it.
        gpus: a size of an elastic job, instead of `job.gpus`.
        avoid: nodes that are used only if there is no place without them.
        spares: the number of nodes without leases in each pool that stay free (`spare_nodes`).
        packing: the choice among nodes that hold the job (pack.py); it does not apply to gangs of several nodes.
    """
    if not job.has_part and not _has_free(index, candidates, gpus or job.gpus):
        return None
    if candidates and candidates[0][0][2]:  # first where nodes are reserved for the job
        own = tuple(pool for pool in candidates if all(kind[2] for kind in pool))
        if own != candidates:
            leases = place(index, job, own, gpus=gpus, avoid=avoid, spares=spares, packing=packing)
            if leases is not None:
                return leases
    if not spares and not avoid:
        return _place(index, job, candidates, gpus or job.gpus, packing)
    kept = {name: None for pool in candidates if len(pool) == 1 for name in spare_nodes(index, pool, spares)}
    avoided = {name: None for name in avoid if name in index.entries}
    for absent in ([kept | avoided] if avoided else []) + [kept]:
        with index.as_if(absent):
            found = _place(index, job, candidates, gpus or job.gpus, packing)
        if found is not None:
            return found
    return None


def _has_free(index: FreeIndex, candidates: tuple[Pool, ...], gpus: int) -> bool:
    """Return whether so many GPUs are free, in whatever shape; a cheap first test."""
    for pool in candidates:
        for kind in pool:
            gpus -= index.free(kind)
    return gpus <= 0


def spare_nodes(index: FreeIndex, pool: Pool, count: int) -> tuple[str, ...]:
    """Return `count` nodes with all GPUs free, in the roomiest domains, to be kept for failures of other nodes."""
    if count <= 0:
        return ()
    view = index.view(pool)
    columns = [view.column(cls) for cls in sorted(view.total) if all(free == cls[1] for free in cls[2])]
    names: list[str] = []
    for row in reversed(view.fullest_first().tolist()):
        for column in columns:
            names += reversed(view.names.get((row, column), ()))
        if len(names) >= count:
            break
    return tuple(names[:count])


def _place(
    index: FreeIndex, job: Job, candidates: tuple[Pool, ...], gpus: int, packing: Packing
) -> tuple[Lease, ...] | None:
    if job.mig is not None:
        instance = find_instance(index, job, candidates, packing)
        return None if instance is None else (instance,)
    less = not gpus or job.gpu_milli < 1000
    if less or _is_scored(job, packing):
        lease = _packed(index, job, candidates, gpus, packing)
        if lease is not None or less:
            return None if lease is None else (lease,)
    found: list[tuple[Need, Arrangement]] = []
    for pool in candidates:
        if found and len(pool) > 1:
            break  # both capacities together are the last resort, and stand last
        need = need_of(index, job, pool, gpus)
        shape = None if need is None else search(index.view(pool, *host_request(job, 1)), need)
        if need is not None and shape is not None:
            found.append((need, shape))
    if not found:
        return None
    if len(found) > 1:
        found.sort(key=lambda each: (each[1].spread, len(each[1].picks), _price(index, *each), each[1].left_over))
    return _leases(index, *found[0])


def _is_scored(job: Job, packing: Packing) -> bool:
    """Return whether nodes are scored; otherwise the fewest GPUs left over decide."""
    if job.unit_gpus is not None or job.within == "island":
        return False
    return packing == "fgd" or (packing == "mix" and bool(job.cpu_milli or job.memory_bytes))


def _packed(index: FreeIndex, job: Job, candidates: tuple[Pool, ...], gpus: int, packing: Packing) -> Lease | None:
    ask = (*host_request(job, 1), gpus, job.gpu_milli)
    found = index.packer(packing).pick(ask, [pool[0] for pool in candidates if len(pool) == 1])
    if found is None:
        return None
    name, gpu = found
    if not gpus or job.gpu_milli < 1000:
        return Lease(node=name, gpus=(gpu,) if gpus else (), milli=job.gpu_milli)
    entry, whole = index.entries[name], Need(gpus, 1, 0, False, None)
    return Lease(node=name, gpus=choose(entry, whole, 1, 0))


def _price(index: FreeIndex, need: Need, shape: Arrangement) -> int:
    return sum(
        index.entries[name].node.micro_usd_per_gpu_hour * (units * need.unit + rest)
        for name, units, rest in shape.picks
    )


def _leases(index: FreeIndex, need: Need, shape: Arrangement) -> tuple[Lease, ...]:
    """Return leases with nodes of one domain together and a rest last, so that units are consecutive ranks."""
    if len(shape.picks) == 1:
        name, units, rest = shape.picks[0]
        return (Lease(node=name, gpus=choose(index.entries[name], need, units, rest)),)
    leases = []
    for rest, _, name, units in sorted(
        (rest, index.entries[name].node.domain, name, units) for name, units, rest in shape.picks
    ):
        entry = index.entries[name]
        gpus = choose(entry, need, units, rest)
        leases.append(Lease(node=name, gpus=gpus))
    return tuple(leases)
