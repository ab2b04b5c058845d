"""The answer as a JSON document: times in seconds, or in the unit of the given numbers.

Version 2; the schemas are `PipelineDocument.model_json_schema()` and that of `TableDocument`. New keys may come.
"""

from collections.abc import Sequence
from typing import Literal

from cordee.document import Row, read_from
from cordee.plan.pipeline.answer import PipelineAnswer, verdict
from cordee.plan.pipeline.table import PassTimes, PlacementShape, ScheduleTable
from cordee.plan.pipeline.timeline import ScheduleTimeline


class RunDocument(Row):
    """One table in time."""

    placement: PlacementShape = read_from("table", "placement", "shape")
    stages: int = read_from("table", "placement", "stages")
    weight_copies: int = read_from("table", "placement", "copies")
    step_s: float = read_from("makespan_s")
    bubble_s: float
    bubble_s_without_barrier: float = read_from("bubble_without_barrier_s")
    idle_fraction: float
    idle_s: tuple[float, ...]
    peak_activations: tuple[float, ...] = read_from("peaks")


class ScheduleDocument(Row):
    """One named schedule, or why it does not exist for these numbers."""

    schedule: str
    source: str = read_from("record", "source")
    splits_backward: bool = read_from("record", "splits_backward")
    misfit: str | None
    fits: bool
    bound_s: float | None
    over_bound: float | None = read_from("gap")
    run: RunDocument | None = read_from("timeline")


class SearchedDocument(Row):
    """The best order found for one placement of the stages."""

    placement: PlacementShape = read_from("timeline", "table", "placement", "shape")
    bound_s: float
    over_bound: float = read_from("gap")
    optimal: bool
    orders_tried: int = read_from("tried")
    run: RunDocument = read_from("timeline")


class RehearsedDocument(Row):
    """A step that ran on ranks of this machine."""

    bubble_s_measured: float = read_from("measured", "bubble_s")
    bubble_s_predicted: float = read_from("predicted", "bubble_s")
    step_s_measured: float = read_from("measured", "makespan_s")
    step_s_predicted: float = read_from("predicted", "makespan_s")
    gradient_error: float


class PipelineDocument(Row):
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


class TableDocument(Row):
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
    compared, best = answer.compared, answer.compared.best
    return PipelineDocument.model_validate(
        {
            "ranks": compared.ranks,
            "micro_batches": compared.micro_batches,
            "unit": "s" if answer.in_seconds else "given",
            "times": compared.costs,
            "memory_limit_activations": compared.room and compared.room.activations,
            "schedules": compared.rows,
            "searched": compared.found,
            "recommended": compared.choice and compared.choice.schedule,
            "best_placement": best and best.timeline.table.placement.shape,
            "overlap_break_even": compared.break_even,
            "sentences": tuple(verdict(answer)),
            "shown": answer.chosen.table.name,
            "rehearsed": answer.ran,
        }
    )


def table_document(
    table: ScheduleTable, violations: Sequence[str], run: ScheduleTimeline | None, costs: PassTimes
) -> TableDocument:
    """Return the document of a table of the user's."""
    return TableDocument(
        table=table.name,
        ranks=table.placement.ranks,
        placement=table.placement.shape,
        micro_batches=table.micro_batches,
        times=costs,
        violations=tuple(violations),
        run=None if run is None else RunDocument.model_validate(run),
    )
