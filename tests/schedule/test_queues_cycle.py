"""Queues in the cycle: limits hold, quotas come back, fair shares converge, in worlds played to their end."""

import pytest
import random_worlds
from hypothesis import given, settings

from cordee.events import AttemptPlaced, Capacity, CheckpointCommitted, NoticeGiven, Queue, QueuesSet
from cordee.ids import JobId
from cordee.schedule import decide, explain
from cordee.units import US_PER_HOUR
from world import S, World, brief, job, node, ranks_ended

TWO = (Queue(name="a", quota_gpus=8), Queue(name="b", quota_gpus=8))


def queues(*tree: Queue, at_us: int = 0) -> QueuesSet:
    return QueuesSet(at_us=at_us, queues=tree)


def held(world: World, queue: str) -> int:
    return world.state.quotas.leaf(queue).path[-2].held // 1000


def reasons(world: World) -> list[str]:
    return [f"{each.job_id} {each.reason.value}" for each in world.log if isinstance(each, NoticeGiven)]


def test_lent_quota_comes_back_without_a_charge():
    world = World(node("n1"), node("n2"), queues(*TWO), work={"x": 1000, "y": 1000})
    world.tell(job("x", 8, queue="a"), job("y", 8, queue="a")).play(until_s=200)
    assert held(world, "a") == 16
    world.tell(job("mine", 8, "preemptible", queue="b", at_us=200 * S)).play(until_s=250)
    assert world.phase("mine") == "running" and (held(world, "a"), held(world, "b")) == (8, 8)
    assert reasons(world) == ["x quota"]  # its tier does not shield it; and it does not borrow again what it gave back
    world.play()
    assert {world.phase(name) for name in ("x", "y", "mine")} == {"done"}
    rows = {row.key: row for row in world.ledger.cost("queue", world.now_us)}
    assert rows["b"].charged_gpu_us == 0
    assert not rows["a"].lost_by_cause or [cause for cause, *_ in rows["a"].lost_by_cause] == ["quota"]


def test_a_tier_does_not_reach_into_the_quota_of_others():
    world = World(node("n1"), node("n2"), queues(*TWO))
    world.tell(job("x", 8, "preemptible", queue="a"), job("y", 8, "preemptible", queue="b")).play(until_s=50)
    world.tell(job("more", 8, "production", queue="b", at_us=50 * S)).play(until_s=60)
    # It preempts a job below it in its own queue; x is inside its quota.
    assert reasons(world) == ["y preempt"]


def test_a_limit_holds_and_the_reason_is_given():
    world = World(node("n1"), node("n2"), queues(Queue(name="a", limit_gpus=8)))
    world.tell(job("x", 6, queue="a"), job("y", 4, queue="a"), job("z", 2, queue="a")).play(until_s=20)
    assert world.phase("x") == world.phase("z") == "running"
    explanation = explain(world.state, JobId("y"), world.now_us)
    assert explanation.reason.value == "queue-limit"
    assert explanation.text == "it needs 4 GPUs; queue a holds 8 of the 8 that it may hold"
    world.play()
    assert world.phase("y") == "done"


def test_a_higher_tier_makes_room_inside_its_queues_limit():
    world = World(node("n1"), node("n2"), queues(Queue(name="a", limit_gpus=8)))
    world.tell(job("x", 8, "preemptible", queue="a"), job("other", 4, "preemptible")).play(until_s=50)
    world.tell(job("urgent", 4, "production", queue="a", at_us=50 * S)).play(until_s=100)
    assert reasons(world) == ["x preempt"] and world.phase("urgent") == "running"


def test_the_limit_of_one_user_does_not_hold_another():
    world = World(node("n1"), queues(Queue(name="a", user_gpus=4)), job("x", 4, "preemptible", queue="a"))
    world.tell(job("w", 4, "preemptible", queue="a", owner="bob")).play(until_s=10)
    # ann's limit refuses her second job, which could preempt only her own; bob's job may preempt.
    world.tell(job("y", 4, "preemptible", queue="a", at_us=10 * S)).play(until_s=11)
    world.tell(job("z", 4, "standard", queue="a", owner="cyd", at_us=11 * S)).play(until_s=60)
    assert world.phase("z") == "running" and world.phase("y") == "queued"


def test_a_job_that_is_refused_spoils_nothing_for_others():
    tree = queues(Queue(name="a", user_gpus=4), Queue(name="b"))
    world = World(node("n1"), tree, job("x", 4, queue="a"), job("w", 4, "preemptible")).play(until_s=10)
    # Both have the same size and tier, but the first is at its user's limit and has no job of that user to preempt.
    world.tell(job("y", 4, queue="a", priority=1, at_us=10 * S), job("z", 4, queue="b", at_us=10 * S)).play(until_s=60)
    assert reasons(world) == ["w preempt"] and world.phase("z") == "running" and world.phase("y") == "queued"


