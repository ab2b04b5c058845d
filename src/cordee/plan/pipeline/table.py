"""A pipeline schedule as a table: the cells of each rank in their order, and the placement of the stages.

A cell is one action, or a forward and a backward that overlap. Times are in `timeline.py`. Actions have torch's
notation: `3F0` is the forward pass of micro-batch 0 on stage 3, I the gradient of its input, W that of its weights, B
both in one pass.
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from cordee.errors import LayoutError, SpecError

PassKind = Literal["F", "I", "W", "B"]
PlacementShape = Literal["line", "loop", "v", "bidirectional"]

OVERLAPPED = "OVERLAP_F_B"


@dataclass(frozen=True, slots=True, order=True)
class Action:
    """One pass of one micro-batch through one stage."""

    stage: int
    kind: PassKind
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Cell = tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class StagePlacement:
    """The ranks that hold the stages.

    line: stage r on rank r. loop: stage s on rank s mod p. v: down the ranks and back up. bidirectional: two copies of
    the model, one down the ranks and one up, each with half of the micro-batches; the stages of the second follow
    those of the first in number.
    """

    shape: PlacementShape
    ranks: int
    chunks: int = 1

    @property
    def stages(self) -> int:
        """Stages on all ranks, of both copies where there are two."""
        return self.ranks * self.chunks

    @property
    def copies(self) -> int:
        """Copies of the model; a micro-batch passes one of them."""
        return 2 if self.shape == "bidirectional" else 1

    @property
    def model_stages(self) -> int:
        """Stages of one copy of the model."""
        return self.stages // self.copies

    def rank_of(self, stage: int) -> int:
        """Return the rank that holds a stage."""
        if self.shape in ("v", "bidirectional"):
            return min(stage, self.stages - 1 - stage)
        return stage % self.ranks

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank."""
        return tuple(stage for stage in range(self.stages) if self.rank_of(stage) == rank)

    def previous(self, stage: int) -> int | None:
        """Return the stage whose output is the input of this one; None for the first."""
        return stage - 1 if stage % self.model_stages else None

    def next(self, stage: int) -> int | None:
        """Return the stage that takes the output of this one; None for the last."""
        return stage + 1 if (stage + 1) % self.model_stages else None


@dataclass(frozen=True, slots=True)
class ScheduleTable:
    """A schedule for so many ranks and micro-batches; `micro_batches` counts those of both copies of the model."""

    name: str
    placement: StagePlacement
    micro_batches: int
    cells: tuple[tuple[Cell, ...], ...]

    @property
    def model_micro_batches(self) -> int:
        """Micro-batches that pass each stage."""
        return self.micro_batches // self.placement.copies


@dataclass(frozen=True, slots=True)
class PassTimes:
    """Seconds (or any one unit) of each pass of one micro-batch over 1/p of the model's depth.

    Args:
        forward_s: F, the forward pass.
        inner_s: I, the gradient of its input.
        weight_s: W, the gradient of its weights.
        overlapped_s: a forward and a whole backward in one cell; None if overlap saves nothing.
        latency_s: from the end of a pass to the arrival of its output on another rank.
        depth: relative sizes of slices of the model, first to last: `(1, 1, 1, 1.4)`. A stage has the size of its
            slices, in time and in activations.
    """

    forward_s: float
    inner_s: float
    weight_s: float
    overlapped_s: float | None = None
    latency_s: float = 0.0
    depth: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("forward_s", "inner_s", "weight_s", "latency_s"):
            value = getattr(self, name)
            least = "at least 0" if name == "latency_s" else "more than 0"
            if not math.isfinite(value) or value < 0 or (value == 0 and name != "latency_s"):
                raise LayoutError(f"{name} is {value:g}: it must be finite and {least}")
        if any(not math.isfinite(size) or size <= 0 for size in self.depth):
            wrong = next(size for size in self.depth if not math.isfinite(size) or size <= 0)
            raise LayoutError(f"a slice of the model has size {wrong:g}: each must be finite and more than 0")
        both = self.overlapped_s
        longest = max(self.forward_s, self.inner_s + self.weight_s)
        if both is not None and not longest <= both <= self.whole_s * (1 + 1e-9):
            raise LayoutError(
                f"an overlapped forward and backward take {both:g}, but alone F takes {self.forward_s:g} and B "
                f"{self.inner_s + self.weight_s:g}: it must be from {longest:g} to {self.whole_s:g}"
            )

    @property
    def whole_s(self) -> float:
        """F, I and W in sequence."""
        return self.forward_s + self.inner_s + self.weight_s

    @property
    def both_s(self) -> float:
        """A forward and a backward in one cell."""
        return self.whole_s if self.overlapped_s is None else self.overlapped_s

    def of(self, kind: PassKind) -> float:
        """Return the seconds of one pass over 1/p of the depth."""
        if kind == "F":
            return self.forward_s
        if kind == "I":
            return self.inner_s
        return self.weight_s if kind == "W" else self.inner_s + self.weight_s

    def size(self, placement: StagePlacement, stage: int) -> float:
        """Return the size of a stage in units of 1/p of the depth.

        >>> PassTimes(1, 1, 1, depth=(1, 3)).size(StagePlacement("v", 2, 2), 3)
        1.5
        """
        count = placement.model_stages
        fraction = placement.ranks / count
        slices = len(self.depth)
        if not slices:
            return fraction
        at = stage % count
        low, high = at * slices / count, (at + 1) * slices / count
        covered = sum(size * max(0.0, min(high, index + 1) - max(low, index)) for index, size in enumerate(self.depth))
        return fraction * covered / (high - low)


