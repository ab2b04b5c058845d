"""Budgets: use in a month and in total, jobs that wait for a hard one, and what is told of each."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.control.codec import codec
from cordee.events import Budget, BudgetReached, BudgetRemoved, BudgetSet, NoticeGiven, Queue, QueuesSet
from cordee.ids import JobId
from cordee.schedule import explain
from cordee.schedule.quota.budgets import Spent, month_of
from cordee.schedule.state.saved import SavedState, restored_state, saved_state
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import apply
from cordee.units import MICRO_USD, US_PER_DAY
from world import HOUR, S, World, job, node

TREE = QueuesSet(at_us=0, queues=(Queue(name="research"), Queue(name="llm", parent="research"), Queue(name="other")))
MONTH_S = 31 * 24 * 3600  # of January 1970


def budget(usd: float | None = None, *, at_us: int = 0, hours: int | None = None, **more) -> BudgetSet:
    money = None if usd is None else round(usd * MICRO_USD)
    made = Budget(micro_usd=money, gpu_us=None if hours is None else hours * HOUR, **more)
    return BudgetSet(at_us=at_us, budget=made, by="ada")


def told(world: World) -> list[tuple[int, float]]:
    return [(each.percent, each.at_us / S) for each in world.log if isinstance(each, BudgetReached)]


def spent(world: World, **whose: str) -> tuple[int, int]:
    [kept] = [
        each
        for each in world.state.quotas.budgets.kept.values()
        if all(getattr(each.budget, k) == v for k, v in whose.items())
    ]
    gpu, money = kept.used.within(kept.budget.per, world.now_us)
    return gpu // 1000, money // (1000 * HOUR)


changes = st.lists(st.tuples(st.integers(0, 90 * US_PER_DAY), st.integers(0, 8), st.integers(0, 5)), max_size=12)


@given(changes, st.integers(0, 100 * US_PER_DAY))
def test_use_in_a_month_is_the_integral_of_holdings_since_its_begin(drawn, now_us):
    used, moves = Spent(), sorted((at_us, change) for at_us, *change in drawn if at_us <= now_us)
    for at_us, change in moves:
        used = used.moved(at_us, tuple(change))
    begin_us, end_us = month_of(now_us)
    first = datetime.fromtimestamp(now_us // S, UTC).replace(day=1, hour=0, minute=0, second=0)
    assert begin_us == round(first.timestamp()) * S and begin_us <= now_us < end_us
    for per, from_us in (("month", begin_us), ("total", 0)):
        expected = tuple(sum(change[n] * (now_us - max(at_us, from_us)) for at_us, change in moves) for n in (0, 1))
        assert used.within(per, now_us) == expected
    undone = used.moved(now_us, (3, 4)).moved(now_us, (-3, -4))
    assert undone[:2] == used[:2] and undone.within("month", now_us) == used.within("month", now_us)
    twice = used.plus(used, now_us)
    assert twice.within("month", end_us - 1) == tuple(2 * each for each in used.within("month", end_us - 1))


def test_a_job_waits_for_a_hard_budget_and_starts_in_the_next_month():
    world = World(node("n1"), TREE, budget(40, queue="llm", hard=True), work={"x": 3600, "y": 3600})
    world.tell(job("x", 8, queue="llm")).play(until_s=4000)
    assert world.phase("x") == "done"
    world.tell(job("y", 8, queue="llm", at_us=4000 * S), job("z", 8, queue="other", at_us=4000 * S)).play(until_s=5000)
    assert world.phase("y") == "queued" and world.phase("z") == "done"  # another queue's job goes on
    found = explain(world.state, JobId("y"), world.now_us)
    assert found.reason.value == "budget" and found.until_us == MONTH_S * S
    assert found.text == (
        "queue llm spent $29.28 of the budget of $40.00 for 1970-01; with it, the next 1h would take $28.80"
    )
    world.play()
    placed = [each.at_us / S for each in world.log if type(each).__name__ == "AttemptPlaced" and each.job_id == "y"]
    assert placed == [MONTH_S] and world.phase("y") == "done"


def test_running_jobs_are_finished_unless_the_budget_stops_them():
    for stops, reasons, phase in ((False, [], "done"), (True, ["quota"], "queued")):
        limit = budget(40, queue="research", per="total", hard=True, stops=stops)
        world = World(node("n1"), TREE, limit, work={"x": 8000}).tell(job("x", 8, queue="llm")).play(until_s=20_000)
        assert [each.reason.value for each in world.log if isinstance(each, NoticeGiven)] == reasons
        assert world.phase("x") == phase
        money = spent(world)[1]
        assert (money <= 40 * MICRO_USD) is stops, money
        assert money > 39 * MICRO_USD  # it left as late as its grace period allowed


def test_each_part_of_a_budget_is_told_once_and_at_its_moment():
    world = World(node("n1"), TREE, budget(8, user="ann"), work={"x": 2000}, deaf="x")
    world.tell(job("x", 8, queue="llm")).play()
    assert told(world) == [(50, 500), (80, 800), (100, 1000)]  # eight GPUs cost $0.008 a second
    assert [each.micro_usd for each in world.log if isinstance(each, BudgetReached)] == [
        4_000_000,
        6_400_000,
        8_000_000,
    ]
    again = World(node("n1"), TREE, work={"x": 2000}).tell(job("x", 8, queue="llm")).play(until_s=900)
    again.tell(budget(8, at_us=900 * S, user="ann")).play()
    assert told(again) == [(80, 900), (100, 1000)]  # it counts the month from its begin, and tells the highest part


def test_a_budget_of_gpu_time_tells_again_in_each_month():
    world = World(node("n1"), budget(hours=1), work={"x": 900}, deaf="x")
    world.tell(job("x", 8)).later(job("y", 8, at_us=(MONTH_S + 50) * S)).play()
    assert [(percent, at_s % MONTH_S) for percent, at_s in told(world)][:2] == [(50, 225), (80, 360)]
    world.work["z"] = 900
    world.tell(job("z", 8, at_us=world.now_us)).play()
    assert [percent for percent, _ in told(world)] == [50, 80, 100, 50, 80, 100]


def test_the_budget_of_one_user_keeps_no_other_from_starting():
    tight = budget(1, user="ann", queue="research", hard=True)
    world = World(node("n1"), TREE, tight, job("x", 8, queue="llm"), job("y", 8, queue="llm", owner="bob"))
    world.play(until_s=200)
    assert world.phase("x") == "queued" and world.phase("y") == "done"
    assert "ann in queue research spent $0" in explain(world.state, JobId("x"), world.now_us).text
    at_us = world.now_us
    world.tell(BudgetRemoved(at_us=at_us, queue="research", user="ann", per="month", by="ada")).play()
    assert world.phase("x") == "done"


def test_a_budget_keeps_its_use_when_the_tree_of_queues_changes():
    world = World(node("n1"), TREE, budget(100, queue="research")).tell(job("x", 8, queue="llm")).play(until_s=60)
    before = spent(world)
    moved = (Queue(name="research"), Queue(name="llm"))
    world.tell(QueuesSet(at_us=world.now_us, queues=moved))
    assert spent(world) == (0, 0)  # llm is no longer inside it
    world.tell(QueuesSet(at_us=world.now_us, queues=TREE.queues))
    assert spent(world) == before != (0, 0)


@pytest.mark.parametrize("per", ["month", "total"])
def test_a_budget_counts_what_the_ledger_counts_and_follows_from_the_log(per):
    budgets = (
        budget(30, queue="research", per=per, hard=True),
        budget(9, user="bob", per=per, hard=True, stops=True),
    )
    nodes = node("n1"), node("n2", micro_usd_per_gpu_hour=1_234_567)
    world = World(*nodes, TREE, *budgets, work={"a": 1700, "b": 900, "c": 2600, "d": 500})
    world.tell(
        job("a", 8, queue="llm"), job("b", 3, queue="llm", owner="bob"), job("c", 5, owner="bob", queue="research")
    )
    world.later(job("d", 8, "production", queue="llm", at_us=700 * S)).play(until_s=3000)
    for limit, kind, key in (("research", "queue", None), (None, "user", "bob")):
        rows = world.ledger.rows(world.now_us)
        mine = [each for each in rows if key is None or each.owner == key]
        money = spent(world, queue=limit, user=key)[1]
        assert 0 <= money - sum(each.micro_usd.held for each in mine) <= len(mine), kind  # an attempt is rounded down
    replayed = State()
    for event in world.log:
        apply(replayed, event)
    assert replayed.snapshot() == world.state.snapshot()
    coded = codec(SavedState)
    read = restored_state(coded.decode(coded.encode(saved_state(world.state))), world.state.policy)
    assert read.quotas.value() == world.state.quotas.value()
    later_us = world.now_us + 40 * US_PER_DAY
    for restored, known in zip(
        read.quotas.budgets.kept.values(), world.state.quotas.budgets.kept.values(), strict=True
    ):
        assert restored.used.within(per, later_us) == known.used.within(per, later_us)
