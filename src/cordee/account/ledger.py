"""The ledger: every GPU-microsecond of every attempt in exactly one class, and its dollars.

    capacity = held + idle
    held     = useful + checkpoint + restart + stall + loading + serving + idle held + draining + lost + unreported

A lease is held from AttemptPlaced to its RanksEnded. The energy that drivers count is divided as the time is
(`energy.py`). The ledger folds the log event by event, and its clock never goes back: an event stamped earlier than the
one before it counts at that one's time. Reports of ranks carry times of their own, by their node's clock, and do not
move the ledger's. Useful time is provisional until a checkpoint covers it: what none covers is lost if the attempt ends
otherwise than finished, and the job that gained by the notice is charged.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from cordee.account.attempt import AttemptRow, OpenAttempt
from cordee.account.idle import IdleGpus
from cordee.account.replica import ReplicaTimeline
from cordee.account.split import Split
from cordee.account.sums import RETIRED_BY, By, CostRow, Totals, sum_rows, summed
from cordee.account.timeline import Segment
from cordee.account.usage import DAY_US, CostLine, Usage
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    GpusSampled,
    IdleGpusSampled,
    Job,
    JobSubmitted,
    NodeDown,
    NodeUp,
    NoticeGiven,
    RankLeft,
    RanksEnded,
    ReplicaReady,
    ReplicaUnready,
    Reported,
    Restored,
    RolledBack,
    StopRequested,
    TokensServed,
    TokenWeights,
)
from cordee.ids import JobId
from cordee.reports import RANK_REPORTS
from cordee.units import US_PER_S

SETTLE_US = 600 * US_PER_S
"""A replica's account stays open for so long after its end: a gateway reports its last requests later."""


class SavedLedger(NamedTuple):
    """The saved form of a ledger that is not detailed."""

    at_us: int
    jobs: dict[JobId, Job]
    high: dict[JobId, int]
    open: dict[JobId, OpenAttempt]
    epochs: dict[JobId, int]
    settling: dict[tuple[JobId, int], OpenAttempt]
    closed: list[AttemptRow]
    retired: dict[tuple[str, str, str], CostRow]
    ended_micro_usd: dict[str, int]
    usage: Usage
    idle: IdleGpus


class LedgerAt(NamedTuple):
    """The accounts at a time. They change no more, so that summing them, which takes longer, needs no lock.

    Attributes:
        rows: of each attempt but those of retired jobs.
        retired: sums of retired jobs by owner, queue and service.
        idle: GPU-microseconds and micro-dollars that nobody held.
        idle_mj: the energy of idle GPUs, and the part of it that no counter has counted.
    """

    rows: tuple[AttemptRow, ...]
    retired: dict[tuple[str, str, str], CostRow]
    idle: tuple[int, int]
    idle_mj: tuple[int, int]

    def cost(self, by: By) -> tuple[CostRow, ...]:
        """Return the rows of each job, user, queue, service or attempt summed, in the order of their keys.

        Sums by job and by attempt are without retired jobs.
        """
        retired: dict[str, list[CostRow]] = {}
        if by in RETIRED_BY:
            for key, sums in self.retired.items():
                retired.setdefault(key[RETIRED_BY.index(by)], []).append(sums)
        return summed(by, self.rows, retired)

    def totals(self) -> Totals:
        """Return held and idle time of the whole cluster."""
        rows: Sequence[AttemptRow | CostRow] = (*self.rows, *self.retired.values())
        return Totals(
            gpu_us=Split.sum(row.gpu_us for row in rows),
            micro_usd=Split.sum(row.micro_usd for row in rows),
            idle_gpu_us=self.idle[0],
            idle_micro_usd=self.idle[1],
            energy_mj=Split.sum(row.energy_mj for row in rows),
            idle_energy_mj=self.idle_mj[0],
            integrated_mj=sum(row.integrated_mj for row in rows) + self.idle_mj[1],
        )


