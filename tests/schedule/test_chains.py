"""Jobs that start after others, and jobs that people hold, pause, requeue and prioritize."""

import pytest

from cordee.events import (
    After,
    AfterEnd,
    HoldReleased,
    JobDeferred,
    JobEnded,
    JobHeld,
    JobPrioritized,
    JobResumed,
    MaintenanceBooked,
    NodeCordoned,
    RequeueRequested,
    StopRequested,
    SweepDeclared,
    SweepEnded,
)
from cordee.ids import JobId
from cordee.schedule import Policy, State, explain
from cordee.schedule.state.records import JobRecord
from cordee.schedule.state.transitions import apply
from world import S, World, brief, job, node, ranks_ended

N1 = node("n1")


def after(*of: str):
    """Return dependencies: `a`, `a:any`."""
    parts = (each.partition(":") for each in of)
    return tuple(After(of=name, end=AfterEnd(end or "ok")) for name, _, end in parts)


def held(name: str, at_s: int = 0, leave: bool = False) -> JobHeld:
    return JobHeld(at_us=at_s * S, job_id=JobId(name), by="ann", leave=leave)


def released(name: str, at_s: int) -> HoldReleased:
    return HoldReleased(at_us=at_s * S, job_id=JobId(name), by="ann")


def stopped(name: str, at_s: int) -> StopRequested:
    return StopRequested(at_us=at_s * S, job_id=JobId(name), by="ann", now=True)


def waited_us(record: JobRecord) -> int:
    """Return how long a job had waited in all when it was queued for the last time."""
    return record.waits_since_us - record.waits_from_us


def why(world: World, name: str):
    return explain(world.state, JobId(name), world.now_us)


def ends(world: World) -> dict[str, str]:
    return {each.job_id: each.why for each in world.log if isinstance(each, JobEnded)}


def replayed(world: World) -> None:
    again = State()
    for event in world.log:
        apply(again, event)
    assert again.snapshot() == world.state.snapshot()


def test_a_job_starts_after_others_and_says_for_whom_it_waits():
    world = World(N1, job("a", 2), job("b", 2), job("c", 2, after=after("a", "b:any")), work={"a": 10, "b": 50})
    world.play(until_s=5)
    assert world.phase("c") == "waiting"
    assert (why(world, "c").reason, why(world, "c").blocking) == ("waits-for-jobs", ("a", "b"))
    assert why(world, "c").text == "waits until a has ended well; waits until b has ended"
    world.play(until_s=100)
    assert why(world, "c").text == "waits until b has ended"
    world.play()
    assert ends(world)["c"] == "finished"
    placed = {each.job_id: each.at_us for each in world.log if type(each).__name__ == "AttemptPlaced"}
    assert placed["c"] == next(each.at_us for each in world.log if isinstance(each, JobEnded) and each.job_id == "b")
    assert waited_us(world.state.jobs[JobId("c")]) == 0, "it did not wait for GPUs"
    replayed(world)


def test_what_can_never_start_ends_at_once_and_so_does_what_waits_for_it():
    chain = [job("a", 2), *(job(name, 2, after=after(of)) for name, of in (("b", "a"), ("c", "b"), ("d", "c:any")))]
    world = World(N1, *chain, job("e", 2, after=after("a:failed")), job("f", 2, after=after("e:failed")), broken=["a"])
    world.play()
    found = ends(world)
    assert found["b"] == "a failed, and this one was to start after it ended well"
    assert found["c"] == "b was stopped, and this one was to start after it ended well"
    assert found["d"] == found["e"] == "finished"
    assert found["f"] == "e ended well, and this one was to start after it failed"
    at = {each.job_id: each.at_us for each in world.log if isinstance(each, JobEnded)}
    assert at["a"] == at["b"] == at["c"]
    replayed(world)


@pytest.mark.parametrize(("outcome", "expected"), [("done", "finished"), ("failed", "ended without a trial that is")])
def test_a_job_starts_after_a_sweep_whose_trials_have_ended(outcome, expected):
    world = World(N1, SweepDeclared(at_us=0, sweep="s", by="ann", spec="{}"), broken=["t2"], work={"t1": 5})
    trials = ("t1", "t2") if outcome == "done" else ("t2",)
    world.tell(*(job(name, 1, sweep="s", trial=number) for number, name in enumerate(trials, 1)))
    world.tell(job("c", 1, after=after("s")))
    world.play()
    assert world.phase("c") == "waiting", "the sweep may start more trials"
    world.tell(SweepEnded(at_us=world.now_us, sweep="s", by="ann", why="")).play()
    assert expected in ends(world)["c"]
    replayed(world)


