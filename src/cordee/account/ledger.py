"""The ledger: every GPU-microsecond of every attempt in exactly one class, and its dollars.

    capacity = held + idle
    held     = useful + checkpoint + restart + stall + lost + unreported

A lease is held from AttemptPlaced to its RanksEnded. The ledger folds the log event by event, and its clock never goes
back: an event stamped earlier than the one before it counts at that one's time. Reports of ranks carry times of their
own, by their node's clock, and do not move the ledger's. Useful time is provisional until a checkpoint covers it: what
none covers is lost if the attempt ends otherwise than finished, and the job that gained by the notice is charged.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from cordee.account.attempt import AttemptRow, OpenAttempt
from cordee.account.idle import IdleGpus
from cordee.account.split import Split
from cordee.account.timeline import Segment, Timeline
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    Job,
    JobSubmitted,
    NodeDown,
    NodeUp,
    NoticeGiven,
    RankLeft,
    RanksEnded,
    Reported,
    Restored,
    StopRequested,
)
from cordee.ids import JobId, attempt_name
from cordee.reports import RANK_REPORTS

By = Literal["job", "user", "queue", "epoch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """The sum of the accounts of a job, user, queue or attempt."""

    key: str
    attempts: int
    gpu_us: Split
    micro_usd: Split
    lost_by_cause: tuple[tuple[str, int, int], ...]  # cause, GPU-microseconds, micro-dollars
    charged_gpu_us: int  # what others lost for it
    charged_micro_usd: int
    steps: int
    steps_repeated: int
    tokens: int
    price_sources: tuple[str, ...]

    @property
    def micro_usd_per_million_tokens(self) -> int | None:
        """Return micro-dollars paid per million tokens kept; None if no tokens were reported."""
        return self.micro_usd.held * 1_000_000 // self.tokens if self.tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Held and idle time of the whole cluster."""

    gpu_us: Split
    micro_usd: Split
    idle_gpu_us: int
    idle_micro_usd: int