def test_a_queue_that_does_not_lend_starts_at_once():
    world = World(node("n1"), node("n2"), queues(Queue(name="a", quota_gpus=8, lend=False), Queue(name="b")))
    world.tell(job("x", 8, queue="b"), job("y", 8, queue="b")).play(until_s=20)
    assert world.phase("x") == "running" and world.phase("y") == "queued"
    assert explain(world.state, JobId("y"), world.now_us).reason.value == "kept"
    world.tell(job("mine", 8, queue="a", at_us=20 * S)).play(until_s=21)
    assert world.phase("mine") == "running"


def test_kept_quota_is_used_neither_by_assumed_nor_by_leaving_jobs():
    """Of 16 GPUs `a` keeps 8; `in` leaves them and `mine` claims them: no reason to let another in."""
    tree = queues(Queue(name="a", quota_gpus=8, lend=False), Queue(name="b"))
    world = World(node("n1"), node("n2"), tree, job("in", 8, "preemptible", queue="a")).play(until_s=50)
    world.tell(job("fits", 8, queue="b", at_us=50 * S), job("not", 4, queue="b", at_us=50 * S)).play(until_s=60)
    world.tell(job("mine", 8, "production", queue="a", at_us=60 * S))
    assert [f"{type(each).__name__} {each.job_id}" for each in world.cycle()] == ["NoticeGiven in"]
    with world.state.journal.what_if():
        quotas, record = world.state.quotas, world.state.jobs[JobId("not")]
        held = world.state.attempts[JobId("in")].holds(world.state.attempts[JobId("in")].held)
        quotas.assume(world.state.jobs[JobId("mine")].job, held, world.now_us)
        refusal = quotas.admits(record.job, world.now_us)
        assert refusal is not None and refusal.bound.value == "kept" and refusal.short_milli == 4000
        assert "8 are kept" in refusal.text
        quotas.withdraw(world.state.jobs[JobId("mine")].job, held, world.now_us)
    assert world.cycle() == ()


def look_again(world: World) -> list[str]:
    """Return the decision of a second cycle at the same moment, and the jobs that could start then."""
    world.state.idle = None
    could = [name for name in world.state.jobs if explain(world.state, name, world.now_us).reason.value == "starts-now"]
    return [*brief(decide(world.state, world.now_us).events), *could]


def test_a_cycle_decides_all_where_a_job_is_resized():
    """`a` shrinks for `c`. What it starts again on is kept in the next cycle as well, and no GPU is counted twice."""
    spot = {"capacity": Capacity.SPOT}
    kept = queues(Queue(name="q", quota_gpus=3, lend=False), Queue(name="r", quota_gpus=1, lend=False))
    world = World(node("n0", 2), node("n1", 2, **spot), node("n2", 2, **spot), node("n3", 4, "A100"), kept)
    world.tell(job("a", 3, "production", queue="r", capacity="on-demand", sizes=(2,)))
    world.tell(job("b", 1, "production", queue="q", gpu_name="H100"))
    world.tell(job("c", 2, "production", queue="q", capacity="on-demand"))
    world.tell(*(job(name, 1, "production", queue="q") for name in "defgh"))
    assert brief(world.cycle()) == [
        *("place a n3:3", "place b n0:1", "notice a resize for c"),
        *("place d n0:1", "place e n1:1", "place f n1:1", "place g n2:1", "place h n2:1"),
    ]
    assert look_again(world) == []
    world.tell(job("i", 1, "production", queue="default", gpu_name="A100"))
    assert brief(world.cycle()) == [], "the fourth A100 is where a goes on"
    world.play()
    assert {world.phase(name) for name in "abcdefghi"} == {"done"}


def test_a_job_that_is_resized_comes_right_behind_the_job_that_gains_in_the_next_cycle_too():
    """`c` shrinks for `b` and goes on on n1, before `f` is looked at; that `c` is of a lower tier changes nothing."""
    tree = queues(Queue(name="q", quota_gpus=2, lend=False), Queue(name="r", lend=False))
    world = World(node("n0", 12), node("n1", 1), node("n2", 1), tree, job("c", 12, queue="r", sizes=(1,)))
    world.play(until_s=10)
    world.tell(*(job(name, gpus, "production", queue="q", at_us=10 * S) for name, gpus in (("b", 2), ("f", 1))))
    assert brief(world.cycle()) == ["notice c resize for b"]
    assert look_again(world) == []


