"""When each cell of a table runs, given the times of the passes: the timeline, what idles, and what is held.

A cell starts when its rank is free and its inputs are there; what it makes is on another rank `latency_s` later.
Sending takes no time of a rank. Torch's runtime gives a rank its cells in this order and no other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cordee.errors import LayoutError
from cordee.plan.pipeline.table import Action, Cell, Costs, Placement, Table, cell_text

STEPS_APART = 4


@dataclass(frozen=True, slots=True)
class Span:
    """A cell on its rank."""

    cell: Cell
    start_s: float
    end_s: float

    @property
    def length_s(self) -> float:
        """Seconds."""
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """All cells of all ranks in time.

    `period_s` is what a step takes where steps follow one another without a barrier: a rank begins the next one when
    its own is done. `peaks` are activations, in micro-batches over 1/p of the depth.
    """

    table: Table
    spans: tuple[tuple[Span, ...], ...]
    peaks: tuple[float, ...]
    period_s: float

    @property
    def makespan_s(self) -> float:
        """From the first action to the end of the last: a step after which all ranks meet."""
        return max(row[-1].end_s for row in self.spans)

    @property
    def busy_s(self) -> tuple[float, ...]:
        """What each rank computes."""
        return tuple(sum(span.length_s for span in row) for row in self.spans)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """What each rank waits in a step after which all ranks meet."""
        return tuple(round(self.makespan_s - busy, 9) for busy in self.busy_s)

    @property
    def bubble_s(self) -> float:
        """What the rank that waits longest idles in a step after which all ranks meet."""
        return max(self.idle_s)

    @property
    def bubble_apart_s(self) -> float:
        """The same where no barrier stands between steps."""
        return round(self.period_s - min(self.busy_s), 9) + 0.0

    @property
    def idle_fraction(self) -> float:
        """Idle share of all ranks' time."""
        return sum(self.idle_s) / (self.makespan_s * len(self.spans))

    @property
    def peak(self) -> float:
        """Activations of the fullest rank."""
        return max(self.peaks)


def timeline(table: Table, costs: Costs, passes: Callable[[Action], float] | None = None) -> Timeline:
    """Every cell as early as its rank, its order and its inputs allow.

    Args:
        table: the cells.
        costs: of the passes.
        passes: seconds of each pass where they were measured; they stand in place of the costs, and nothing is gained
            by overlapping.

    Raises:
        LayoutError: the order cannot run: each rank that has cells left waits for another.
    """
    lengths = _lengths(table, costs, passes)
    spans = _run(table, costs, lengths, [0.0] * table.placement.ranks)
    free = [row[-1].end_s if row else 0.0 for row in spans]
    earlier = free
    for _ in range(STEPS_APART):
        earlier, free = free, [row[-1].end_s if row else 0.0 for row in _run(table, costs, lengths, free)]
    period_s = max(late - early for early, late in zip(earlier, free, strict=True))
    return Timeline(table, tuple(tuple(row) for row in spans), peaks(table, costs), period_s)


def makespan_s(table: Table, costs: Costs) -> float:
    """When the last rank is done; what `timeline` gives, sooner."""
    return max(row[-1].end_s for row in one_step(table, costs))


def one_step(table: Table, costs: Costs) -> list[list[Span]]:
    """Return the spans of one step alone."""
    return _run(table, costs, _lengths(table, costs, None), [0.0] * len(table.cells))


def cell_s(cell: Cell, sizes: Sequence[float], costs: Costs) -> float:
    """Seconds of a cell; an overlapped one gains what its smaller half lets it gain."""
    if len(cell) == 1:
        return costs.of(cell[0].kind) * sizes[cell[0].stage]
    small = min(sizes[action.stage] for action in cell)
    alone = sum(costs.of(action.kind) * sizes[action.stage] for action in cell)
    return alone - (costs.whole_s - costs.both_s) * small


def sizes_of(placement: Placement, costs: Costs) -> list[float]:
    """Every stage in units of 1/p of the depth."""
    return [costs.size(placement, stage) for stage in range(placement.stages)]


def _lengths(table: Table, costs: Costs, passes: Callable[[Action], float] | None) -> Callable[[Cell], float]:
    if passes is not None:
        return lambda cell: sum(passes(action) for action in cell)
    sizes = sizes_of(table.placement, costs)
    return lambda cell: cell_s(cell, sizes, costs)


def _run(table: Table, costs: Costs, length_of: Callable[[Cell], float], free_s: Sequence[float]) -> list[list[Span]]:
    place = table.placement
    lies = [place.rank_of(stage) for stage in range(place.stages)]
    free = list(free_s)
    spans: list[list[Span]] = [[] for _ in table.cells]
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
                    ready = _ready_s(action, place, lies, ends, costs.latency_s)
                    if ready is None:
                        start = None
                        break
                    start = max(start, ready) if start is not None else ready
                if start is None:
                    waits = True
                    break
                free[rank] = end = start + length_of(cell)
                done.append(Span(cell, start, end))
                moved = True
                for action in cell:
                    ends["I" if action.kind == "B" else action.kind, action.stage, action.micro_batch] = end
        if waits and not moved:
            raise LayoutError(f"{table.name} cannot run: {'; '.join(_stuck(table, spans))}")
    return spans


def _ready_s(
    action: Action, place: Placement, lies: Sequence[int], ends: dict[tuple[str, int, int], float], latency_s: float
) -> float | None:
    """When what an action needs is on its rank; None while that has not run."""
    stage, each = action.stage, action.micro_batch
    if action.kind == "W":
        return ends.get(("I", stage, each))
    if action.kind == "F":
        kind, source = "F", place.before(stage)
        if source is None:
            return 0.0
    else:
        kind, source = "I", place.after(stage)
        own = ends.get(("F", stage, each))
        if source is None or own is None:
            return own
    end = ends.get((kind, source, each))
    if end is None:
        return None
    return end if lies[source] == lies[stage] else end + latency_s


def _stuck(table: Table, spans: Sequence[Sequence[Span]]) -> list[str]:
    return [
        f"rank {rank} waits before {cell_text(row[len(done)])}, its cell {len(done) + 1} of {len(row)}"
        for rank, (row, done) in enumerate(zip(table.cells, spans, strict=True))
        if len(done) < len(row)
    ]


def peaks(table: Table, costs: Costs) -> tuple[float, ...]:
    """The most that each rank holds: from a forward to the gradient of its weights."""
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
