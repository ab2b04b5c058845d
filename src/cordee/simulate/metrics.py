"""Metrics of a cluster by its log: a fold, so that a simulated log and a live one are measured in the same way.

    metrics = Metrics()
    for event in log: metrics.apply(event)
    metrics.summary((ledger, now_us))

A job that has not ended counts as if it ended with the run: otherwise a policy looks better for each long job that it
does not end. The slowdown of a job is the time from its submission to its end over the time it worked; at least ten
seconds of work count, so that a job of one second does not dominate (bounded slowdown; Feitelson and Rudolph 1998).
Without any job that ended there is none of these figures. Fairness is measured over slowdowns: the largest, and Jain's
index, 1 if all are equal (Jain, Chiu and Hawe 1984). `fragmented` is GPU time that was free while the smallest waiting
gang would have fitted in it by number.
"""

import math
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from cordee.account.ledger import Ledger
from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Event,
    JobEnded,
    JobSubmitted,
    KillOrdered,
    NodeDown,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    RanksEnded,
    Reported,
    SpanClass,
)
from cordee.ids import JobId
from cordee.simulate.occupancy import Occupancy
from cordee.units import US_PER_HOUR, US_PER_S

_WORK_MIN_US = 10 * US_PER_S
CHOSEN = frozenset(
    (NoticeReason.PREEMPT, NoticeReason.TIME_SLICE, NoticeReason.QUOTA, NoticeReason.RESIZE, NoticeReason.MOVE)
)
"""The reasons of notices that count as preemptions: the scheduler chose another job."""


@dataclass(slots=True)
class _Job:
    submitted_us: int
    milli: int  # thousandths of GPUs that it needs
    queue: str
    waits: bool = True
    first_us: int = -1
    ended_us: int | None = None  # of one that never started
    ran_us: int = 0
    worked_us: int = 0
    high: int = 0  # the most steps that an attempt has done
    placed_us: int = 0
    leases: dict[str, int] = field(default_factory=dict)  # node: thousandths
    milli_held: int = 0  # of the attempt
    rate: int = 0  # nano-dollars an hour of the attempt
    notice: NoticeGiven | None = None

    def figures(self, end_us: int) -> tuple[int, int, float]:
        """Return its time from submission to the end, that without GPUs, and its slowdown, if it ends at a time."""
        jct_us, ran_us = end_us - self.submitted_us, self.ran_us + (0 if self.waits else end_us - self.placed_us)
        return jct_us, jct_us - ran_us, max(1.0, jct_us / max(self.worked_us or ran_us, _WORK_MIN_US))


@dataclass(frozen=True, slots=True, kw_only=True)
class Lost:
    """The loss by one cause: repeated work, and saves on notice."""

    cause: str
    redone_gpu_us: int
    save_gpu_us: int
    micro_usd: int

    @property
    def gpu_hours(self) -> float:
        """Return both in GPU-hours."""
        return (self.redone_gpu_us + self.save_gpu_us) / US_PER_HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Statistics of a number over jobs."""

    mean: float
    p50: float
    p99: float
    max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueRow:
    """One queue: the jobs that ended, and their means."""

    name: str
    ended: int
    wait_s: float
    jct_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The metrics of a run.

    Attributes:
        jct_s: from submission to the end, or the run's end; None if no job ended.
        wait_s: from submission to the first start; of jobs that never started, to their end or the run's; None without
            jobs.
        unended: the number of jobs that had not ended.
        unstarted: the number of jobs that never started.
        away_s: all the time that a job did not hold GPUs, until its end or the run's; None if no job ended.
        goodput: useful over held GPU time.
        held_fraction: held over all GPU time, until the last job ended.
        fragmented: fraction of all GPU time.
        slowdown_p99, slowdown_max, slowdown_jain: fairness; None if no job ended.
        restart_gpu_us: GPU time until the first new step of attempts.
        lost: by cause.
    """

    jobs: int
    ended: int
    unended: int
    jct_s: Spread | None
    wait_s: Spread | None
    unstarted: int
    away_s: Spread | None
    makespan_s: float
    goodput: float
    held_fraction: float
    fragmented: float
    slowdown_p99: float | None
    slowdown_max: float | None
    slowdown_jain: float | None
    preemptions: int
    notices: dict[str, int]
    kills: int
    useful_gpu_us: int
    restart_gpu_us: int
    held_micro_usd: int
    lost: tuple[Lost, ...]
    queues: tuple[QueueRow, ...]

    @property
    def lost_gpu_hours(self) -> float:
        """Return repeated work and saves in GPU-hours."""
        return sum(each.gpu_hours for each in self.lost)

    @property
    def lost_micro_usd(self) -> int:
        """Return the cost of repeated work and saves."""
        return sum(each.micro_usd for each in self.lost)


