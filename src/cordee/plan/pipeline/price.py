"""The price of a schedule: the bubble and the micro-batches in flight of its table, for one layout or for many at once.

The time of a table is its longest path, so a maximum of sums of passes. The sums that matter are found once for each
table; then the bubbles of a million candidates with different pass times cost a few products. Where a record in
`schedules.py` states the sums, no table is built.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache, reduce

import numpy as np

from cordee.hardware.arrays import Floats, Ints
from cordee.plan.pipeline.schedules import Form, find_schedule
from cordee.plan.pipeline.table import Action, PassKind, PassTimes, ScheduleTable, StagePlacement
from cordee.plan.pipeline.timeline import one_step

Times = float | np.float64 | Floats
Counts = int | float | np.int64 | Ints | Floats
# The forms are exact where each of F, I and W is at least this part of their sum.
LEAST_PART = 0.01
# The first ratios F:I:W that are tried, off the lattice on which paths tie.
_FIRST = ((0.335, 0.334, 0.331), (0.421, 0.377, 0.202), (0.291, 0.463, 0.246), (0.612, 0.197, 0.191),
          (0.173, 0.641, 0.186), (0.213, 0.222, 0.565))  # fmt: skip
_NUDGES = ((3e-4, 1e-4, 0.0), (0.0, 3e-4, 1e-4), (1e-4, 0.0, 3e-4))
_EPSILON = 1e-9


def bubble_s(
    schedule: str, ranks: int, chunks: int, micro_batches: Counts, *, forward_s: Times, inner_s: Times, weight_s: Times
) -> Floats | float:
    """Return the idle seconds of a rank in a step, for stages that take the same time.

    Args:
        schedule: a name in `SCHEDULES`.
        ranks: p.
        chunks: stages on a rank, where the schedule leaves them open.
        micro_batches: of the step; an array if there are many candidates.
        forward_s: F of one micro-batch over all layers of a rank; an array likewise.
        inner_s: I, the gradient of its input.
        weight_s: W, the gradient of its weights.

    >>> second = {"forward_s": 1.0, "inner_s": 1.0, "weight_s": 1.0}
    >>> [float(bubble_s(name, 4, 3, 8, **second)) for name in ("1f1b", "interleaved", "zb-h1", "zb-v")]
    [9.0, 3.0, 3.0, 0.0]
    """
    if ranks == 1:
        return 0.0
    record = find_schedule(schedule)
    count = np.minimum(np.asarray(micro_batches, dtype=np.int64), record.steady_from(ranks))
    fewest, most = int(count.min()), int(count.max())
    passes = (forward_s, inner_s, weight_s)
    if fewest == most:
        return _largest(bubble_forms(schedule, ranks, most, chunks), passes)
    sizes = np.broadcast_shapes(count.shape, *(np.shape(each) for each in passes))
    count = np.broadcast_to(count, sizes)
    many = [np.broadcast_to(np.asarray(each, dtype=np.float64), sizes) for each in passes]
    found = np.empty(sizes)
    for each in np.unique(count):
        at = count == each
        found[at] = _largest(bubble_forms(schedule, ranks, int(each), chunks), [times[at] for times in many])
    return found


def _largest(forms: Iterable[Form], passes: Sequence[Times]) -> Floats:
    """Return the largest of the sums of passes."""
    forward_s, inner_s, weight_s = passes
    sums = [np.asarray(forward * forward_s + inner * inner_s + weight * weight_s) for forward, inner, weight in forms]
    return reduce(np.maximum, sums)


def micro_batches_in_flight(schedule: str, ranks: int, rank: int, chunks: int, micro_batches: Counts) -> Floats:
    """Return the micro-batches of all its layers that a rank holds at once; a chunk counts its part of them."""
    lines = find_schedule(schedule).in_flight(ranks, rank, chunks)
    return reduce(np.minimum, [np.asarray(slope * micro_batches + offset) for slope, offset in lines])


@lru_cache(maxsize=65_536)
def bubble_forms(schedule: str, ranks: int, micro_batches: int, chunks: int) -> tuple[Form, ...]:
    """Return the sums of passes whose largest is the bubble: the schedule's own once it is full, else its table's."""
    record = find_schedule(schedule)
    known = record.bubble(ranks, chunks, micro_batches)
    return known or table_forms(record.table(ranks, micro_batches, chunks), barrier=record.barrier)


def table_forms(table: ScheduleTable, *, barrier: bool = True) -> tuple[Form, ...]:
    """Return the sums of passes whose largest is the bubble of a table with equal stages, for any times of the passes.

    At some ratio of F, I and W the longest path is one sum. Where the sums found so far meet, either the table takes no
    longer than they say, and nothing is missing there, or a new sum is found beside it.
    """
    paths = _Paths(table, barrier)
    forms = {_key(form): form for form in paths.longest(np.array(_FIRST))[1]}
    known: set[Form] = set()
    while corners := [point for point in _corners(list(forms.values())) if _key(point) not in known]:
        known.update(_key(point) for point in corners)
        points = np.array(corners)
        above = np.max(points @ np.array(list(forms.values())).T, axis=1)
        over = points[paths.longest(points)[0] > above + _EPSILON]
        if len(over):
            beside = np.concatenate([over + np.array(nudge) for nudge in _NUDGES])
            forms |= {_key(form): form for form in paths.longest(beside)[1]}
    meets = {_key(form) for form in forms.values() if len(_cell(form, list(forms.values()))) > 2}
    return tuple(sorted(key for key in meets))


def _key(point: Floats) -> Form:
    first, second, third = (round(float(value), 9) + 0.0 for value in point)
    return first, second, third


def _corners(forms: list[Floats]) -> list[Floats]:
    """Return the ratios F:I:W at which the largest of the forms changes, and the ends of the range."""
    return [point for form in forms for point in _cell(form, forms)]


def _cell(form: Floats, forms: list[Floats]) -> list[Floats]:
    """Return the corners of the ratios at which this form is the largest; the range itself is a triangle."""
    least, most = LEAST_PART, 1 - 2 * LEAST_PART
    polygon = [np.array(corner) for corner in ((most, least, least), (least, most, least), (least, least, most))]
    for other in forms:
        if other is not form and polygon:
            polygon = _clipped(polygon, form - other)
    return polygon


def _clipped(polygon: list[Floats], normal: Floats) -> list[Floats]:
    """Return the part of a polygon on one side of a line through the origin."""
    kept = []
    for one, other in zip(polygon, [*polygon[1:], polygon[0]], strict=True):
        here, there = float(one @ normal), float(other @ normal)
        if here >= -_EPSILON:
            kept.append(one)
        if (here > _EPSILON and there < -_EPSILON) or (here < -_EPSILON and there > _EPSILON):
            kept.append(one + (other - one) * (here / (here - there)))
    return kept


def _need(one: Action, place: StagePlacement) -> tuple[PassKind, int] | None:
    """Return the kind and the stage of the pass that this one waits for; B counts as I."""
    if one.kind == "W":
        return "I", one.stage
    source = place.previous(one.stage) if one.kind == "F" else place.next(one.stage)
    if source is None:
        return None if one.kind == "F" else ("F", one.stage)
    return "F" if one.kind == "F" else "I", source


class _Paths:
    """A table as a graph: of each cell its passes and what it waits for; many ratios of pass times run at once."""

    def __init__(self, table: ScheduleTable, barrier: bool) -> None:
        place = table.placement
        self._barrier = barrier
        self._cells = [cell for row in table.cells for cell in row]
        rank_of = [rank for rank, row in enumerate(table.cells) for _ in row]
        count, size = len(self._cells), place.ranks / place.model_stages
        whole = {"F": (1, 0, 0), "I": (0, 1, 0), "W": (0, 0, 1), "B": (0, 1, 1)}
        self._passes = size * np.array([np.sum([whole[one.kind] for one in cell], axis=0) for cell in self._cells])
        self._busy = np.array([self._passes[np.array(rank_of) == rank].sum(axis=0) for rank in range(place.ranks)])
        ends: dict[tuple[PassKind, int, int], int] = {
            ("I" if one.kind == "B" else one.kind, one.stage, one.micro_batch): at
            for at, cell in enumerate(self._cells) for one in cell
        }  # fmt: skip
        # Beyond the cells: a row for each rank, when it is free, and a last one for what waits for nothing.
        self._waits = np.full((count, 3), count + place.ranks)
        for at, cell in enumerate(self._cells):
            first = at == 0 or rank_of[at - 1] != rank_of[at]
            self._waits[at, 0] = count + rank_of[at] if first else at - 1
            for column, one in enumerate(cell, start=1):
                need = _need(one, place)
                if need is not None:
                    self._waits[at, column] = ends[need[0], need[1], one.micro_batch]
        starts = [span.start_s for row in one_step(table, PassTimes(1, 1, 1)) for span in row]
        # Cells that start together for equal passes do not wait for each other, whatever the passes take.
        self._together = [np.flatnonzero(np.array(starts) == start) for start in sorted(set(starts))]
        self._last = np.cumsum([len(row) for row in table.cells]) - 1

    def longest(self, points: Floats) -> tuple[Floats, Floats]:
        """Return the bubble at each ratio, and the sum of passes that it is there."""
        ratios = np.arange(len(points))
        free = np.zeros((len(self._last), len(points))), np.zeros((len(self._last), len(points), 3))
        ends = self._run(points, *free)
        if not self._barrier:
            again = self._run(points, *ends)
            ends = again[0] - ends[0], again[1] - ends[1]
        last = ends[0].argmax(axis=0)
        forms: Floats = ends[1][last, ratios] - self._busy.min(axis=0)
        return np.einsum("ij,ij->i", forms, points), forms

    def _run(self, points: Floats, free_s: Floats, free_form: Floats) -> tuple[Floats, Floats]:
        """Return when each rank is done, in time and as a sum of passes, if it is free from `free_s` on."""
        nothing = np.zeros((1, len(points)))
        end_s = np.concatenate([np.zeros((len(self._cells), len(points))), free_s, nothing])
        form = np.concatenate([np.zeros((len(self._cells), len(points), 3)), free_form, np.zeros((1, len(points), 3))])
        ratios = np.arange(len(points))
        for cells in self._together:
            waits = end_s[self._waits[cells]]
            longest = waits.argmax(axis=1)
            source = np.take_along_axis(self._waits[cells], longest, axis=1)
            end_s[cells] = np.take_along_axis(waits, longest[:, None, :], axis=1)[:, 0]
            end_s[cells] += self._passes[cells] @ points.T
            form[cells] = form[source, ratios] + self._passes[cells][:, None, :]
        return end_s[self._last], form[self._last]