class Ledger:
    """A fold over the log. With `detailed` it keeps each attempt's segments, which a picture needs."""

    def __init__(self, *, detailed: bool = False) -> None:
        self.at_us = 0
        self._detailed = detailed
        self._jobs: dict[JobId, Job] = {}
        self._high: dict[JobId, int] = {}  # steps that some attempt of a job has done
        self._open: dict[JobId, OpenAttempt] = {}
        self._epochs: dict[JobId, int] = {}
        self._closed: list[AttemptRow] = []
        self._segments: dict[tuple[JobId, int], tuple[Segment, ...]] = {}
        self._idle = IdleGpus()
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            JobSubmitted: self._submitted,
            StopRequested: self._stop_requested,
            NodeUp: self._idle.node_up,
            NodeDown: self._idle.node_down,
            AttemptPlaced: self._placed,
            NoticeGiven: self._noticed,
            RanksEnded: self._ranks_ended,
            Reported: self._reported,
            Restored: self._restored,
            RankLeft: self._rank_left,
            CheckpointCommitted: self._committed,
            AttemptEnded: self._attempt_ended,
        }

    def apply(self, event: Event) -> None:
        """Fold one event. A stale one (of another epoch, or of a lease or attempt that ended) changes nothing."""
        kind = type(event)
        if event.at_us > self.at_us and kind not in RANK_REPORTS:
            self._idle.advance(event.at_us)
            self.at_us = event.at_us
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(event)

    def rows(self, now_us: int) -> tuple[AttemptRow, ...]:
        """Return a row for each attempt: closed ones in the order they closed, then live ones until now."""
        now_us = max(now_us, self.at_us)
        return (*self._closed, *(self._open[job_id].row(now_us, None) for job_id in sorted(self._open)))

    def segments(self, now_us: int) -> dict[tuple[JobId, int], tuple[Segment, ...]]:
        """Return the segments of each attempt by job and epoch, live ones until now; only of a detailed ledger."""
        assert self._detailed, "only a detailed ledger keeps segments"
        now_us = max(now_us, self.at_us)
        live = {(job_id, each.epoch): each.segments(now_us, None) for job_id, each in self._open.items()}
        return self._segments | live

    def cost(self, by: By, now_us: int) -> tuple[CostRow, ...]:
        """Return the rows of each job, user, queue or attempt summed, in the order of their keys."""
        key = self._key(by)
        groups: dict[str, list[AttemptRow]] = {}
        charged: dict[str, list[AttemptRow]] = {}
        for row in self.rows(now_us):
            groups.setdefault(key(row), []).append(row)
            if row.for_job is not None and by != "epoch":
                charged.setdefault(self._gainer(by, row.for_job), []).append(row)
        keys = sorted(groups.keys() | charged.keys())
        return tuple(_sum(key, groups.get(key, []), charged.get(key, [])) for key in keys)

    def totals(self, now_us: int) -> Totals:
        """Return held and idle time of the whole cluster until now."""
        now_us = max(now_us, self.at_us)
        rows = self.rows(now_us)
        idle_gpu_us, idle_micro_usd = self._idle.until(now_us)
        return Totals(
            gpu_us=sum((row.gpu_us for row in rows), Split()),
            micro_usd=sum((row.micro_usd for row in rows), Split()),
            idle_gpu_us=idle_gpu_us,
            idle_micro_usd=idle_micro_usd,
        )

    # -- jobs ------------------------------------------------------------------------------------------------

    def _submitted(self, event: JobSubmitted) -> None:
        self._jobs.setdefault(event.job.job_id, event.job)

    def _stop_requested(self, event: StopRequested) -> None:
        if event.job_id in self._open:
            self._open[event.job_id].stopped = True

    # -- attempts --------------------------------------------------------------------------------------------

    def _placed(self, event: AttemptPlaced) -> None:
        job = self._jobs.get(event.job_id)
        if job is None or event.job_id in self._open or event.epoch <= self._epochs.get(event.job_id, 0):
            return
        self._epochs[event.job_id] = event.epoch
        timeline = Timeline(self.at_us, detailed=self._detailed)
        self._open[event.job_id] = OpenAttempt(job, event, self._idle.nodes, timeline)
        self._idle.take(event.leases)

    def _live(self, job_id: JobId, epoch: int) -> OpenAttempt | None:
        attempt = self._open.get(job_id)
        return attempt if attempt is not None and attempt.epoch == epoch else None

    def _noticed(self, event: NoticeGiven) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None and attempt.notice is None:
            attempt.notice = event

    def _ranks_ended(self, event: RanksEnded) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None and event.node in attempt.leases and event.node not in attempt.freed_us:
            attempt.freed_us[event.node] = self.at_us
            self._idle.give_back(attempt.leases[event.node])

    def _reported(self, event: Reported) -> None:
        attempt = self._live(event.job_id, event.epoch)
        segment = attempt.timeline.report(event) if attempt is not None else None
        if attempt is not None and segment is not None and segment.steps:
            after, high = segment.first_step + segment.steps, self._high.get(event.job_id, 0)
            attempt.steps_repeated += max(0, min(after, high) - segment.first_step)
            self._high[event.job_id] = max(high, after)

    def _restored(self, event: Restored) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None:
            attempt.timeline.reports = True
            attempt.timeline.restored_us = event.at_us

    def _rank_left(self, event: RankLeft) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None:
            attempt.timeline.reports = True

    def _committed(self, event: CheckpointCommitted) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None:
            # While every lease runs, each will last at least until now: durable time before now counts for all.
            attempt.timeline.commit(event, fold_until_us=0 if attempt.freed_us else self.at_us)

    def _attempt_ended(self, event: AttemptEnded) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None and len(attempt.freed_us) == len(attempt.leases):
            self._closed.append(attempt.row(self.at_us, event.outcome))
            if self._detailed:
                self._segments[event.job_id, event.epoch] = attempt.segments(self.at_us, event.outcome)
            del self._open[event.job_id]

    # -- keys ------------------------------------------------------------------------------------------------

    def _key(self, by: By) -> Callable[[AttemptRow], str]:
        keys: dict[By, Callable[[AttemptRow], str]] = {
            "job": lambda row: row.job_id,
            "user": lambda row: row.owner,
            "queue": lambda row: row.queue,
            "epoch": lambda row: attempt_name(row.job_id, row.epoch),
        }
        return keys[by]

    def _gainer(self, by: By, job_id: JobId) -> str:
        job = self._jobs.get(job_id)
        if by == "job" or job is None:
            return job_id
        return job.owner if by == "user" else job.queue


def attempt_segments(events: Iterable[Event]) -> dict[tuple[JobId, int], tuple[Segment, ...]]:
    """Return the segments of each attempt in a log, by job and epoch; live ones until the log's last time."""
    ledger, last_us = Ledger(detailed=True), 0
    for event in events:
        ledger.apply(event)
        last_us = max(last_us, event.at_us)
    return ledger.segments(last_us)


def _sum(key: str, rows: Iterable[AttemptRow], charged: Iterable[AttemptRow]) -> CostRow:
    rows, charged = list(rows), list(charged)
    by_cause: dict[str, tuple[int, int]] = {}
    for row in rows:
        if row.cause is not None:
            gpu_us, micro_usd = by_cause.get(row.cause, (0, 0))
            by_cause[row.cause] = (gpu_us + row.gpu_us.lost, micro_usd + row.micro_usd.lost)
    return CostRow(
        key=key,
        attempts=len(rows),
        gpu_us=sum((row.gpu_us for row in rows), Split()),
        micro_usd=sum((row.micro_usd for row in rows), Split()),
        lost_by_cause=tuple((cause, *amounts) for cause, amounts in sorted(by_cause.items())),
        charged_gpu_us=sum(row.gpu_us.lost for row in charged),
        charged_micro_usd=sum(row.micro_usd.lost for row in charged),
        steps=sum(row.steps for row in rows),
        steps_repeated=sum(row.steps_repeated for row in rows),
        tokens=sum(row.tokens for row in rows),
        price_sources=tuple(sorted({source for row in rows for source in row.price_sources})),
    )
