"""The world behind a log: when jobs arrived, how long each worked, which nodes came and went.

It is what a replay plays again under another policy. What the log does not show it does not make up: a job that had not
ended goes on, and nobody knows for how long.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

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
    Restored,
    StopRequested,
)
from cordee.ids import JobId
from cordee.schedule.gang import Work
from cordee.simulate.run import Submission
from cordee.simulate.world import Outage
from cordee.units import US_PER_S

_STEP_US = 1_000


@dataclass(slots=True)
class ObservedJob:
    """One job as the log shows it.

    Attributes:
        worked_us: useful time of all attempts, or held time of a script that reports nothing.
        starts_us: from placed to the first new step, of each attempt that reached it.
        stalls_us: how long each checkpoint stalled the ranks.
        uploads_us: from then until each was durable.
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
    uploads_us: list[int] = field(default_factory=list)
    handles_notice: bool = False


@dataclass(slots=True)
class ObservedLog:
    """The world of a log.

    Attributes:
        nodes: as they first came up, and when.
        outages: of these nodes.
    """

    jobs: list[ObservedJob]
    nodes: list[tuple[int, Node]]
    outages: list[Outage]
    queues: list[QueuesSet]
    start_us: int
    end_us: int
    ledger: Ledger
    log: Sequence[Event]

    def submissions(self, *, estimates: bool = False) -> list[Submission]:
        """Return the same arrivals with the same work; with `estimates` each job declares its true run time."""
        return [
            Submission(
                at_us=seen.submitted_us,
                job=replace(seen.job, estimate_us=seen.worked_us) if estimates else seen.job,
                work=_work(seen),
                stop_us=seen.stopped_us,
            )
            for seen in self.jobs
        ]


def newest(events: Iterable[Event], lasts_us: int) -> list[Event]:
    """Return the log without the jobs that had ended before its last stretch of this length.

    What runs or waits when it begins is there from its submission on, beside fewer others than it had.
    """
    log = list(events)
    from_us = max((event.at_us for event in log), default=0) - lasts_us
    ended = {event.job_id: event.at_us for event in log if isinstance(event, JobEnded)}
    gone = {job_id for job_id, at_us in ended.items() if at_us < from_us}
    return [event for event in log if _job_of(event) not in gone]


def _job_of(event: Event) -> JobId | None:
    return event.job.job_id if isinstance(event, JobSubmitted) else getattr(event, "job_id", None)


def observe(events: Iterable[Event]) -> ObservedLog:
    """Fold the log."""
    observer = _Observer()
    for event in events:
        observer.apply(event)
    return observer.seen()


