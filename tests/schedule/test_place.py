"""Where a gang goes."""

import pytest

from cordee.events import Capacity
from cordee.schedule.entry import Entry
from cordee.schedule.free import FreeIndex
from world import World, brief, job, node


def rack(name: str, *nodes: str, **more):
    return tuple(node(each, domain=("block", name), **more) for each in nodes)


TWO_RACKS = (*rack("r1", "n1", "n2"), *rack("r2", "n3", "n4"))

CASES = {
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
    old = index.put("n1", Entry(node("n1", domain=("b", "r")).node, 255, 8))
    assert old is None and index.free(("H100", Capacity.ON_DEMAND)) == 8
    index.put("n1", None)
    assert index.kinds == {} and index.entries == {}
