"""One run: a workload, a cluster and its outages in; the log and the ledger out.

The same inputs give the same log, byte for byte: there is no clock and no randomness here but the caller's.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cordee.account.ledger import Ledger
from cordee.control.collector import collected_when_idle
from cordee.control.precedence import Undisputed
from cordee.control.tick import Control
from cordee.events import Event, Job, Node, Queue
from cordee.schedule.gang import Work
from cordee.schedule.policy import Policy
from cordee.simulate.engine import Engine
from cordee.simulate.store import MemoryStore
from cordee.simulate.world import Outage, SimCluster
from cordee.units import US_PER_S

_TICKS_MAX = 10_000  # of the control plane without time passing
STILL_US = 30 * 86_400 * US_PER_S
"""Endless outages end with a run in which no gang has run for so long: the jobs that wait never start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job that arrives, and what it will do; at `stop_us` its owner stops it."""

    at_us: int
    job: Job
    work: Work
    stop_us: int | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """The result of a run that ended, or was cut, at `at_us`. The log is empty if its events went to a sink."""

    log: tuple[Event, ...]
    ledger: Ledger
    at_us: int
    errors: int = 0  # steps of decisions that failed; none should


class Guest(Protocol):
    """Something beside the trace that acts in the same time, such as a service that scales."""

    def begin(self, engine: Engine, cluster: SimCluster, control: Control) -> None:
        """Schedule its first action."""
        ...


@collected_when_idle(every=1_000_000)
def run(
    nodes: Iterable[Node],
    submissions: Iterable[Submission],
    outages: Iterable[Outage] = (),
    *,
    policy: Policy | None = None,
    queues: tuple[Queue, ...] = (),
    start_us: int = 0,
    until_us: int | None = None,
    defer_reports: bool = False,
    sink: Callable[[Event], None] | None = None,
    guest: Guest | None = None,
) -> Run:
    """Run the control plane over this world until every job that can start has ended, or until `until_us`.

    Args:
        nodes: up from the start.
        submissions: in the order of their arrival, unless they are a sequence.
        outages: in the order in which they begin, unless they are a sequence; an iterator may be endless.
        policy: None: the default one.
        queues: the tree of queues; empty: one queue.
        start_us: when the server starts.
        until_us: when to cut.
        defer_reports: ranks defer their reports where no decision rests on them; the ledger is the same.
        sink: takes each event of the log, which is not kept then.
        guest: acts beside the submissions; it may have no end, so `until_us` has to cut.
    """
    policy = policy or Policy()
    endless = guest is None and not isinstance(outages, Sequence)
    engine = Engine(start_us)
    cluster = SimCluster(engine, nodes, outages)
    store = MemoryStore(sink)
    control = Control(clock=engine, store=store, executor=cluster, policy=policy, precedence=Undisputed())
    control.up()
    if queues:
        control.set_queues(queues)
    if guest is not None:
        guest.begin(engine, cluster, control)
    arrivals = iter(_in_order(submissions))
    arrival = next(arrivals, None)
    errors = ticks = 0
    active_us = start_us
    while True:
        wake_us = control.tick()
        ticks += 1
        assert ticks < _TICKS_MAX, f"at {engine.now_us()} us decision follows upon decision without end"
        errors += len(control.errors)
        if cluster.has_reports:  # a command was answered at once
            continue
        if endless:
            if cluster.runs or arrival is not None:
                active_us = engine.now_us()
            is_still = engine.now_us() - active_us > STILL_US
            if arrival is None and (is_still or not store.open_jobs or (cluster.idle and not wake_us)):
                break
        at_us = _earliest(engine.next_us(), wake_us, None if arrival is None else arrival.at_us)
        if at_us is None or (until_us is not None and at_us > until_us):
            break
        assert at_us >= engine.now_us(), "a wake-up in the past never ends"
        ticks = ticks if at_us == engine.now_us() else 0  # what is due at once, such as a kill without grace
        engine.advance(at_us)
        while arrival is not None and arrival.at_us <= at_us:
            _submit(arrival, engine, cluster, control, defer_reports and may_defer_reports(arrival.job, policy))
            arrival = next(arrivals, None)
    assert until_us is not None or not cluster.runs, "the run ends while a gang runs"
    if until_us is not None and until_us > engine.now_us():
        engine.advance(until_us)
    cluster.flush()
    control.tick()
    return Run(tuple(store.log), control.ledger, engine.now_us(), errors)


def _in_order(submissions: Iterable[Submission]) -> Iterable[Submission]:
    return sorted(submissions, key=lambda each: each.at_us) if isinstance(submissions, Sequence) else submissions


def _earliest(*times_us: int | None) -> int | None:
    return min([each for each in times_us if each is not None], default=None)


def may_defer_reports(job: Job, policy: Policy) -> bool:
    """Return whether no decision rests on the job's newest checkpoint: it can save in its grace period."""
    return policy.notice and job.protected and job.grace_us >= job.save_us


def _submit(submission: Submission, engine: Engine, cluster: SimCluster, control: Control, defer: bool) -> None:
    job = submission.job
    cluster.works[job.job_id] = submission.work
    if defer:
        cluster.deferred.add(job.job_id)
    control.submit(job, "")
    if submission.stop_us is not None:
        engine.at(max(submission.stop_us, engine.now_us()), lambda: control.stop(job.job_id, by=job.owner))