class _Observer:
    """The fold."""

    def __init__(self) -> None:
        self._log: list[Event] = []
        self._ledger = Ledger()
        self._jobs: dict[JobId, ObservedJob] = {}
        self._nodes: dict[str, tuple[int, Node]] = {}
        self._gone: dict[str, NodeDown] = {}
        self._notice_at_us: dict[str, int] = {}
        self._outages: list[Outage] = []
        self._queues: list[QueuesSet] = []
        self._placed: dict[tuple[JobId, int], AttemptPlaced] = {}
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            JobSubmitted: self._submitted,
            JobEnded: lambda event: setattr(self._jobs[event.job_id], "state", event.state),
            StopRequested: lambda event: setattr(self._jobs[event.job_id], "stopped_us", event.at_us),
            AttemptPlaced: lambda event: self._placed.__setitem__((event.job_id, event.epoch), event),
            Restored: self._restored,
            CheckpointCommitted: self._committed,
            NodeUp: self._node_up,
            NodeReclaimed: lambda event: self._notice_at_us.__setitem__(event.node, event.at_us),
            NodeDown: self._node_down,
            QueuesSet: self._queues.append,
        }

    def apply(self, event: Event) -> None:
        """Fold one event; ignore those of a job that was never submitted."""
        self._log.append(event)
        self._ledger.apply(event)
        handler = self._handlers.get(type(event))
        job_id = getattr(event, "job_id", None)
        if handler is not None and (job_id is None or job_id in self._jobs):
            handler(event)

    def seen(self) -> ObservedLog:
        """Return the world of the log."""
        start_us = min((event.at_us for event in self._log), default=0)
        end_us = max((event.at_us for event in self._log), default=0)
        outages = list(self._outages)
        for event in self._gone.values():
            outages.append(self._outage(event, None))
        for name, (up_us, _) in self._nodes.items():  # a node that came later was away until then
            if up_us > start_us:
                outages.append(Outage(at_us=start_us, nodes=(name,), back_us=up_us - start_us, why="not there yet"))
        self._measure(end_us)
        return ObservedLog(
            list(self._jobs.values()),
            list(self._nodes.values()),
            outages,
            self._queues,
            start_us,
            end_us,
            self._ledger,
            self._log,
        )

    def _submitted(self, event: JobSubmitted) -> None:
        self._jobs.setdefault(event.job.job_id, ObservedJob(event.job, event.at_us))

    def _node_down(self, event: NodeDown) -> None:
        self._gone.setdefault(event.node, event)

    def _restored(self, event: Restored) -> None:
        placed = self._placed.get((event.job_id, event.epoch))
        if placed is not None:
            self._jobs[event.job_id].starts_us.append(event.at_us - placed.at_us)

    def _committed(self, event: CheckpointCommitted) -> None:
        seen = self._jobs[event.job_id]
        seen.commits += 1
        seen.stalls_us.append(event.stall_us)
        seen.uploads_us.append(event.upload_us)

    def _node_up(self, event: NodeUp) -> None:
        name = event.node.name
        if name in self._gone:
            gone = self._gone.pop(name)
            self._outages.append(self._outage(gone, event.at_us - gone.at_us))
        self._nodes.setdefault(name, (event.at_us, event.node))

    def _outage(self, gone: NodeDown, back_us: int | None) -> Outage:
        notice_us = max(0, gone.at_us - self._notice_at_us.pop(gone.node, gone.at_us))
        return Outage(at_us=gone.at_us, nodes=(gone.node,), notice_us=notice_us, back_us=back_us, why=gone.why)

    def _measure(self, end_us: int) -> None:
        """Measure by the ledger how long each job worked."""
        for row in self._ledger.rows(end_us):
            seen = self._jobs[row.job_id]
            held = sum(len(lease.gpus) for lease in self._placed[row.job_id, row.epoch].leases)
            if row.gpu_us.useful or row.gpu_us.restart:
                seen.reports = True
                seen.worked_us += row.gpu_us.useful // held
            else:
                seen.worked_us = max(seen.worked_us, row.gpu_us.held // held)
            seen.handles_notice |= row.outcome is Outcome.CHECKPOINTED


def _work(seen: ObservedJob) -> Work:
    """Return the work in short steps: their length only matters where a rank stops."""
    job, ended = seen.job, seen.state in ("done", "failed")
    worked_us = max(1, seen.worked_us)
    steps = max(1, worked_us // _STEP_US)
    step_us = max(1, worked_us // steps)
    if not ended:
        steps += 10 * 365 * 86_400 * US_PER_S // _STEP_US  # unknown: more than any replay is long
    start_us = round(median(seen.starts_us)) if seen.starts_us else 0
    return Work(
        steps=steps,
        step_us=step_us,
        start_us=start_us,
        first_start_us=seen.starts_us[0] if seen.starts_us else 0,
        every_us=max(step_us, worked_us // seen.commits) if seen.commits else None,
        stall_us=round(median(seen.stalls_us)) if seen.stalls_us else 0,
        upload_us=round(median(seen.uploads_us)) if seen.uploads_us else job.save_us if job.protected else 0,
        saves_at_end=False,
        handles_notice=seen.handles_notice or (job.protected and seen.reports),
        reports=seen.reports,
    )
