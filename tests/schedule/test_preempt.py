"""The choice of victims, and the cost of a preemption."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.events import CheckpointCommitted, Lease, NodeDown, RanksStarted
from cordee.ids import JobId
from cordee.schedule import Attempt, decide, explain
from cordee.schedule.preemption import knapsack
from cordee.schedule.preemption.knapsack import Victim, choose
from cordee.schedule.preemption.loss import Cost, charge, expected_loss
from world import HOUR, PRICE, S, World, brief, job, node, ranks_ended


def attempt(ran_s: int, committed_s: int | None = None, **more) -> Attempt:
    """One of 8 GPUs at PRICE (0.008 dollars a second) that started at 0 s and is asked about at `ran_s`."""
    asked = {"save_us": 30 * S, "restart_us": 60 * S, "grace_us": 60 * S, "checkpoint_every_us": 1800 * S} | more
    leases = (Lease(node="n1", gpus=tuple(range(8))),)
    captured_us = None if committed_s is None else committed_s * S
    submitted = job("a", 8, "preemptible", **asked).job
    return Attempt(
        job=submitted, epoch=1, placed_us=-60 * S, leases=leases, prices=(PRICE,), held=leases, started_us=0,
        captured_us=captured_us,
    )  # fmt: skip


SHORT = {"grace_us": 10 * S}
A_SECOND = 8 * PRICE * S // HOUR


@pytest.mark.parametrize(
    ("ran_s", "committed_s", "more", "lost_s", "charged_s"),
    [
        (3600, 3000, {}, 90, 90),  # saves within its grace: 30 s, and restarts: 60 s
        (3600, 3000, SHORT, 660, 660),  # cannot save: 600 s of work
        (9000, 3000, SHORT, 6060, 1860),  # overdue: at most one interval is weighed
        (3600 + 300, None, SHORT, 3960, 360),  # silent: as if it had checkpointed on time
        (3600 + 80, None, SHORT, 3740, 1860),  # and the one of an hour is not durable yet: never more than one interval
        (900, None, {"protected": False}, 960, 960),  # unprotected: all its work
        (36000, None, {"protected": False}, 36060, 1860),  # up to one interval
    ],
)
def test_the_expected_loss_and_the_charge(ran_s, committed_s, more, lost_s, charged_s):
    it = attempt(ran_s, committed_s, **more)
    assert expected_loss(it, ran_s * S) == Cost(lost_s * A_SECOND, lost_s * 8 * S)
    assert charge(it, ran_s * S) == Cost(charged_s * A_SECOND, charged_s * 8 * S)


@given(ran_s=st.integers(0, 10**6), every_s=st.integers(1, 10**4), reported=st.booleans(), protected=st.booleans())
def test_silence_never_makes_an_attempt_dearer_than_one_interval(ran_s, every_s, reported, protected):
    more = {"checkpoint_every_us": every_s * S, "protected": protected} | SHORT
    it = attempt(ran_s, 0 if reported else None, **more)
    assert charge(it, ran_s * S).gpu_us <= 8 * (every_s + 60) * S


victims = st.lists(
    st.builds(
        Victim,
        job_id=st.uuids().map(lambda drawn: JobId(str(drawn))),
        gpus=st.sampled_from([0, 1, 2, 3, 4, 8, 16]),
        cost=st.builds(Cost, st.integers(0, 3), st.integers(0, 3)),
        level=st.integers(1, 2),
    ),
    max_size=8,
    unique_by=lambda victim: victim.job_id,
)


def weight(chosen) -> tuple[int, int, int, int]:
    return (
        sum(each.cost.micro_usd for each in chosen),
        sum(each.cost.gpu_us for each in chosen),
        len(chosen),
        -sum(each.level for each in chosen),
    )


@given(candidates=victims, need=st.integers(1, 30), rotate=st.integers(0, 7))
def test_the_chosen_set_is_the_cheapest_of_all_and_does_not_depend_on_order(candidates, need, rotate):
    enough = [
        each
        for size in range(1, len(candidates) + 1)
        for each in combinations(candidates, size)
        if sum(victim.gpus for victim in each) >= need
    ]
    chosen = choose(candidates, need)
    assert (chosen is None) == (not enough)
    if chosen is not None:
        assert sum(victim.gpus for victim in chosen) >= need
        assert weight(chosen) == min(map(weight, enough))
        assert choose(candidates[rotate:] + candidates[:rotate], need) == chosen


@given(candidates=victims, need=st.integers(1, 30))
def test_the_greedy_choice_has_no_member_that_is_not_needed(candidates, need):
    there = [each for each in candidates if each.gpus]
    if sum(each.gpus for each in there) < need:
        return
    chosen = knapsack._greedy(there, need)
    freed = sum(each.gpus for each in chosen)
    assert freed >= need and all(freed - each.gpus < need for each in chosen)


def world_of(*jobs, **options) -> World:
    """Jobs that started on nodes of 4 GPUs, at 1,000 s; those named `kept...` committed at 990 s."""
    nodes = [node(f"n{number}", 4) for number in range(len(jobs))]
    world = World(*nodes, *jobs, work={str(each.job.job_id): 10**6 for each in jobs}, **options)
    world.play(until_s=70)
    world.at(990)
    for each in jobs:
        if str(each.job.job_id).startswith("kept"):
            more = {"step": 9, "generation": 1, "size_bytes": 1, "stall_us": 0, "upload_us": 0}
            world.tell(CheckpointCommitted(at_us=990 * S, job_id=each.job.job_id, epoch=1, **more))
    return world.at(1000)


def preempt(world: World, gpus: int, tier: str = "production", **more) -> list[str]:
    world.tell(job("p", gpus, tier, at_us=world.now_us, **more))
    return brief(world.cycle())


def test_the_victim_is_the_one_that_loses_least():
    world = world_of(job("far", 4, grace_us=0), job("kept", 4, grace_us=0), job("other", 4, grace_us=0))
    assert preempt(world, 4) == ["notice kept preempt for p"]


def test_only_lower_tiers_are_preempted():
    world = world_of(job("a", 4, "standard"), job("b", 4, "production"))
    assert preempt(world, 4, "standard") == []
    world = world_of(job("a", 4, "standard"), job("b", 4, "preemptible", protected=False))
    assert preempt(world, 4, "standard") == ["notice b preempt for p"]


def test_no_attempt_is_preempted_when_it_would_not_help():
    assert preempt(world_of(job("a", 4), job("b", 4, "production")), 8) == []


def test_no_attempt_is_preempted_off_a_node_that_is_down():
    world = world_of(job("a", 4))
    world.tell(NodeDown(at_us=world.now_us, node="n0", epoch=1, why="silent"), node("n1", 2))
    assert preempt(world, 4) == []


def test_a_gang_that_has_begun_to_finish_is_left_to_it():
    world = World(node("n1", 4), node("n2", 4), job("a", 8, "preemptible"))
    world.play(until_s=2)
    world.tell(*ranks_ended(world, "a", "finished", "n1"))
    assert preempt(world, 8) == []


def test_two_small_victims_when_they_are_cheaper_than_a_large_one():
    world = World(node("n1"), node("n2"), job("large", 8), job("s1", 4), job("s2", 4))
    world.play(until_s=2)
    assert preempt(world.at(1000), 8) == ["notice large preempt for p"]  # as dear: fewer jobs
    world = World(node("n1"), node("n2"), job("large", 8, save_us=31 * S, grace_us=60 * S), job("s1", 4), job("s2", 4))
    world.play(until_s=2)
    assert preempt(world.at(1000), 8) == ["notice s1 preempt for p", "notice s2 preempt for p"]


def test_a_job_is_not_preempted_again_before_it_has_run_as_long_as_its_minimum():
    world = World(node("n1"), job("a", 8, min_run_us=100 * S))
    world.play(until_s=2)
    # A first attempt goes at once.
    assert brief(world.tell(job("p", 8, "production")).cycle()) == ["notice a preempt for p"]
    world.tell(*ranks_ended(world, "a", "checkpointed")).cycle()
    world.tell(*ranks_ended(world, "p", "finished"))
    assert brief(world.cycle())[-1] == "place a n1:8"
    world.tell(RanksStarted(at_us=10 * S, job_id=JobId("a"), epoch=2, node="n1"))
    world.tell(job("q", 8, "production", at_us=50 * S))
    decision = decide(world.state, world.now_us)
    assert decision.events == () and decision.wake_at_us == 110 * S
    why = explain(world.state, JobId("q"), world.now_us)
    assert (why.reason, why.blocking, why.until_us) == ("waits-for-minimum-run", ("a",), 110 * S)
    assert why.text.endswith("a, which was preempted before, may not be preempted again for 1m")
    assert brief(world.at(110).cycle()) == ["notice a preempt for q"]


def test_without_prices_gpu_time_decides():
    jobs = (job("a", 4, grace_us=0), job("b", 4, grace_us=0), job("kept", 4, grace_us=0))
    world = World(*(node(f"n{n}", 4, micro_usd_per_gpu_hour=0) for n in range(3)), *jobs)
    world.play(until_s=70)
    more = {"step": 9, "generation": 1, "size_bytes": 1, "stall_us": 0, "upload_us": 0}
    world.tell(CheckpointCommitted(at_us=65 * S, job_id=JobId("kept"), epoch=1, **more))
    assert preempt(world, 4) == ["notice kept preempt for p"]


def test_a_notice_has_the_expected_loss_and_the_preemptor():
    world = world_of(job("a", 4, "preemptible", protected=False))
    world.tell(job("p", 4, "production", at_us=world.now_us))
    (given,) = world.cycle()
    assert given.for_job == "p" and given.deadline_us == 1030 * S
    assert given.expected_loss_micro_usd == 4 * PRICE * (999 + 60) * S // HOUR


def test_a_victim_leaves_its_cpu_where_gpus_are_free():
    world = World(node("n1", cpu_milli=8000), job("a", 2, "preemptible", cpu_milli=6000))
    world.play(until_s=2)
    world.tell(job("p", 2, "production", at_us=5 * S, cpu_milli=4000))
    assert brief(world.cycle()) == ["notice a preempt for p"]


def test_no_attempt_is_preempted_where_none_leaves_enough_cpu():
    world = World(node("n1", cpu_milli=8000), node("n2"), job("a", 8, "preemptible", gpu_name="H100"))
    world.play(until_s=2)
    world.tell(job("p", 8, "production", at_us=5 * S, cpu_milli=9000), job("q", 8, "production", cpu_milli=9000))
    decision = decide(world.state, world.now_us)
    assert decision.errors == ()
