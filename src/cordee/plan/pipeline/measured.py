"""A recorded step compared with a prediction: times of passes, overheads of the runtime, and the bubble.

A runtime spends time between two passes even if the later one waits for nothing. That overhead counts as work of the
later pass, in the prediction and in the measurement; the rest is waiting.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from cordee.plan.pipeline.table import PassKind, PassTimes, ScheduleTable, StagePlacement
from cordee.plan.pipeline.timeline import ScheduleTimeline, timeline

# (stage, kind, micro-batch, start, end), in seconds of one clock for all ranks.
RecordedPass = tuple[int, str, int, float, float]
RecordedStep = Sequence[Sequence[RecordedPass]]


@dataclass(frozen=True, slots=True)
class RuntimeOverheads:
    """Overheads of a runtime: before a pass that waits for nothing, and from a pass to one that waits for it."""

    before_s: float
    arrival_s: float


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One recorded step, from the first pass of any rank to the last."""

    makespan_s: float
    busy_s: tuple[float, ...]

    @property
    def bubble_s(self) -> float:
        """The idle time of the rank that waits longest."""
        return self.makespan_s - min(self.busy_s)


def overheads(placement: StagePlacement, steps: Sequence[RecordedStep]) -> RuntimeOverheads:
    """Return the medians of the overhead before passes that waited for nothing, and of the time from an arrival on."""
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
    return RuntimeOverheads(median(idle) if idle else 0.0, median(arrivals) if arrivals else 0.0)


def measure(step: RecordedStep, over: RuntimeOverheads) -> MeasuredStep:
    """Return the length of a step and the busy time of every rank."""
    start_s = min(row[0][3] for row in step) - over.before_s
    busy_s = tuple(sum(one[4] - one[3] + over.before_s for one in row) for row in step)
    return MeasuredStep(max(row[-1][4] for row in step) - start_s, busy_s)


def median_passes(steps: Sequence[RecordedStep]) -> dict[tuple[int, PassKind], float]:
    """Return the median seconds of each (stage, pass)."""
    found: dict[tuple[int, PassKind], list[float]] = {}
    for step in steps:
        for row in step:
            for stage, kind, _, start_s, end_s in row:
                found.setdefault((stage, kind), []).append(end_s - start_s)  # type: ignore[arg-type]
    return {key: median(values) for key, values in found.items()}


def predicted(
    table: ScheduleTable, passes: Mapping[tuple[int, PassKind], float], over: RuntimeOverheads
) -> ScheduleTimeline:
    """Return the timeline of a table with these pass times and the runtime's overheads."""
    return timeline(table, _between(over), lambda action: passes[action.stage, action.kind] + over.before_s)


def replayed(table: ScheduleTable, step: RecordedStep, over: RuntimeOverheads) -> ScheduleTimeline:
    """Return the timeline of a table with every pass as long as in a recorded step.

    Passes of varying length make others wait, so a step of mean passes idles less than steps do on average.
    """
    lengths = {(stage, kind, each): end_s - start_s for row in step for stage, kind, each, start_s, end_s in row}
    return timeline(table, _between(over), lambda one: lengths[one.stage, one.kind, one.micro_batch] + over.before_s)


def _between(over: RuntimeOverheads) -> PassTimes:
    """Return pass times whose latency is what an arrival adds to the overhead that every pass has before it."""
    return PassTimes(1.0, 1.0, 1.0, latency_s=max(0.0, over.arrival_s - over.before_s))


def _ends(step: RecordedStep) -> dict[tuple[str, int, int], float]:
    return {("I" if kind == "B" else kind, stage, each): end_s for row in step for stage, kind, each, _, end_s in row}


def _source(placement: StagePlacement, one: RecordedPass) -> tuple[str, int, int] | None:
    """Return the pass of a neighbour stage that this one needs."""
    stage, kind, each = one[:3]
    if kind == "W":
        return None
    to = placement.previous(stage) if kind == "F" else placement.next(stage)
    return None if to is None else ("F" if kind == "F" else "I", to, each)
