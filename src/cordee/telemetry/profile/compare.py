"""A profile beside another one, beside the plan of the same layout, and beside the peak of its GPU."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cordee.plan.step import StepTime
from cordee.telemetry.profile.account import RankReport
from cordee.telemetry.profile.sweep import Time

US_PER_S = 1e6
# What makes a difference of kernels worth a line: a thousandth of the time compared.
WORTH = 1e-3


@dataclass(frozen=True, slots=True)
class Delta:
    """One figure before and after."""

    name: str
    before_us: float
    after_us: float

    @property
    def change_us(self) -> float:
        """How much more it became."""
        return self.after_us - self.before_us


@dataclass(frozen=True, slots=True)
class Comparison:
    """Means over ranks, of a step where both sides have steps, of the whole profile otherwise."""

    per: str
    times: tuple[Delta, ...]
    classes: tuple[Delta, ...]
    kernels: tuple[Delta, ...]


TIMES: dict[str, Callable[[Time], float]] = {
    "span": lambda time: time.span_us,
    "compute": lambda time: time.compute_us,
    "communication": lambda time: time.communication_us,
    "hidden": lambda time: time.hidden_us,
    "exposed": lambda time: time.exposed_us,
    "idle": lambda time: time.idle_us,
}


def compare(before: Sequence[RankReport], after: Sequence[RankReport]) -> Comparison:
    """What became longer and what shorter; kernels that changed most come first."""
    stepped = all(report.steps for report in (*before, *after))
    sides = [_Side(before, stepped), _Side(after, stepped)]
    times = tuple(Delta(name, *(side.mean(take) for side in sides)) for name, take in TIMES.items())
    least = WORTH * max(delta.before_us for delta in times)
    classes, kernels = (
        sorted(
            (Delta(name, *(side.get(name, 0.0) for side in pair)) for name in {*pair[0], *pair[1]}),
            key=lambda delta: (-abs(delta.change_us), delta.name),
        )
        for pair in ([side.classes for side in sides], [side.kernels for side in sides])
    )
    changed = tuple(delta for delta in kernels if abs(delta.change_us) >= least)
    return Comparison("step" if stepped else "profile", times, tuple(classes), changed)


class _Side:
    """One side's means."""

    def __init__(self, reports: Sequence[RankReport], stepped: bool) -> None:
        self._times = [time for report in reports for time in _times(report, stepped)]
        self.classes: dict[str, float] = {}
        self.kernels: dict[str, float] = {}
        for report in reports:
            parts = len(reports) * (len(report.steps) if stepped else 1)
            for belongs in report.classes:
                name = belongs.belongs.name
                self.classes[name] = self.classes.get(name, 0.0) + belongs.total_us / parts
            for kernel in report.kernels:
                self.kernels[kernel.name] = self.kernels.get(kernel.name, 0.0) + kernel.total_us / parts

    def mean(self, take: Callable[[Time], float]) -> float:
        """Of a figure, over ranks and steps."""
        return sum(map(take, self._times)) / len(self._times)


def _times(report: RankReport, stepped: bool) -> list[Time]:
    return [step.time for step in report.steps] if stepped else [report.time]


@dataclass(frozen=True, slots=True)
class AgainstPlan:
    """A step as planned and as measured; a pipeline's bubble is measured as exposed receives, not as idle."""

    steps: int
    rows: tuple[Delta, ...]


def against_plan(reports: Sequence[RankReport], planned: StepTime, steps: int | None) -> AgainstPlan:
    """The plan's step before, the mean of the measured steps after; `steps` where the profile has no marks of them."""
    count, side = _steps_of(reports, steps)
    work_s = planned.compute_s + planned.recompute_s + planned.optimizer_s
    shown_s = planned.tensor_s + planned.context_s + planned.expert_s + planned.pipeline_s + planned.data_s
    shown_s = shown_s + planned.offload_s
    idle_s = planned.bubble_s + planned.host_s
    rows = [
        ("step", planned.total_s, TIMES["span"]),
        ("compute", work_s, TIMES["compute"]),
        ("exposed", shown_s, TIMES["exposed"]),
        ("idle", idle_s, TIMES["idle"]),
        ("not computing", shown_s + idle_s, lambda time: time.exposed_us + time.idle_us),
    ]
    parts = count if side == "profile" else 1
    measured = [time for report in reports for time in _times(report, side == "step")]
    return AgainstPlan(
        count,
        tuple(
            Delta(name, float(plan_s) * US_PER_S, sum(map(take, measured)) / len(measured) / parts)
            for name, plan_s, take in rows
        ),
    )


def _steps_of(reports: Sequence[RankReport], steps: int | None) -> tuple[int, str]:
    """How many steps a rank has, and whether the profile marks them."""
    if steps is None and all(report.steps for report in reports):
        return min(len(report.steps) for report in reports), "step"
    return steps or 1, "profile"


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Two figures that are taken for each other: how long the GPU was busy, and how much of its peak it computed.

    Busy is what nvidia-smi calls GPU-Util: a GPU that waits within a kernel counts as busy.
    """

    busy_fraction: float
    compute_fraction: float
    mfu: float | None
    flop_per_step: float | None
    peak_flop_per_s: float | None
    steps: int


def efficiency(
    report: RankReport, flop_per_step: float | None, peak_flop_per_s: float | None, steps: int | None
) -> Efficiency:
    """MFU of one rank; `flop_per_step` are the model's on this GPU."""
    count, side = _steps_of([report], steps)
    span_us = sum(time.span_us for time in _times(report, side == "step"))
    mfu = None
    if flop_per_step is not None and peak_flop_per_s is not None and span_us:
        mfu = flop_per_step * count / (span_us / US_PER_S * peak_flop_per_s)
    time = report.time
    return Efficiency(time.share(time.busy_us), time.share(time.compute_us), mfu, flop_per_step, peak_flop_per_s, count)
