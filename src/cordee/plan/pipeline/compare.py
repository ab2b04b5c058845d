"""All schedules compared: step, bubble, memory, optimality gap; the recommended one, and when overlap pays."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cordee.errors import LayoutError
from cordee.plan.pipeline.bound import makespan_bound_s
from cordee.plan.pipeline.schedules import SCHEDULES, PipelineSchedule, build, find_schedule
from cordee.plan.pipeline.search import SearchedOrder, best_order
from cordee.plan.pipeline.table import PassTimes, StagePlacement
from cordee.plan.pipeline.timeline import ScheduleTimeline, makespan_s, timeline

RANKS_MAX, MICRO_BATCHES_MAX, CELLS_MAX = 256, 4096, 40_000
SEARCHED_CELLS_MAX = 3_000
_EPSILON = 1e-9


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """The memory limit of a rank, in activations of one micro-batch over 1/p of the depth.

    Args:
        activations: the most beside one copy of the weights.
        copy: size of a second copy of the weights, which DualPipe has.
    """

    activations: float
    copy: float = 0.0

    def for_placement(self, placement: StagePlacement) -> float:
        """Return the limit for activations beside the copies of the weights."""
        return self.activations - self.copy * (placement.copies - 1)


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """One schedule: its timeline, or why it does not exist; `bound_s` is the lower bound for its placement."""

    schedule: str
    timeline: ScheduleTimeline | None
    misfit: str | None = None
    bound_s: float | None = None
    room: float | None = None

    @property
    def record(self) -> PipelineSchedule:
        """The record of the schedule."""
        return find_schedule(self.schedule)

    @property
    def fits(self) -> bool:
        """Return whether it runs within the memory limit."""
        return self.timeline is not None and (self.room is None or self.timeline.peak <= self.room + _EPSILON)

    @property
    def gap(self) -> float | None:
        """The relative gap to the lower bound."""
        if self.timeline is None or self.bound_s is None:
            return None
        return self.timeline.makespan_s / self.bound_s - 1


@dataclass(frozen=True, slots=True)
class ScheduleComparison:
    """The question, the named schedules, and the best order found for each placement.

    `break_even` is the fraction of F and B that an overlapped cell has to save for DualPipeV to beat ZB-V; None if it
    never does, or if DualPipeV does not exist for these numbers.
    """

    ranks: int
    micro_batches: int
    chunks: int
    costs: PassTimes
    room: MemoryLimit | None
    rows: tuple[ScheduleRow, ...]
    found: tuple[SearchedOrder, ...]
    break_even: float | None

    @property
    def choice(self) -> ScheduleRow | None:
        """The fastest schedule that fits; of equals the one with fewer copies of the weights, then activations."""
        fitting = [row for row in self.rows if row.fits]
        return min(fitting, key=_merit, default=None)

    @property
    def best(self) -> SearchedOrder | None:
        """The fastest order that was found."""
        return min(self.found, key=lambda found: round(found.timeline.makespan_s, 9), default=None)


def _merit(row: ScheduleRow) -> tuple[float, int, float]:
    assert row.timeline is not None, "only what runs is judged"
    run = row.timeline
    return (round(run.makespan_s, 9), run.table.placement.copies, run.peak)


def compare(
    ranks: int,
    micro_batches: int,
    costs: PassTimes,
    *,
    room: MemoryLimit | None = None,
    chunks: int = 2,
    search: bool = True,
    schedules: Sequence[str] = tuple(SCHEDULES),
) -> ScheduleComparison:
    """Compare every schedule for these numbers, and search a better order for each placement.

    Raises:
        LayoutError: numbers for which no pipeline exists, or too many micro-batches and ranks.
    """
    _refuse_sizes(ranks, micro_batches, costs, room)
    rows = tuple(_row(schedule, ranks, micro_batches, chunks=chunks, costs=costs, room=room) for schedule in schedules)
    found = _search(rows, costs, room) if search and 3 * ranks * micro_batches <= SEARCHED_CELLS_MAX else ()
    return ScheduleComparison(
        ranks, micro_batches, chunks, costs, room, rows, found, overlap_break_even(ranks, micro_batches, costs)
    )


def _refuse_sizes(ranks: int, micro_batches: int, costs: PassTimes, room: MemoryLimit | None) -> None:
    for name, value, most in (("ranks", ranks, RANKS_MAX), ("micro-batches", micro_batches, MICRO_BATCHES_MAX)):
        if not 1 <= value <= most:
            raise LayoutError(f"{value} {name}: a pipeline has from 1 to {most:,}")
    if ranks * micro_batches > CELLS_MAX:
        hint = "use fewer: the bubble does not change beyond a few times as many micro-batches as ranks"
        raise LayoutError(f"{ranks} ranks x {micro_batches} micro-batches are over {CELLS_MAX:,}", hint=hint)
    if room is not None and not 0 < room.activations < float("inf"):
        raise LayoutError(
            f"the memory holds {room.activations:g} activations of a micro-batch: none fits",
            hint="give more memory, smaller micro-batches or more ranks",
        )
    if len(costs.depth) > 8 * ranks * 4:
        raise LayoutError(f"{len(costs.depth)} slices of the model for {ranks} ranks: at most {32 * ranks}")


def _row(
    schedule: str, ranks: int, micro_batches: int, *, chunks: int, costs: PassTimes, room: MemoryLimit | None
) -> ScheduleRow:
    misfit = find_schedule(schedule).misfit(ranks, micro_batches, chunks)
    if misfit is not None:
        return ScheduleRow(schedule, None, misfit[0])
    run = timeline(build(schedule, ranks, micro_batches, chunks), costs)
    place = run.table.placement
    most = None if room is None else room.for_placement(place)
    if most is not None and most <= 0:
        return ScheduleRow(schedule, None, f"its {place.copies} copies of the weights leave no memory for activations")
    # A schedule that does not fit is compared with the bound in the memory that it takes.
    bound_s = makespan_bound_s(place, micro_batches, costs, None if most is None else max(most, run.peak))
    return ScheduleRow(schedule, run, None, bound_s if bound_s < float("inf") else None, most)


def _search(rows: Sequence[ScheduleRow], costs: PassTimes, room: MemoryLimit | None) -> tuple[SearchedOrder, ...]:
    """Search each placement that a schedule has, starting from the schedules' own orders."""
    known: dict[StagePlacement, list[ScheduleTimeline]] = {}
    for row in rows:
        if row.timeline is not None:
            known.setdefault(row.timeline.table.placement, []).append(row.timeline)
    found = []
    for place, runs in known.items():
        tables = [run.table for run in runs]
        count = tables[0].micro_batches
        best = best_order(place, count, costs, None if room is None else room.for_placement(place), known=tables)
        if best is not None:
            found.append(best)
    return tuple(found)


def overlap_break_even(ranks: int, micro_batches: int, costs: PassTimes) -> float | None:
    """Return the fraction of F and B that an overlapped cell has to save for DualPipeV to be as fast as ZB-V.

    >>> round(overlap_break_even(8, 20, PassTimes(1, 1, 1)), 3)
    0.078
    """
    if find_schedule("dualpipev").misfit(ranks, micro_batches) is not None:
        return None
    table = build("dualpipev", ranks, micro_batches)
    goal_s = makespan_s(build("zb-v", ranks, micro_batches), costs)

    def over_s(fraction: float) -> float:
        return makespan_s(table, replace(costs, overlapped_s=(1 - fraction) * costs.whole_s)) - goal_s

    low, high = 0.0, 1 - max(costs.forward_s, costs.inner_s + costs.weight_s) / costs.whole_s
    if over_s(low) <= _EPSILON:
        return 0.0
    if over_s(high) > 0:
        return None
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if over_s(middle) > 0 else (low, middle)
    return high
