"""The order of queues by their fair shares, at a moment and over time."""

from random import Random

import pytest
from quota_trees import HOUR, TREE, a_job, gpus, hold, quotas

from cordee.events import Queue
from cordee.schedule.quota.held import Held
from cordee.schedule.quota.quotas import HALF_LIFE_US, SHARE, Quotas


def test_a_queue_that_is_inside_its_quota_goes_first_then_the_one_that_borrowed_least_by_weight():
    tree = quotas(Queue(name="a", quota_gpus=8), Queue(name="b", weight=2), Queue(name="c"))
    for queue, count in (("a", 6), ("b", 8), ("c", 5)):
        hold(tree, queue, count)
    assert sorted("cba", key=lambda queue: tree.share(queue, 0)) == ["a", "b", "c"]
    hold(tree, "a", 2)
    # Now a is at its quota: it has borrowed nothing, so of those that would borrow it is still the first.
    assert tree.share("a", 0) == (1, 0)
    assert tree.share("c", 0) == (1, 5 * SHARE // 32)
    assert tree.share("b", 0) == (1, 8 * SHARE // 32 // 2)


def test_a_fair_share_counts_the_resource_that_the_queue_borrows_most():
    tree = quotas(Queue(name="a"), Queue(name="b"))
    tree.resize(Held(cpu_milli=100_000, memory_bytes=1000), 0)
    tree.put(a_job("a", 1), Held(gpu_milli=1000, cpu_milli=50_000), 0)
    tree.put(a_job("b", 1), Held(gpu_milli=8000, memory_bytes=100), 0)
    assert tree.share("a", 0)[1] == SHARE // 2 and tree.share("b", 0)[1] == SHARE * 8 // 32


def test_use_fades_with_the_half_life():
    tree = quotas(Queue(name="a"), half_life_us=HOUR)
    job = hold(tree, "a", 32)
    tree.take(job, gpus(32), 10 * HOUR)
    now, later = tree.share("a", 10 * HOUR)[1], tree.share("a", 13 * HOUR)[1]
    assert now == pytest.approx(SHARE * 4 / 5, rel=2e-3)  # it held everything for long, and holds nothing
    assert later == pytest.approx(now / 8, rel=2e-3)


def test_the_order_of_the_file_does_not_matter():
    one, other = quotas(*TREE), quotas(*reversed(TREE))
    for tree in (one, other):
        hold(tree, "x1", 4)
        hold(tree, "y", 3)
    assert one.value() == other.value()


def saturate(weights: dict[str, int], cluster: int, hours: int, seed: int, half_life_us: int) -> dict[str, int]:
    """Return the GPU time of queues that always have more to run; each start goes to the first in their order."""
    random, tree = (
        Random(seed),
        quotas(
            *(Queue(name=name, weight=weight) for name, weight in weights.items()),
            cluster=cluster,
            half_life_us=half_life_us,
        ),
    )
    got, now_us, free, live = dict.fromkeys(weights, 0), 0, cluster, list[tuple[int, int, str, int]]()
    number = 0
    while now_us < hours * HOUR:
        while free:
            queue = min(sorted(weights), key=lambda each: tree.share(each, now_us))
            size = min(free, random.choice([1, 1, 2, 4, 8]))
            number += 1
            live.append((now_us + random.randrange(HOUR // 10, 3 * HOUR), number, queue, size))
            tree.put(a_job(queue, size), gpus(size), now_us)
            free -= size
        live.sort(reverse=True)
        ends_us, _, queue, size = live.pop()
        for _, _, each, held in [*live, (0, 0, queue, size)]:
            got[each] += held * (ends_us - now_us)
        now_us = ends_us
        tree.take(a_job(queue, size), gpus(size), now_us)
        free += size
    return got


@pytest.mark.parametrize("half_life_us", [HOUR, HALF_LIFE_US])
def test_queues_that_always_want_more_get_gpu_time_by_their_weights(half_life_us):
    for seed in range(3):
        got = saturate({"a": 2, "b": 1}, 32, 24 * 10, seed, half_life_us)
        assert got["a"] / sum(got.values()) == pytest.approx(2 / 3, rel=0.005), f"seed {seed}"


def test_no_queue_has_borrowed_before_a_node_is_known():
    tree = Quotas([Queue(name="a", quota_gpus=8), Queue(name="b")])
    assert tree.share("a", HOUR) == (0, 0) and tree.share("b", HOUR) == (1, 0)
    assert [each.queue.name for each in tree.standings(HOUR)] == ["a", "b", "default"]
