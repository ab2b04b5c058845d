"""The fastest layout that fits, out of millions, and the proof that none was passed over.

Of a layout's words two only add work: recomputation and offload. So the time of the same sizes under the lightest
burden (nothing recomputed, nothing offloaded) is a floor under all its burdens. From that follow the two prunings:

1. If the lightest burden fits, it is the best of its row: the other burdens are at least as slow.
2. A row whose floor is not below the best that was already found cannot beat it, whatever its burden.

Both compare numbers that the model itself gives; nothing is estimated. What is left to believe is that no heavier
burden is faster, which is checked for every candidate that is timed, and by tests that compare with brute force.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import product

import numpy as np

from cordee.hardware.arrays import Floats, Ints
from cordee.hardware.catalog import Gpu
from cordee.plan.buffers import cuda_bytes_of
from cordee.plan.layout import Layout, Offload, Recompute
from cordee.plan.memory import peak_bytes
from cordee.plan.space import Choices, Rows, Space, burdens, pipelines, rows, ways
from cordee.plan.step import step_time
from cordee.plan.training import Training
from cordee.plan.wanted import LayoutWanted
from cordee.workload.model import ModelShape

# Rows that are evaluated at once: few enough for the processor's cache, many enough to hide the interpreter.
SLICE = 8192
# Rounding may let a heavier burden appear faster by this fraction; more than that is a fault of the model.
ROUNDING = 1e-9
_MOVE_ACTIVATIONS = ("activations", "both")


@dataclass(frozen=True, slots=True)
class Winner:
    """The best layout of a group: the fastest that fits, else the one nearest to fitting (then `seconds` is None)."""

    layout: Layout
    peak_bytes: float
    seconds: float | None


@dataclass(frozen=True, slots=True)
class SearchSize:
    """The size of a search. Candidates are whole layouts; rows are candidates without their burden."""

    candidates: int
    rows: int
    weighed: int
    timed: int


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that all candidates have in common."""

    shape: ModelShape
    gpu: Gpu
    gpus: int
    training: Training


