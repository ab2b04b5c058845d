"""Where a gang goes."""

from dataclasses import replace

import pytest

from cordee.events import Capacity, HeldSet, Lease, NodeDown
from cordee.ids import JobId
from cordee.schedule import decide
from cordee.schedule.placement.entry import Used, entry_of
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.place import fits, lacks, place, pools, spare_nodes
from cordee.schedule.policy import Policy
from world import S, World, brief, job, node, ranks_ended


def rack(name: str, *nodes: str, **more):
    return tuple(node(each, domain=("block", name), **more) for each in nodes)


TWO_RACKS = (*rack("r1", "n1", "n2"), *rack("r2", "n3", "n4"))

SET = "s3://bucket/set"
HELD = HeldSet(url=SET, held_bytes=10**12, size_bytes=10**12, bytes_per_s=10**9)
HALF = replace(HELD, held_bytes=5 * 10**11)
ALMOST = replace(HELD, held_bytes=995 * 10**9)

CASES = {
    "where its data lie": ([node("n1"), node("n2", data=(HELD,)), job("a", 8, data=(SET,))], "place a n2:8"),
    "where most of its data lie": (
        [node("n1"), node("n2", data=(HALF,)), node("n3", data=(HELD,)), job("x", 8, priority=1, data=(SET,)),
         job("a", 8, data=(SET,))],
        "place a n2:8",
    ),
    "not there for five seconds of loading": (
        [node("n1", data=(ALMOST,)), node("n2", data=(HELD,)), job("a", 8, data=(SET,))],
        "place a n1:8",
    ),
    "not there at the cost of a second rack": (
        [*rack("r1", "n1", data=(HELD,)), *rack("r1", "n0"), *rack("r2", "n2", data=(HELD,)),
         job("a", 16, data=(SET,))],
        "place a n0:8+n1:8",
    ),
    "at once elsewhere rather than later where its data lie": (
        [node("n1", data=(HELD,)), node("n2"), job("x", 8, priority=1), job("a", 8, data=(SET,))],
        "place a n2:8",
    ),
    "fewest free GPUs that are enough": ([*TWO_RACKS, job("x", 6, priority=1), job("a", 2)], "place a n1:2"),
    "a whole node rather than two halves": ([*TWO_RACKS, job("x", 4, priority=1), job("a", 8)], "place a n2:8"),
    "of equal nodes, in the fullest rack": (
        [*rack("r1", "n1", "n2"), *rack("r2", "n3"), job("a", 8)],
        "place a n3:8",
    ),
    "one rack rather than two": ([*TWO_RACKS, job("x", 8, priority=1), job("a", 16)], "place a n3:8+n4:8"),
    "two racks when it must": ([*TWO_RACKS, job("x", 8, priority=1), job("a", 24)], "place a n2:8+n3:8+n4:8"),
    "fewest nodes": (
        [node("n1", 4), node("n2", 4), node("n3", 8), node("n4", 2), job("a", 10)],
        "place a n3:8+n4:2",
    ),
    "one island in a node with less room elsewhere": (
        [node("n1", 4, island_gpus=2), node("n2", 8, island_gpus=4), job("a", 3)],
        "place a n2:3",
    ),
    "the GPU that it names": ([node("n1", gpu="A100"), node("n2"), job("a", 8, gpu_name="H100")], "place a n2:8"),
    "the capacity that it names": ([node("n1"), node("n2", capacity=Capacity.SPOT), job("a", 8, capacity="spot")],
                                   "place a n2:8"),
    "any GPU: the cheaper of two that lie equally well": (
        [node("n1", gpu="A100", micro_usd_per_gpu_hour=2), node("n2", micro_usd_per_gpu_hour=1), job("a", 8)],
        "place a n2:8",
    ),
    "any GPU: one node before two, at any price": (
        [node("n1", 4, "A100"), node("n2", 4, "A100"), node("n3", micro_usd_per_gpu_hour=10**9), job("a", 8)],
        "place a n3:8",
    ),
    "any capacity: together when neither alone is enough": (
        [node("n1"), node("n2", capacity=Capacity.SPOT), job("a", 16)],
        "place a n1:8+n2:8",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_place(case):
    events, expected = CASES[case]
    assert brief(World(*events).cycle())[-1] == expected


@pytest.mark.parametrize(
    "events",
    [
        [node("n1", gpu="A100"), node("n2"), job("a", 16)],
        [node("n1"), job("a", 9)],
        [node("n1"), node("n2", capacity=Capacity.SPOT), job("a", 9, capacity="spot")],
        [node("n1", gpu="A100"), job("a", 1, gpu_name="H100")],
        [node("n1", unavailable=(3,)), job("a", 8)],
        [job("a", 1)],
    ],
    ids=["mixed kinds", "too large", "other capacity", "other GPU", "foreign process", "no node"],
)
def test_no_place(events):
    assert World(*events).cycle() == ()


def test_gpus_are_chosen_within_one_island():
    world = World(node("n1", 8, island_gpus=4), job("x", 2, priority=1), job("a", 4), job("b", 2))
    leases = {str(event.job_id): event.leases[0].gpus for event in world.cycle()}
    assert leases == {"x": (0, 1), "a": (4, 5, 6, 7), "b": (2, 3)}


def test_the_index_forgets_a_node_that_goes():
    index = FreeIndex()
    old = index.put("n1", entry_of(node("n1", domain=("b", "r")).node, Used()))
    assert old is None and index.free(("H100", Capacity.ON_DEMAND, ())) == 8
    index.put("n1", None)
    assert index.kinds == {} and index.entries == {}


def of(*nodes) -> FreeIndex:
    index = FreeIndex()
    for event, used in nodes:
        index.put(event.node.name, entry_of(event.node, Used(used)))
    return index


def test_the_rack_that_needs_fewer_nodes_is_chosen():
    scattered = [(node(f"a{number}", 4, domain=("r1",)), 3) for number in range(4)]
    index = of(*scattered, *[(node(f"b{number}", 4, domain=("r2",)), 0) for number in range(3)])
    asked = job("a", 8, unit_gpus=2).job
    assert [lease.node for lease in place(index, asked, pools(asked, index.kinds))] == ["b0", "b1"]


def test_the_fuller_of_two_racks_that_need_as_many_nodes_is_chosen():
    index = of(*[(node(f"n{number}", domain=("r1" if number < 3 else "r2",)), 0) for number in range(5)])
    asked = job("a", 16).job
    assert [lease.node for lease in place(index, asked, pools(asked, index.kinds))] == ["n3", "n4"]


def test_ranks_of_a_unit_share_an_island_and_the_rest_comes_last():
    index = of((node("n0", island_gpus=4), 1), (node("n1", island_gpus=4), 0))
    asked = job("a", 13, unit_gpus=4).job
    leases = place(index, asked, pools(asked, index.kinds))
    assert [(lease.node, lease.gpus) for lease in leases] == [("n1", (0, 1, 2, 3, 4, 5, 6, 7)), ("n0", (4, 5, 6, 7, 1))]


def test_an_island_may_span_nodes():
    nodes = [(node(f"n{number}", 4, domain=("r", f"i{number // 3}"), island_gpus=72), 0) for number in range(6)]
    index = of(*nodes)
    asked = job("a", 12, within="island").job
    candidates = pools(asked, index.kinds)
    assert [lease.node for lease in place(index, asked, candidates)] == ["n0", "n1", "n2"]
    assert lacks(index, job("a", 16, within="island").job, candidates[0]) is None
    assert place(index, job("a", 16, within="rack").job, candidates) is not None


def test_spare_nodes_are_kept_in_the_roomiest_domain():
    index = of(*[(node(f"n{number}", domain=("r1" if number < 2 else "r2",)), 0) for number in range(5)])
    asked = job("a", 24).job
    candidates = pools(asked, index.kinds)
    assert spare_nodes(index, candidates[0], 2) == ("n4", "n3")
    assert {lease.node for lease in place(index, asked, candidates, spares=2)} == {"n0", "n1", "n2"}
    assert place(index, asked, candidates, spares=3) is None
    assert fits(index, asked, candidates[0]), "they are back"


def test_a_part_goes_where_it_leaves_the_least_and_whole_gpus_stay_whole():
    index = FreeIndex()
    for name, used in (("n0", Used()), ("n1", Used(parts=((3, 400),))), ("n2", Used(parts=((5, 600),)))):
        index.put(name, entry_of(node(name).node, used))
    asked = job("a", 1, gpu_milli=400).job
    assert place(index, asked, pools(asked, index.kinds)) == (Lease(node="n2", gpus=(5,), milli=400),)


@pytest.mark.parametrize("packing", ["mix", "fgd", "tight"])
def test_a_job_without_gpus_does_not_strand_those_of_others(packing):
    index = FreeIndex()
    for name, used in (("n0", Used()), ("n1", Used(whole=255))):
        index.put(name, entry_of(node(name, cpu_milli=8000).node, used))
    for at_us in range(20):
        index.mix.seen(job("b", 1, cpu_milli=1000).job, at_us)
    asked = job("a", 0, cpu_milli=4000).job
    assert place(index, asked, pools(asked, index.kinds), packing=packing) == (Lease(node="n1", gpus=()),)


def test_a_node_that_failed_lately_is_used_last():
    up = [node("n1"), node("n2")]
    assert brief(World(*up, job("a", 8)).cycle()) == ["place a n1:8"]
    back = [NodeDown(at_us=S, node="n1", epoch=1, why="silent"), node("n1", epoch=2, at_us=2 * S)]
    assert brief(World(*up, *back, job("a", 8, at_us=2 * S)).cycle()) == ["place a n2:8"]
    assert brief(World(*up, *back, job("a", 16, at_us=2 * S)).cycle()) == ["place a n1:8+n2:8"]


def test_spare_nodes_wait_for_a_job_that_loses_its_place():
    world = World(*[node(f"n{number}") for number in range(3)], job("a", 8), job("b", 8), job("c", 8))
    world.state.use(Policy(spares=1))
    first = decide(world.state, 0, Policy(spares=1))
    assert brief(first.events) == ["place a n0:8", "place b n1:8"]
    world.tell(*first.events, NodeDown(at_us=S, node="n0", epoch=1, why="silent"))
    world.tell(*ranks_ended(world, "a", "lost"))
    assert "place a n2:8" in brief(decide(world.state, S, Policy(spares=1)).events)


def test_replicas_of_one_gpu_break_up_one_node_for_gangs_of_eight():
    names = [f"{kind}{number}" for kind, most in (("g", 3), ("r", 6)) for number in range(1, most + 1)]
    world = World(
        *(node(f"n{number}") for number in range(1, 4)),
        *(job(name, 8, "preemptible") for name in names[:3]),
        work=dict.fromkeys(names, 10_000),
    )
    for number, name in enumerate(names[3:], 1):
        world.later(job(name, 1, "production", service="chat", within="node", at_us=number * 100 * S))
    world.play(until_s=900)
    # All GPUs were held. The first replica takes a gang's node, and those after it the others of its GPUs.
    on = {name: {lease.node for lease in world.state.attempts[JobId(name)].held} for name in names[3:]}
    assert len(set.union(*on.values())) == 1, on
    assert [world.phase(name) for name in names[:3]].count("queued") == 1, "two gangs go on"
