"""Records: the values that `State` holds. They are frozen, and replaced when something happens to them."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from cordee.events import (
    AttemptEnded,
    Job,
    JobDeferred,
    JobEnded,
    JobHeld,
    KillOrdered,
    Lease,
    Node,
    NoticeGiven,
    RankBehind,
    RanksEnded,
    RequeueRequested,
    ReservationMade,
    StopRequested,
)
from cordee.frozen import quick_replace
from cordee.schedule.quota.day import Pair
from cordee.schedule.quota.held import Held, held_by
from cordee.schedule.state.retries import ANY, Counts

NEVER = 2**62
"""A time that never comes, in microseconds."""


class Phase(StrEnum):
    """The phase of a job's life."""

    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
    PAUSED = "paused"  # holds no GPU, and waits for none
    HELD = "held"  # likewise, because a person holds it
    WAITING = "waiting"  # likewise, until other jobs have ended or a time has come
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def ended(self) -> bool:
        """Return whether the job will not run again."""
        return self in (Phase.DONE, Phase.FAILED, Phase.STOPPED)

    @property
    def deferred(self) -> bool:
        """Return whether the job is in no line and holds no GPU, and may run later."""
        return self in (Phase.PAUSED, Phase.HELD, Phase.WAITING)


class Order(NamedTuple):
    """The place that people gave a waiting job; it holds until the job's next start.

    Attributes:
        priority: in place of the job's own.
        rank: negative: before all others of that priority in its queue; positive: behind them.
        standing, submitted_us: as of another job, whose place it has; None: its own.
    """

    priority: int
    rank: int = 0
    standing: int | None = None
    submitted_us: int | None = None


class Gate(NamedTuple):
    """The reasons why a job may not run now, or not on.

    Attributes:
        stop: the request to end it.
        held: the request to hold or pause it.
        requeue: the request to send its live attempt to the end of its queue.
        deferred: the decision that took it out of its line; None: it is in one, or runs.
        order: the place that people gave it.
        look_us: when it is looked at again: it may start, or its window closes; None: at no time.
    """

    stop: StopRequested | None = None
    held: JobHeld | None = None
    requeue: RequeueRequested | None = None
    deferred: JobDeferred | None = None
    order: Order | None = None
    look_us: int | None = None


@quick_replace
class JobRecord(NamedTuple):
    """A job and its life so far."""

    job: Job
    submitted_us: int
    waits_since_us: int  # when it was queued for the last time
    phase: Phase = Phase.QUEUED
    epoch: int = 0  # of its newest attempt
    failures: Counts = ()  # failed or lost attempts in a row without a checkpoint, by cause (`retries.py`)
    preemptions: int = 0  # attempts that left because another job needed the GPUs
    used_us: int = 0  # attempts that ended: placed until the last GPU was free
    served_gpu_us: int = 0  # GPUs x time of leases that ended
    used_cost: int = 0  # cost of those leases in micro-dollars x microseconds per hour
    size: int | None = None  # GPUs that its resized attempt is to start again on
    gate: Gate = Gate()
    last: AttemptEnded | None = None
    ended: JobEnded | None = None
    paused_us: int = 0  # paused or deferred

    @property
    def stop(self) -> StopRequested | None:
        """The request to end the job."""
        return self.gate.stop

    @property
    def priority(self) -> int:
        """The priority by which it waits."""
        return self.job.priority if self.gate.order is None else self.gate.order.priority

    @property
    def attempts_without_commit(self) -> int:
        """Failed or lost attempts in a row, but for causes whose retries the job limits itself."""
        return dict(self.failures).get(ANY, 0)

    @property
    def waits_from_us(self) -> int:
        """The time from which it would have waited in all if it had waited without a break.

        Time in which it ran, was paused or was deferred is no wait. Right while the job waits, and when it is placed.
        """
        return self.submitted_us + self.used_us + self.paused_us


@quick_replace
class Attempt(NamedTuple):
    """The live attempt of a job: from AttemptPlaced until AttemptEnded."""

    job: Job
    epoch: int
    placed_us: int
    leases: tuple[Lease, ...]
    prices: tuple[int, ...]  # micro-dollars per GPU-hour of each lease's node when placed
    held: tuple[Lease, ...]  # leases whose ranks have not ended
    limit_at_us: int | None = None  # when it gets notice for its job's limits
    started_us: int | None = None  # first RanksStarted
    captured_us: int | None = None  # work before this is durable
    committed_step: int | None = None
    behind: RankBehind | None = None  # the rank that holds the others up
    ended: tuple[RanksEnded, ...] = ()  # the ends of the other leases
    notice: NoticeGiven | None = None
    kill: KillOrdered | None = None
    stepped: bool = False  # it has done a step

    @property
    def leaving(self) -> bool:
        """Return whether its GPUs become free without a further decision."""
        return self.notice is not None or self.kill is not None

    @property
    def gpus(self) -> int:
        """GPUs of the gang; an elastic job may have fewer than it asked for."""
        return sum([len(lease.gpus) for lease in self.leases])

    @property
    def gpu_milli(self) -> int:
        """The gang in thousandths of a GPU."""
        return sum([lease.gpu_milli for lease in self.leases])

    @property
    def micro_usd_per_hour(self) -> int:
        """The price of the whole gang."""
        return micro_usd_per_hour(self.job, self.leases, self.prices)

    def used_since(self, since_us: int) -> Pair:
        """Return the GPU time and the money that its ended leases used since then, in the units of a queue's day."""
        priced = zip(self.leases, self.prices, strict=True)
        rate_of = {each.node: (each.gpu_milli, self.job.nano_usd_per_hour(each, price)) for each, price in priced}
        spans = [(*rate_of[each.node], max(0, each.at_us - max(since_us, self.placed_us))) for each in self.ended]
        return sum(milli * us for milli, _, us in spans), sum(nano * us for _, nano, us in spans)

    def holds(self, leases: tuple[Lease, ...]) -> Held:
        """Return the holdings that some of its leases amount to."""
        price_of = {lease.node: price for lease, price in zip(self.leases, self.prices, strict=True)}
        return held_by(self.job, leases, [price_of[lease.node] for lease in leases])


def micro_usd_per_hour(job: Job, leases: tuple[Lease, ...], prices: tuple[int, ...]) -> int:
    """Return the price per hour of a job's leases on nodes of these prices per GPU-hour."""
    return sum([job.nano_usd_per_hour(lease, price) for lease, price in zip(leases, prices, strict=True)]) // 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node as its newest agent describes it."""

    node: Node
    up: bool = True
    why: str = ""  # the reason why it is down
    unreachable: bool = False  # its agent is silent
    reclaimed_us: int | None = None  # when the cloud takes it back
    cordoned_by: str | None = None  # the operator who took it out of use
    cordon_why: str = ""
    drains: bool = False  # cordoned, and its attempts get notice
    leave_us: int | None = None  # cordoned, and its attempts get notice in time to have left by then
    downs: tuple[int, ...] = ()  # times at which it went down lately
    quarantined_until_us: int = 0  # because it went down too often
    reservations: tuple[ReservationMade, ...] = ()  # that began: only jobs of all of them start on it

    @property
    def reserved_for(self) -> tuple[str, ...]:
        """For whom the node is reserved now."""
        return tuple(sorted({each.whom for each in self.reservations})) if self.reservations else ()

    @property
    def stays(self) -> bool:
        """Return whether GPUs that become free on it can be used again."""
        there = self.up and not self.unreachable and self.reclaimed_us is None
        return there and self.cordoned_by is None and not self.quarantined_until_us
