"""One run: a workload, a cluster and what the cloud does to it in; the log and the ledger out.

The same inputs give the same log, byte for byte: there is no clock and no randomness here but the caller's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cordee.account.ledger import Ledger
from cordee.control.collector import collected_when_idle
from cordee.control.tick import Control
from cordee.events import Event, Job, Node, Queue
from cordee.schedule.policy import Policy
from cordee.simulate.engine import Engine
from cordee.simulate.store import MemoryStore
from cordee.simulate.work import Work
from cordee.simulate.world import Reclaim, SimCluster

_TURNS_MAX = 10_000  # of the control plane without time passing


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job that arrives, and what it will do; at `stop_us` its owner has it stopped."""

    at_us: int
    job: Job
    work: Work
    stop_us: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """What is left of a run that ended, or was cut, at `at_us`. The log is empty if it was told to somebody."""

    log: tuple[Event, ...]
    ledger: Ledger
    at_us: int
    errors: int = 0  # steps of decisions that failed; none should


@collected_when_idle()
def run(
    nodes: Iterable[Node],
    submissions: Iterable[Submission],
    reclaims: Iterable[Reclaim] = (),
    *,
    policy: Policy | None = None,
    queues: tuple[Queue, ...] = (),
    start_us: int = 0,
    until_us: int | None = None,
    late: bool = False,
    tell: Callable[[Event], None] | None = None,
) -> Run:
    """Run the control plane over this world until every job has ended, or until `until_us`.

    Args:
        nodes: that are there from the start.
        submissions: in the order of their arrival, if they are not a sequence.
        reclaims: in the order in which they begin, if they are not a sequence; then they may be without end.
        policy: by which rules; None: the default ones.
        queues: the tree of queues; empty: all are equal.
        start_us: when the server comes up.
        until_us: when to cut.
        late: ranks tell late where no decision rests on what they tell; the ledger is the same.
        tell: takes each event of the log in place of keeping it.
    """
    policy = policy or Policy()
    endless = not isinstance(reclaims, Sequence)
    engine = Engine(start_us)
    cluster = SimCluster(engine, nodes, reclaims)
    store = MemoryStore(tell)
    control = Control(clock=engine, store=store, executor=cluster, policy=policy)
    control.up()
    if queues:
        control.set_queues(queues)
    if isinstance(submissions, Sequence):
        submissions = sorted(submissions, key=lambda each: each.at_us)
    coming = iter(submissions)
    following = next(coming, None)
    errors = turns = 0
    while True:
        wake_us = control.tick()
        turns += 1
        assert turns < _TURNS_MAX, f"at {engine.now_us()} us decision follows upon decision without end"
        errors += len(control.errors)
        if cluster.told:  # a command was answered at once
            continue
        if endless and following is None and not (store.open_jobs and (wake_us or not cluster.quiet)):
            break
        at_us = _soonest(engine.next_us(), wake_us, None if following is None else following.at_us)
        if at_us is None or (until_us is not None and at_us > until_us):
            break
        assert at_us >= engine.now_us(), "a wake-up in the past never ends"
        turns = turns if at_us == engine.now_us() else 0  # what is due at once, such as a kill without grace
        engine.advance(at_us)
        while following is not None and following.at_us <= at_us:
            _submit(following, engine, cluster, control, late and tells_late(following.job, policy))
            following = next(coming, None)
    if until_us is not None and until_us > engine.now_us():
        engine.advance(until_us)
    cluster.ask()
    control.tick()
    return Run(tuple(store.log), control.ledger, engine.now_us(), errors)


def tells_late(job: Job, policy: Policy) -> bool:
    """Whether no decision rests on the newest checkpoint of the job: who can save in the grace period loses no work."""
    return policy.notice and job.protected and job.grace_us >= job.save_us


def _soonest(*times_us: int | None) -> int | None:
    return min((at_us for at_us in times_us if at_us is not None), default=None)


def _submit(submission: Submission, engine: Engine, cluster: SimCluster, control: Control, late: bool) -> None:
    job = submission.job
    cluster.works[job.job_id] = submission.work
    if late:
        cluster.late.add(job.job_id)
    control.submit(job, "")
    if submission.stop_us is not None:
        engine.at(max(submission.stop_us, engine.now_us()), lambda: control.stop(job.job_id, by=job.owner))
