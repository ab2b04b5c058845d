"""The answer of `cordee pipeline` as one value, and its sentences, for the terminal, the page and the JSON document."""

from dataclasses import dataclass

from cordee.plan.pipeline.compare import ScheduleComparison, ScheduleRow
from cordee.plan.pipeline.measured import MeasuredStep, RecordedStep
from cordee.plan.pipeline.search import SearchedOrder
from cordee.plan.pipeline.table import PassTimes
from cordee.plan.pipeline.timeline import ScheduleTimeline

PLACED = {"line": "line", "loop": "interleaved", "v": "V", "bidirectional": "bidirectional"}


@dataclass(frozen=True)
class Rehearsal:
    """A step on real ranks, and the prediction from the steps before it."""

    step: RecordedStep
    predicted: ScheduleTimeline
    measured: MeasuredStep
    gradient_error: float

    @property
    def off(self) -> float:
        """The relative error of the predicted bubble."""
        return self.measured.bubble_s / self.predicted.bubble_s - 1 if self.predicted.bubble_s else 0.0


@dataclass(frozen=True)
class PipelineAnswer:
    """The comparison, the schedule to show, and whether times are seconds or a unit of the user's."""

    compared: ScheduleComparison
    chosen: ScheduleTimeline
    in_seconds: bool
    ran: Rehearsal | None = None


def format_time(value: float, in_seconds: bool) -> str:
    """Return a time as text.

    >>> format_time(0.0123, True), format_time(63.5, False), format_time(2.0, True)
    ('12.3 ms', '63.5', '2 s')
    """
    if not in_seconds:
        return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e-6:.4g} us" if value else "0 s"


def costs_text(costs: PassTimes, in_seconds: bool) -> str:
    """Return the times of the passes as text."""
    parts = [f"F {format_time(costs.forward_s, in_seconds)}", f"B {format_time(costs.inner_s, in_seconds)}",
             f"W {format_time(costs.weight_s, in_seconds)}"]  # fmt: skip
    if costs.overlapped_s is not None:
        parts.append(f"F&B overlapped {format_time(costs.overlapped_s, in_seconds)} (saves {saving(costs):.1%})")
    else:
        parts.append("overlap saves nothing")
    parts.append(f"latency {format_time(costs.latency_s, in_seconds)}" if costs.latency_s else "no latency")
    if costs.depth:
        parts.append(f"slices {', '.join(f'{size:g}' for size in costs.depth)}")
    return ", ".join(parts)


def saving(costs: PassTimes) -> float:
    """Return the fraction of F and B that an overlapped cell saves."""
    return 1 - costs.both_s / costs.whole_s


def room_text(compared: ScheduleComparison) -> str:
    """Return the memory limit as text."""
    return "unlimited memory" if compared.room is None else f"memory for {compared.room.activations:.4g} activations"


def row_note(row: ScheduleRow, in_seconds: bool) -> str:
    """Return remarks on a schedule: missing memory, copies of the weights, bubble without a barrier."""
    assert row.timeline is not None, "it runs"
    if not row.fits and row.room is not None:
        return f"{row.timeline.peak - row.room:.4g} activations too many"
    notes = []
    if row.timeline.table.placement.copies == 2:
        notes.append("2 copies of the weights")
    if row.timeline.bubble_without_barrier_s < row.timeline.bubble_s - 1e-9:
        notes.append(f"{format_time(row.timeline.bubble_without_barrier_s, in_seconds)} without a barrier")
    return ", ".join(notes)


def verdict(answer: PipelineAnswer) -> list[str]:
    """Return the recommendation: the schedule, a faster searched order, and when overlap pays."""
    compared, choice, best = answer.compared, answer.compared.choice, answer.compared.best
    lines = []
    if choice is not None and choice.timeline is not None:
        run = choice.timeline
        proven = ": no order of its stages is faster" if choice.gap is not None and choice.gap <= 1e-9 else ""
        lines.append(
            f"Use {choice.schedule}: {format_time(run.makespan_s, answer.in_seconds)} a step, "
            f"{run.idle_fraction:.1%} of it idle, {run.peak:g} activations{proven}."
        )
        faster = _faster(best, run)
        if faster is not None and best is not None:
            place = best.timeline.table.placement
            copies = "" if place.copies == 1 else " and 2 copies of the weights"
            lines.append(
                f"A searched schedule ({PLACED[place.shape]}) is {faster:.1%} faster, with "
                f"{best.timeline.peak:g} activations{copies}: --schedule best --csv FILE writes "
                "its table, and cordee.train.pipeline.runtime runs it on torch."
            )
    else:
        lines.append(
            "No named schedule fits this memory; a searched one does: --schedule best --csv FILE writes its table."
        )
    lines.append(overlap_text(compared))
    return lines


def _faster(best: SearchedOrder | None, run: ScheduleTimeline) -> float | None:
    if best is None or best.timeline.makespan_s >= run.makespan_s * (1 - 5e-4):
        return None
    return 1 - best.timeline.makespan_s / run.makespan_s


def overlap_text(compared: ScheduleComparison) -> str:
    """Return when DualPipeV beats ZB-V."""
    even = compared.break_even
    if even is None:
        if compared.micro_batches < 2 * compared.ranks:
            return f"DualPipeV needs at least {2 * compared.ranks} micro-batches."
        return "With these times DualPipeV is slower than ZB-V whatever overlap saves."
    if even == 0:
        return "With these times DualPipeV is as fast as ZB-V even if overlap saves nothing."
    return (
        f"DualPipeV beats ZB-V once an overlapped cell saves {even:.1%} of F and B; torch runs the two passes "
        "in turn, which saves nothing, unless a function is registered for the cell."
    )


def ran_text(ran: Rehearsal) -> str:
    """Return the measured step beside the predicted one."""
    bubbles = [format_time(run.bubble_s, True) for run in (ran.measured, ran.predicted)]
    steps = [format_time(run.makespan_s, True) for run in (ran.measured, ran.predicted)]
    return (
        f"bubble {bubbles[0]} measured, {bubbles[1]} predicted ({ran.off:+.1%}); step {steps[0]} measured, {steps[1]} "
        f"predicted; relative gradient error {ran.gradient_error:.1e}"
    )
