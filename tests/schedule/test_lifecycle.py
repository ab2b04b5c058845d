"""World before -> events, for the lives of jobs and attempts."""

import pytest

from cordee.events import (
    AttemptEnded,
    CheckpointCommitted,
    Failure,
    NodeDown,
    NoticeGiven,
    NoticeReason,
    Reported,
    ServerShuttingDown,
    ServerUp,
    SpanClass,
)
from cordee.events import StopRequested as Stop
from cordee.ids import JobId
from cordee.schedule import Phase, explain
from world import HOUR, PRICE, S, World, brief, job, node, ranks_ended

TWO = (node("n1"), node("n2"))


def running(*events, **options) -> World:
    """Return a world at 10 s with jobs that were placed and started at 1 s."""
    world = World(*events, **options)
    world.play(until_s=2)
    return world.at(10)


def end(world: World, name: str, outcome: str, on: str | None = None, **more) -> list[str]:
    world.tell(*ranks_ended(world, name, outcome, on, **more))
    return brief(world.cycle())


def stop(name: str, now: bool = False) -> Stop:
    return Stop(at_us=0, job_id=JobId(name), by="ann", now=now)


def committed(name: str, step: int, epoch: int = 1, at_us: int = 0) -> CheckpointCommitted:
    more = {"generation": step, "size_bytes": 1, "stall_us": 0, "upload_us": 0}
    return CheckpointCommitted(at_us=at_us, job_id=JobId(name), epoch=epoch, step=step, **more)


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        ("finished", ["attempt a.1 finished", "job a done"]),
        ("failed", ["attempt a.1 failed", "place a n1:8"]),
        ("lost", ["attempt a.1 lost", "place a n1:8"]),
        ("checkpointed", ["attempt a.1 checkpointed", "place a n1:8"]),
    ],
)
def test_an_attempt_that_ends_by_itself(outcome, expected):
    assert end(running(node("n1"), job("a", 8)), "a", outcome) == expected


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ("failed", "killed", "failed"),
        ("lost", "failed", "lost"),
        ("failed", "lost", "lost"),
        ("finished", "checkpointed", "checkpointed"),
        ("finished", "finished", "finished"),
        ("finished", "killed", "killed"),
    ],
)
def test_an_attempt_ends_with_the_worst_of_its_rank_groups(first, second, expected):
    world = running(*TWO, job("a", 16))
    end(world, "a", first, "n1")
    assert f"attempt a.1 {expected}" in end(world, "a", second, "n2")


def test_a_rank_group_that_ends_badly_takes_the_rest_of_the_gang_with_it_once():
    world = running(*TWO, job("a", 16))
    assert end(world, "a", "lost", "n1") == ["kill a"]
    assert brief(world.cycle()) == []
    assert end(world, "a", "killed", "n2") == ["attempt a.1 lost", "place a n1:8+n2:8"]


def test_a_rank_group_that_finishes_early_waits_for_the_others():
    world = running(*TWO, job("a", 16))
    assert end(world, "a", "finished", "n1") == []
    assert end(world, "a", "finished", "n2") == ["attempt a.1 finished", "job a done"]


def test_three_attempts_without_a_commit_end_the_job_with_the_first_failure():
    world = World(node("n1"), job("a", 8), broken=["a"]).play()
    assert world.phase("a") == "failed"
    ended = [event for event in world.log if type(event).__name__ == "AttemptEnded"]
    assert [each.epoch for each in ended] == [1, 2, 3]
    assert ended[-1].failure.tail == ("boom",)
    assert "3 attempts in a row without a checkpoint" in world.state.jobs[JobId("a")].ended.why


def test_a_commit_starts_the_count_anew_and_a_preemption_does_not_count():
    world = running(node("n1"), job("a", 8))
    assert end(world, "a", "failed") == ["attempt a.1 failed", "place a n1:8"]
    assert end(world, "a", "failed") == ["attempt a.2 failed", "JobDeferred"]
    assert brief(world.at(world.now_us / S + 2).cycle()) == ["JobReleased", "place a n1:8"]
    world.tell(committed("a", 5, epoch=3))
    end(world, "a", "failed")
    assert world.state.jobs[JobId("a")].attempts_without_commit == 0
    end(world, "a", "lost")
    world.tell(job("p", 8, "production", at_us=world.now_us))
    assert brief(world.cycle()) == ["notice a preempt for p"]
    end(world, "a", "lost")
    assert world.state.jobs[JobId("a")].attempts_without_commit == 1


def test_an_attempt_that_a_faulty_node_has_ended_before_its_ranks_is_no_try():
    world = running(node("n1"), job("a", 8, retries=(("infrastructure", 0),)))
    for epoch in range(1, 6):
        said = end(world, "a", "lost", node_fault=True)
        world.at(world.now_us / S + 7200).cycle()  # past any quarantine of the node
        assert said[0] == f"attempt a.{epoch} lost" and world.phase("a") == "running"
    ended = [event for event in world.log if isinstance(event, AttemptEnded)]
    assert {(each.counted, each.node_fault) for each in ended} == {("", True)}
    assert end(world, "a", "lost")[-1] == "job a failed", "one without a preflight counts as ever"


