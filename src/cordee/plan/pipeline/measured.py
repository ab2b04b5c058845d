"""A step that ran laid over the one that was predicted: what passes took, what lay between them, and the bubble.

Between two passes that did not wait for anything a runtime still spends time: it is counted as work of the later one,
on both sides. What is left is waiting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from cordee.plan.pipeline.table import Costs, Kind, Placement, Table
from cordee.plan.pipeline.timeline import Timeline, timeline

# (stage, kind, micro-batch, start, end), in seconds of one clock for all ranks.
Ran = tuple[int, str, int, float, float]
Step = Sequence[Sequence[Ran]]


@dataclass(frozen=True, slots=True)
class Overheads:
    """What a runtime adds: before a pass that waits for nothing, and from a pass to one that waits for its output."""

    before_s: float
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Measured:
    """One step that ran, from the first pass of any rank to the last."""

    makespan_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble_s(self) -> float:
        """What the rank that waits longest idles."""
        return self.makespan_s - min(self.busy_s)


def overheads(placement: Placement, steps: Sequence[Step]) -> Overheads:
    """The median of what lies before passes that waited for nothing, and of arrivals at passes that did wait."""
    idle, arrivals = [], []
    for step in steps:
        ends = _ends(step)
        for rank, row in enumerate(step):
            for before, one in pairwise(row):
                source = _source(placement, one)
                there_s = ends[source] if source is not None else 0.0
                if there_s < before[4] - (one[4] - one[3]) / 4:
                    idle.append(one[3] - before[4])
                elif source is not None and there_s > before[4] and placement.rank_of(source[1]) != rank:
                    arrivals.append(one[3] - there_s)
    return Overheads(median(idle) if idle else 0.0, median(arrivals) if arrivals else 0.0)


def measure(step: Step, over: Overheads) -> Measured:
    """What every rank did in a step, and what it waited."""
    start_s = min(row[0][3] for row in step) - over.before_s
    busy_s = tuple(sum(one[4] - one[3] + over.before_s for one in row) for row in step)
    return Measured(max(row[-1][4] for row in step) - start_s, busy_s)


def usual_passes(steps: Sequence[Step]) -> dict[tuple[int, Kind], float]:
    """Seconds of each (stage, pass): the median."""
    found: dict[tuple[int, Kind], list[float]] = {}
    for step in steps:
        for row in step:
            for stage, kind, _, start_s, end_s in row:
                found.setdefault((stage, kind), []).append(end_s - start_s)  # type: ignore[arg-type]
    return {key: median(values) for key, values in found.items()}


def predicted(table: Table, passes: Mapping[tuple[int, Kind], float], over: Overheads) -> Timeline:
    """The table with these passes and what the runtime adds to them."""
    return timeline(table, _between(over), lambda action: passes[action.stage, action.kind] + over.before_s)


def replayed(table: Table, step: Step, over: Overheads) -> Timeline:
    """The table with every pass as long as it was in a step that ran: what its waiting should have been.

    Passes that vary make others wait, so a step of average passes idles less than steps do on average.
    """
    lengths = {(stage, kind, each): end_s - start_s for row in step for stage, kind, each, start_s, end_s in row}
    return timeline(table, _between(over), lambda one: lengths[one.stage, one.kind, one.micro_batch] + over.before_s)


def _between(over: Overheads) -> Costs:
    """A pass that waits for its input has what lies before it behind the arrival."""
    return Costs(1.0, 1.0, 1.0, latency_s=max(0.0, over.arrival_s - over.before_s))


def _ends(step: Step) -> dict[tuple[str, int, int], float]:
    return {("I" if kind == "B" else kind, stage, each): end_s for row in step for stage, kind, each, _, end_s in row}


def _source(placement: Placement, one: Ran) -> tuple[str, int, int] | None:
    """The pass of a neighbour stage that this one needs."""
    stage, kind, each = one[:3]
    if kind == "W":
        return None
    to = placement.before(stage) if kind == "F" else placement.after(stage)
    return None if to is None else ("F" if kind == "F" else "I", to, each)
