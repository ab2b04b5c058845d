"""The curves of a job: what its script logged, and what was measured of it, step by step; bounded however long it runs.

A fold over the log like the ledger. A curve keeps each point until it is full; then it keeps every second one, and
takes every second one from then on, and so forth. Steps that are repeated, after a preemption or a rollback, replace
what was there: a curve shows the model that came of it.
"""

import math
from array import array
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from cordee.events import AttemptEvent, Event, GpusSampled, JobSubmitted, Measured, MetricsLogged, Restored, RolledBack
from cordee.ids import JobId

POINTS_MAX = 512
"""Points of one curve."""

CURVES_MAX = 128
"""Curves of one job; further names are left out."""

TOKENS_PER_S, MFU, STEP_S, PEAK_BYTES = (
    "measured/tokens_per_s",
    "measured/mfu",
    "measured/step_s",
    "measured/peak_bytes",
)
GPU_BUSY, GPU_MEMORY, GPU_POWER = "gpu/busy", "gpu/memory_bytes", "gpu/power_w"
_MJ_PER_J = 1000


class CurvePoint(NamedTuple):
    """One point; a value that is not finite is NaN."""

    step: int
    at_us: int
    value: float


class SavedCurve(NamedTuple):
    """The saved form of a curve."""

    stride: int
    pending: int
    steps: list[int]
    at_us: list[int]
    values: list[float]
    last: CurvePoint | None


class Curve:
    """The points of one metric, by growing steps."""

    def __init__(self) -> None:
        self._steps, self._at_us, self._values = array("q"), array("q"), array("d")
        self._stride = 1  # each so many points that come, one is kept
        self._count = 0  # points that came since the last one that was kept
        self._last: CurvePoint | None = None

    def add(self, point: CurvePoint) -> None:
        """Take a point; those of the same step and later ones are replaced."""
        if self._last is not None and point.step <= self._last.step:
            self.cut(point.step)
        self._last = point
        if self._count % self._stride == 0:
            if len(self._steps) >= POINTS_MAX:
                self._halve()
            self._steps.append(point.step)
            self._at_us.append(point.at_us)
            self._values.append(point.value)
            self._count = 0
        elif not math.isfinite(point.value) and math.isfinite(self._values[-1]):
            self._values[-1] = point.value  # a NaN is news
        self._count += 1

    def cut(self, step: int) -> None:
        """Forget the points of this step and later ones."""
        while self._steps and self._steps[-1] >= step:
            for column in (self._steps, self._at_us, self._values):
                column.pop()
        self._count = 0
        self._last = CurvePoint(self._steps[-1], self._at_us[-1], self._values[-1]) if self._steps else None

    def _halve(self) -> None:
        """Keep every second point; of two, the one that is not finite."""
        values = self._values
        for at in range(0, len(values) - 1, 2):
            if not math.isfinite(values[at + 1]):
                values[at] = values[at + 1]
        self._steps, self._at_us, self._values = self._steps[::2], self._at_us[::2], values[::2]
        self._stride *= 2

    def points(self) -> Iterator[CurvePoint]:
        """Yield the points that are kept, and the newest one."""
        yield from map(CurvePoint, self._steps, self._at_us, self._values)
        if self._last is not None and self._last.step != self._steps[-1]:
            yield self._last

    @property
    def last(self) -> CurvePoint | None:
        """Return the newest point."""
        return self._last

    def saved(self) -> SavedCurve:
        """Return the saved form."""
        columns = self._steps.tolist(), self._at_us.tolist(), self._values.tolist()
        return SavedCurve(self._stride, self._count, *columns, self._last)

    @classmethod
    def restored(cls, saved: SavedCurve) -> "Curve":
        """Return the curve that was saved."""
        new = cls()
        new._stride, new._count, new._last = saved.stride, saved.pending, saved.last
        new._steps, new._at_us = array("q", saved.steps), array("q", saved.at_us)
        new._values = array("d", saved.values)
        return new


class SavedJobCurves(NamedTuple):
    """The saved form of the curves of one job; `energy_mj` is that of its GPUs."""

    epoch: int
    step: int
    logged: tuple[int, int]
    energy_mj: int
    nodes: dict[str, GpusSampled]
    curves: dict[str, SavedCurve]


