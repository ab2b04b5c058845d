"""What the search answers with: candidates, the plan they make, and a verdict for admission."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cordee.errors import DoesNotFitError
from cordee.hardware.catalog import Gpu, Price
from cordee.plan.layout import Layout, Training
from cordee.plan.memory import RankMemory
from cordee.plan.step import StepTime
from cordee.units import format_bytes
from cordee.view.markup import text
from cordee.view.memory import MemoryBar, memory_svg
from cordee.view.tables import Column, table_html
from cordee.workload.model import ModelShape

SHOWN_IN_NOTEBOOK = 8


@dataclass(frozen=True)
class Candidate:
    """One layout with its memory and, if it fits, its speed. Nine of ten such steps are expected in the interval."""

    layout: Layout
    memory: RankMemory
    wall_bytes: int
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
    def shortfall_bytes(self) -> int:
        """Bytes over the wall; 0 if it fits."""
        return max(0, self.peak_bytes - self.wall_bytes)

    @property
    def fits(self) -> bool:
        """Whether its fullest GPU holds it."""
        return self.peak_bytes <= self.wall_bytes


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
        return f"{self.change}: {self.candidate.layout}, {peak} on the fullest GPU ({self.because})"


@dataclass(frozen=True)
class Plan:
    """One row for each mesh: the fastest way to run it that fits (fastest first), or the one nearest to fitting.

    In a notebook it draws itself; `table()` gives its rows to whatever makes data frames.
    """

    shape: ModelShape
    gpu: Gpu
    gpus: int
    training: Training
    price: Price | None
    state_bytes: int
    fewest_gpus: int
    fitting: tuple[Candidate, ...]
    rejected: tuple[Candidate, ...]
    remedies: tuple[Remedy, ...]
    candidates: int = 0

    @property
    def best(self) -> Candidate | None:
        """The fastest layout that fits."""
        return self.fitting[0] if self.fitting else None

    def table(self) -> list[dict[str, Any]]:
        """A row for each layout in base units, ready for `pandas.DataFrame`."""
        return [
            {
                "layout": str(candidate.layout),
                "fits": candidate.fits,
                "peak_bytes": candidate.peak_bytes,
                "shortfall_bytes": candidate.shortfall_bytes,
                "step_s": None if candidate.step is None else float(candidate.step.total_s),
                "mfu": candidate.mfu,
                "tokens_per_s": candidate.tokens_per_s,
                "usd_per_billion_tokens": candidate.usd_per_billion_tokens,
            }
            for candidate in (*self.fitting, *self.rejected)
        ]

    def _repr_html_(self) -> str:
        shown = (*self.fitting[:SHOWN_IN_NOTEBOOK], *self.rejected[: SHOWN_IN_NOTEBOOK if not self.fitting else 2])
        bars = [
            MemoryBar(
                str(candidate.layout),
                candidate.memory.worst.parts(),
                "" if candidate.fits else f"+{format_bytes(candidate.shortfall_bytes)}",
            )
            for candidate in shown
        ]
        title = (
            f"<p><b>{text(self.shape.name)}</b> on <b>{self.gpus} x {self.gpu.name}</b>: "
            f"{self.shape.parameters:,} parameters, {format_bytes(self.state_bytes)} of state; "
            f"{len(self.fitting)} meshes fit, {len(self.rejected)} do not</p>"
        )
        return title + memory_svg(bars, self.gpu.memory_bytes) + layouts_html(self.fitting[:SHOWN_IN_NOTEBOOK])


def layouts_html(candidates: tuple[Candidate, ...]) -> str:
    """The ranked table, as HTML; empty without a layout that fits."""
    if not candidates:
        return ""
    priced = candidates[0].usd_per_billion_tokens is not None
    columns = [
        Column("layout"),
        Column("fullest GPU"),
        Column("step"),
        Column("nine of ten"),
        Column("MFU"),
        Column("tokens/s"),
    ]
    columns += [Column("$ per 1B tokens")] if priced else []
    rows = []
    for candidate in candidates:
        assert candidate.step is not None and candidate.mfu is not None and candidate.tokens_per_s is not None, (
            "it fits"
        )
        low, high = candidate.step_interval_s or (candidate.step.total_s, candidate.step.total_s)
        cells = [
            str(candidate.layout),
            format_bytes(candidate.peak_bytes),
            f"{candidate.step.total_s:,.2f} s",
            f"{low:,.2f} to {high:,.2f} s",
            f"{candidate.mfu:.0%}",
            f"{candidate.tokens_per_s:,.0f}",
        ]
        rows.append(cells + ([f"${candidate.usd_per_billion_tokens:,.0f}"] if priced else []))
    return table_html(columns, rows)


@dataclass(frozen=True)
class Verdict:
    """Whether a job's model fits its GPUs; if not, by how much, and what would."""

    fits: bool
    gpus: int
    gpu: str
    model: str
    candidate: Candidate
    suggestion: Candidate | None
    remedies: tuple[Remedy, ...]

    @property
    def shortfall_bytes(self) -> int:
        """Bytes over the wall on the fullest GPU."""
        return self.candidate.shortfall_bytes

    def error(self) -> DoesNotFitError:
        """The refusal with its numbers and a layout that would fit."""
        assert not self.fits, "only what does not fit is refused"
        candidate = self.candidate
        message = (
            f"{self.model} does not fit {self.gpus} x {self.gpu}: {candidate.layout} needs "
            f"{format_bytes(candidate.peak_bytes)} on its fullest GPU, which has "
            f"{format_bytes(candidate.wall_bytes)}: {format_bytes(candidate.shortfall_bytes)} too much"
        )
        return DoesNotFitError(message, hint=self._hint())

    def _hint(self) -> str:
        if self.suggestion is not None:
            peak = format_bytes(self.suggestion.peak_bytes)
            return f"layout {self.suggestion.layout} fits with {peak}"
        if not self.remedies:
            return "use larger GPUs"
        return "; or ".join(f"{remedy.change}: {remedy.candidate.layout} fits" for remedy in self.remedies)
