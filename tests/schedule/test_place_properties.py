"""What holds of every place: whole gangs of whole units, nothing over, and no better place than the brute force's."""

from dataclasses import replace
from itertools import product

from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.events import Job, Lease
from cordee.ids import JobId
from cordee.schedule.placement.entry import Used, entry_of, host_request
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.place import fits, lacks, need_of, place, pools
from world import job, node

USED = st.tuples(st.integers(0, 255), st.dictionaries(st.integers(0, 7), st.integers(1, 999), max_size=2))
DOMAINS = {
    "none": st.just(()),
    "racks": st.sampled_from([("r0",), ("r1",)]),
    "blocks": st.sampled_from([("b0", "r0"), ("b0", "r1"), ("b1", "r0")]),
    "uneven": st.sampled_from([(), ("r0",), ("b0", "r0"), ("b0", "r1")]),
    "islands": st.sampled_from([("r0", "i0"), ("r0", "i1"), ("r1", "i0")]),
}


@st.composite
def clusters(draw, nodes_max=4):
    """Nodes and what is used of each."""
    where = draw(st.sampled_from(sorted(DOMAINS)))
    found = []
    for number in range(draw(st.integers(1, nodes_max))):
        gpus = draw(st.sampled_from([2, 4, 8]))
        more = {
            "domain": draw(DOMAINS[where]),
            "island_gpus": 16 if where == "islands" else draw(st.sampled_from([0, 0, 2, 4])),
        }
        if draw(st.booleans()):
            more |= {"cpu_milli": 1000 * draw(st.integers(0, 16)), "memory_bytes": draw(st.integers(0, 40))}
        each = node(f"n{number}", gpus, **more).node
        whole, parts = draw(USED)
        whole &= (1 << gpus) - 1
        shared = tuple(sorted((gpu, milli) for gpu, milli in parts.items() if gpu < gpus and not whole >> gpu & 1))
        found.append((each, Used(whole, shared)))
    return found


@st.composite
def asks(draw):
    """A job."""
    gpus = draw(st.integers(1, 14))
    part = draw(st.sampled_from([1000, 1000, 1000, 250, 500]))
    more = {
        "cpu_milli": draw(st.sampled_from([0, 0, 1000, 8000])) * gpus,
        "memory_bytes": draw(st.sampled_from([0, 0, 5])) * gpus,
        "within": draw(st.sampled_from([None, None, "island", "node", "rack", "block"])),
        "unit_gpus": draw(st.sampled_from([None, None, 1, 2, 3, 4])),
    }
    return job("a", gpus if part == 1000 else 1, gpu_milli=part, **more).job


def index_of(cluster) -> FreeIndex:
    index = FreeIndex()
    for each, used in cluster:
        index.put(each.name, entry_of(each, used))
    return index