class JobCurves:
    """The curves of one job, by name.

    Attributes:
        curves: by name.
        epoch: of the newest attempt that was restored; reports of earlier ones come too late.
        step: the newest that was reported.
        logged: step and time of the newest report of metrics.
        energy_mj: energy of its GPUs, in millijoules, as far as the driver counts it.
        nodes: the newest sample of each node of the newest attempt.
    """

    def __init__(self) -> None:
        self.curves: dict[str, Curve] = {}
        self.epoch = self.step = self.energy_mj = 0
        self.logged = (0, 0)
        self.nodes: dict[str, GpusSampled] = {}

    def add(self, name: str, point: CurvePoint) -> None:
        """Add a point to a curve; a new one begins with it."""
        if name not in self.curves and len(self.curves) >= CURVES_MAX:
            return
        self.curves.setdefault(name, Curve()).add(point)

    def saved(self) -> SavedJobCurves:
        """Return the saved form."""
        return SavedJobCurves(
            self.epoch,
            self.step,
            self.logged,
            self.energy_mj,
            self.nodes,
            {name: each.saved() for name, each in self.curves.items()},
        )

    @classmethod
    def restored(cls, saved: SavedJobCurves) -> "JobCurves":
        """Return the curves that were saved."""
        new = cls()
        new.epoch, new.step, new.energy_mj, new.nodes = saved.epoch, saved.step, saved.energy_mj, saved.nodes
        new.logged = saved.logged
        new.curves = {name: Curve.restored(each) for name, each in saved.curves.items()}
        return new


class Curves:
    """The curves of all jobs that are not retired; `handlers` are by the kinds of events that may change something."""

    def __init__(self) -> None:
        self._jobs: dict[JobId, JobCurves] = {}
        self.handlers: dict[type[Any], Callable[[Any], None]] = {
            JobSubmitted: self._submitted,
            Restored: self._restored,
            RolledBack: self._rolled_back,
            MetricsLogged: self._logged,
            Measured: self._measured,
            GpusSampled: self._sampled,
        }

    def saved(self) -> dict[JobId, SavedJobCurves]:
        """Return the saved form."""
        return {job_id: each.saved() for job_id, each in self._jobs.items()}

    @classmethod
    def restored(cls, saved: dict[JobId, SavedJobCurves]) -> "Curves":
        """Return the curves that were saved."""
        new = cls()
        new._jobs = {job_id: JobCurves.restored(each) for job_id, each in saved.items()}
        return new

    def of(self, job_id: JobId) -> JobCurves | None:
        """Return the curves of a job; None if it is retired."""
        return self._jobs.get(job_id)

    def retire(self, job_ids: Iterable[JobId]) -> None:
        """Forget jobs that have ended."""
        for job_id in job_ids:
            self._jobs.pop(job_id, None)

    def apply(self, event: Event) -> None:
        """Take note of one event; what concerns no known job changes nothing."""
        handler = self.handlers.get(type(event))
        if handler is not None:
            handler(event)

    def _submitted(self, event: JobSubmitted) -> None:
        self._jobs.setdefault(event.job.job_id, JobCurves())

    def _live(self, event: AttemptEvent) -> JobCurves | None:
        job = self._jobs.get(event.job_id)
        return job if job is not None and event.epoch >= job.epoch else None

    def _restored(self, event: Restored) -> None:
        if (job := self._live(event)) is not None:
            job.epoch, job.step, job.nodes = event.epoch, event.step, {}
            job.logged = (event.step, event.at_us)

    def _rolled_back(self, event: RolledBack) -> None:
        if (job := self._live(event)) is not None:
            job.step = event.to_step
            job.logged = (event.to_step, event.at_us)

    def _logged(self, event: MetricsLogged) -> None:
        if (job := self._live(event)) is not None:
            since_step, since_us = job.logged
            span = max(1, event.step - since_step)
            steps = event.steps or (event.step,) * len(event.names)
            for name, step, value in zip(event.names, steps, event.values, strict=True):
                # Steps since the report before are taken to be equally long.
                part = min(span, max(0, step - since_step)) if event.step > since_step else span
                at_us = event.at_us if not since_us else since_us + (event.at_us - since_us) * part // span
                job.add(name, CurvePoint(step, at_us, math.nan if value is None else value))
            job.step, job.logged = event.step, (event.step, event.at_us)

    def _measured(self, event: Measured) -> None:
        job = self._live(event)
        if job is None or event.rank != 0:
            return
        job.step = event.step
        step_s = None if event.step_us is None else event.step_us / 1e6
        found = {TOKENS_PER_S: event.tokens_per_s, MFU: event.mfu, STEP_S: step_s, PEAK_BYTES: event.peak_bytes}
        for name, value in found.items():
            if value is not None:
                job.add(name, CurvePoint(event.step, event.at_us, value))

    def _sampled(self, event: GpusSampled) -> None:
        if (job := self._live(event)) is None:
            return
        job.energy_mj += event.energy_mj
        job.nodes = {name: each for name, each in job.nodes.items() if each.epoch == event.epoch} | {event.node: event}
        every = list(job.nodes.values())
        busy = sum(each.busy * each.gpus for each in every) / sum(each.gpus for each in every)
        for name, value in (
            (GPU_BUSY, busy),
            (GPU_MEMORY, max(each.memory_bytes for each in every)),
            (GPU_POWER, sum(each.power_mw for each in every) / _MJ_PER_J),
        ):
            job.add(name, CurvePoint(job.step, event.at_us, value))
