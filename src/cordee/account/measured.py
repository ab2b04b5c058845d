"""Planned, measured, off by: each attempt's estimate beside what its ranks measured.

A fold over the log like the ledger. It compares like with like: the plan's allocated bytes with those of CUDA's
allocator, the plan's save with stall and upload of the newest checkpoint, its restart with the time from placed to the
first new step. Step time and peak memory that leave their estimate give one `EstimateMissed` a job, however often
ranks measure.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Literal, NamedTuple

from cordee.events import (
    AttemptPlaced,
    CheckpointCommitted,
    Estimate,
    EstimateMissed,
    Event,
    JobSubmitted,
    Measured,
    Reported,
    Restored,
    SpanClass,
)
from cordee.ids import JobId
from cordee.units import US_PER_S, format_bytes, format_duration

PEAK_SLACK = 1.10  # a peak is off above so many times the planned one
STEPS_MIN = 10  # steps of an attempt before their median counts: the first ones compile and warm up


class Quantity(StrEnum):
    """A value that is planned and measured."""

    PEAK = "peak memory"
    STEP = "step time"
    MFU = "MFU"
    SAVE = "save"
    RESTART = "restart"
    KV_TOKENS = "KV tokens"
    SEQUENCES = "sequences"
    TTFT = "TTFT"
    TPOT = "TPOT"


Unit = Literal["bytes", "us", "fraction", "count"]
UNITS: dict[Quantity, Unit] = {
    Quantity.PEAK: "bytes",
    Quantity.STEP: "us",
    Quantity.MFU: "fraction",
    Quantity.SAVE: "us",
    Quantity.RESTART: "us",
    Quantity.KV_TOKENS: "count",
    Quantity.SEQUENCES: "count",
    Quantity.TTFT: "us",
    Quantity.TPOT: "us",
}


@dataclass(frozen=True, slots=True)
class EstimateComparison:
    """One quantity of one attempt, in `unit`. `low` to `high` is the planned interval, None without one."""

    quantity: Quantity
    planned: float | None
    measured: float | None
    low: float | None = None
    high: float | None = None

    @property
    def unit(self) -> Unit:
        """Return the unit: bytes, microseconds, a fraction, or a count."""
        return UNITS[self.quantity]

    @property
    def off_by(self) -> float | None:
        """Return the fraction by which the measured value is above the planned one; negative: below.

        >>> EstimateComparison(Quantity.SAVE, 4_000_000, 5_000_000).off_by
        0.25
        """
        return None if not self.planned or self.measured is None else self.measured / self.planned - 1

    @property
    def missed(self) -> bool:
        """Return whether the measured value lies outside the planned interval."""
        value = self.measured
        if value is None:
            return False
        return (self.low is not None and value < self.low) or (self.high is not None and value > self.high)

    def sentence(self) -> str:
        """Say how a missed value differs."""
        if self.quantity is Quantity.PEAK:
            measured, planned = format_bytes(round(self.measured or 0)), format_bytes(round(self.planned or 0))
            return f"its peak memory is {measured}, {100 * (self.off_by or 0):.0f} % more than the planned {planned}"
        measured, low, high = (
            format_duration((value or 0) / US_PER_S) for value in (self.measured, self.low, self.high)
        )
        return f"its {self.quantity} is {measured}, outside the planned {low} to {high}"


@dataclass(slots=True)
class Measurement:
    """One attempt's estimate, and the newest values that its ranks measured; a peak is the largest of all ranks.

    `step_us_range` is from the shortest to the longest step time that was measured once the first steps were over.
    """

    job_id: JobId
    epoch: int
    placed_us: int
    gpus: int
    estimate: Estimate | None
    first_step: int = 0
    step: int = 0
    saved_step: int = 0
    steps_total: int | None = None
    peak_bytes: int | None = None
    step_us: int | None = None
    step_us_range: tuple[int, int] | None = None
    mfu: float | None = None
    save_us: int | None = None
    restart_us: int | None = None

    @property
    def left_us(self) -> int | None:
        """Return the time until its last step at its own pace; None if the number of steps or the pace is not known."""
        if self.steps_total is None or self.step_us is None:
            return None
        return max(0, self.steps_total - self.step) * self.step_us

    @property
    def is_steady(self) -> bool:
        """Return whether the first steps, which compile and warm up, are over."""
        return self.step - self.first_step >= STEPS_MIN

    def comparisons(self) -> tuple[EstimateComparison, ...]:
        """Compare every quantity that was planned or measured."""
        plan = self.estimate or _NO_ESTIMATE
        low, high = (plan.step_us_low, plan.step_us_high) if self.is_steady else (None, None)
        rows = (
            self._peak(plan),
            EstimateComparison(Quantity.STEP, plan.step_us, self.step_us, low, high),
            EstimateComparison(Quantity.MFU, plan.mfu, self.mfu),
            EstimateComparison(Quantity.SAVE, plan.save_us or None, self.save_us),
            EstimateComparison(Quantity.RESTART, plan.restart_us or None, self.restart_us),
        )
        return tuple(row for row in rows if row.planned is not None or row.measured is not None)

    def _peak(self, plan: Estimate) -> EstimateComparison:
        planned = plan.allocated_bytes or plan.peak_bytes or None
        most = min(PEAK_SLACK * planned, plan.gpu_memory_bytes) if planned else None
        return EstimateComparison(Quantity.PEAK, planned, self.peak_bytes, high=most)


def service_comparisons(
    estimate: Estimate | None,
    *,
    kv_tokens: int | None,
    sequences: int | None,
    ttft_us: int | None,
    tpot_us: int | None,
) -> tuple[EstimateComparison, ...]:
    """Compare every quantity of a service that was planned or measured.

    Args:
        estimate: of one replica; None: it was not planned.
        kv_tokens: that the cache of a replica holds.
        sequences: that a replica answers at a time.
        ttft_us: time to first token of 99 of 100 requests.
        tpot_us: time per output token of 99 of 100 requests.
    """
    plan = estimate or _NO_ESTIMATE
    rows = (
        EstimateComparison(Quantity.KV_TOKENS, plan.kv_tokens, kv_tokens),
        EstimateComparison(Quantity.SEQUENCES, plan.sequences, sequences),
        EstimateComparison(Quantity.TTFT, plan.ttft_us, ttft_us),
        EstimateComparison(Quantity.TPOT, plan.tpot_us, tpot_us),
    )
    return tuple(row for row in rows if row.planned is not None or row.measured is not None)


@dataclass(frozen=True, slots=True)
class StepsLeft:
    """The steps that a job still has to do, and the time of one; nine of ten times are expected from low to high.

    Attributes:
        gpus: on which a step takes that time.
        measured: whether the job measured its steps itself; else they are planned.
    """

    steps: int
    gpus: int
    step_us: int
    low_us: int
    high_us: int
    measured: bool


_NO_ESTIMATE = Estimate(layout="", peak_bytes=0, gpu_memory_bytes=0)


class SavedMeasurements(NamedTuple):
    """The saved form of measurements; `missed` is of each job, by quantity."""

    estimates: dict[JobId, tuple[Estimate, ...]]
    attempts: dict[JobId, list[Measurement]]
    missed: dict[JobId, dict[Quantity, str]]
    due: dict[tuple[JobId, Quantity], EstimateMissed]


class Measurements:
    """A fold over the log: the estimate and the measured values of every attempt.

    Attributes:
        handlers: by the kinds of events that may change something.
    """

    def __init__(self) -> None:
        self._estimates: dict[JobId, tuple[Estimate, ...]] = {}
        self._attempts: dict[JobId, list[Measurement]] = {}
        self._missed: dict[JobId, dict[Quantity, str]] = {}
        self._due: dict[tuple[JobId, Quantity], EstimateMissed] = {}
        self.handlers: dict[type[Event], Callable[[Any], None]] = {
            JobSubmitted: self._submitted,
            AttemptPlaced: self._placed,
            Restored: self._restored,
            Reported: self._reported,
            CheckpointCommitted: self._committed,
            Measured: self._measured,
            EstimateMissed: self._estimate_missed,
        }

    def saved(self) -> SavedMeasurements:
        """Return the saved form; it shares this object's values, so encode it before the next change."""
        return SavedMeasurements(self._estimates, self._attempts, self._missed, self._due)

    @classmethod
    def restored(cls, saved: SavedMeasurements) -> "Measurements":
        """Return the measurements that were saved."""
        new = cls()
        new._estimates, new._attempts, new._missed, new._due = saved
        return new

    def retire(self, job_id: JobId) -> tuple[list[Measurement], list[str]]:
        """Forget a job that has ended; return its attempts, and the sentences in which it left its estimate."""
        self._estimates.pop(job_id, None)
        return self._attempts.pop(job_id, []), list(self._missed.pop(job_id, {}).values())

    def apply(self, event: Event) -> None:
        """Take note of one event; what concerns no known attempt changes nothing."""
        handler = self.handlers.get(type(event))
        if handler is not None:
            handler(event)

    def of(self, job_id: JobId, epoch: int | None = None) -> Measurement | None:
        """Return the newest attempt of a job, or the one of this epoch."""
        attempts = self._attempts.get(job_id, ())
        return next((each for each in reversed(attempts) if epoch in (None, each.epoch)), None)

    def attempts(self, job_id: JobId) -> list[Measurement]:
        """Return a copy of the attempts of a job, oldest first."""
        return [replace(each) for each in self._attempts.get(job_id, ())]

    def steps_left(self, job_id: JobId, *, running: bool) -> StepsLeft | None:
        """Return the steps that a job has left; None if it never reported how many there are, or no time is known.

        A job that waits goes on from its newest checkpoint.
        """
        attempt = self.of(job_id)
        if attempt is None or attempt.steps_total is None:
            return None
        steps = max(0, attempt.steps_total - (attempt.step if running else attempt.saved_step))
        paced = next((each for each in reversed(self._attempts[job_id]) if each.step_us), None)
        plan = (attempt if paced is None else paced).estimate or _NO_ESTIMATE
        planned_us = plan.step_us or 0
        low_us, high_us = plan.step_us_low or planned_us, plan.step_us_high or planned_us
        if paced is None or paced.step_us is None:
            return StepsLeft(steps, plan.gpus, planned_us, low_us, high_us, measured=False) if planned_us else None
        step_us = paced.step_us
        if paced.step_us_range is not None:
            low_us, high_us = paced.step_us_range
        elif planned_us:  # as uncertain as the plan until the first steps are over
            low_us, high_us = step_us * low_us // planned_us, step_us * high_us // planned_us
        else:
            low_us = high_us = step_us
        return StepsLeft(steps, paced.gpus, step_us, low_us, high_us, measured=True)

    def missed(self, job_id: JobId) -> tuple[str, ...]:
        """Return the sentences in which this job left its estimate."""
        return tuple(self._missed.get(job_id, {}).values())

    def due(self) -> Sequence[EstimateMissed]:
        """Return the events that are missing from the log; applying one settles it."""
        return tuple(self._due.values())

    def _submitted(self, event: JobSubmitted) -> None:
        if event.job.estimates:
            self._estimates.setdefault(event.job.job_id, event.job.estimates)

    def _placed(self, event: AttemptPlaced) -> None:
        gpus = sum(len(lease.gpus) for lease in event.leases)
        estimate = next((each for each in self._estimates.get(event.job_id, ()) if each.gpus == gpus), None)
        attempt = Measurement(event.job_id, event.epoch, event.at_us, gpus, estimate)
        if (before := self.of(event.job_id)) is not None:
            attempt.steps_total = before.steps_total
            attempt.first_step = attempt.step = attempt.saved_step = before.saved_step
        self._attempts.setdefault(event.job_id, []).append(attempt)

    def _live(self, job_id: JobId, epoch: int) -> Measurement | None:
        attempts = self._attempts.get(job_id)
        return attempts[-1] if attempts and attempts[-1].epoch == epoch else None

    def _reported(self, event: Reported) -> None:
        if event.span is not SpanClass.USEFUL or (attempt := self._live(event.job_id, event.epoch)) is None:
            return
        attempt.step = event.first_step + event.steps
        if attempt.restart_us is None:
            attempt.restart_us = max(0, event.from_us - attempt.placed_us)

    def _restored(self, event: Restored) -> None:
        if (attempt := self._live(event.job_id, event.epoch)) is not None:
            attempt.first_step = attempt.step = attempt.saved_step = event.step

    def _committed(self, event: CheckpointCommitted) -> None:
        if (attempt := self._live(event.job_id, event.epoch)) is not None:
            attempt.saved_step, attempt.save_us = event.step, event.stall_us + event.upload_us

    def _estimate_missed(self, event: EstimateMissed) -> None:
        quantity = Quantity(event.quantity)
        if event.job_id in self._attempts:  # else the job is retired
            self._missed.setdefault(event.job_id, {})[quantity] = event.why
        self._due.pop((event.job_id, quantity), None)

    def _measured(self, event: Measured) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is None:
            return
        attempt.peak_bytes = max(event.peak_bytes, attempt.peak_bytes or 0)
        if event.rank == 0:
            attempt.step, attempt.step_us = max(event.step, attempt.step), event.step_us
            attempt.steps_total, attempt.mfu = event.steps_total, event.mfu
            if attempt.is_steady and event.step_us:
                low_us, high_us = attempt.step_us_range or (event.step_us, event.step_us)
                attempt.step_us_range = min(low_us, event.step_us), max(high_us, event.step_us)
        known = self._missed.get(event.job_id, {})
        for row in attempt.comparisons() if attempt.estimate else ():
            if row.missed and row.quantity not in known:
                self._due[event.job_id, row.quantity] = EstimateMissed(
                    at_us=event.at_us,
                    job_id=event.job_id,
                    epoch=event.epoch,
                    quantity=row.quantity.value,
                    why=row.sentence(),
                )