@pytest.mark.parametrize(
    ("retries", "outcomes", "why"),
    [
        ((("script", 0),), ["failed"], "a.1 failed (retries of script: 0)"),
        ((("exit 1", 1), ("script", 0)), ["failed", "failed"], "a.2 failed (retries of exit 1: 1)"),
        ((("exit 9", 1), ("script", 0)), ["failed"], "a.1 failed (retries of script: 0)"),
        ((("infrastructure", 4),), ["lost"] * 5, "a.5 lost (retries of infrastructure: 4)"),
        # What has no number of its own counts as ever, and by itself.
        ((("infrastructure", 4),), ["lost", "failed", "lost", "failed", "lost", "failed"], "3 attempts in a row"),
    ],
)
def test_retries_are_counted_by_cause(retries, outcomes, why):
    world = running(node("n1"), job("a", 8, retries=retries))
    for outcome in outcomes:
        world.at(world.now_us / S + 7200).cycle()  # past any quarantine of the node, and any pause
        assert world.phase("a") == "running", outcome
        failure = Failure(rank=0, exit_code=1, signal=None) if outcome == "failed" else None
        said = end(world, "a", outcome, failure=failure)
    assert said[-1] == "job a failed"
    assert why in world.state.jobs[JobId("a")].ended.why


def test_the_pause_between_tries_grows_and_why_says_what_was_counted():
    world, pauses = running(node("n1"), job("a", 8, retries=(("infrastructure", 10),))), []
    for _ in range(8):
        at_us = world.now_us
        end(world, "a", "lost")
        while world.phase("a") == "waiting":
            why = explain(world.state, JobId("a"), world.now_us)
            world.at(why.until_us / S).cycle()
        pauses.append((world.now_us - at_us) // S)
        world.at(world.now_us / S + 7200).cycle()
    assert pauses == [0, 2, 8, 32, 128, 512, 600, 600]
    assert "a.8 counts as infrastructure (8 of 10 retries)" in why.text and why.reason == "waits-for-time"
    assert {each.counted for each in world.log if isinstance(each, AttemptEnded)} == {"infrastructure"}


@pytest.mark.parametrize(
    ("line", "stepped", "retries", "expected"),
    [
        ("ValueError: no such optimizer", False, (), "failed"),
        ("[rank0]: ModuleNotFoundError: No module named 'tranformers'", False, (), "failed"),
        ("ValueError: no such optimizer", True, (), "running"),
        ("ValueError: no such optimizer", False, (("script", 2),), "running"),
        ("torch.distributed.DistNetworkError: the peer is gone", False, (), "running"),
        ("Killed", False, (), "running"),
    ],
)
def test_an_exception_before_the_first_step_that_would_come_again_is_not_tried_again(line, stepped, retries, expected):
    world = running(node("n1"), job("a", 8, retries=retries))
    if stepped:
        span = {"span": SpanClass.USEFUL, "from_us": 1, "first_step": 0, "steps": 1}
        world.tell(Reported(at_us=world.now_us, job_id=JobId("a"), epoch=1, **span))
    end(world, "a", "failed", failure=Failure(rank=0, exit_code=1, signal=None, tail=("Traceback", line)))
    assert world.phase("a") == expected
    if expected == "failed":
        assert "before its first step, which any further attempt would repeat" in world.state.jobs[JobId("a")].ended.why


def test_a_checkpoint_starts_the_counts_by_cause_anew():
    world = running(node("n1"), job("a", 8, retries=(("script", 1),)))
    for epoch in (1, 2, 3):
        world.tell(committed("a", epoch, epoch=epoch))
        assert end(world, "a", "failed") == [f"attempt a.{epoch} failed", "place a n1:8"]
    assert end(world, "a", "failed") == ["attempt a.4 failed", "job a failed"]


def test_after_a_notice_a_failure_is_no_failure_of_the_script():
    world = running(node("n1"), job("a", 8)).tell(job("p", 8, "production", at_us=10 * S))
    assert brief(world.cycle()) == ["notice a preempt for p"]
    assert end(world, "a", "failed") == ["attempt a.1 killed", "place p n1:8"]


def test_the_deadline_of_a_notice_kills():
    world = running(node("n1"), job("a", 8, grace_us=30 * S), deaf=["a"])
    world.tell(job("p", 8, "production", at_us=10 * S)).cycle()
    assert brief(world.at(39.999999).cycle()) == []
    assert brief(world.at(40).cycle()) == ["kill a"]
    assert brief(world.at(50).cycle()) == []


def test_a_preempted_job_that_asked_not_to_be_requeued_is_stopped():
    world = running(node("n1"), job("a", 8, requeue=False))
    world.tell(job("p", 8, "production", at_us=10 * S)).cycle()
    assert end(world, "a", "checkpointed") == ["attempt a.1 checkpointed", "job a stopped", "place p n1:8"]


@pytest.mark.parametrize("name", ["b", "a"])
def test_stop_of_a_waiting_and_of_a_running_job(name):
    world = running(node("n1"), job("a", 8), job("b", 8)).tell(stop(name))
    if name == "b":
        assert brief(world.cycle()) == ["job b stopped"]
    else:
        assert brief(world.cycle()) == ["notice a stop"]
        assert end(world, "a", "checkpointed") == ["attempt a.1 checkpointed", "job a stopped", "place b n1:8"]


def test_stop_now_kills_also_after_a_first_stop():
    world = running(node("n1"), job("a", 8)).tell(stop("a"))
    assert brief(world.cycle()) == ["notice a stop"]
    world.tell(stop("a", now=True))
    assert brief(world.cycle()) == ["kill a"]
    assert end(world, "a", "killed") == ["attempt a.1 killed", "job a stopped"]


def test_a_job_that_finishes_after_its_stop_is_done():
    world = running(node("n1"), job("a", 8)).tell(stop("a"))
    world.cycle()
    assert end(world, "a", "finished") == ["attempt a.1 finished", "job a done"]


def test_draining_gives_notice_to_all_and_places_nothing_until_the_server_is_up():
    world = running(*TWO, job("a", 8), job("b", 8), job("c", 8)).tell(ServerShuttingDown(at_us=0))
    assert brief(world.cycle()) == ["notice a down", "notice b down"]
    end(world, "a", "checkpointed")
    end(world, "b", "killed")
    assert not world.state.attempts and brief(world.cycle()) == []
    world.tell(ServerUp(at_us=0))
    assert brief(world.cycle()) == ["place a n1:8", "place b n2:8"]


def test_the_time_limit_is_a_ceiling_over_all_attempts():
    world = running(node("n1"), job("a", 8, time_limit_us=100 * S, grace_us=30 * S))
    end(world, "a", "lost")  # it used 10 s and is placed again at 10 s
    assert brief(world.at(69.9).cycle()) == []
    assert brief(world.at(70).cycle()) == ["notice a limit"]
    assert end(world, "a", "checkpointed") == ["attempt a.2 checkpointed", "job a stopped"]
    assert "time 1m40s" in world.state.jobs[JobId("a")].ended.why


def test_a_job_with_no_time_left_is_not_started_again():
    world = running(node("n1"), job("a", 8, time_limit_us=100 * S, grace_us=30 * S)).at(69)
    end(world, "a", "lost")
    world.at(70)
    assert end(world, "a", "lost") == ["attempt a.2 lost", "job a stopped"]


def test_the_cost_limit():
    # 8 GPUs at PRICE cost 8,000 micro-dollars a second: 1 dollar is 125 s, less the grace of 30 s.
    world = running(node("n1"), job("a", 8, cost_limit_micro_usd=1_000_000, grace_us=30 * S))
    assert PRICE * 8 * 125 * S == 1_000_000 * HOUR
    assert brief(world.at(94.9).cycle()) == []
    assert brief(world.at(95).cycle()) == ["notice a limit"]


def test_the_grace_takes_at_most_half_of_a_limit():
    world = running(node("n1"), job("a", 8, time_limit_us=40 * S, grace_us=30 * S))
    assert brief(world.at(19.9).cycle()) == []
    assert brief(world.at(20).cycle()) == ["notice a limit"]


def test_rank_groups_of_a_node_that_is_down_stay_leased_until_reported():
    world = running(*TWO, job("a", 16), job("b", 8)).tell(NodeDown(at_us=0, node="n1", epoch=1, why="silent"))
    assert brief(world.cycle()) == []
    assert end(world, "a", "lost", "n1") == ["kill a"]
    assert end(world, "a", "killed", "n2") == ["attempt a.1 lost", "place b n2:8"]
    world.tell(node("n1", epoch=2), node("n3"))
    assert brief(world.cycle()) == ["place a n1:8+n3:8"]


@pytest.mark.parametrize("reason", ["reclaim", "down"])
def test_notices_of_others_lead_to_another_attempt(reason):
    world = running(node("n1"), job("a", 8))
    given = {"epoch": 1, "reason": NoticeReason(reason), "deadline_us": 20 * S}
    world.tell(NoticeGiven(at_us=10 * S, job_id=JobId("a"), **given))
    assert brief(world.at(20).cycle()) == ["kill a"]
    assert end(world, "a", "killed") == ["attempt a.1 killed", "place a n1:8"]


def test_phases_are_as_the_table_draws_them():
    world = World(node("n1"), job("a", 8))
    assert world.phase("a") == "queued"
    world.cycle()
    assert world.phase("a") == "running"
    world.tell(stop("a"))
    world.cycle()
    assert world.phase("a") == "stopping"
    end(world, "a", "killed")
    assert Phase(world.phase("a")).ended
