"""The ledger: every GPU-microsecond of every attempt in exactly one class, and the dollars of it.

    capacity = held + idle
    held     = useful + checkpoint + restart + stall + lost + unreported

Held is each lease from AttemptPlaced to its RanksEnded. The ledger folds the log, event by event; its clock never goes
back, so an event stamped earlier than the one before it counts at that one's time. What ranks tell has times of its
own, by their node's clock, and moves no other. Useful is provisional until a
checkpoint covers it: what none covers, when the attempt ends otherwise than finished, is lost, charged to the job that
gained by the notice, under the notice's reason. GPUs of a node that is down are neither held nor idle unless leased.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from cordee.account.split import Class, Split, rounded
from cordee.account.timeline import Timeline
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    Job,
    JobSubmitted,
    Lease,
    Measured,
    Node,
    NodeDown,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    Outcome,
    RankBehind,
    RankLeft,
    RanksEnded,
    Reported,
    Restored,
    StopRequested,
)
from cordee.ids import JobId, attempt_name
from cordee.units import US_PER_HOUR

By = Literal["job", "user", "queue", "epoch"]

_MILLI = 1000  # GPUs are counted in thousandths, since a lease may be of a part of one

_CHARGED = frozenset(NoticeReason) - {NoticeReason.QUOTA}
"""Who gains by these pays; who takes back what was borrowed does not: the borrower knew."""

_TOLD_BY_RANKS = frozenset((Reported, Restored, Measured, RankLeft, RankBehind, CheckpointCommitted))


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRow:
    """One attempt's account. `cause` says why what is lost was lost, `for_job` who is charged with it."""

    job_id: JobId
    epoch: int
    owner: str
    queue: str
    gpus: int
    placed_us: int
    ended_us: int | None  # None: live, and every class provisional
    outcome: Outcome | None
    gpu_us: Split
    micro_usd: Split
    cause: str | None
    for_job: JobId | None
    steps: int
    steps_repeated: int  # done before by an attempt of this job that did not keep them
    tokens: int  # of steps that are not lost
    price_sources: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostRow:
    """The accounts of a job, user, queue or attempt, summed."""

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
        """All dollars paid per million tokens kept; None where no tokens were told."""
        return self.micro_usd.held * 1_000_000 // self.tokens if self.tokens else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """The whole cluster."""

    gpu_us: Split
    micro_usd: Split
    idle_gpu_us: int
    idle_micro_usd: int

    @property
    def capacity_gpu_us(self) -> int:
        """What there was to hold."""
        return self.gpu_us.held + self.idle_gpu_us


class _Open:
    """An attempt whose account is not closed."""

    __slots__ = (
        "epoch", "freed_us", "job", "leases", "notice", "placed_us", "prices", "sources", "steps_repeated", "stopped",
        "timeline",
    )  # fmt: skip

    def __init__(self, job: Job, event: AttemptPlaced, at_us: int, nodes: dict[str, Node]) -> None:
        self.job, self.epoch, self.placed_us = job, event.epoch, at_us
        self.leases = {lease.node: lease for lease in event.leases}
        self.prices = {name: nodes[name].micro_usd_per_gpu_hour for name in self.leases}
        self.sources = tuple(sorted({nodes[name].price_source for name in self.leases}))
        self.freed_us: dict[str, int] = {}
        self.timeline = Timeline(at_us)
        self.notice: NoticeGiven | None = None
        self.stopped = False
        self.steps_repeated = 0

    def row(self, now_us: int, outcome: Outcome | None) -> AttemptRow:
        """The account until now, or until its GPUs were free."""
        held: dict[int, list[int]] = {}  # end: thousandths of GPUs, and these times their price
        for name, lease in self.leases.items():
            sums = held.setdefault(self.freed_us.get(name, max(now_us, self.placed_us)), [0, 0])
            milli = len(lease.gpus) * lease.milli
            sums[0] += milli
            sums[1] += milli * self.prices[name]
        gpu_us: dict[Class, int] = {}
        cost: dict[Class, int] = {}
        for end_us, (milli, rate) in held.items():
            for cls, time_us in self.timeline.split(end_us, outcome).items():
                gpu_us[cls] = gpu_us.get(cls, 0) + time_us * milli
                cost[cls] = cost.get(cls, 0) + time_us * rate
        split = rounded(gpu_us, _MILLI)
        cause = None if outcome is None or not split.lost else self._cause(outcome)
        return AttemptRow(
            job_id=self.job.job_id,
            epoch=self.epoch,
            owner=self.job.owner,
            queue=self.job.queue,
            gpus=sum(len(lease.gpus) for lease in self.leases.values()),
            placed_us=self.placed_us,
            ended_us=None if outcome is None else max(self.freed_us.values()),
            outcome=outcome,
            gpu_us=split,
            micro_usd=rounded(cost, _MILLI * US_PER_HOUR),
            cause=cause,
            for_job=self.notice.for_job if cause and self.notice and self.notice.reason in _CHARGED else None,
            steps=self.timeline.steps,
            steps_repeated=self.steps_repeated,
            tokens=self.timeline.tokens_kept(outcome),
            price_sources=self.sources,
        )

    def _cause(self, outcome: Outcome) -> str:
        if self.notice is not None:
            return self.notice.reason.value
        if outcome is Outcome.KILLED:
            return "stop" if self.stopped else "kill"
        return "failure" if outcome is Outcome.FAILED else "infrastructure"


