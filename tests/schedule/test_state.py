"""What `apply` ignores, what `what_if` takes back, and what follows from the log."""

import pytest

from cordee.event_json import decode, encode
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    JobEnded,
    KillOrdered,
    Lease,
    NodeDown,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RanksEnded,
    RanksStarted,
    StopRequested,
)
from cordee.ids import JobId
from cordee.schedule import State
from cordee.schedule.state.transitions import apply
from world import S, World, job, node, ranks_ended

A, B, NOBODY = JobId("a"), JobId("b"), JobId("nobody")


@pytest.fixture
def world() -> World:
    """`a` runs as its second attempt on n1 and n2, `b` waits, `done` has ended; n2's agent is at epoch 3."""
    world = World(node("n1"), node("n2", epoch=3), job("done", 1), work={"done": 1}).play()
    world.tell(job("a", 16, at_us=world.now_us), job("b", 16, at_us=world.now_us))
    world.cycle()
    world.tell(*ranks_ended(world, "a", "lost"))
    world.cycle()
    assert world.state.attempts[A].epoch == 2
    return world


STALE = {
    "submitted again": lambda: job("a", 1),
    "stop of nobody": lambda: StopRequested(at_us=0, job_id=NOBODY, by="x"),
    "stop of a job that ended": lambda: StopRequested(at_us=0, job_id=JobId("done"), by="x"),
    "end of a job with a live attempt": lambda: JobEnded(at_us=0, job_id=A, state="done", why=""),
    "an older agent's node": lambda: node("n2", 4, epoch=2),
    "an older agent goes": lambda: NodeDown(at_us=0, node="n2", epoch=2, why=""),
    "an unknown node goes": lambda: NodeDown(at_us=0, node="n9", epoch=2, why=""),
    "placed again": lambda: AttemptPlaced(at_us=0, job_id=A, epoch=2, leases=(Lease(node="n1", gpus=(0,)),)),
    "placed with an older epoch": lambda: AttemptPlaced(at_us=0, job_id=B, epoch=0, leases=()),
    "notice of an older epoch": lambda: NoticeGiven(
        at_us=0, job_id=A, epoch=1, reason=NoticeReason.STOP, deadline_us=0
    ),
    "kill of an older epoch": lambda: KillOrdered(at_us=0, job_id=A, epoch=1, why=""),
    "start of an older epoch": lambda: RanksStarted(at_us=0, job_id=A, epoch=1, node="n1"),
    "ranks of an older epoch": lambda: RanksEnded(at_us=0, job_id=A, epoch=1, node="n1", outcome=Outcome.LOST),
    "ranks on another node": lambda: RanksEnded(at_us=0, job_id=A, epoch=2, node="n9", outcome=Outcome.LOST),
    "ranks of an unknown job": lambda: RanksEnded(at_us=0, job_id=NOBODY, epoch=1, node="n1", outcome=Outcome.LOST),
    "commit of an older epoch": lambda: CheckpointCommitted(
        at_us=0, job_id=A, epoch=1, step=5, generation=1, size_bytes=1, stall_us=0, upload_us=0
    ),
    "end of an older attempt": lambda: AttemptEnded(at_us=0, job_id=A, epoch=1, outcome=Outcome.LOST, why=""),
    "end of an attempt that holds GPUs": lambda: AttemptEnded(at_us=0, job_id=A, epoch=2, outcome=Outcome.LOST, why=""),
}


@pytest.mark.parametrize("what", STALE)
def test_stale_events_change_nothing(world, what):
    before = world.state.snapshot()
    apply(world.state, STALE[what]())
    assert world.state.snapshot() == before


def test_a_rank_group_ends_once(world):
    (first, _) = ranks_ended(world, "a", "finished")
    world.tell(first)
    before = world.state.snapshot()
    apply(world.state, first)
    assert world.state.snapshot() == before
    assert world.state.nodes.free.free(("H100", "on-demand", ())) == 8


def test_a_commit_covers_work_before_its_capture_and_an_older_step_changes_nothing(world):
    def commit(at_s: int, step: int, drain_s: int) -> CheckpointCommitted:
        more = {"generation": step, "size_bytes": 1, "stall_us": 0, "upload_us": drain_s * S}
        return CheckpointCommitted(at_us=at_s * S, job_id=A, epoch=2, step=step, **more)

    for event in (commit(900, 50, 10), commit(950, 40, 0)):
        apply(world.state, event)
    attempt = world.state.attempts[A]
    assert (attempt.captured_us, attempt.committed_step) == (890 * S, 50)


def test_a_gpu_cannot_be_leased_twice(world):
    with pytest.raises(AssertionError, match=r"b leases GPUs \(0,\) of n1 twice"):
        apply(world.state, AttemptPlaced(at_us=0, job_id=B, epoch=1, leases=(Lease(node="n1", gpus=(0,)),)))


def test_a_what_if_takes_back_everything_also_nested_and_after_an_error(world):
    before = world.state.snapshot()
    with world.state.journal.what_if():
        apply(world.state, KillOrdered(at_us=10**9, job_id=A, epoch=2, why=""))
        inner = world.state.snapshot()
        assert inner != before
        with pytest.raises(RuntimeError), world.state.journal.what_if():
            for event in ranks_ended(world, "a", "killed"):
                apply(world.state, event)
            apply(world.state, AttemptEnded(at_us=10**9, job_id=A, epoch=2, outcome=Outcome.KILLED, why=""))
            apply(world.state, JobEnded(at_us=10**9, job_id=A, state="failed", why=""))
            apply(world.state, node("n3", 4, "A100"))
            raise RuntimeError
        assert world.state.snapshot() == inner
    assert world.state.snapshot() == before


def test_the_log_gives_the_same_state_through_json(world):
    again = State()
    for event in world.log:
        apply(again, decode(encode(event)))
    assert again.snapshot() == world.state.snapshot()


def test_gpus_of_foreign_processes_are_not_free_and_a_report_changes_that():
    state = World(node("n1", unavailable=(0, 1))).state
    assert state.nodes.free.free(("H100", "on-demand", ())) == 6
    apply(state, node("n1", unavailable=(0, 1, 2), at_us=S))
    assert state.nodes.free.free(("H100", "on-demand", ())) == state.nodes.free.usable(("H100", "on-demand", ())) == 5