def test_a_held_job_is_not_started_and_one_that_runs_goes_on_until_it_leaves():
    world = World(N1, job("a", 8), job("b", 8), work={"a": 20})
    world.tell(held("a"), held("b"))
    assert brief(world.cycle()) == ["JobDeferred", "JobDeferred"]
    assert (world.phase("a"), why(world, "a").reason) == ("held", "held")
    assert "held by ann, 0 ms ago: `cordee resume a` lets it start again" in why(world, "a").text
    world.tell(released("a", 10))
    assert brief(world.cycle()) == ["JobReleased", "place a n1:8"]
    world.play(until_s=15)
    world.tell(held("a", 15))
    assert brief(world.cycle()) == []
    world.play()
    assert (world.phase("a"), world.phase("b")) == ("done", "held")
    world.tell(stopped("b", 900)).play()
    assert ends(world)["b"] == "stopped by ann"


def test_a_paused_job_saves_gives_its_gpus_back_and_goes_on_when_it_is_resumed():
    world = World(N1, job("a", 8), job("b", 8), work={"a": 50, "b": 10}).play(until_s=70)
    world.tell(held("a", 70, leave=True))
    assert brief(world.cycle()) == ["notice a pause"]
    world.play(until_s=300)
    assert (world.phase("a"), world.phase("b")) == ("paused", "done")
    assert not world.state.attempts
    assert why(world, "a").text.startswith("paused by ann, ")
    world.tell(released("a", 1000)).play()
    assert world.phase("a") == "done" and world.state.jobs[JobId("a")].epoch == 2
    assert waited_us(world.state.jobs[JobId("a")]) < S
    replayed(world)


def test_a_pause_that_is_taken_back_before_the_job_has_left_lets_it_go_on_at_once():
    world = World(N1, job("a", 8), work={"a": 50}).play(until_s=70)
    world.tell(held("a", 70, leave=True)).cycle()
    world.tell(released("a", 70)).play()
    assert world.phase("a") == "done"
    assert not [each for each in world.log if isinstance(each, JobDeferred)]


def requeued(name: str, at_s: int) -> RequeueRequested:
    return RequeueRequested(at_us=at_s * S, job_id=JobId(name), by="ann")


def order(world: World) -> list[str]:
    return [each.job_id for each in world.log if type(each).__name__ == "AttemptPlaced"]


def test_a_requeued_job_saves_and_goes_behind_those_that_wait():
    jobs = (job(name, 8, at_us=number) for number, name in enumerate("abc"))
    world = World(N1, *jobs, work=dict.fromkeys("abc", 50)).play(until_s=70)
    world.tell(requeued("a", 70), requeued("b", 71))
    assert brief(world.cycle()) == ["notice a requeue"]
    world.play()
    assert order(world) == ["a", "c", "a", "b"]
    assert {world.phase(name) for name in "abc"} == {"done"}
    replayed(world)


def test_a_job_that_has_failed_runs_again_when_it_is_requeued():
    world = World(N1, job("a", 8), broken=["a"]).play()
    assert world.phase("a") == "failed"
    world.broken.clear()
    world.tell(requeued("a", 5000)).play()
    record = world.state.jobs[JobId("a")]
    assert (world.phase("a"), record.failures) == ("done", ())
    assert waited_us(record) < 200 * S, "the time in which it had ended is no wait"
    replayed(world)


def test_an_operator_sends_a_job_to_the_top_of_its_queue_past_higher_priorities():
    jobs = [
        job("run", 8, priority=9),
        *(job(name, 8, priority=p, at_us=1) for name, p in (("a", 0), ("b", 5), ("c", 0))),
    ]
    world = World(N1, *jobs, work=dict.fromkeys(("run", "a", "b", "c"), 5)).play(until_s=3)
    world.tell(JobPrioritized(at_us=3 * S, job_id=JobId("c"), by="ada")).play()
    assert order(world) == ["run", "c", "b", "a"]
    replayed(world)


