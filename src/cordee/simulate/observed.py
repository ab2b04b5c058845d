"""What a log shows of the world it came from: who arrived when, how long each worked, which nodes came and went.

It is what a replay plays again under another policy. What the log does not show it does not make up: a job that had not
ended goes on, and nobody knows for how long.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from cordee.account.ledger import Ledger
from cordee.events import (
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    Job,
    JobEnded,
    JobSubmitted,
    Node,
    NodeDown,
    NodeReclaimed,
    NodeUp,
    Outcome,
    QueuesSet,
    StopRequested,
)
from cordee.ids import JobId
from cordee.simulate.run import Submission
from cordee.simulate.work import Work
from cordee.simulate.world import Reclaim
from cordee.units import US_PER_S


@dataclass(slots=True)
class SeenJob:
    """One job as the log tells of it.

    Attributes:
        worked_us: useful time that its last attempt ended with, or held time of a script that told nothing.
        starts_us: from placed to the first new step, of each attempt that came so far.
        every_us: useful time between its checkpoints; None if it wrote none.
        drains_us: what its checkpoints took until they were durable.
    """

    job: Job
    submitted_us: int
    state: str = ""
    stopped_us: int | None = None
    worked_us: int = 0
    reports: bool = False
    starts_us: list[int] = field(default_factory=list)
    commits: int = 0
    stalls_us: list[int] = field(default_factory=list)
    drains_us: list[int] = field(default_factory=list)
    handles_notice: bool = False


@dataclass(slots=True)
class Seen:
    """A log's world.

    Attributes:
        nodes: as they first came up, and when.
        outages: times at which they went.
    """

    jobs: list[SeenJob]
    nodes: list[tuple[int, Node]]
    outages: list[Reclaim]
    queues: list[QueuesSet]
    start_us: int
    end_us: int
    ledger: Ledger
    log: Sequence[Event]

    def submissions(self) -> list[Submission]:
        """The same arrivals with the same work."""
        return [
            Submission(at_us=seen.submitted_us, job=seen.job, work=_work(seen), stop_us=seen.stopped_us)
            for seen in self.jobs
        ]


def observe(events: Iterable[Event]) -> Seen:
    """Fold the log."""
    log = list(events)
    ledger, jobs = Ledger(), dict[JobId, SeenJob]()
    nodes: dict[str, tuple[int, Node]] = {}
    gone: dict[str, tuple[int, str]] = {}
    told: dict[str, int] = {}
    outages: list[Reclaim] = []
    queues: list[QueuesSet] = []
    for event in log:
        ledger.apply(event)
        if isinstance(event, JobSubmitted):
            jobs.setdefault(event.job.job_id, SeenJob(event.job, event.at_us))
        elif isinstance(event, JobEnded):
            jobs[event.job_id].state = event.state
        elif isinstance(event, StopRequested) and event.job_id in jobs:
            jobs[event.job_id].stopped_us = event.at_us
        elif isinstance(event, CheckpointCommitted) and event.job_id in jobs:
            seen = jobs[event.job_id]
            seen.commits += 1
            seen.stalls_us.append(event.stall_us)
            seen.drains_us.append(event.drain_us)
        elif isinstance(event, NodeUp):
            name = event.node.name
            if name in gone:
                at_us, why = gone.pop(name)
                notice_us = max(0, at_us - told.pop(name, at_us))
                outages.append(
                    Reclaim(at_us=at_us, nodes=(name,), notice_us=notice_us, back_us=event.at_us - at_us, why=why)
                )
            nodes.setdefault(name, (event.at_us, event.node))
        elif isinstance(event, NodeReclaimed):
            told[event.node] = event.at_us
        elif isinstance(event, NodeDown) and event.node in nodes:
            gone.setdefault(event.node, (event.at_us, event.why))
        elif isinstance(event, QueuesSet):
            queues.append(event)
    for name, (at_us, why) in gone.items():
        outages.append(Reclaim(at_us=at_us, nodes=(name,), notice_us=max(0, at_us - told.get(name, at_us)), why=why))
    start_us = min((event.at_us for event in log), default=0)
    end_us = max((event.at_us for event in log), default=0)
    _measure(ledger, jobs, log, end_us)
    return Seen(list(jobs.values()), list(nodes.values()), outages, queues, start_us, end_us, ledger, log)


def _measure(ledger: Ledger, jobs: dict[JobId, SeenJob], log: Sequence[Event], end_us: int) -> None:
    gpus = {
        (event.job_id, event.epoch): sum(len(each.gpus) for each in event.leases)
        for event in log
        if isinstance(event, AttemptPlaced)
    }
    for row in ledger.rows(end_us):
        seen, held = jobs[row.job_id], gpus[row.job_id, row.epoch]
        useful_us, restart_us = row.gpu_us.useful // held, row.gpu_us.restart // held
        if row.gpu_us.useful or row.gpu_us.restart:
            seen.reports = True
            seen.worked_us += useful_us
            seen.starts_us.append(restart_us)
        else:
            seen.worked_us = max(seen.worked_us, row.gpu_us.held // held)
        seen.handles_notice |= row.outcome is Outcome.CHECKPOINTED


def _work(seen: SeenJob) -> Work:
    """Steps of a second: where a step ends matters to nobody but the rank that stops."""
    job, ended = seen.job, seen.state in ("done", "failed")
    worked_us = max(1, seen.worked_us)
    steps = max(1, round(worked_us / US_PER_S))
    step_us = max(1, worked_us // steps)
    if not ended:
        steps += 10 * 365 * 86_400  # nobody knows how much more: more than any replay is long
    start_us = round(median(seen.starts_us)) if seen.starts_us else 0
    return Work(
        steps=steps,
        step_us=step_us,
        start_us=start_us,
        first_start_us=seen.starts_us[0] if seen.starts_us else 0,
        every_us=max(step_us, worked_us // seen.commits) if seen.commits else None,
        stall_us=round(median(seen.stalls_us)) if seen.stalls_us else 0,
        drain_us=round(median(seen.drains_us)) if seen.drains_us else job.save_us if job.protected else 0,
        saves_at_end=False,
        handles_notice=seen.handles_notice or (job.protected and seen.reports),
        reports=seen.reports,
    )