def in_islands(each, gpus, unit: int, in_island: bool) -> list[int]:
    """How many of these GPUs each part of a node has within which a unit must lie."""
    size = (
        each.island_gpus if in_island and 0 < each.island_gpus < each.gpus and unit <= each.island_gpus else each.gpus
    )
    return [sum(gpu // size == at for gpu in gpus) for at in range(-(-each.gpus // size))]


def can_hold(parts: list[int], unit: int, units: int, rest: int) -> bool:
    """Whether so many units and a rest go into parts of a node, by trying."""
    if units:
        return any(
            free >= unit and can_hold([*parts[:at], free - unit, *parts[at + 1 :]], unit, units - 1, rest)
            for at, free in enumerate(parts)
        )
    return not rest or any(free >= rest for free in parts)


def common(paths: list[tuple[str, ...]]) -> tuple[str, ...]:
    """Return the common prefix of domain paths."""
    shared = paths[0]
    while any(path[: len(shared)] != shared for path in paths):
        shared = shared[:-1]
    return shared


def spread(cluster, names) -> int:
    """How far a gang on these nodes is apart: 0 one node, then 1 + the height of the lowest domain; 99 the cluster."""
    if len(names) == 1:
        return 0
    paths = {each.name: each.domain for each, _ in cluster}
    top = common([paths[name] for name in names])
    if not top:
        return 99
    spans = any(each.island_gpus > each.gpus for each, _ in cluster)
    below = max(len(path) - len(top) for path in paths.values() if path[: len(top)] == top)
    return 2 + below - spans


HIGHEST = {"node": 0, "island": 1, "rack": 2, "block": 3, None: 99}


def every_way(cluster, asked: Job, need):
    """All ways to lay units and the rest on nodes, as (spread, nodes)."""
    index = index_of(cluster)
    cpu, memory = host_request(asked, 1)
    room = []
    for each, _ in cluster:
        entry = index.entries[each.name]
        free = [gpu for gpu in range(each.gpus) if entry.free >> gpu & 1]
        most = min(
            len(free),
            entry.cpu_milli // cpu if cpu and entry.cpu_milli is not None else 99,
            entry.memory_bytes // memory if memory and entry.memory_bytes is not None else 99,
        )
        parts = in_islands(each, free, need.unit, need.in_island)
        alone = in_islands(each, free, need.gpus, True)
        room.append((most, parts, max(alone) if need.gpus <= (each.island_gpus or each.gpus) else 0))
    for counts in product(*(range(most // need.unit + 1) for most, _, _ in room)):
        if sum(counts) != need.units:
            continue
        for at in range(len(cluster)) if need.rest else [None]:
            taken = {}
            for number, units in enumerate(counts):
                rest = need.rest if number == at else 0
                if units or rest:
                    taken[number] = (units, rest)
            if all(
                units * need.unit + rest <= room[number][0] and can_hold(room[number][1], need.unit, units, rest)
                for number, (units, rest) in taken.items()
            ):
                names = [cluster[number][0].name for number in taken]
                far = spread(cluster, names)
                if need.within == "island" and far == 0 and room[next(iter(taken))][2] < need.gpus:
                    continue
                if far <= HIGHEST[need.within]:
                    yield far, len(taken)


def check(cluster, asked: Job, leases: tuple[Lease, ...]) -> None:
    """A place is whole, of whole units, on what is free."""
    used, nodes = {each.name: taken for each, taken in cluster}, {each.name: each for each, _ in cluster}
    assert sum(len(lease.gpus) for lease in leases) == asked.gpus, "a gang is whole"
    assert len({lease.node for lease in leases}) == len(leases)
    for lease in leases:
        after = used[lease.node].plus(lease, asked)  # asserts that nothing is leased twice and no GPU over 1000 milli
        entry = entry_of(nodes[lease.node], after)
        assert not set(lease.gpus) & set(nodes[lease.node].unavailable)
        assert entry.cpu_milli is None or entry.cpu_milli >= 0
        assert entry.memory_bytes is None or entry.memory_bytes >= 0


@st.composite
def wide(draw):
    """Nodes of four GPUs of which little is used, and a gang of several nodes."""
    where = draw(st.sampled_from(sorted(DOMAINS)))
    gpus = draw(st.sampled_from([4, 4, 6]))
    island = draw(st.sampled_from([0, 0, gpus // 2]))
    found = []
    for number in range(draw(st.integers(3, 6))):
        spans = 16 if where == "islands" else island
        each = node(f"n{number}", gpus, domain=draw(DOMAINS[where]), island_gpus=spans).node
        found.append((each, Used(draw(st.sampled_from([0, 0, 0, 1, 3, 5, 9])))))
    within = draw(st.sampled_from([None, None, None, None, "rack", "block"]))
    unit = draw(st.sampled_from([None, 2, 2, 3, 4]))
    return found, job("a", draw(st.integers(4, 3 * gpus)), within=within, unit_gpus=unit).job


@settings(max_examples=250)
@given(wide())
def test_a_gang_of_several_nodes_is_whole_and_lies_as_near_as_any(drawn):
    check_place(*drawn)


@settings(max_examples=200)
@given(clusters(), asks())
def test_a_place_is_whole_and_lies_as_near_as_any(cluster, asked):
    check_place(cluster, asked)


def check_place(cluster, asked: Job) -> None:
    """The place is right by all rules, and brute force knows no better one."""
    index = index_of(cluster)
    pool = next(iter(index.kinds))
    before = index.value()
    leases = place(index, asked, ((pool,),))
    lacking = lacks(index, asked, (pool,))
    assert fits(index, asked, (pool,)) == (leases is not None) == (lacking == 0)
    assert index.value() == before, "to ask changes nothing"
    if leases is not None:
        check(cluster, asked, leases)
    if asked.gpu_milli < 1000:
        return
    need = need_of(index, asked, (pool,))
    if need is None:
        assert leases is None and lacking is None
        return
    ways = set(every_way(cluster, asked, need))
    assert (leases is not None) == bool(ways)
    if leases is None:
        return
    nodes = {each.name: each for each, _ in cluster}
    for lease in leases[:-1]:
        parts = in_islands(nodes[lease.node], lease.gpus, need.unit, need.in_island)
        assert all(part % need.unit == 0 for part in parts), "units are unbroken, and the rest comes last"
    for at in range(0, need.units * need.unit, need.unit):
        ranks = [(lease.node, gpu) for lease in leases for gpu in lease.gpus][at : at + need.unit]
        assert len({name for name, _ in ranks}) == 1, "a unit is consecutive ranks"
        parts = in_islands(nodes[ranks[0][0]], [gpu for _, gpu in ranks], need.unit, need.in_island)
        assert sum(map(bool, parts)) == 1
    far = spread(cluster, [lease.node for lease in leases])
    assert far == min(ways)[0], "no nearer place"
    if not need.rest and len({nodes[lease.node].domain for lease in leases}) == 1:
        assert (far, len(leases)) == min(ways), "no fewer nodes of a rack"


@given(clusters(nodes_max=6), asks(), st.data())
def test_a_place_depends_neither_on_the_order_of_events_nor_on_earlier_searches(cluster, asked, data):
    index, pool = index_of(cluster), None
    pool = next(iter(index.kinds))
    other = FreeIndex()
    for each, used in data.draw(st.permutations(cluster)):
        other.put(each.name, entry_of(each, Used()))
        place(other, asked, ((pool,),), packing=data.draw(st.sampled_from(["mix", "tight", "fgd"])))
        other.put(each.name, entry_of(each, used))
    for packing in ("mix", "fgd", "tight"):
        assert place(index, asked, ((pool,),), packing=packing) == place(other, asked, ((pool,),), packing=packing)
    assert index.value() == other.value()


@given(clusters(), asks(), st.data())
def test_predicted_changes_of_ends_equal_their_changes(cluster, asked, data):
    index = index_of(cluster)
    pool = (next(iter(index.kinds)),)
    lease_job = replace(asked, gpus=1, gpu_milli=1000, unit_gpus=None, within=None)
    freed, after = {}, list(cluster)
    for at, (each, used) in enumerate(cluster):
        gpus = [gpu for gpu in range(each.gpus) if used.whole >> gpu & 1 and data.draw(st.booleans())]
        if gpus:
            free_of_host = replace(lease_job, cpu_milli=0, memory_bytes=0)
            leases = [(Lease(node=each.name, gpus=(gpu,)), free_of_host) for gpu in gpus]
            freed[each.name] = index.entries[each.name].plus(leases)
            less = used
            for lease, of in leases:
                less = less.minus(lease, of)
            after[at] = (each, less)
            assert freed[each.name] == entry_of(each, less)
    before = index.value(), lacks(index, asked, pool)
    assert lacks(index, asked, pool, freed) == lacks(index_of(after), asked, pool)
    with index.as_if(freed):
        assert place(index, asked, (pool,)) == place(index_of(after), asked, (pool,))
    assert (index.value(), lacks(index, asked, pool)) == before


@given(clusters(), asks(), st.sets(st.sampled_from(["n0", "n1", "n2", "n3"])))
def test_nodes_to_avoid_are_used_only_if_there_is_no_place_without_them(cluster, asked, avoid):
    index = index_of(cluster)
    candidates = ((next(iter(index.kinds)),),)
    others = index_of([(each, used) for each, used in cluster if each.name not in avoid])
    chosen = place(index, asked, candidates, avoid=avoid)
    without = place(others, asked, candidates) if others.kinds else None
    if without is not None:
        assert chosen == without
    else:
        assert chosen == place(index, asked, candidates)


@given(st.lists(st.tuples(st.sampled_from([0, 1, 1, 2]), st.integers(1, 20), st.booleans()), max_size=40))
def test_small_jobs_share_gpus_come_and_go_and_nothing_is_ever_over(steps):
    index, used, running = FreeIndex(), {}, []
    nodes = {name: node(name, 2, cpu_milli=8000, memory_bytes=8000).node for name in ("n0", "n1")}
    for name, each in nodes.items():
        used[name] = Used()
        index.put(name, entry_of(each, used[name]))
    for number, (gpus, size, ends) in enumerate(steps):
        if ends and running:
            asked, lease = running.pop(0)
            used[lease.node] = used[lease.node].minus(lease, asked)
        else:
            milli = 50 * size if gpus == 1 else 1000
            more = {"gpu_milli": milli, "cpu_milli": 100 * size, "memory_bytes": 70 * size}
            asked = job(f"j{number}", gpus, **more).job
            index.mix.seen(asked, number)
            pool = pools(asked, index.kinds)
            leases = place(index, asked, pool)
            assert fits(index, asked, pool[0]) == (leases is not None)
            if leases is None:
                continue
            (lease,) = leases
            used[lease.node] = used[lease.node].plus(lease, asked)
            running.append((asked, lease))
        index.put(lease.node, entry_of(nodes[lease.node], used[lease.node]))
        entry = index.entries[lease.node]
        assert entry.cpu_milli >= 0 and entry.memory_bytes >= 0
    for asked, lease in running:
        used[lease.node] = used[lease.node].minus(lease, asked)
    assert set(used.values()) == {Used()}


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 4)), min_size=1, max_size=60), st.data())
def test_the_mix_is_undone_and_does_not_depend_on_the_order_within_a_moment(moments, data):
    first, second = FreeIndex().mix, FreeIndex().mix
    reports = sorted((at_us, gpus) for at_us, gpus in moments)
    undo = []
    values = [first.value()]
    for at_us, gpus in reports:
        undo.append(first.seen(job("a", gpus).job, at_us))
        values.append(first.value())
    shuffled = sorted(data.draw(st.permutations(reports)), key=lambda each: each[0])
    for at_us, gpus in shuffled:
        second.seen(job("a", gpus).job, at_us)
    assert first.value() == second.value()
    for step in reversed(undo):
        assert first.value() == values.pop()
        first.unseen(step)
    assert first.value() == values.pop()


def test_a_pool_of_two_capacities_is_the_last_resort():
    index = FreeIndex()
    for name, capacity in (("n1", "on-demand"), ("n2", "spot")):
        event = node(name, capacity=capacity)
        index.put(name, entry_of(event.node, Used()))
    asked = Job(job_id=JobId("a"), name="a", owner="me", gpus=16)
    both = pools(asked, index.kinds)
    assert [fits(index, asked, pool) for pool in both] == [False, False, True]
    assert [lease.node for lease in place(index, asked, both)] == ["n1", "n2"]