class Ledger:
    """A fold over the log."""

    def __init__(self) -> None:
        self.at_us = 0
        self._jobs: dict[JobId, Job] = {}
        self._high: dict[JobId, int] = {}  # steps that some attempt of a job has done
        self._open: dict[JobId, _Open] = {}
        self._epochs: dict[JobId, int] = {}
        self._closed: list[AttemptRow] = []
        self._nodes: dict[str, Node] = {}
        self._up: dict[str, bool] = {}
        self._leased: dict[str, dict[int, int]] = {}  # node: thousandths of each GPU
        self._idle: dict[str, tuple[int, int]] = {}  # node: thousandths of GPUs, and these times their price
        self._idle_milli = self._idle_rate = 0
        self._idle_milli_us = self._idle_cost = 0
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            JobSubmitted: self._submitted,
            StopRequested: self._stop_requested,
            NodeUp: self._node_up,
            NodeDown: self._node_down,
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
        """Take note of one event. Stale ones (another epoch, a share or attempt that ended) change nothing."""
        kind = type(event)
        if event.at_us > self.at_us and kind not in _TOLD_BY_RANKS:
            self._pass(event.at_us)
        handler = self._handlers.get(kind)
        if handler is not None:
            handler(event)

    def rows(self, now_us: int) -> tuple[AttemptRow, ...]:
        """Every attempt, closed ones first in the order they closed; live ones until now."""
        now_us = max(now_us, self.at_us)
        return (*self._closed, *(self._open[job_id].row(now_us, None) for job_id in sorted(self._open)))

    def cost(self, by: By, now_us: int) -> tuple[CostRow, ...]:
        """The rows of each job, user, queue or attempt summed, in the order of their keys."""
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
        """Held and idle of the whole cluster until now."""
        now_us = max(now_us, self.at_us)
        rows = self.rows(now_us)
        ahead_us = now_us - self.at_us
        return Totals(
            gpu_us=sum((row.gpu_us for row in rows), Split()),
            micro_usd=sum((row.micro_usd for row in rows), Split()),
            idle_gpu_us=(self._idle_milli_us + self._idle_milli * ahead_us) // _MILLI,
            idle_micro_usd=(self._idle_cost + self._idle_rate * ahead_us) // (_MILLI * US_PER_HOUR),
        )

    # -- jobs ------------------------------------------------------------------------------------------------

    def _submitted(self, event: JobSubmitted) -> None:
        self._jobs.setdefault(event.job.job_id, event.job)

    def _stop_requested(self, event: StopRequested) -> None:
        if event.job_id in self._open:
            self._open[event.job_id].stopped = True

    # -- nodes and what is idle ------------------------------------------------------------------------------

    def _pass(self, at_us: int) -> None:
        # The log's first event is where time begins; nothing was idle before it, since no node was up.
        self._idle_milli_us += self._idle_milli * (at_us - self.at_us)
        self._idle_cost += self._idle_rate * (at_us - self.at_us)
        self.at_us = at_us

    def _node_up(self, event: NodeUp) -> None:
        known = self._nodes.get(event.node.name)
        if known is None or event.node.epoch >= known.epoch:
            self._nodes[event.node.name], self._up[event.node.name] = event.node, True
            self._recount(event.node.name)

    def _node_down(self, event: NodeDown) -> None:
        known = self._nodes.get(event.node)
        if known is not None and event.epoch >= known.epoch:
            self._up[event.node] = False
            self._recount(event.node)

    def _recount(self, name: str) -> None:
        """What of the node is idle from now on."""
        node, milli = self._nodes[name], 0
        if self._up[name]:
            leased = self._leased.get(name, {})
            milli = _MILLI * node.gpus - sum(leased.values())
            milli -= sum(_MILLI - leased.get(gpu, 0) for gpu in node.unavailable)
        was_milli, was_rate = self._idle.get(name, (0, 0))
        rate = milli * node.micro_usd_per_gpu_hour
        self._idle[name] = (milli, rate)
        self._idle_milli += milli - was_milli
        self._idle_rate += rate - was_rate

    def _lease(self, lease: Lease, sign: int) -> None:
        leased = self._leased.setdefault(lease.node, {})
        for gpu in lease.gpus:
            leased[gpu] = leased.get(gpu, 0) + sign * lease.milli
        self._recount(lease.node)

    # -- attempts --------------------------------------------------------------------------------------------

    def _placed(self, event: AttemptPlaced) -> None:
        job = self._jobs.get(event.job_id)
        if job is None or event.job_id in self._open or event.epoch <= self._epochs.get(event.job_id, 0):
            return
        self._epochs[event.job_id] = event.epoch
        self._open[event.job_id] = _Open(job, event, self.at_us, self._nodes)
        for lease in event.leases:
            self._lease(lease, +1)

    def _live(self, job_id: JobId, epoch: int) -> _Open | None:
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
            self._lease(attempt.leases[event.node], -1)

    def _reported(self, event: Reported) -> None:
        attempt = self._live(event.job_id, event.epoch)
        segment = attempt.timeline.tell(event) if attempt is not None else None
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
            # Every lease still runs, and will at least until now: what is durable before now counts for all of them.
            attempt.timeline.commit(event, fold_until_us=0 if attempt.freed_us else self.at_us)

    def _attempt_ended(self, event: AttemptEnded) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None and len(attempt.freed_us) == len(attempt.leases):
            self._closed.append(attempt.row(self.at_us, event.outcome))
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
