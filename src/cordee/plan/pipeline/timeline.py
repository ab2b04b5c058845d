"""The timeline of a table for given pass times: starts and ends of cells, idle time, activations held.

A cell starts when its rank is free and its inputs have arrived; its output arrives on another rank `latency_s` later.
Sending takes no time of a rank. Like torch's runtime, a rank runs its cells in the order of the table.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cordee.errors import LayoutError
from cordee.plan.pipeline.table import Action, Cell, PassTimes, ScheduleTable, StagePlacement, cell_text

STEPS_APART = 4


@dataclass(frozen=True, slots=True)
class CellSpan:
    """A cell in time."""

    cell: Cell
    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """The length in seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class ScheduleTimeline:
    """All cells of all ranks in time.

    `period_s` is the time of a step without a barrier between steps: a rank starts the next step when its own is done.
    `peaks` are activations held on each rank, in micro-batches over 1/p of the depth.
    """

    table: ScheduleTable
    spans: tuple[tuple[CellSpan, ...], ...]
    peaks: tuple[float, ...]
    period_s: float

    @property
    def makespan_s(self) -> float:
        """The time of a step with a barrier at its end."""
        return max(row[-1].end_s for row in self.spans)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """The busy time of each rank."""
        return tuple(sum(span.length_s for span in row) for row in self.spans)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """The idle time of each rank in a step with a barrier at its end."""
        return tuple(round(self.makespan_s - busy, 9) for busy in self.busy_s)

    @property
    def bubble_s(self) -> float:
        """The idle time of the rank that waits longest, in a step with a barrier at its end."""
        return max(self.idle_s)

    @property
    def bubble_without_barrier_s(self) -> float:
        """The idle time of the rank that waits longest, without a barrier between steps."""
        return round(self.period_s - min(self.busy_s), 9) + 0.0

    @property
    def idle_fraction(self) -> float:
        """The idle fraction of the time of all ranks."""
        return sum(self.idle_s) / (self.makespan_s * len(self.spans))

    @property
    def peak(self) -> float:
        """The activations of the fullest rank."""
        return max(self.peaks)


def timeline(
    table: ScheduleTable, costs: PassTimes, passes: Callable[[Action], float] | None = None
) -> ScheduleTimeline:
    """Run every cell as early as its rank, its order and its inputs allow.

    Args:
        table: the cells.
        costs: times of the passes.
        passes: measured seconds of each pass, in place of the costs; overlap saves nothing then.

    Raises:
        LayoutError: deadlock: each rank that has cells left waits for another.
    """
    lengths = _lengths(table, costs, passes)
    spans = _run(table, costs, lengths, [0.0] * table.placement.ranks)
    free = [row[-1].end_s if row else 0.0 for row in spans]
    earlier = free
    for _ in range(STEPS_APART):
        earlier, free = free, [row[-1].end_s if row else 0.0 for row in _run(table, costs, lengths, free)]
    period_s = max(late - early for early, late in zip(earlier, free, strict=True))
    return ScheduleTimeline(table, tuple(tuple(row) for row in spans), peaks(table, costs), period_s)


def makespan_s(table: ScheduleTable, costs: PassTimes) -> float:
    """Return the time of a step with a barrier; quicker than `timeline`."""
    return max(row[-1].end_s for row in one_step(table, costs))


def one_step(table: ScheduleTable, costs: PassTimes) -> list[list[CellSpan]]:
    """Return the spans of one step alone."""
    return _run(table, costs, _lengths(table, costs, None), [0.0] * len(table.cells))


def cell_s(cell: Cell, sizes: Sequence[float], costs: PassTimes) -> float:
    """Return the seconds of a cell; overlap saves in proportion to its smaller half."""
    if len(cell) == 1:
        return costs.of(cell[0].kind) * sizes[cell[0].stage]
    small = min(sizes[action.stage] for action in cell)
    alone = sum(costs.of(action.kind) * sizes[action.stage] for action in cell)
    return alone - (costs.whole_s - costs.both_s) * small


def sizes_of(placement: StagePlacement, costs: PassTimes) -> list[float]:
    """Return the size of every stage in units of 1/p of the depth."""
    return [costs.size(placement, stage) for stage in range(placement.stages)]


def _lengths(
    table: ScheduleTable, costs: PassTimes, passes: Callable[[Action], float] | None
) -> Callable[[Cell], float]:
    if passes is not None:
        return lambda cell: sum(passes(action) for action in cell)
    sizes = sizes_of(table.placement, costs)
    return lambda cell: cell_s(cell, sizes, costs)


def _run(
    table: ScheduleTable, costs: PassTimes, length_of: Callable[[Cell], float], free_s: Sequence[float]
) -> list[list[CellSpan]]:
    place = table.placement
    ranks_of = [place.rank_of(stage) for stage in range(place.stages)]
    free = list(free_s)
    spans: list[list[CellSpan]] = [[] for _ in table.cells]
    ends: dict[tuple[str, int, int], float] = {}
    waits = True
    while waits:
        waits, moved = False, False
        for rank, row in enumerate(table.cells):
            done = spans[rank]
            while len(done) < len(row):
                cell = row[len(done)]
                start: float | None = free[rank]
                for action in cell:
                    ready = _ready_s(action, place, ranks_of, ends, costs.latency_s)
                    if ready is None:
                        start = None
                        break
                    start = max(start, ready) if start is not None else ready
                if start is None:
                    waits = True
                    break
                free[rank] = end = start + length_of(cell)
                done.append(CellSpan(cell, start, end))
                moved = True
                for action in cell:
                    ends["I" if action.kind == "B" else action.kind, action.stage, action.micro_batch] = end
        if waits and not moved:
            raise LayoutError(f"{table.name} cannot run: {'; '.join(_stuck(table, spans))}")
    return spans


def _ready_s(
    action: Action,
    place: StagePlacement,
    ranks_of: Sequence[int],
    ends: dict[tuple[str, int, int], float],
    latency_s: float,
) -> float | None:
    """Return the arrival of the input of an action on its rank; None while it has not run."""
    stage, each = action.stage, action.micro_batch
    if action.kind == "W":
        return ends.get(("I", stage, each))
    if action.kind == "F":
        kind, source = "F", place.previous(stage)
        if source is None:
            return 0.0
    else:
        kind, source = "I", place.next(stage)
        own = ends.get(("F", stage, each))
        if source is None or own is None:
            return own
    end = ends.get((kind, source, each))
    if end is None:
        return None
    return end if ranks_of[source] == ranks_of[stage] else end + latency_s


def _stuck(table: ScheduleTable, spans: Sequence[Sequence[CellSpan]]) -> list[str]:
    return [
        f"rank {rank} waits before {cell_text(row[len(done)])}, its cell {len(done) + 1} of {len(row)}"
        for rank, (row, done) in enumerate(zip(table.cells, spans, strict=True))
        if len(done) < len(row)
    ]


def peaks(table: ScheduleTable, costs: PassTimes) -> tuple[float, ...]:
    """Return the peak of each rank: activations live from a forward pass to its weight pass."""
    sizes = sizes_of(table.placement, costs)
    found = []
    for row in table.cells:
        held = most = 0.0
        for cell in row:
            held += sum(sizes[action.stage] for action in cell if action.kind == "F")
            most = max(most, held)
            held -= sum(sizes[action.stage] for action in cell if action.kind in "WB")
        found.append(round(most, 9))
    return tuple(found)