def cell_text(cell: Cell) -> str:
    """Return a cell in torch's notation.

    >>> cell_text((Action(0, "F", 3),)), cell_text((Action(0, "F", 3), Action(1, "B", 0)))
    ('0F3', '(0F3;1B0)OVERLAP_F_B')
    """
    if len(cell) == 1:
        return str(cell[0])
    return f"({';'.join(str(action) for action in cell)}){OVERLAPPED}"


def cell_of(text: str) -> Cell:
    """Parse a cell in torch's notation.

    Raises:
        SpecError: not a cell.
    """
    inner = re.fullmatch(rf"\((.*)\){OVERLAPPED}", text.strip())
    found = [re.fullmatch(r"(\d+)([FIWB])(\d+)", part.strip()) for part in (inner[1] if inner else text).split(";")]
    cell = tuple(Action(int(match[1]), match[2], int(match[3])) for match in found if match)  # type: ignore[arg-type]
    if len(cell) != len(found) or (len(cell) != 1 if inner is None else [each.kind for each in cell] != ["F", "B"]):
        hint = "write 3F0, 3I0, 3W0 or 3B0 (stage, pass, micro-batch), or (3F1;3B0)OVERLAP_F_B"
        raise SpecError(f"{text!r} is not a cell of a pipeline's table", hint=hint)
    return cell


def table_csv(table: ScheduleTable) -> str:
    """Return one line for each rank, as torch's `_PipelineScheduleRuntime._load_csv` reads them."""
    return "".join(",".join(cell_text(cell) for cell in row) + "\n" for row in table.cells)


def table_of(name: str, rows: Iterable[Sequence[str]]) -> ScheduleTable:
    """Build a table from the texts of its cells, a sequence for each rank; the placement follows from the stages.

    Raises:
        SpecError: a cell cannot be read, or the placement is neither a line, nor a loop, nor a V.
    """
    cells = tuple(tuple(cell_of(text) for text in row if text.strip()) for row in rows)
    if not cells or not all(cells):
        empty = next((rank for rank, row in enumerate(cells) if not row), 0)
        raise SpecError(f"{name}: rank {empty} has no cells", hint="give one line for each rank")
    ranks_of: dict[int, int] = {}
    for rank, row in enumerate(cells):
        for action in (action for cell in row for action in cell):
            if ranks_of.setdefault(action.stage, rank) != rank:
                raise SpecError(f"{name}: stage {action.stage} is on rank {ranks_of[action.stage]} and on rank {rank}")
    count = 1 + max(action.micro_batch for row in cells for cell in row for action in cell)
    ranks = len(cells)
    if sorted(ranks_of) != list(range(len(ranks_of))) or len(ranks_of) % ranks:
        raise SpecError(f"{name}: {ranks} ranks hold the stages {', '.join(map(str, sorted(ranks_of)))}")
    chunks = len(ranks_of) // ranks
    shapes: tuple[PlacementShape, ...] = ("line",) if chunks == 1 else ("v", "loop")
    for shape in shapes:
        placement = StagePlacement(shape, ranks, chunks)
        if all(placement.rank_of(stage) == rank for stage, rank in ranks_of.items()):
            return ScheduleTable(name, placement, count, cells)
    held = ", ".join(f"{stage} on {ranks_of[stage]}" for stage in sorted(ranks_of))
    raise SpecError(f"{name}: the placement is neither a line, nor a loop, nor a V: {held}")
