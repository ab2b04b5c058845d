"""Turns inside a tier: levels of GPU time, minimum runs, patience, budgets; jobs that move, shrink and grow."""

from dataclasses import replace

import pytest

from cordee.errors import InputError
from cordee.events import (
    NODE_LEFT,
    After,
    AttemptPlaced,
    CheckpointCommitted,
    HoldReleased,
    JobHeld,
    NodeCordoned,
    NodeDown,
    NodeUncordoned,
    NoticeGiven,
    NoticeReason,
    Queue,
    QueuesSet,
    RanksEnded,
    RanksStarted,
    ServerShuttingDown,
    ServerUp,
)
from cordee.ids import JobId
from cordee.schedule import NAMED, Policy, decide, explain
from cordee.schedule.state.overdue import due_in
from cordee.schedule.state.records import NEVER
from world import S, World, brief, job, node, ranks_ended

HOUR_S = 3600


def end(world: World, name: str, outcome: str = "checkpointed") -> list[str]:
    world.tell(*ranks_ended(world, name, outcome))
    return brief(world.cycle())


def test_a_job_that_has_had_more_gives_way_to_one_that_has_waited_a_while():
    world = World(node("n1"), job("old", 8), work={"old": 10**6})
    world.play(until_s=100)
    world.at(HOUR_S)  # eight GPU-hours: one level down
    world.tell(job("new", 4, at_us=world.now_us))
    decision = decide(world.state, world.now_us)
    assert decision.events == () and decision.wake_at_us == (HOUR_S + 120) * S  # turns change at whole minutes
    assert brief(world.at(HOUR_S + 89).cycle()) == []
    assert brief(world.at(HOUR_S + 120).cycle()) == ["notice old time-slice for new"]
    assert end(world, "old") == ["attempt old.1 checkpointed", "place new n1:4"]


def test_it_wakes_when_a_job_falls_below_one_that_waits_and_not_before():
    world = World(node("n1"), job("runs", 8), job("waits", 8), work={"runs": 10**6})
    assert brief(world.at(10).cycle()) == ["place runs n1:8"]
    world.at(11)
    # Eight GPUs have had a GPU-hour after 450 s; until then nobody is below `waits`, also once it has waited for 90 s.
    assert decide(world.state, world.now_us).wake_at_us == 480 * S
    assert brief(world.at(480).cycle()) == ["notice runs time-slice for waits"]


def test_it_sleeps_while_all_that_run_are_on_the_level_of_those_that_wait():
    world = World(node("n1"), job("runs", 8), job("waits", 8), work={"runs": 10**6, "waits": 10**6})
    world.play(until_s=3600)
    assert len(world.log) > 10  # they take turns until both have had a GPU-hour
    decision = decide(world.state, world.now_us)
    assert decision.events == () and decision.wake_at_us is not None
    assert decision.wake_at_us > world.now_us + HOUR_S * S  # sixteen GPU-hours, and a time slice is over much earlier


def test_an_equal_is_not_preempted_and_a_job_of_a_worse_level_preempts_none():
    world = World(node("n1"), job("a", 8), job("b", 8), work={"a": 10**6, "b": 10**6})
    world.play(until_s=300)
    assert brief(world.cycle()) == [] and set(world.state.attempts) == {"a"}