class Ledger:
    """A fold over the log. With `detailed` it keeps each attempt's segments, which a picture needs."""

    def __init__(self, *, detailed: bool = False, idle: IdleGpus | None = None, usage: Usage | None = None) -> None:
        self.at_us = 0
        self._detailed = detailed
        self._jobs: dict[JobId, Job] = {}
        self._high: dict[JobId, int] = {}  # steps that some attempt of a job has done
        self._open: dict[JobId, OpenAttempt] = {}
        self._epochs: dict[JobId, int] = {}
        self._settling: dict[tuple[JobId, int], OpenAttempt] = {}  # replicas that ended, in the order of their ends
        self._closed: list[AttemptRow] = []
        self._retired: dict[tuple[str, str, str], CostRow] = {}  # sums of retired jobs by owner, queue and service
        self._ended_micro_usd: dict[str, int] = {}  # of replicas that ended, by service
        self._segments: dict[tuple[JobId, int], tuple[Segment, ...]] = {}
        self._idle, self._usage = idle or IdleGpus(), usage or Usage()
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
            RolledBack: self._rolled_back,
            RankLeft: self._rank_left,
            CheckpointCommitted: self._committed,
            ReplicaReady: self._replica_ready,
            ReplicaUnready: self._replica_unready,
            TokensServed: self._tokens_served,
            GpusSampled: self._sampled,
            IdleGpusSampled: self._idle.draw,
            AttemptEnded: self._attempt_ended,
        }

    def saved(self) -> SavedLedger:
        """Return the saved form; it shares this object's values, so encode it before the next change."""
        assert not self._detailed, "segments are not saved"
        retired = dict(sorted(self._retired.items()))
        attempts = (self._jobs, self._high, self._open, self._epochs, self._settling, self._closed, retired)
        return SavedLedger(self.at_us, *attempts, self._ended_micro_usd, self._usage, self._idle)

    @classmethod
    def restored(cls, saved: SavedLedger) -> "Ledger":
        """Return the ledger that was saved."""
        new = cls(idle=saved.idle, usage=saved.usage)
        new.at_us, new._jobs, new._high, new._open, new._epochs = saved[:5]
        new._settling, new._closed, new._retired, new._ended_micro_usd = saved[5:9]
        return new

    def apply(self, event: Event) -> None:
        """Fold one event. A stale one (of another epoch, or of a lease or attempt that ended) changes nothing."""
        kind = type(event)
        if event.at_us > self.at_us and kind not in RANK_REPORTS:
            self._advance(event.at_us)
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(event)

    def _advance(self, at_us: int) -> None:
        if at_us >= self._usage.day_us + DAY_US:
            self._close_days(self._usage, at_us)
        self._idle.advance(at_us)
        self.at_us = at_us
        while self._settling:
            key, attempt = next(iter(self._settling.items()))
            if max(attempt.freed_us.values()) + SETTLE_US > at_us:
                return
            del self._settling[key]
            self._close(attempt)

    def _close_days(self, usage: Usage, at_us: int) -> None:
        """End the days before the one of this time."""
        while at_us >= (end_us := usage.day_us + DAY_US):
            usage.close_day(self._service_micro_usd(end_us))
            if all(attempt.replica is None for attempt in self._open.values()):
                usage.skip_to(at_us)

    def _usage_at(self, now_us: int) -> Usage:
        """Return the usage on the day of a time, which no event may have reached yet."""
        if now_us < self._usage.day_us + DAY_US:
            return self._usage
        usage = self._usage.copy()
        self._close_days(usage, now_us)
        return usage

    def retire(self, job_ids: Iterable[JobId]) -> dict[JobId, list[AttemptRow]]:
        """Keep only sums of jobs that have ended, and return the rows of their attempts."""
        gone: dict[JobId, list[AttemptRow]] = {job_id: [] for job_id in job_ids}
        by_key: dict[tuple[str, str, str], tuple[list[AttemptRow], list[AttemptRow]]] = {}
        for row in (row for row in self._closed if row.job_id in gone):
            gone[row.job_id].append(row)
            by_key.setdefault((row.owner, row.queue, row.service), ([], []))[0].append(row)
            if row.charged is not None:
                by_key.setdefault(row.charged[1:], ([], []))[1].append(row)
        self._closed = [row for row in self._closed if row.job_id not in gone]
        for key, (rows, charged) in by_key.items():
            self._retired[key] = sum_rows("", rows, charged, [self._retired[key]] if key in self._retired else [])
        for job_id in gone:
            for known in (self._jobs, self._high, self._epochs):
                known.pop(job_id, None)
        return gone

    def settles(self, job_id: JobId) -> bool:
        """Return whether the account of a job that has ended is still open."""
        return any(each == job_id for each, _ in self._settling)

    def rows(self, now_us: int) -> tuple[AttemptRow, ...]:
        """Return a row for each attempt: closed ones in the order they closed, then the others until now."""
        now_us = max(now_us, self.at_us)
        live = (self._open[job_id] for job_id in sorted(self._open))
        return (*self._closed, *(each.row(now_us, self._jobs) for each in (*self._settling.values(), *live)))

    def segments(self, now_us: int) -> dict[tuple[JobId, int], tuple[Segment, ...]]:
        """Return the segments of each attempt by job and epoch, live ones until now; only of a detailed ledger."""
        assert self._detailed, "only a detailed ledger keeps segments"
        now_us = max(now_us, self.at_us)
        others = (*self._settling.values(), *self._open.values())
        return self._segments | {(each.job.job_id, each.epoch): each.segments(now_us) for each in others}

    def at(self, now_us: int) -> "LedgerAt":
        """Return the accounts as they are at a time."""
        now_us = max(now_us, self.at_us)
        energy = (self._idle.energy_mj, self._idle.integrated_mj)
        return LedgerAt(self.rows(now_us), dict(self._retired), self._idle.until(now_us), energy)

    def cost(self, by: By, now_us: int) -> tuple[CostRow, ...]:
        """Return the same as `LedgerAt.cost`, at a time."""
        return self.at(now_us).cost(by)

    def usage(self, now_us: int) -> list[CostLine]:
        """Return tokens and dollars of services by day, tenant, key and model, until now, oldest first."""
        now_us = max(now_us, self.at_us)
        return self._usage_at(now_us).lines(self._service_micro_usd(now_us))

    def prices(self, now_us: int) -> dict[str, TokenWeights]:
        """Return micro-dollars of a million tokens of each service, until now."""
        now_us = max(now_us, self.at_us)
        return self._usage_at(now_us).prices(self._service_micro_usd(now_us))

    def spent(self, from_us: int, now_us: int) -> dict[str, int]:
        """Return the micro-dollars of each tenant since the start of a day of the last two months, until now."""
        now_us = max(now_us, self.at_us)
        return self._usage_at(now_us).spent(self._service_micro_usd(now_us), from_us)

    def _service_micro_usd(self, until_us: int) -> dict[str, int]:
        """Return the micro-dollars of the replicas of each service from the beginning until a time."""
        held = dict(self._ended_micro_usd)
        for attempt in self._open.values():
            if attempt.job.service is not None:
                held[attempt.job.service] = held.get(attempt.job.service, 0) + attempt.held_micro_usd(until_us)
        return held

    def totals(self, now_us: int) -> Totals:
        """Return held and idle time of the whole cluster until now."""
        return self.at(now_us).totals()

    def idle_months(self, now_us: int) -> dict[int, tuple[int, int]]:
        """Return idle GPU-microseconds and micro-dollars of each month of UTC by its start, until now."""
        return self._idle.months(max(now_us, self.at_us))

    # -- jobs ------------------------------------------------------------------------------------------------

    def _submitted(self, event: JobSubmitted) -> None:
        job = self._jobs.setdefault(event.job.job_id, event.job)
        estimate = job.estimate_on(job.gpus)
        if job.service is not None and estimate is not None and estimate.token_weights is not None:
            self._usage.weights[job.service] = estimate.token_weights

    def _stop_requested(self, event: StopRequested) -> None:
        if event.job_id in self._open:
            self._open[event.job_id].stopped = True

    # -- attempts --------------------------------------------------------------------------------------------

    def _placed(self, event: AttemptPlaced) -> None:
        job = self._jobs.get(event.job_id)
        if job is None or event.job_id in self._open or event.epoch <= self._epochs.get(event.job_id, 0):
            return
        self._epochs[event.job_id] = event.epoch
        attempt = OpenAttempt(job, event, self._idle.nodes, self.at_us, detailed=self._detailed)
        self._open[event.job_id] = attempt
        self._idle.take(event.leases)

    def _live(self, job_id: JobId, epoch: int) -> OpenAttempt | None:
        attempt = self._open.get(job_id)
        return attempt if attempt is not None and attempt.epoch == epoch else None

    def _noticed(self, event: NoticeGiven) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None and attempt.notice is None:
            attempt.notice = event
            if attempt.replica is not None:
                attempt.replica.leave(self.at_us)

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

    def _rolled_back(self, event: RolledBack) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None:
            attempt.timeline.roll_back(event)

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
            attempt.timeline.commit(event, fold_until_us=self._foldable_us(attempt))

    def _replica_ready(self, event: ReplicaReady) -> None:
        replica = self._replica(event.job_id, event.epoch)
        if replica is not None:
            replica.ready(event.at_us)

    def _replica_unready(self, event: ReplicaUnready) -> None:
        replica = self._replica(event.job_id, event.epoch)
        if replica is not None:
            (replica.leave if event.draining else replica.unready)(event.at_us)

    def _tokens_served(self, event: TokensServed) -> None:
        self._usage.count(event)
        replica = self._replica(event.job_id, event.epoch)
        if replica is not None:
            replica.tokens += event.input_tokens + event.output_tokens
            replica.serve(event.from_us, event.busy_us)

    def _sampled(self, event: GpusSampled) -> None:
        attempt = self._live(event.job_id, event.epoch) or self._settling.get((event.job_id, event.epoch))
        if attempt is None:
            self._idle.draw(event)  # it comes after the account was closed, and is accounted once as well
        else:
            attempt.draw(event)

    def _replica(self, job_id: JobId, epoch: int) -> ReplicaTimeline | None:
        """Return the time of a replica that is live or settles, and make room for a change of it."""
        attempt = self._live(job_id, epoch) or self._settling.get((job_id, epoch))
        if attempt is None or attempt.replica is None:
            return None
        attempt.replica.fold(self._foldable_us(attempt))
        return attempt.replica

    def _foldable_us(self, attempt: OpenAttempt) -> int:
        """Return the time before which time counts for all leases: while every one runs, each lasts until now."""
        if attempt.freed_us:
            return 0
        return self.at_us if attempt.energy is None else attempt.energy.foldable_us(self.at_us)

    def _attempt_ended(self, event: AttemptEnded) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is None or len(attempt.freed_us) < len(attempt.leases):
            return
        attempt.outcome = event.outcome
        del self._open[event.job_id]
        service = attempt.job.service
        if service is None:
            self._close(attempt)
        else:
            held = self._ended_micro_usd.get(service, 0) + attempt.held_micro_usd(self.at_us)
            self._ended_micro_usd[service] = held
            self._settling[event.job_id, event.epoch] = attempt

    def _close(self, attempt: OpenAttempt) -> None:
        self._closed.append(attempt.row(self.at_us, self._jobs))
        if self._detailed:
            self._segments[attempt.job.job_id, attempt.epoch] = attempt.segments(self.at_us)


def attempt_segments(events: Iterable[Event], until_us: int = 0) -> dict[tuple[JobId, int], tuple[Segment, ...]]:
    """Return the segments of each attempt in a log, by job and epoch; live ones until then, or the log's last time."""
    ledger, last_us = Ledger(detailed=True), until_us
    for event in events:
        ledger.apply(event)
        last_us = max(last_us, event.at_us)
    return ledger.segments(last_us)
