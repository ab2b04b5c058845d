"""The store in memory keeps what the port promises."""

from cordee.control.ports import Store
from cordee.events import AttemptEnded, AttemptPlaced, Job, JobSubmitted, Lease, Outcome, ServerUp
from cordee.ids import JobId
from cordee.simulate.store import MemoryStore

JOB = JobId("a-aaaaaa")


def test_log_marks_and_commands() -> None:
    store = MemoryStore()
    port: Store = store
    submitted = JobSubmitted(at_us=1, job=Job(job_id=JOB, name="a", owner="o", gpus=1), spec="the spec")
    placed = AttemptPlaced(at_us=2, job_id=JOB, epoch=1, leases=(Lease(node="n", gpus=(0,)),))
    port.commit([ServerUp(at_us=0), submitted], seen=[("node/n/1", 3)])
    port.commit([placed], seen=[("node/n/1", 2)])
    assert list(port.events(after=1)) == [(2, submitted), (3, placed)]
    assert port.marks(["node/n/1", "unknown"]) == {"node/n/1": 3, "unknown": 0}
    (pending,) = port.pending()
    assert (pending.command, pending.spec) == (placed, "the spec")
    port.confirm([pending.number])
    assert port.pending() == []


def test_store_drops_commands_of_ended_attempts() -> None:
    store = MemoryStore()
    submitted = JobSubmitted(at_us=1, job=Job(job_id=JOB, name="a", owner="o", gpus=1), spec="the spec")
    placed = [AttemptPlaced(at_us=2, job_id=JOB, epoch=epoch, leases=()) for epoch in (1, 2)]
    ended = AttemptEnded(at_us=3, job_id=JOB, epoch=1, outcome=Outcome.LOST, why="")
    store.commit([submitted, placed[0], ended, placed[1]])
    (pending,) = store.pending()
    assert pending.command == placed[1]
