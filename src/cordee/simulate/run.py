"""One run: a workload, a cluster and what the cloud does to it in; the log and the ledger out.

The same inputs give the same log, byte for byte: there is no clock and no randomness here but the caller's.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from cordee.account.ledger import Ledger
from cordee.control.tick import Control
from cordee.events import Event, Job, Node
from cordee.simulate.engine import Engine
from cordee.simulate.store import MemoryStore
from cordee.simulate.work import Work
from cordee.simulate.world import Reclaim, SimCluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """A job that arrives, and what it will do."""

    at_us: int
    job: Job
    work: Work


@dataclass(frozen=True, slots=True)
class Run:
    """What is left of a run that ended, or was cut, at `at_us`."""

    log: tuple[Event, ...]
    ledger: Ledger
    at_us: int


def run(
    nodes: Iterable[Node],
    submissions: Iterable[Submission],
    reclaims: Iterable[Reclaim] = (),
    *,
    start_us: int = 0,
    until_us: int | None = None,
) -> Run:
    """Run the control plane over this world until nothing more happens, or until `until_us`."""
    engine = Engine(start_us)
    cluster = SimCluster(engine, nodes, reclaims)
    store = MemoryStore()
    control = Control(clock=engine, store=store, executor=cluster)
    control.up()
    for submission in submissions:
        job, spec = submission.job, submission.work.to_json()
        engine.at(submission.at_us, lambda job=job, spec=spec: control.submit(job, spec))  # type: ignore[misc]
    while True:
        wake_us = control.tick()
        if cluster.reports():  # a command was answered at once
            continue
        due = [at_us for at_us in (engine.next_us(), wake_us) if at_us is not None]
        if not due or (until_us is not None and min(due) > until_us):
            return Run(tuple(store.log), control.ledger, engine.now_us() if until_us is None else until_us)
        assert min(due) > engine.now_us() or engine.next_us() == engine.now_us(), "a wake-up in the past never ends"
        engine.advance(min(due))