def test_gpus_vacated_for_a_job_count_once():
    """`c` waits for the GPUs of `x`; of 3 free ones `r` keeps 1, so `f` starts, before `g` uses what is kept."""
    tree = (Queue(name="q", quota_gpus=4), Queue(name="r", quota_gpus=1, lend=False), Queue(name="s"))
    world = World(node("n0", 4), node("n1", 4), queues(*tree))
    world.tell(job("x", 4, "preemptible", queue="s"), job("y", 1, "production", queue="s")).play(until_s=10)
    world.tell(job("c", 4, "production", queue="q", within="node", at_us=10 * S))
    world.tell(job("f", 1, "production", queue="s", at_us=10 * S), job("g", 1, queue="r", at_us=10 * S))
    assert brief(world.cycle()) == ["notice x preempt for c", "place f n0:1", "place g n0:1"]
    assert look_again(world) == []


def test_gpus_that_leave_for_another_queue_stay_kept():
    """`x` leaves for `c`: from then on its own queue keeps its 4 GPUs, and `f` may have none of them."""
    tree = (Queue(name="q", quota_gpus=4), Queue(name="r", quota_gpus=4, lend=False), Queue(name="s"))
    world = World(node("n0", 4, "A100"), node("n1", 8), queues(*tree), job("y", 4, queue="s", gpu_name="H100"))
    world.tell(job("x", 4, "preemptible", queue="r", gpu_name="A100")).play(until_s=10)
    world.tell(job("c", 4, "production", queue="q", gpu_name="A100", at_us=10 * S))
    world.tell(job("f", 1, "production", queue="s", gpu_name="H100", at_us=10 * S))
    assert brief(world.cycle()) == ["notice x preempt for c"]
    assert look_again(world) == []
    assert world.phase("f") == "queued"


def test_kept_quota_is_not_used_by_a_job_that_waits_for_other_gpus():
    """`q` keeps 4; that `c` waits for 4 that are leased lets `f` in no more than before."""
    tree = (Queue(name="q", quota_gpus=4, lend=False), Queue(name="s"))
    world = World(node("n0", 4, "A100"), node("n1", 4), queues(*tree))
    world.tell(job("x", 4, "preemptible", queue="s", gpu_name="A100")).play(until_s=10)
    world.tell(job("f", 1, "standard", queue="s", at_us=10 * S))
    assert brief(world.cycle()) == []
    world.tell(job("c", 4, "production", queue="q", gpu_name="A100", at_us=10 * S))
    assert brief(world.cycle()) == ["notice x preempt for c"]
    assert look_again(world) == []


def test_an_elastic_job_starts_on_the_gpus_that_its_queue_admits():
    world = World(node("n1"), queues(Queue(name="a", limit_gpus=4)), job("e", 8, queue="a", sizes=(4, 2)))
    assert [each.job_id for each in world.cycle() if isinstance(each, AttemptPlaced)] == ["e"]
    assert held(world, "a") == 4


def test_a_day_ends_by_notice_and_goes_on_when_it_may():
    tree = queues(Queue(name="a", gpu_us_per_day=16 * US_PER_HOUR))
    world = World(node("n1"), tree, work={"x": 4 * 3600}).tell(job("x", 8, queue="a")).play(until_s=3 * 3600)
    assert reasons(world) == ["x quota"] and world.phase("x") == "queued"
    explanation = explain(world.state, JobId("x"), world.now_us)
    assert explanation.reason.value == "day-gpu-time" and explanation.until_us is not None
    world.play()
    assert world.phase("x") == "done"
    used = [held_within_a_day(world, at_s * S) for at_s in range(0, 80 * 3600, 600)]
    assert max(used) <= 16 * US_PER_HOUR


def test_a_job_that_saves_nothing_in_all_of_a_day_does_not_start_again_for_ever():
    """`x` needs 4 h and saves nothing; its queue lets it run for 2 h a day."""
    tree = queues(Queue(name="a", gpu_us_per_day=16 * US_PER_HOUR))
    world = World(node("n1"), tree, work={"x": 4 * 3600}, deaf={"x"}).tell(job("x", 8, queue="a"))
    world.play(until_s=3 * 3600)
    explanation = explain(world.state, JobId("x"), world.now_us)
    assert explanation.reason.value == "day-gpu-time"
    assert "x.1 did not leave within 30" in explanation.text and explanation.text.endswith(
        "; it used 16 GPU-h of the 16 GPU-h that queue a may use within a day and made no checkpoint: it needs "
        "checkpoints, or a larger limit (1 in a row without a checkpoint; 3 end the job)"
    )
    world.play()
    assert world.phase("x") == "failed" and world.state.jobs[JobId("x")].epoch == 3
    assert "3 attempts in a row without a checkpoint; x.3" in world.state.jobs[JobId("x")].ended.why