def test_a_second_attempt_runs_half_an_hour_before_it_is_preempted_by_its_own_tier():
    world = World(node("n1"), job("old", 8), work={"old": 10**6, "new": 60})
    world.play(until_s=100)
    world.at(HOUR_S).later(job("new", 8, at_us=HOUR_S * S)).play(until_s=HOUR_S + 400)
    assert world.state.attempts[JobId("old")].epoch == 2
    placed_us = world.state.attempts[JobId("old")].placed_us
    world.tell(job("next", 8, at_us=world.now_us))
    assert brief(world.at(placed_us / S + 1799).cycle()) == []
    minute_s = -(-(placed_us // S + 1800) // 60) * 60
    assert brief(world.at(minute_s).cycle()) == ["notice old time-slice for next"]


SLOW = {"save_us": 120 * S, "restart_us": 60 * S, "grace_us": 30 * S, "checkpoint_every_us": 1800 * S}


def committed(at_s: int, step: int) -> CheckpointCommitted:
    """What `old` wrote 120 s before is durable."""
    more = {"generation": step, "size_bytes": 1, "stall_us": 0, "upload_us": 120 * S}
    return CheckpointCommitted(at_us=at_s * S, job_id=JobId("old"), epoch=1, step=step, **more)


def crossing(
    *reported: CheckpointCommitted, new_s: int = 7150, policy: Policy | None = None, levels_s=(7200,), **more
) -> World:
    """`old` goes down a level at 7,200 s, the first; it cannot save in its grace. `new` waits from 7,150 s on."""
    policy = replace(policy or Policy(), levels_gpu_us=tuple(8 * each * S for each in levels_s))
    world = World(node("n1"), job("old", 8, **SLOW | more), policy=policy, work={"old": 10**6})
    world.play(until_s=100).tell(*reported).at(new_s)
    world.tell(job("new", 8, at_us=world.now_us))
    return world


def test_a_job_that_loses_its_turn_just_before_its_checkpoint_keeps_its_place_until_that_is_durable():
    world = crossing(committed(5580, 1))
    decision = decide(world.at(7260).state, world.now_us)
    assert decision.events == () and decision.wake_at_us == 7440 * S  # 5,460 + 1,800, and 180 until it is durable
    world.at(7380).tell(committed(7380, 2))
    (given,) = world.cycle()
    assert (given.job_id, given.reason) == ("old", NoticeReason.TIME_SLICE)
    assert given.expected_loss_micro_usd == 8 * 1000 * (120 + 60)  # since the capture, and a restart
    world = crossing(committed(5580, 1), policy=Policy(awaits_checkpoint=False))
    assert brief(world.at(7260).cycle()) == ["notice old time-slice for new"]


def test_no_attempt_keeps_its_place_for_a_missing_checkpoint_and_silence_gains_nothing():
    world = crossing(committed(5580, 1))
    assert brief(world.at(7320).cycle()) == []
    assert brief(world.at(7440).cycle()) == ["notice old time-slice for new"]
    assert brief(crossing().at(7260).cycle()) == ["notice old time-slice for new"]  # none in its first interval
    assert brief(crossing(committed(5200, 1)).at(7260).cycle()) == ["notice old time-slice for new"]  # nor in the next
    # An attempt keeps no place if its next checkpoint is far, its turn ended an interval ago, or it writes none.
    assert brief(crossing(committed(6600, 1)).at(7260).cycle()) == ["notice old time-slice for new"]
    assert brief(crossing(committed(7380, 1), new_s=8900).at(9000).cycle()) == ["notice old time-slice for new"]
    assert brief(crossing(protected=False).at(7260).cycle()) == ["notice old time-slice for new"]


def test_a_place_is_kept_for_a_checkpoint_that_is_due_within_a_minimum_run_however_long_an_interval_is_declared():
    """With 8 GPUs it goes down a level at 450 s, 7,200 s and 28,800 s; half of its interval has passed at each."""
    for every_s, kept_s in ((780, (480, 1000)), (7 * 86_400, ())):
        for new_s in (400, 7_150, 28_750, int(3.6 * 86_400), int(6.9 * 86_400)):
            world = World(node("n1"), job("old", 8, **SLOW | {"checkpoint_every_us": every_s * S}), work={"old": 10**6})
            world.play(until_s=100).at(new_s)
            world.tell(job("new", 8, at_us=world.now_us))
            for at_s in (new_s + 200, new_s + 620):
                is_kept = bool(kept_s) and kept_s[0] <= at_s < kept_s[1]
                assert (brief(decide(world.at(at_s).state, at_s * S).events) == []) is is_kept, (every_s, new_s, at_s)
    for captured_s, is_kept in ((2780, True), (2790, False)):  # the next is durable 6,220 s later, at 9,000 s or after
        world = crossing(committed(captured_s + 120, 1), checkpoint_every_us=6040 * S)
        decision = decide(world.at(7260).state, world.now_us)
        assert (not decision.events, decision.wake_at_us == 9000 * S) == (is_kept, is_kept)


def test_a_level_further_down_does_not_make_anybody_wait_longer():
    world = crossing(committed(5580, 1), levels_s=(7200, 7290, 7380, 7430, 7450))
    for at_s in (7260, 7320, 7380):
        decision = decide(world.at(at_s).state, world.now_us)
        assert decision.events == () and decision.wake_at_us <= 7440 * S
    assert brief(world.at(7440).cycle()) == ["notice old time-slice for new"]
    assert world.state.attempts[JobId("old")].captured_us == 5460 * S  # and that although it reported no other


def test_a_job_that_waited_too_long_does_not_wait_for_a_checkpoint():
    world = crossing(committed(5580, 1), policy=Policy(patience_us=50 * S, patience_fraction=1.0))
    assert brief(world.at(7240).cycle()) == []
    assert brief(world.at(7260).cycle()) == ["notice old time-slice for new"]


def test_a_job_that_waits_for_a_checkpoint_sees_the_attempt_and_the_time():
    world = crossing(committed(5580, 1)).at(7300)
    before = world.state.snapshot(), world.state.policy
    why = explain(world.state, JobId("new"), world.now_us)
    assert (why.reason, why.blocking, why.until_us) == ("waits-for-checkpoint", ("old",), 7440 * S)
    assert "old keeps its GPUs until its next checkpoint is durable, for at most 2m20s more" in why.text
    assert (world.state.snapshot(), world.state.policy) == before
    assert brief(world.cycle()) == [] and brief(world.at(7440).cycle()) == ["notice old time-slice for new"]


def test_a_higher_tier_and_a_quota_do_not_wait_for_checkpoints():
    world = crossing(committed(5580, 1)).at(7260).tell(job("urgent", 8, "production", at_us=7260 * S))
    assert brief(world.cycle()) == ["notice old preempt for urgent"]
    mine = QueuesSet(at_us=7250 * S, queues=(Queue(name="red", quota_gpus=8),))
    world = crossing(committed(5580, 1)).at(7260).tell(mine, job("owner", 8, queue="red", at_us=7260 * S))
    assert brief(world.cycle()) == ["notice old quota for owner"]


def test_a_job_that_did_not_run_for_too_long_goes_first_preempts_any_level_and_is_preempted_no_more():
    policy = Policy(patience_us=1000 * S)
    names = [f"j{each}" for each in range(40)]
    world = World(node("n1"), job("big", 8, at_us=0), policy=policy, work=dict.fromkeys(names, 200) | {"big": 10**5})
    world.later(*(job(name, 5, at_us=each * 90 * S) for each, name in enumerate(names)))
    world.play(until_s=8000)
    waited = [record.waits_since_us - record.submitted_us - record.used_us for record in world.state.jobs.values()]
    assert max(waited) < 6000 * S  # 8 of 8 GPUs are more than its allowance: patience lasts longer for it


def test_in_an_overloaded_cluster_those_that_waited_too_long_get_their_part_of_it():
    names = [f"j{each:02}" for each in range(40)]
    policy = Policy(patience_us=5000 * S, patience_fraction=0.5, levels_gpu_us=(500 * S,))
    world = World(node("n1"), *(job(name, 1) for name in names), policy=policy, work=dict.fromkeys(names, 10**6))
    most = 0
    for until_s in range(4000, 16_000, 500):
        world.play(until_s=until_s)
        rows = world.state.running.rows
        most = max(most, int(rows.ints["gpus"][rows.flags["overdue"]].sum()))
    assert most == 1  # 0.5 x 8 GPUs x 8 / (8 + 32) is less than one
    short = job("short", 1, at_us=world.now_us)
    assert world.state.waiting.count == 32
    world.later(short).play(until_s=18_000)
    assert world.state.jobs[JobId("short")].ended  # though thirty others have waited longer than they should


def test_the_allowance_of_overdue_jobs_falls_with_the_demand_of_their_tier_and_above():
    policy = Policy(patience_us=1000 * S, patience_fraction=0.5)
    world = World(node("n1"), job("runs", 8, "production"), policy=policy, work={"runs": 10**6})
    world.play(until_s=10)
    production, _, preemptible = range(3)
    assert [world.state.allowances().gpus(tier) for tier in range(3)] == [4, 4, 4]
    world.later(job("p", 8, "production", at_us=20 * S), job("s", 8, at_us=20 * S)).play(until_s=30)
    allowances = world.state.allowances()
    assert [allowances.gpus(tier) for tier in range(3)] == [0.5 * 8 * 8 / 16, 0.5 * 8 * 8 / 24, 0.5 * 8 * 8 / 24]
    assert (
        allowances.wait_us(allowances.ratio(production, 8)) == 4 * 1000 * S
    )  # four times the allowance: after four times the patience
    assert allowances.wait_us(allowances.ratio(preemptible, 8)) == 6 * 1000 * S


def test_parts_of_gpus_count_as_parts_in_demand_in_holdings_and_in_what_a_job_has_received():
    policy = Policy(patience_us=1000 * S, patience_fraction=0.5)
    parts = [f"p{each:02}" for each in range(64)]
    world = World(node("n1"), job("runs", 8), policy=policy, work=dict.fromkeys(parts, 10**6) | {"runs": 2000})
    world.play(until_s=10)
    world.later(*(job(name, 1, at_us=20 * S, gpu_milli=125) for name in parts)).play(until_s=30)
    assert world.state.allowances().gpus(1) == 0.5 * 8 * 8 / 16  # 64 eighths are 8 GPUs
    world.play(until_s=4000)
    state = world.state
    assert state.attempts.keys() == set(parts)
    assert (state.quotas.held_milli, state.waiting.asked_milli(1)) == (8000, 0)  # together as before
    assert state.running.overdue_milli == 4000  # an eighth at a time, until half of the GPUs are held
    row, attempt = state.running.row_of[JobId("p00")], state.attempts[JobId("p00")]
    assert state.running.served(world.now_us)[row] == (world.now_us - attempt.placed_us) // 8
    received = state.running.served(world.now_us)[row]
    world.tell(*ranks_ended(world, "p00", "finished"))
    assert state.jobs[JobId("p00")].served_gpu_us == received


@pytest.mark.parametrize("why", ["not before", "held", "after another"])
def test_a_job_that_might_not_start_has_not_waited_and_gives_way_to_its_own_tier(why: str):
    policy, hour = Policy(patience_us=HOUR_S * S), HOUR_S * S
    more = {"not before": {"not_before_us": 5 * hour}, "after another": {"after": (After(of="first"),)}}.get(why, {})
    world = World(node("n1"), policy=policy, work={"a": 10**6, "first": 5 * HOUR_S})
    held = JobHeld(at_us=0, job_id=JobId("a"), by="ann", leave=False)
    world.tell(job("first", 1), job("a", 4, **more), *([held] if why == "held" else []))
    world.later(HoldReleased(at_us=5 * hour, job_id=JobId("a"), by="ann")).play(until_s=6 * HOUR_S)
    attempt = world.state.attempts[JobId("a")]
    assert attempt.placed_us >= 5 * hour
    assert attempt.placed_us - world.state.jobs[JobId("a")].waits_from_us < 600 * S
    assert world.state.running.overdue_milli == 0
    world.later(job("new", 8, at_us=10 * hour)).play(until_s=10 * HOUR_S + 300)
    assert "notice a time-slice for new" in brief(world.log)


def test_a_gang_larger_than_its_allowance_is_overdue_after_a_longer_wait_and_the_cycle_wakes_for_it():
    policy = Policy(patience_us=1000 * S, patience_fraction=0.5, levels_gpu_us=())
    world = World(node("n1"), job("runs", 8), policy=policy, work={"runs": 10**6})
    world.play(until_s=100)
    world.later(job("gang", 8, at_us=200 * S)).play(until_s=300)
    assert decide(world.at(1300).state, world.now_us).wake_at_us == 4200 * S  # 2 of 8 GPUs: four times as long
    assert brief(world.at(4199).cycle()) == []
    assert brief(world.at(4200).cycle()) == ["notice runs time-slice for gang"]


def test_a_gang_that_waited_too_long_gets_the_gpus_that_its_victims_leave_although_these_wait_then():
    names = "abcdefgh"
    policy = Policy(patience_us=1000 * S)
    world = World(node("n1"), *(job(name, 1) for name in names), policy=policy, work=dict.fromkeys(names, 10**6))
    world.play(until_s=50).tell(job("gang", 4, at_us=50 * S)).play(until_s=1400)
    assert brief(event for event in world.log if isinstance(event, NoticeGiven | AttemptPlaced))[8:] == [
        *(f"notice {name} time-slice for gang" for name in "abcd"),
        "place gang n1:4",
    ]


def test_gpus_reserved_for_a_gang_that_is_overdue_no_more_go_to_others_at_the_same_moment():
    """`late` has its ordinary turn, but takes the allowance of `big`: then `new` starts on what was kept for `big`."""
    policy = Policy(patience_us=1000 * S, patience_fraction=0.17)
    production = (job(name, gpus, "production") for name, gpus in (("a", 6), ("b", 6), ("c", 2), ("d", 2)))
    world = World(node("n1"), node("n2"), *production, policy=policy, work=dict.fromkeys("abcd", 10**6))
    waiting = (job("big", 8, at_us=10 * S, within="node"), job("late", 2, at_us=20 * S), job("new", 1, at_us=4990 * S))
    world.later(*waiting).play(until_s=5000)
    for name in "cd":
        world.tell(*ranks_ended(world, name, "finished"))
    decision = decide(world.state, world.now_us)
    assert brief(decision.events)[-1:] == ["place late n2:2"] and decision.wake_at_us == world.now_us
    world.cycle()
    decision = decide(world.state, world.now_us)
    assert brief(decision.events) == ["place new n1:1"] and decision.wake_at_us > world.now_us
    world.cycle()
    assert decide(world.state, world.now_us).events == ()


def test_patience_follows_the_run_time_of_the_long_jobs_that_ended_and_a_cycle_sees_it_at_once():
    names = [f"j{each:03}" for each in range(20)]
    world = World(node("n1"), job("first", 8), work=dict.fromkeys(names, 2000) | {"first": 100})
    world.play(until_s=1000)
    assert world.state.jobs[JobId("first")].ended
    assert world.state.patience_us == NEVER  # one job does not tell how long others run
    world.later(*(job(name, 8, at_us=1000 * S) for name in names)).play(until_s=100_000)
    assert all(world.state.jobs[JobId(name)].ended for name in names)
    assert world.state.patience_us == 2 * Policy().time_slice_us  # half of 2,000 s is less
    world.work["long"] = 200_000
    world.later(job("long", 8, at_us=world.now_us)).play(until_s=400_000)
    ran_s = [world.state.jobs[JobId(name)].used_us // S for name in (*names, "first", "long")]
    long_s = sum(each**2 for each in ran_s) / sum(ran_s)
    assert world.state.patience_us == pytest.approx(long_s * S / 2, abs=S)
    again = [job(name, 8, at_us=world.now_us) for name in ("runs", "waits")]
    world.later(*again).play(until_s=world.now_us // S + 10)
    patience_us, due = world.state.patience_us, world.state.allowances()
    (line,) = world.state.waiting.lines.values()
    assert due_in(line, due, world.now_us).next_us == line.ages[0][0] + patience_us  # no cycle has to note it


def test_jobs_of_one_level_have_their_turns_in_the_order_of_arrival():
    levels = Policy(levels_gpu_us=(8 * 10_000 * S,), time_slice_us=60 * S)
    jobs = (job("first", 8), job("second", 8))
    world = World(node("n1"), *jobs, policy=levels, work={"first": 9000, "second": 9000})
    world.play(until_s=8000)
    assert world.state.jobs[JobId("second")].epoch == 0  # it has received less, but the first is of its level
    world.play(until_s=20_000)
    assert [world.state.jobs[JobId(each)].epoch for each in ("first", "second")] == [1, 1]


def test_a_job_is_preempted_no_more_often_than_it_allows():
    world = World(node("n1"), job("v", 8, "preemptible", preemptions_max=1), work={"v": 10**5, "p": 10, "q": 10})
    world.play(until_s=100)
    world.later(job("p", 8, "production", at_us=100 * S)).play(until_s=300)
    assert world.state.jobs[JobId("v")].preemptions == 1 and JobId("v") in world.state.attempts
    assert brief(world.tell(job("q", 8, "production", at_us=world.now_us)).cycle()) == []


def test_small_jobs_move_where_they_fit_to_make_a_shape():
    """Twelve GPUs are free, six on each node: the gang of 8 lets a job of 2 move."""
    world = World(node("n1"), node("n2"), job("a", 2), job("b", 6), job("c", 2), work=dict.fromkeys("abc", 10**6))
    world.play(until_s=100)
    world.tell(*ranks_ended(world, "b", "finished")).cycle()
    world.tell(job("gang", 8, at_us=world.now_us)).cycle()
    if JobId("gang") in world.state.attempts:
        return  # they lay together
    moved = world.at(200).cycle()
    assert [event.reason for event in moved if isinstance(event, NoticeGiven)] == [NoticeReason.MOVE]
    (given,) = [event for event in moved if isinstance(event, NoticeGiven)]
    assert given.for_job == "gang" and given.gpus == 2
    end(world, str(given.job_id))
    assert {JobId("gang"), given.job_id} <= set(world.state.attempts)


def test_an_elastic_victim_restarts_at_once_on_the_rest():
    world = World(node("n1"), job("e", 8, "preemptible", sizes=(4, 2)), work={"e": 10**6})
    world.play(until_s=100)
    (given,) = world.tell(job("p", 4, "production", at_us=world.now_us)).cycle()
    assert (given.reason, given.gpus, given.for_job) == (NoticeReason.RESIZE, 4, "p")
    assert end(world, "e") == ["attempt e.1 checkpointed", "place p n1:4", "place e n1:4"]


def test_a_shrunk_job_restarts_on_the_rest_even_if_it_is_overdue():
    red = QueuesSet(at_us=0, queues=(Queue(name="red", quota_gpus=4),))
    elastic = job("e", 8, sizes=(4, 2), grace_us=0)
    world = World(
        red, node("n1"), job("a", 8, "production"), elastic,
        work={"a": 200, "e": 10**6}, deaf=["e"], policy=Policy(patience_us=50 * S),
    )  # fmt: skip
    world.play(until_s=1000)
    (given,) = world.tell(job("p", 4, queue="red", at_us=world.now_us)).cycle()
    assert (given.reason, given.gpus, given.for_job) == (NoticeReason.RESIZE, 4, "p")
    world.play(until_s=world.now_us / S + 1)
    assert {name: world.state.attempts[JobId(name)].gpus for name in ("e", "p")} == {"e": 4, "p": 4}


def test_an_elastic_job_starts_smaller_and_grows_when_that_pays():
    world = World(node("n1"), job("a", 4), job("e", 8, sizes=(4,)), work={"a": 1000, "e": 10**6})
    assert brief(world.cycle()) == ["place a n1:4", "place e n1:4"]
    world.play(until_s=2000)
    placed = {each.epoch: each for each in world.log if isinstance(each, AttemptPlaced) and each.job_id == "e"}
    notices = [event for event in world.log if isinstance(event, NoticeGiven)]
    assert [(each.job_id, each.reason, each.gpus) for each in notices] == [("e", NoticeReason.RESIZE, 8)]
    assert sum(len(lease.gpus) for lease in placed[2].leases) == 8


def test_an_elastic_job_grows_as_soon_as_it_wants():
    elastic = job("e", 8, sizes=(4,), grow_after_us=10 * S)
    world = World(node("n1"), job("a", 4), elastic, work={"a": 100, "e": 10**6})
    world.play(until_s=1000)
    (notice,) = (event for event in world.log if isinstance(event, NoticeGiven))
    freed_us = next(each.at_us for each in world.log if isinstance(each, RanksEnded) and each.job_id == "a")
    assert (notice.reason, notice.gpus, notice.at_us) == (NoticeReason.RESIZE, 8, freed_us), "it had run for 10 s"


def test_a_node_that_goes_down_again_and_again_rests_for_an_hour():
    world = World(node("n1"), job("x", 1, at_us=400 * S))
    for epoch in range(1, 4):
        world.tell(NodeDown(at_us=epoch * 60 * S, node="n1", epoch=epoch, why="silent"))
        world.tell(node("n1", epoch=epoch + 1, at_us=epoch * 60 * S + S))
    decision = decide(world.at(400).state, world.now_us)
    assert decision.events == ()
    assert "n1 is quarantined because it went down too often" in explain(world.state, JobId("x"), world.now_us).text
    assert brief(world.at(180 + HOUR_S).cycle()) == ["place x n1:1"]


@pytest.mark.parametrize("ends", [(), (ServerShuttingDown(at_us=0),)], ids=["left", "shutdown"])
def test_a_node_that_goes_as_it_was_told_to_does_not_rest(ends):
    """An engine gives idle nodes back many times an hour, and a server may be shut down as often."""
    world = World(node("n1"), job("x", 1, at_us=400 * S))
    for epoch in range(1, 6):
        world.tell(*(replace(end, at_us=epoch * 60 * S) for end in ends))
        why = "the agent exited" if ends else NODE_LEFT
        world.tell(NodeDown(at_us=epoch * 60 * S, node="n1", epoch=epoch, why=why), ServerUp(at_us=epoch * 60 * S))
        world.tell(node("n1", epoch=epoch + 1, at_us=epoch * 60 * S + S))
    assert brief(world.at(400).cycle()) == ["place x n1:1"]


def test_a_cordoned_node_takes_no_job_and_a_drained_one_gives_notice():
    world = World(node("n1"), node("n2"), job("a", 8), work={"a": 10**6})
    world.play(until_s=100)
    world.tell(NodeCordoned(at_us=100 * S, node="n1", by="ann"), job("b", 16))
    assert brief(world.cycle()) == []
    world.tell(NodeCordoned(at_us=101 * S, node="n1", by="ann", drain=True))
    assert brief(world.cycle()) == ["notice a drain"]
    assert end(world, "a") == ["attempt a.1 checkpointed", "place a n2:8"]
    world.tell(NodeUncordoned(at_us=200 * S, node="n1", by="ann"), job("c", 8))
    assert brief(world.cycle()) == ["place c n1:8"]


def queues_of(**quotas: int) -> QueuesSet:
    return QueuesSet(at_us=0, queues=tuple(Queue(name=name, quota_gpus=gpus) for name, gpus in quotas.items()))


def test_lent_quota_comes_back_whatever_the_tier_and_is_not_taken_again():
    jobs = (job("b1", 8, "standard", queue="b"), job("b2", 8, "standard", queue="b"))
    world = World(node("n1"), node("n2"), queues_of(a=8, b=8), *jobs, work={"b1": 10**6, "b2": 10**6})
    world.play(until_s=100)
    world.tell(job("mine", 8, "preemptible", queue="a", at_us=world.now_us))
    (given,) = world.cycle()
    assert (given.reason, given.for_job) == (NoticeReason.QUOTA, "mine")
    assert brief(end_of(world, given.job_id))[-1].startswith("place mine")
    assert brief(world.at(200).cycle()) == []


def end_of(world: World, job_id: JobId):
    world.tell(*ranks_ended(world, job_id, "checkpointed"))
    return world.cycle()


def test_a_quota_shields_from_higher_tiers_of_queues_that_borrow():
    jobs = (job("low", 8, "preemptible", queue="b"), job("a1", 8, queue="a"))
    world = World(node("n1"), node("n2"), queues_of(a=8, b=8), *jobs, work={"low": 10**6, "a1": 10**6})
    world.play(until_s=100)
    assert brief(world.tell(job("a2", 8, "production", queue="a")).cycle()) == ["notice a1 preempt for a2"]


def test_without_notice_victims_are_killed_in_the_same_cycle():
    world = World(node("n1"), job("v", 8, "preemptible"), policy=NAMED["kill"])
    world.play(until_s=100)
    assert brief(world.tell(job("p", 8, "production")).cycle()) == ["notice v preempt for p", "kill v"]


def test_in_strict_order_no_job_passes_the_first_one_that_waits():
    world = World(node("n1"), job("a", 4), job("b", 8, at_us=1), job("c", 4, at_us=2), policy=NAMED["fifo"])
    assert brief(world.cycle()) == ["place a n1:4"]
    world = World(node("n1"), job("a", 4), job("b", 8, at_us=1), job("c", 4, at_us=2), policy=NAMED["fit"])
    assert brief(world.cycle()) == ["place a n1:4", "place c n1:4"]


@pytest.mark.parametrize("levels", [(2**62,), (2**80,), (5, 5), (-1,)])
def test_levels_that_do_not_rise_or_do_not_fit_into_64_bits_are_refused(levels):
    with pytest.raises(InputError, match="no bounds in GPU-microseconds"):
        Policy(levels_gpu_us=levels)
    assert Policy(levels_gpu_us=(0, 2**62 - 1)).levels_gpu_us


def test_without_a_patience_no_gang_reserves_gpus():
    policy = Policy(patience=None)
    world = World(node("n1"), job("runs", 4), policy=policy, work={"runs": 10**6})
    world.play(until_s=10)
    world.later(job("gang", 8, at_us=20 * S), job("small", 4, at_us=30 * S)).play(until_s=40)
    assert JobId("small") in world.state.attempts  # under EASY it waits behind the gang


@pytest.mark.parametrize(
    ("more", "heeded"), [((), False), ((job("gang", 16, "production"),), True), ((queues_of(default=16),), True)]
)
def test_the_start_of_a_later_attempt_is_a_change_only_where_a_job_may_wait_for_its_minimum_run(more, heeded):
    jobs = (job("low", 8, min_run_us=1800 * S), job("high", 8, "production"))
    world = World(node("n1"), node("n2"), *jobs, work={"low": 10**6, "high": 10**6})
    world.play(until_s=100)
    assert end(world, "low")[-1].startswith("place low")
    world.tell(*more)
    assert brief(world.cycle()) == []
    before, attempt = world.state.changes.total, world.state.attempts[JobId("low")]
    world.tell(
        RanksStarted(at_us=world.now_us, job_id=attempt.job.job_id, epoch=attempt.epoch, node=attempt.held[0].node)
    )
    assert (world.state.changes.total > before) is heeded
