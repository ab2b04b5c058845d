"""Pipeline schedules as tables: records, timelines, prices, lower bounds, and a search for better orders."""

from cordee.plan.pipeline.bound import makespan_bound_s
from cordee.plan.pipeline.check import timing_violations, violations
from cordee.plan.pipeline.compare import MemoryLimit, ScheduleComparison, ScheduleRow, compare, overlap_break_even
from cordee.plan.pipeline.schedules import SCHEDULES, PipelineSchedule, build, find_schedule
from cordee.plan.pipeline.search import SearchedOrder, best_order
from cordee.plan.pipeline.table import (
    Action,
    Cell,
    PassTimes,
    ScheduleTable,
    StagePlacement,
    cell_text,
    table_csv,
    table_of,
)
from cordee.plan.pipeline.timeline import CellSpan, ScheduleTimeline, timeline

__all__ = [
    "SCHEDULES",
    "Action",
    "Cell",
    "CellSpan",
    "MemoryLimit",
    "PassTimes",
    "PipelineSchedule",
    "ScheduleComparison",
    "ScheduleRow",
    "ScheduleTable",
    "ScheduleTimeline",
    "SearchedOrder",
    "StagePlacement",
    "best_order",
    "build",
    "cell_text",
    "compare",
    "find_schedule",
    "makespan_bound_s",
    "overlap_break_even",
    "table_csv",
    "table_of",
    "timeline",
    "timing_violations",
    "violations",
]  # fmt: skip
