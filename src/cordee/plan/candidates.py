"""Parts of the answer: a layout that was evaluated, a remedy, and the ranked layouts of one case."""

from dataclasses import dataclass
from functools import cached_property

from cordee.hardware.catalog import Price
from cordee.plan.layout import Layout
from cordee.plan.memory import RankMemory
from cordee.plan.optimum import Case
from cordee.plan.step import StepTime
from cordee.plan.training import Training
from cordee.units import format_bytes


@dataclass(frozen=True)
class Candidate:
    """One layout with its memory and, if it fits, its speed. Nine of ten such runs are expected in the intervals."""

    layout: Layout
    memory: RankMemory
    gpu_memory_bytes: int
    needed_interval_bytes: tuple[int, int]
    step: StepTime | None = None
    mfu: float | None = None
    tokens_per_s: float | None = None
    usd_per_billion_tokens: float | None = None
    step_interval_s: tuple[float, float] | None = None

    @cached_property
    def peak_bytes(self) -> int:
        """Bytes on its fullest GPU."""
        return self.memory.total_bytes

    @property
    def expected(self) -> str:
        """The distance within which nine of ten measured steps are expected, in words; empty without a step."""
        if self.step_s is None or self.step_interval_s is None:
            return ""
        low, high = (edge / self.step_s - 1 for edge in self.step_interval_s)
        return f"; nine of ten steps of the fastest layout are expected within {low:+.0%} and {high:+.0%}"

    @property
    def step_s(self) -> float | None:
        """Seconds of a step; None if it does not fit."""
        return None if self.step is None else float(self.step.total_s)

    @property
    def shortfall_bytes(self) -> int:
        """Bytes above the GPU's memory; 0 if it fits."""
        return max(0, self.peak_bytes - self.gpu_memory_bytes)

    @property
    def fits(self) -> bool:
        """Return whether its fullest GPU holds it."""
        return self.peak_bytes <= self.gpu_memory_bytes

    @property
    def tight(self) -> bool:
        """Return whether it fits as planned, but not at the upper end of its interval."""
        return self.fits and self.needed_interval_bytes[1] > self.gpu_memory_bytes


@dataclass(frozen=True)
class Remedy:
    """One change after which a layout fits, and the bytes that make it so."""

    change: str
    gpus: int
    training: Training
    candidate: Candidate
    because: str

    def __str__(self) -> str:
        peak = format_bytes(self.candidate.peak_bytes)
        tight = ", tight" if self.candidate.tight else ""
        return f"{self.change}: {self.candidate.layout}, {peak} on the fullest GPU{tight} ({self.because})"


@dataclass(frozen=True)
class Layouts:
    """One candidate for each mesh: the fastest that fits (fastest first), or the one nearest to fitting."""

    case: Case
    price: Price | None
    fitting: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    candidates: int

    @property
    def best(self) -> Candidate | None:
        """The fastest layout that fits."""
        return self.fitting[0] if self.fitting else None

    @property
    def fits(self) -> bool:
        """Return whether any layout fits."""
        return bool(self.fitting)

    @property
    def nearest(self) -> Candidate:
        """The best layout, or the one nearest to fitting."""
        return self.best or self.rejected[0]