def test_an_owner_exchanges_the_places_of_two_own_jobs_and_passes_nobody_else():
    jobs = [job("run", 8), *(job(name, 8, at_us=at) for at, name in enumerate(("a", "x", "b"), 1))]
    world = World(N1, *jobs, work=dict.fromkeys(("run", "a", "x", "b"), 5)).play(until_s=3)
    world.tell(JobPrioritized(at_us=3 * S, job_id=JobId("b"), by="ann", place_of=JobId("a"))).play()
    assert order(world) == ["run", "b", "x", "a"]
    replayed(world)


HOUR = 3600
NIGHT = (22 * HOUR * S, 6 * HOUR * S, 0)


def placed(world: World) -> list[tuple[str, int]]:
    return [(each.job_id, each.at_us // S) for each in world.log if type(each).__name__ == "AttemptPlaced"]


def test_a_job_starts_at_its_time_and_in_its_window_only():
    world = World(N1, job("a", 8, not_before_us=500 * S), job("b", 8, window=NIGHT), job("c", 2), work={"a": 30})
    world.tell(held("b"))
    world.play(until_s=10)
    assert (world.phase("a"), world.phase("b"), world.phase("c")) == ("waiting", "held", "running")
    assert (why(world, "a").reason, why(world, "a").until_us) == ("waits-for-time", 500 * S)
    assert why(world, "a").text == "starts at 1970-01-01 00:08 UTC at the earliest"
    world.play()
    world.tell(released("b", 7 * HOUR)).play()
    assert [each for each in placed(world) if each[0] != "c"] == [("a", 500), ("b", 22 * HOUR)]
    replayed(world)


def test_a_job_that_waits_when_its_window_closes_waits_for_the_next_one():
    big = job("big", 8, "production")
    world = World(N1, big, job("b", 8, window=NIGHT, at_us=S), work={"big": 8 * HOUR, "b": 10}).play()
    assert placed(world) == [("big", 1), ("b", 22 * HOUR)]
    assert waited_us(world.state.jobs[JobId("b")]) <= 6 * HOUR * S, "the day is no wait"
    replayed(world)


def test_a_job_that_stops_at_the_end_of_its_window_goes_on_in_the_next_one():
    world = World(N1, job("b", 8, window=NIGHT, window_stops=True), work={"b": 7 * HOUR}).play(until_s=6 * HOUR)
    [given] = [each for each in world.log if type(each).__name__ == "NoticeGiven"]
    assert (given.reason, given.at_us) == ("window", 6 * HOUR * S - 30 * S)
    assert world.phase("b") == "waiting" and not world.state.attempts
    world.play()
    assert [at for _, at in placed(world)] == [0, 22 * HOUR] and world.phase("b") == "done"
    replayed(world)


def test_a_job_that_saved_before_its_window_closes_does_not_start_again_in_its_grace_period():
    started = job("b", 8, window=NIGHT, window_stops=True, grace_us=600 * S)
    world = World(N1, started, work={"b": 7 * HOUR}).play(until_s=6 * HOUR)
    assert [at for _, at in placed(world)] == [0] and world.phase("b") == "waiting"
    world.play()
    assert [at for _, at in placed(world)] == [0, 22 * HOUR] and world.phase("b") == "done"
    replayed(world)


def maintenance(node_name: str, from_s: int, for_s: int, name: str = "m1") -> MaintenanceBooked:
    more = {"from_us": from_s * S, "until_us": (from_s + for_s) * S, "by": "ada", "why": "firmware"}
    return MaintenanceBooked(at_us=0, booking=name, node=node_name, **more)


def test_before_a_maintenance_attempts_save_and_go_elsewhere_and_nothing_starts_there():
    world = World(N1, node("n2"), job("a", 8), job("b", 8, grace_us=60 * S), work=dict.fromkeys("ab", 2000))
    world.tell(maintenance("n1", 1000, 500)).play(until_s=399)
    assert not world.state.nodes.records["n1"].cordoned_by
    world.play(until_s=400)
    record = world.state.nodes.records["n1"]
    assert (record.cordoned_by, record.leave_us) == ("ada", 1000 * S)
    assert record.cordon_why == "maintenance 1970-01-01 00:16 UTC to 1970-01-01 00:25 UTC: firmware"
    world.play(until_s=1000)
    moved = next(each for each in world.log if type(each).__name__ == "NoticeGiven")
    grace_s = 60 if moved.job_id == "b" else 30
    assert (moved.reason, moved.at_us, moved.deadline_us) == ("drain", (1000 - grace_s) * S, 1000 * S)
    assert not any(lease.node == "n1" for each in world.state.attempts.values() for lease in each.held)
    world.play()
    assert {world.phase(name) for name in "ab"} == {"done"}
    assert [at for _, at in placed(world)] == [0, 0, 1500], "the node is back after its maintenance"
    assert not world.state.agenda.bookings and world.state.nodes.records["n1"].leave_us is None
    replayed(world)


def test_a_node_that_was_cordoned_before_stays_so_after_its_maintenance():
    world = World(N1, NodeCordoned(at_us=0, node="n1", by="bob", why="broken"), maintenance("n1", 1000, 500)).play()
    record = world.state.nodes.records["n1"]
    assert (record.cordoned_by, record.cordon_why, world.now_us) == ("bob", "broken", 1500 * S)


def cordons(world: World) -> list[tuple[str, int, int]]:
    given = (each for each in world.log if isinstance(each, NodeCordoned) and each.leave_us is not None)
    return [(each.node, each.at_us // S, each.leave_us // S) for each in given]


def test_of_two_maintenances_of_a_node_the_second_waits_until_the_first_is_over():
    world = World(N1, job("a", 8), maintenance("n1", 1000, 100), maintenance("n1", 1200, 100, "m2"), work={"a": 2000})
    world.play(until_s=1090)
    assert not world.state.attempts, "it has left for the first one"
    world.play()
    assert cordons(world) == [("n1", 400, 1000), ("n1", 1100, 1200)]
    assert [at for _, at in placed(world)] == [0, 1300] and world.phase("a") == "done"
    replayed(world)


def test_a_long_grace_period_cordons_only_the_node_that_its_job_runs_on_and_at_most_a_day_before():
    day, begin = 24 * HOUR, 72 * HOUR
    bookings = [maintenance("n1", begin, 100), maintenance("n2", begin, 100, "m2")]
    jobs = [job("a", 8, grace_us=30 * day * S), job("b", 8)]
    equal = Policy(levels_gpu_us=())  # `a` does not preempt `b` while it waits for n1
    world = World(N1, node("n2"), *bookings, *jobs, work=dict.fromkeys("ab", 10 * day), policy=equal)
    world.play(until_s=begin - 300)
    assert cordons(world) == [("n1", begin - day, begin), ("n2", begin - 600, begin)]


def test_a_job_waits_for_the_next_end_of_a_job_that_was_requeued_meanwhile():
    world = World(N1, job("a", 2), job("c", 2), job("b", 2, after=after("a", "c")), work={"a": 10, "c": 200})
    world.play(until_s=120)
    assert world.phase("a") == "done"
    world.work["a"] = 600
    world.tell(requeued("a", 120)).play(until_s=500)
    assert why(world, "b").text == "waits until a has ended well"
    world.play()
    assert (world.phase("b"), world.state.agenda.dependents) == ("done", {})
    replayed(world)


def test_what_a_job_waited_for_is_over_once_it_has_run():
    jobs = [job("a", 2), job("b", 2, after=after("a")), job("c", 2, after=after("a"))]
    world = World(N1, *jobs, work={"a": 10, "b": 10_000}).play(until_s=300)
    assert (world.phase("b"), world.phase("c")) == ("running", "done")
    world.broken.add("a")
    world.tell(requeued("a", 300)).play(until_s=1000)
    assert world.phase("a") == "failed"
    world.tell(requeued("b", 1000), requeued("c", 1000)).play(until_s=1300)
    assert (world.phase("b"), world.phase("c")) == ("running", "done")
    replayed(world)


def test_a_trial_that_waits_at_a_rung_is_not_looked_at_when_its_window_closes():
    world = World(N1, job("t", 8, window=NIGHT, pauses=True, sweep="s"), work={"t": 7 * HOUR}).play(until_s=600)
    world.tell(*ranks_ended(world, "t", "checkpointed"))
    world.cycle()
    assert (world.phase("t"), world.state.agenda.times) == ("paused", [])
    before = len(world.log)
    world.play(until_s=7 * HOUR)
    assert len(world.log) == before
    world.at(7 * HOUR)
    world.tell(JobResumed(at_us=world.now_us, job_id=JobId("t"), by="its sweep", why="promoted"))
    assert brief(world.cycle()) == ["JobDeferred"]
    world.play(until_s=23 * HOUR)
    assert world.phase("t") == "running" and placed(world)[-1] == ("t", 22 * HOUR)
    replayed(world)