@dataclass
class _Ladder:
    """The best of each group so far."""

    groups: int
    seconds: Floats = field(init=False)
    nearest: Floats = field(init=False)
    fastest_at: dict[int, tuple[Rows, int]] = field(default_factory=dict)
    nearest_at: dict[int, tuple[Rows, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seconds = np.full(self.groups, np.inf)
        self.nearest = np.full(self.groups, np.inf)

    def offer(self, at: Rows, groups: Ints, times: Floats) -> None:
        """Record rows that fit, with their times."""
        _keep_least(self.seconds, self.fastest_at, at, groups, times)

    def miss(self, at: Rows, groups: Ints, peaks: Floats) -> None:
        """Record rows that do not fit, with what they need."""
        _keep_least(self.nearest, self.nearest_at, at, groups, peaks)


def _keep_least(least: Floats, where: dict[int, tuple[Rows, int]], at: Rows, groups: Ints, values: Floats) -> None:
    better = np.flatnonzero(values < least[groups])
    if not len(better):
        return
    # By group, then by value, then by row: the first of each group is its least.
    order = better[np.lexsort((better, values[better], groups[better]))]
    heads = order[np.r_[True, np.diff(groups[order]) > 0]]
    for row in heads:
        least[groups[row]] = values[row]
        where[int(groups[row])] = (at, int(row))


def count(case: Case, wanted: LayoutWanted, choices: Choices) -> int:
    """Return the number of candidates, before any is pruned."""
    each = len(burdens(wanted, choices))
    return each * sum(len(block) for block in _blocks(case, wanted, choices))


def best_of_meshes(case: Case, wanted: LayoutWanted, choices: Choices) -> tuple[list[Winner], SearchSize]:
    """Return the best layout of every mesh."""
    return _search(case, wanted, choices, lambda block: block.mesh)


def optimum(case: Case, wanted: LayoutWanted, choices: Choices) -> tuple[Winner | None, SearchSize]:
    """Return the one best layout."""
    found, tally = _search(case, wanted, choices, lambda block: np.zeros(len(block), dtype=np.int64))
    return (found[0] if found else None), tally


def brute_force(case: Case, wanted: LayoutWanted, choices: Choices) -> Winner | None:
    """Return the best layout by judging every candidate; for tests and benchmarks."""
    ladder = _Ladder(1)
    for block, burden in product(_blocks(case, wanted, choices), burdens(wanted, choices)):
        at = block.with_words(recompute=burden[0], offload=burden[1])
        for part in _slices(at):
            groups = np.zeros(len(part), dtype=np.int64)
            peaks = _peaks(case, part)
            fits = peaks <= case.gpu.visible_bytes
            ladder.miss(part, groups, np.where(fits, np.inf, peaks))
            ladder.offer(part, groups, np.where(fits, _times(case, part), np.inf))
    found = _winners(case, ladder)
    return found[0] if found else None


def _blocks(case: Case, wanted: LayoutWanted, choices: Choices) -> list[Rows]:
    """Return every layout that divides."""
    found: list[Rows] = []
    meshes = 0
    space = Space(case.shape, case.training, case.gpus, wanted, choices)
    for pp in pipelines(space):
        at = rows(space, pp, first_mesh=meshes)
        if at is not None:
            meshes = int(at.mesh.max()) + 1
            found += ways(space, at)
    return found


def _slices(block: Rows) -> list[Rows]:
    if len(block) <= SLICE:
        return [block]
    return [block.take(np.arange(start, min(start + SLICE, len(block)))) for start in range(0, len(block), SLICE)]


def _search(
    case: Case, wanted: LayoutWanted, choices: Choices, group_of: Callable[[Rows], Ints]
) -> tuple[list[Winner], SearchSize]:
    blocks = _blocks(case, wanted, choices)
    every = burdens(wanted, choices)
    light = every[0]
    # Full recomputation leaves fewer activations to move, so that only times without moving them bound from below.
    moves = light[1] in _MOVE_ACTIVATIONS
    total = sum(len(block) for block in blocks)
    # More recomputation leaves more room for paged moments, so that only times without paging bound from below.
    resident = replace(case, training=replace(case.training, optimizer=replace(case.training.optimizer, paged=False)))
    parts: list[tuple[Floats, Rows]] = []
    for block in blocks:
        for part in _slices(block.with_words(recompute=light[0], offload="none" if moves else light[1])):
            parts.append((_times(resident, part), part))
    # The most promising first: the sooner a good one is found, the fewer are left to weigh.
    parts.sort(key=lambda pair: float(pair[0].min()))
    ladder = _Ladder(max((int(group_of(block).max()) for block in blocks), default=-1) + 1)
    weighed = timed = 0
    for floors, part in parts:
        tried, met = _climb(case, ladder, (floors, part), every, group_of)
        weighed, timed = weighed + tried, timed + met
    return _winners(case, ladder), SearchSize(total * len(every), total, weighed, timed)


def _climb(
    case: Case,
    ladder: _Ladder,
    start: tuple[Floats, Rows],
    every: tuple[tuple[Recompute, Offload], ...],
    group_of: Callable[[Rows], Ints],
) -> tuple[int, int]:
    """Try one slice under all burdens and drop what can no longer win; return the numbers weighed and timed."""
    floors, part = start
    weighed = timed = 0
    for recompute, offload in every:
        groups = group_of(part)
        alive = np.flatnonzero(floors < ladder.seconds[groups])
        floors, part, groups = floors[alive], part.take(alive), groups[alive]
        if not len(part):
            break
        at = part.with_words(recompute=recompute, offload=offload)
        peaks = _peaks(case, at)
        weighed += len(at)
        fits = peaks <= case.gpu.visible_bytes
        ladder.miss(at, groups, np.where(fits, np.inf, peaks))
        good = np.flatnonzero(fits)
        if not len(good):
            continue
        resident = not case.training.optimizer.paged and offload not in _MOVE_ACTIVATIONS
        light = (recompute, offload) == every[0] and resident
        fitting = at.take(good)
        times = floors[good] if light else _times(case, fitting)
        timed += len(good)
        assert (times >= floors[good] * (1 - ROUNDING)).all(), "a heavier burden is never faster"
        ladder.offer(fitting, groups[good], times)
        if light:
            rest = np.flatnonzero(~fits)
            floors, part = floors[rest], part.take(rest)
    return weighed, timed


def _winners(case: Case, ladder: _Ladder) -> list[Winner]:
    """Return the fastest of each group that has one that fits, else its nearest; in the order of the groups."""
    experts = case.shape.experts is not None
    found = []
    for group in range(ladder.groups):
        if group in ladder.fastest_at:
            at, row = ladder.fastest_at[group]
            layout = at.one(row, experts)
            peak = float(peak_bytes(case.shape, layout, case.training, cuda_bytes_of(case.gpu)))
            found.append(Winner(layout, peak, float(ladder.seconds[group])))
        elif group in ladder.nearest_at:
            at, row = ladder.nearest_at[group]
            found.append(Winner(at.one(row, experts), float(ladder.nearest[group]), None))
    return found


def _peaks(case: Case, at: Rows) -> Floats:
    peaks = peak_bytes(case.shape, at.layout, case.training, cuda_bytes_of(case.gpu))
    return np.broadcast_to(np.asarray(peaks, dtype=np.float64), len(at))


def _times(case: Case, at: Rows) -> Floats:
    seconds = step_time(case.shape, case.gpu, at.layout, case.training).total_s
    return np.broadcast_to(np.asarray(seconds, dtype=np.float64), len(at))
