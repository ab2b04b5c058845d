"""The answer of `cordee profile` as one value, which the terminal, the page and the JSON document show."""

from collections.abc import Sequence
from dataclasses import dataclass

from cordee.plan.step import StepTime
from cordee.telemetry.profile.account import RankReport
from cordee.telemetry.profile.compare import Efficiency, PlanComparison, ProfileComparison
from cordee.telemetry.profile.ranks import Skew


@dataclass(frozen=True)
class PlanOfProfile:
    """The plan of the layout that was profiled; `flop_per_step` is for one GPU."""

    model: str
    gpus: int
    gpu: str
    layout: str
    step: StepTime
    mfu: float | None
    flop_per_step: float
    job: str | None = None


@dataclass(frozen=True)
class ProfileAnswer:
    """The whole answer; `shown` is the index of the rank shown in full, `top` the number of kernels listed."""

    reports: Sequence[RankReport]
    shown: int
    efficiency: Sequence[Efficiency]
    skew: Skew | None
    compared: ProfileComparison | None
    base: Sequence[str]
    planned: PlanOfProfile | None
    against: PlanComparison | None
    top: int
