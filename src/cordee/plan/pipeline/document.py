"""The answer as a JSON document: times in seconds, or in the unit of the given numbers.

Version 2; the schemas are `PipelineDocument.model_json_schema()` and that of `TableDocument`. New keys may come.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict

from cordee.plan.pipeline.answer import PipelineAnswer, verdict
from cordee.plan.pipeline.schedules import find_schedule
from cordee.plan.pipeline.table import PassTimes, PlacementShape, ScheduleTable
from cordee.plan.pipeline.timeline import ScheduleTimeline


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RunDocument(_Row):
    """One table in time."""

    placement: PlacementShape
    stages: int
    weight_copies: int
    step_s: float
    bubble_s: float
    bubble_s_without_barrier: float
    idle_fraction: float
    idle_s: tuple[float, ...]
    peak_activations: tuple[float, ...]


class ScheduleDocument(_Row):
    """One named schedule, or why it does not exist for these numbers."""

    schedule: str
    source: str
    splits_backward: bool
    misfit: str | None
    fits: bool
    bound_s: float | None
    over_bound: float | None
    run: RunDocument | None


class SearchedDocument(_Row):
    """The best order found for one placement of the stages."""

    placement: PlacementShape
    bound_s: float
    over_bound: float
    optimal: bool
    orders_tried: int
    run: RunDocument


class RehearsedDocument(_Row):
    """A step that ran on ranks of this machine."""

    bubble_s_measured: float
    bubble_s_predicted: float
    step_s_measured: float
    step_s_predicted: float
    gradient_error: float


class PipelineDocument(_Row):
    """Everything that was found."""

    version: int = 2
    ranks: int
    micro_batches: int
    unit: Literal["s", "given"]
    times: PassTimes
    memory_limit_activations: float | None
    schedules: tuple[ScheduleDocument, ...]
    searched: tuple[SearchedDocument, ...]
    recommended: str | None
    best_placement: PlacementShape | None
    overlap_break_even: float | None
    sentences: tuple[str, ...]
    shown: str
    rehearsed: RehearsedDocument | None


class TableDocument(_Row):
    """A table of the user's: its violations, or its run."""

    version: int = 2
    table: str
    ranks: int
    placement: PlacementShape
    micro_batches: int
    times: PassTimes
    violations: tuple[str, ...]
    run: RunDocument | None


def pipeline_document(answer: PipelineAnswer) -> PipelineDocument:
    """Return the document of a comparison."""
    compared, best, ran = answer.compared, answer.compared.best, answer.ran
    return PipelineDocument(
        ranks=compared.ranks,
        micro_batches=compared.micro_batches,
        unit="s" if answer.in_seconds else "given",
        times=compared.costs,
        memory_limit_activations=None if compared.room is None else compared.room.activations,
        schedules=tuple(
            ScheduleDocument(
                schedule=row.schedule, source=find_schedule(row.schedule).source,
                splits_backward=find_schedule(row.schedule).splits_backward,
                misfit=row.misfit, fits=row.fits, bound_s=row.bound_s, over_bound=row.gap,
                run=None if row.timeline is None else _run(row.timeline),
            ) for row in compared.rows
        ),
        searched=tuple(
            SearchedDocument(
                placement=found.timeline.table.placement.shape, bound_s=found.bound_s, over_bound=found.gap,
                optimal=found.optimal, orders_tried=found.tried, run=_run(found.timeline),
            ) for found in compared.found
        ),
        recommended=None if compared.choice is None else compared.choice.schedule,
        best_placement=None if best is None else best.timeline.table.placement.shape,
        overlap_break_even=compared.break_even,
        sentences=tuple(verdict(answer)),
        shown=answer.chosen.table.name,
        rehearsed=None if ran is None else RehearsedDocument(
            bubble_s_measured=ran.measured.bubble_s, bubble_s_predicted=ran.predicted.bubble_s,
            step_s_measured=ran.measured.makespan_s, step_s_predicted=ran.predicted.makespan_s,
            gradient_error=ran.gradient_error,
        ),
    )  # fmt: skip


def table_document(
    table: ScheduleTable, violations: Sequence[str], run: ScheduleTimeline | None, costs: PassTimes
) -> TableDocument:
    """Return the document of a table of the user's."""
    return TableDocument(
        table=table.name, ranks=table.placement.ranks, placement=table.placement.shape,
        micro_batches=table.micro_batches, times=costs, violations=tuple(violations),
        run=None if run is None else _run(run),
    )  # fmt: skip


def _run(run: ScheduleTimeline) -> RunDocument:
    place = run.table.placement
    return RunDocument(
        placement=place.shape, stages=place.stages, weight_copies=place.copies, step_s=run.makespan_s,
        bubble_s=run.bubble_s, bubble_s_without_barrier=run.bubble_without_barrier_s, idle_fraction=run.idle_fraction,
        idle_s=run.idle_s, peak_activations=run.peaks,
    )  # fmt: skip