class Metrics:
    """The fold over the log.

    Attributes:
        jobs: the number submitted.
        jct_us, wait_us: a number for each job that ended, and for each that started.
        occupancy: GPUs up and held, and waiting jobs, over time.
    """

    def __init__(self) -> None:
        self.jobs = 0
        self.jct_us, self.wait_us = array("q"), array("q")
        self.occupancy = Occupancy()
        self._open: dict[JobId, _Job] = {}
        self._more: list[_Job] = []  # that ended before they started, and of other clusters those that have not ended
        self._away_us, self._slow = array("q"), array("d")
        self._saves: dict[str, list[int]] = {}  # cause: thousandths of GPU time, money
        self._notices: Counter[str] = Counter()
        self._kills = 0
        self._queues: dict[str, list[float]] = {}
        self._lasted_us = (-1, 0)  # from the first submission to the last end
        self._at_end = (0, 0, 0)  # thousandths of GPU time: up, held, fragmented
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            JobSubmitted: self._submitted,
            JobEnded: self._job_ended,
            NodeUp: self.occupancy.node_up,
            NodeDown: self.occupancy.node_down,
            AttemptPlaced: self._placed,
            NoticeGiven: self._noticed,
            KillOrdered: self._kill_ordered,
            RanksEnded: self._ranks_ended,
            AttemptEnded: self._attempt_ended,
        }

    def apply(self, event: Event) -> None:
        """Fold one event."""
        kind = type(event)
        handler = self._handlers.get(kind)
        if handler is not None:
            if event.at_us > self.occupancy.since_us:
                self.occupancy.advance(event.at_us)
            handler(event)
        elif kind is Reported:
            self._reported(event)  # type: ignore[arg-type]

    def add(self, other: "Metrics") -> None:
        """Add the metrics of another cluster, whose run is over; the occupancy stays that of the first."""
        self.jobs += other.jobs
        self.jct_us.extend(other.jct_us)
        self.wait_us.extend(other.wait_us)
        self._more += other._without_end_or_start()
        self._away_us.extend(other._away_us)
        self._slow.extend(other._slow)
        for cause, sums in other._saves.items():
            known = self._saves.setdefault(cause, [0, 0])
            known[:] = [mine + its for mine, its in zip(known, sums, strict=True)]
        for name, row in other._queues.items():
            queue = self._queues.setdefault(name, [0, 0, 0])
            queue[:] = [mine + its for mine, its in zip(queue, row, strict=True)]
        self._notices += other._notices
        self._kills += other._kills
        there, held, fragmented = (mine + its for mine, its in zip(self._at_end, other._at_end, strict=True))
        self._at_end = (there, held, fragmented)
        (first_us, last_us), (its_first_us, its_last_us) = self._lasted_us, other._lasted_us
        first_us = min((at_us for at_us in (first_us, its_first_us) if at_us >= 0), default=-1)
        self._lasted_us = first_us, max(last_us, its_last_us)

    def summary(self, *ledgers: tuple[Ledger, int]) -> Summary:
        """Return the metrics until now; the ledgers, each with its time, have folded the same log."""
        until_us = max(now_us for _, now_us in ledgers)
        unended = [job for job in self._without_end_or_start() if job.ended_us is None]
        never_us = [
            (until_us if job.ended_us is None else job.ended_us) - job.submitted_us
            for job in self._without_end_or_start()
            if job.first_us < 0
        ]
        so_far = [job.figures(until_us) for job in unended] if self.jct_us else []
        slow = sorted([*self._slow, *(slowdown for _, _, slowdown in so_far)])
        lost: dict[str, list[int]] = {
            cause: [0, milli_us // 1000, usd] for cause, (milli_us, usd) in self._saves.items()
        }
        useful = held = restart = held_usd = 0
        for row in (row for ledger, now_us in ledgers for row in ledger.rows(now_us)):
            useful += row.gpu_us.useful
            held += row.gpu_us.held
            restart += row.gpu_us.restart
            held_usd += row.micro_usd.held
            if row.cause is not None:
                sums = lost.setdefault(row.cause, [0, 0, 0])
                sums[0] += row.gpu_us.lost
                sums[2] += row.micro_usd.lost
        capacity, was_held, fragmented = self._at_end if self.jct_us else self.occupancy.until(until_us)
        squares = math.fsum(each * each for each in slow)
        return Summary(
            jobs=self.jobs,
            ended=len(self.jct_us),
            unended=len(unended),
            jct_s=spread([*self.jct_us, *(jct_us for jct_us, _, _ in so_far)]),
            wait_s=spread([*self.wait_us, *never_us]),
            unstarted=len(never_us),
            away_s=spread([*self._away_us, *(away_us for _, away_us, _ in so_far)]),
            makespan_s=(self._lasted_us[1] - self._lasted_us[0]) / US_PER_S if self.jct_us else 0.0,
            goodput=useful / held if held else 0.0,
            held_fraction=was_held / capacity if capacity else 0.0,
            fragmented=fragmented / capacity if capacity else 0.0,
            slowdown_p99=slow[-(-99 * len(slow) // 100) - 1] if slow else None,
            slowdown_max=slow[-1] if slow else None,
            slowdown_jain=math.fsum(slow) ** 2 / (len(slow) * squares) if slow else None,
            preemptions=sum(self._notices[reason.value] for reason in CHOSEN),
            notices=dict(sorted(self._notices.items())),
            kills=self._kills,
            useful_gpu_us=useful,
            restart_gpu_us=restart,
            held_micro_usd=held_usd,
            lost=tuple(
                Lost(cause=cause, redone_gpu_us=redone, save_gpu_us=save, micro_usd=usd)
                for cause, (redone, save, usd) in sorted(lost.items())
                if redone or save
            ),
            queues=tuple(
                QueueRow(name=name, ended=int(n), wait_s=wait / n / US_PER_S, jct_s=jct / n / US_PER_S)
                for name, (n, wait, jct) in sorted(self._queues.items())
            ),
        )

    def _without_end_or_start(self) -> list[_Job]:
        """Return the jobs that have not ended, and those that never started."""
        return [*self._more, *self._open.values()]

    # -- jobs ------------------------------------------------------------------------------------------------

    def _submitted(self, event: JobSubmitted) -> None:
        job = event.job
        if self._lasted_us[0] < 0:  # time before the first submission is not idle
            self._lasted_us, self.occupancy.sums = (event.at_us, 0), (0, 0, 0)
        self.jobs += 1
        known = self._open[job.job_id] = _Job(event.at_us, job.gpus * job.gpu_milli, job.queue)
        self.occupancy.wait(known.milli, +1)

    def _placed(self, event: AttemptPlaced) -> None:
        job = self._open.get(event.job_id)
        if job is None or not job.waits:
            return
        self.occupancy.wait(job.milli, -1)
        job.waits, job.placed_us, job.notice = False, event.at_us, None
        if job.first_us < 0:
            job.first_us = event.at_us
            self.wait_us.append(event.at_us - job.submitted_us)
        job.rate = job.milli_held = 0
        for lease in event.leases:
            milli = len(lease.gpus) * lease.milli
            job.leases[lease.node] = milli
            job.milli_held += milli
            job.rate += milli * self.occupancy.prices.get(lease.node, 0)  # traces have no price of CPU cores
        self.occupancy.held_milli += job.milli_held

    def _reported(self, event: Reported) -> None:
        job = self._open.get(event.job_id)
        if job is None or job.waits:
            return
        if event.steps and event.span is SpanClass.USEFUL:
            new = event.first_step + event.steps - max(job.high, event.first_step)
            if new > 0:
                job.worked_us += (event.at_us - event.from_us) * new // event.steps
                job.high += max(0, event.first_step + event.steps - job.high)
        elif job.notice is not None and event.span is SpanClass.CHECKPOINT:
            save_us = max(0, event.at_us - max(event.from_us, job.notice.at_us))
            sums = self._saves.setdefault(str(job.notice.reason), [0, 0])
            sums[0] += save_us * job.milli_held
            sums[1] += save_us * job.rate // (1000 * US_PER_HOUR)

    def _noticed(self, event: NoticeGiven) -> None:
        self._notices[str(event.reason)] += 1
        job = self._open.get(event.job_id)
        if job is not None and job.notice is None:
            job.notice = event

    def _kill_ordered(self, event: KillOrdered) -> None:
        self._kills += 1

    def _ranks_ended(self, event: RanksEnded) -> None:
        job = self._open.get(event.job_id)
        if job is not None and not job.waits:
            self.occupancy.held_milli -= job.leases.pop(event.node, 0)

    def _attempt_ended(self, event: AttemptEnded) -> None:
        job = self._open.get(event.job_id)
        if job is not None and not job.waits:
            job.ran_us += event.at_us - job.placed_us
            job.waits = True
            self.occupancy.wait(job.milli, +1)

    def _job_ended(self, event: JobEnded) -> None:
        job = self._open.pop(event.job_id, None)
        if job is None:
            return
        if job.waits:
            self.occupancy.wait(job.milli, -1)
        if job.first_us < 0:
            job.ended_us = event.at_us
            self._more.append(job)
        if event.state == "stopped":
            return
        jct_us, away_us, slowdown = job.figures(event.at_us)
        self.jct_us.append(jct_us)
        self._away_us.append(away_us)
        self._slow.append(slowdown)
        sums = self._queues.setdefault(job.queue, [0, 0, 0])
        sums[0] += 1
        sums[1] += max(0, job.first_us - job.submitted_us)
        sums[2] += jct_us
        self._lasted_us, self._at_end = (self._lasted_us[0], event.at_us), self.occupancy.sums


def spread(values_us: Sequence[int]) -> Spread | None:
    """Return mean, median, 99th percentile and maximum in seconds; None without values."""
    if not values_us:
        return None
    ordered = sorted(values_us)
    return Spread(
        mean=sum(ordered) / len(ordered) / US_PER_S,
        p50=ordered[(len(ordered) - 1) // 2] / US_PER_S,
        p99=ordered[-(-99 * len(ordered) // 100) - 1] / US_PER_S,
        max=ordered[-1] / US_PER_S,
    )
