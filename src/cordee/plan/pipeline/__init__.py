"""Pipeline schedules as explicit tables, their timelines, how good they can be, and the best that is found."""

from cordee.plan.pipeline.bound import makespan_bound_s
from cordee.plan.pipeline.check import faults, timeline_faults
from cordee.plan.pipeline.compare import Comparison, Room, Row, compare, overlap_break_even
from cordee.plan.pipeline.schedules import SCHEDULES, PipelineSchedule, build, find_schedule
from cordee.plan.pipeline.search import Found, best_order
from cordee.plan.pipeline.table import Action, Cell, Costs, Placement, Table, cell_text, table_csv, table_of
from cordee.plan.pipeline.timeline import Span, Timeline, timeline

__all__ = [
    "SCHEDULES", "Action", "Cell", "Comparison", "Costs", "Found", "PipelineSchedule", "Placement", "Room", "Row",
    "Span", "Table", "Timeline", "best_order", "build", "cell_text", "compare", "faults", "find_schedule",
    "makespan_bound_s", "overlap_break_even", "table_csv", "table_of", "timeline", "timeline_faults",
]  # fmt: skip