@pytest.mark.parametrize(("by", "counts"), [("cost", 1), ("others", 0), ("checkpoint", 0), ("its own", 0)])
def test_ends_by_a_day_limit_that_count_as_failed(by, counts):
    """An attempt that did not have seven eighths of the day may succeed with more; after a checkpoint none counts."""
    tree = queues(
        Queue(name="a", gpu_us_per_day=None if by == "cost" else 16 * US_PER_HOUR, micro_usd_per_day=16 * 10**6)
    )
    world = World(node("n1", micro_usd_per_gpu_hour=10**6), tree, deaf={"x"}, work={"x": 10**5, "y": 10**5})
    if by == "others":
        world.tell(job("y", 2, queue="a"))
    world.tell(job("x", 6 if by == "others" else 8, queue="a")).cycle()
    if by == "checkpoint":
        world.play(until_s=600)
        commit = CheckpointCommitted(
            at_us=600 * S, job_id=JobId("x"), epoch=1, step=5, generation=1, size_bytes=1, stall_us=0, upload_us=0
        )
        world.tell(commit)
    if by == "its own":  # A script that saves by itself says so with its exit code, 75.
        world.play(until_s=7195)
        assert world.state.attempts[JobId("x")].leaving and reasons(world) == ["x quota"]
        world.tell(*ranks_ended(world, "x", "checkpointed")).cycle()
    world.play(until_s=3 * 3600)
    record = world.state.jobs[JobId("x")]
    assert record.last is not None and record.last.epoch == 1 and "(quota)" in record.last.why
    assert record.attempts_without_commit == counts


def held_within_a_day(world: World, at_us: int) -> int:
    """GPU time, counted anew from the log."""
    rows = world.ledger.rows(world.now_us)
    from_us = at_us - 24 * US_PER_HOUR
    return sum(row.gpus * max(0, min(at_us, row.ended_us or at_us) - max(from_us, row.placed_us)) for row in rows)


def test_fair_shares_converge_to_the_weights():
    """Two queues that always have more to run; each job runs for long compared to a restart."""
    tree = queues(Queue(name="a", weight=2), Queue(name="b", weight=1))
    jobs = [
        job(f"{queue}{number:03}", 1 + number % 3, queue=queue, save_us=S, restart_us=S)
        for number in range(420)
        for queue in ("a", "b")
    ]
    work = {each.job.job_id: 3000 + 700 * (index % 7) for index, each in enumerate(jobs)}
    world = World(*(node(f"n{number}") for number in range(4)), tree, *jobs, work=work)
    until_s = 24 * 3600
    world.play(until_s=until_s)
    assert world.state.waiting.count > 50, "both queues are saturated to the end"
    got = {row.key: row.gpu_us.held for row in world.ledger.cost("queue", world.now_us)}
    assert got["a"] / (got["a"] + got["b"]) == pytest.approx(2 / 3, rel=0.02)


# -- random worlds -------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(**random_worlds.QUEUES)
def test_random_worlds_with_queues(**world):
    random_worlds.keeps_the_rules_of_queues(**world)


def test_a_preemption_that_lets_in_a_job_before_its_own_is_completed_in_the_next_cycle():
    """`d` would make `q` hold 6. Without `g`, and before `c` is counted, `q` would hold 5 with it."""
    tree = queues(Queue(name="q", quota_gpus=5, lend=False), Queue(name="q1", parent="q"))
    world = World(node("n0"), tree, *(job(name, 1, "production", queue="q") for name in "aef"))
    world.tell(job("g", 1, queue="q"), job("b", 4, "production", queue="q1")).play(until_s=20)
    world.tell(job("d", 2, "production", queue="q", at_us=20 * S))
    assert brief(world.cycle()) == []
    world.at(21).tell(job("c", 1, "production", queue="q", at_us=21 * S))
    assert brief(world.cycle()) == ["notice g preempt for c"]
    assert look_again(world) == ["notice b quota for d"]
    assert brief(world.cycle()) == ["notice b quota for d"] and look_again(world) == []


def test_a_job_that_takes_back_its_quota_goes_first_from_the_next_cycle_on():
    """`b` claims three free GPUs before `a` preempts `f`; then `a` is first, and takes one of the three."""
    tree = queues(Queue(name="q", quota_gpus=1), Queue(name="q1", parent="q"))
    world = World(node("n0", 7), tree, *(job(name, 1, "production", queue="q1") for name in "cd"))
    world.tell(*(job(name, 1, queue="q1") for name in "ef")).play(until_s=20)
    world.tell(job("b", 4, "production", queue="q1", at_us=20 * S), job("a", 1, queue="q", at_us=20 * S))
    assert brief(world.cycle()) == ["notice e preempt for b", "notice f quota for a"]
    assert look_again(world) == ["place a n0:1", "a"]
    assert brief(world.cycle()) == ["place a n0:1"] and look_again(world) == []
    assert world.play(until_s=60).phase("b") == "running"
