"""A profile compared with another one, with the plan of its layout, and with its GPU's peak."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cordee.plan.step import StepTime
from cordee.telemetry.profile.account import RankReport
from cordee.telemetry.profile.sweep import Breakdown

US_PER_S = 1e6
# A kernel that changed by less than this fraction of the time is left out.
CHANGE_MIN = 1e-3
POINT_TO_POINT = "NCCL point-to-point"


@dataclass(frozen=True, slots=True)
class Delta:
    """One figure before and after."""

    name: str
    before_us: float
    after_us: float

    @property
    def change_us(self) -> float:
        """The difference; positive if it became longer."""
        return self.after_us - self.before_us


@dataclass(frozen=True, slots=True)
class ProfileComparison:
    """Means over ranks, for a step where both sides have steps, else for the whole profile."""

    per: str
    times: tuple[Delta, ...]
    classes: tuple[Delta, ...]
    kernels: tuple[Delta, ...]


TIMES: dict[str, Callable[[Breakdown], float]] = {
    "span": lambda time: time.span_us,
    "compute": lambda time: time.compute_us,
    "communication": lambda time: time.communication_us,
    "hidden": lambda time: time.hidden_us,
    "exposed": lambda time: time.exposed_us,
    "idle": lambda time: time.idle_us,
}


def compare(before: Sequence[RankReport], after: Sequence[RankReport]) -> ProfileComparison:
    """Compare two profiles; the kernels that changed most come first."""
    stepped = all(report.steps for report in (*before, *after))
    sides = [_Side(before, stepped), _Side(after, stepped)]
    times = tuple(Delta(name, *(side.mean(take) for side in sides)) for name, take in TIMES.items())
    least = CHANGE_MIN * max(delta.before_us for delta in times)
    classes, kernels = (
        sorted(
            (Delta(name, *(side.get(name, 0.0) for side in pair)) for name in {*pair[0], *pair[1]}),
            key=lambda delta: (-abs(delta.change_us), delta.name),
        )
        for pair in ([side.classes for side in sides], [side.kernels for side in sides])
    )
    changed = tuple(delta for delta in kernels if abs(delta.change_us) >= least)
    return ProfileComparison("step" if stepped else "profile", times, tuple(classes), changed)


class _Side:
    """The means of one side."""

    def __init__(self, reports: Sequence[RankReport], stepped: bool) -> None:
        self._times = [time for report in reports for time in _times(report, stepped)]
        self.classes: dict[str, float] = {}
        self.kernels: dict[str, float] = {}
        for report in reports:
            parts = len(reports) * (len(report.steps) if stepped else 1)
            for kernel_class in report.classes:
                name = kernel_class.kernel_class.name
                self.classes[name] = self.classes.get(name, 0.0) + kernel_class.total_us / parts
            for kernel in report.kernels:
                self.kernels[kernel.name] = self.kernels.get(kernel.name, 0.0) + kernel.total_us / parts

    def mean(self, take: Callable[[Breakdown], float]) -> float:
        """Return the mean of a figure over ranks and steps."""
        return sum(map(take, self._times)) / len(self._times)


def _times(report: RankReport, stepped: bool) -> list[Breakdown]:
    return [step.time for step in report.steps] if stepped else [report.time]


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """A step as planned and as profiled; a bubble shows as exposed receives from other stages, not as idle time."""

    steps: int
    rows: tuple[Delta, ...]


def compare_with_plan(reports: Sequence[RankReport], planned: StepTime, steps: int | None) -> PlanComparison:
    """Compare the planned step with the mean profiled one; `steps` counts them where the profile has no marks."""
    count, side = _steps_of(reports, steps)
    parts = count if side == "profile" else 1
    measured = [time for report in reports for time in _times(report, side == "step")]
    profiled = {name: sum(map(take, measured)) / len(measured) / parts for name, take in TIMES.items()}
    waits_us = _receives_fraction(reports) * profiled["exposed"]
    compute_s = planned.compute_s + planned.recompute_s + planned.optimizer_s
    exposed_s = planned.tensor_s + planned.context_s + planned.expert_s + planned.data_s + planned.offload_s
    bubble_s = planned.bubble_s + planned.pipeline_s
    rows = [
        ("step", planned.total_s, profiled["span"]),
        ("compute", compute_s, profiled["compute"]),
        ("exposed communication", exposed_s, profiled["exposed"] - waits_us),
        ("bubble and stage transfers", bubble_s, waits_us),
        ("idle", planned.host_s, profiled["idle"]),
        ("not computing", exposed_s + bubble_s + planned.host_s, profiled["exposed"] + profiled["idle"]),
    ]
    return PlanComparison(
        count, tuple(Delta(name, float(plan_s) * US_PER_S, found_us) for name, plan_s, found_us in rows)
    )


def _receives_fraction(reports: Sequence[RankReport]) -> float:
    """Return the fraction of point-to-point kernels in exposed communication: a stage waits for its input."""
    rows = [row for report in reports for row in report.classes if row.kernel_class.communicates]
    exposed_us = sum(row.exposed_us for row in rows)
    between_us = sum(row.exposed_us for row in rows if row.kernel_class.name == POINT_TO_POINT)
    return between_us / exposed_us if exposed_us else 0.0


def _steps_of(reports: Sequence[RankReport], steps: int | None) -> tuple[int, str]:
    """Return the number of steps of a rank, and whether the profile marks them."""
    if steps is None and all(report.steps for report in reports):
        return min(len(report.steps) for report in reports), "step"
    return steps or 1, "profile"


@dataclass(frozen=True, slots=True)
class Efficiency:
    """The busy fraction and the MFU of a GPU, two figures that are often confused.

    Busy is nvidia-smi's GPU-Util: it includes kernels that wait.
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
    """Return the efficiency of one rank; `flop_per_step` are the model's FLOPs on this GPU."""
    count, side = _steps_of([report], steps)
    span_us = sum(time.span_us for time in _times(report, side == "step"))
    mfu = None
    if flop_per_step is not None and peak_flop_per_s is not None and span_us:
        mfu = flop_per_step * count / (span_us / US_PER_S * peak_flop_per_s)
    time = report.time
    return Efficiency(time.busy_fraction, time.compute_fraction, mfu, flop_per_step, peak_flop_per_s, count)
