"""Checks of a table: every pass once, on the rank of its stage, in an order that can run, within the memory.

This module shares no code with those that build and time tables: it reads cells and spans alone.
"""

from collections import Counter
from itertools import pairwise

from cordee.plan.pipeline.table import Action, PassTimes, ScheduleTable, StagePlacement, cell_text
from cordee.plan.pipeline.timeline import ScheduleTimeline, cell_s, peaks, sizes_of
from cordee.units import plural

_EPSILON = 1e-6


def violations(table: ScheduleTable, costs: PassTimes | None = None, memory: float | None = None) -> tuple[str, ...]:
    """Return the violations of a table; none if it is valid.

    Args:
        table: the table to check.
        costs: sizes of stages, for the memory; None: equal ones.
        memory: the most activations a rank may hold, in micro-batches over 1/p of the depth.
    """
    found = _counts(table) or _orders(table)
    if not found:
        found = _deadlock(table)
    if not found and memory is not None:
        found = [
            f"rank {rank} holds {peak:g} activations, {peak - memory:g} over its limit of {memory:g}"
            for rank, peak in enumerate(peaks(table, costs or PassTimes(1, 1, 1)))
            if peak > memory + _EPSILON
        ]
    return tuple(found)


def _counts(table: ScheduleTable) -> list[str]:
    place, count = table.placement, table.model_micro_batches
    found = []
    seen: Counter[Action] = Counter()
    if len(table.cells) != place.ranks:
        return [f"the table has {plural(len(table.cells), 'row')} for {plural(place.ranks, 'rank')}"]
    for rank, row in enumerate(table.cells):
        for cell in row:
            if len(cell) != 1 and [action.kind for action in cell] != ["F", "B"]:
                found.append(f"rank {rank} overlaps {cell_text(cell)}: only a forward and a backward overlap")
            for action in cell:
                seen[action] += 1
                if not 0 <= action.stage < place.stages or place.rank_of(action.stage) != rank:
                    found.append(f"rank {rank} runs {action}, but does not hold stage {action.stage}")
                elif not 0 <= action.micro_batch < count:
                    found.append(f"rank {rank} runs {action}, but there are {count} micro-batches")
    for stage in range(place.stages):
        for each in range(count):
            times = {kind: seen[Action(stage, kind, each)] for kind in ("F", "I", "W", "B")}
            whole, split = times["B"] == 1 and not times["I"] + times["W"], times["I"] == times["W"] == 1
            if times["F"] != 1 or not (whole or (split and not times["B"])):
                counted = ", ".join(f"{kind} {number} times" for kind, number in times.items())
                found.append(f"stage {stage} runs micro-batch {each}: {counted}; it needs F and B, or F, I and W, once")
    return found


def _orders(table: ScheduleTable) -> list[str]:
    """Return passes that run before their inputs on the same rank."""
    found = []
    for rank, row in enumerate(table.cells):
        done: set[Action] = set()
        for cell in row:
            for action in cell:
                needs = {"F": None, "W": "I"}.get(action.kind, "F")
                if needs is not None and Action(action.stage, needs, action.micro_batch) not in done:  # type: ignore[arg-type]
                    found.append(f"rank {rank} runs {action} before {action.stage}{needs}{action.micro_batch}")
            done.update(cell)
    return found


def _deadlock(table: ScheduleTable) -> list[str]:
    """Return the ranks that wait for ever: run all cells whose inputs are there until none is left or none can run."""
    place = table.placement
    done: set[tuple[str, int, int]] = set()
    at = [0] * len(table.cells)
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(table.cells):
            while at[rank] < len(row) and all(_ready(action, table, done) for action in row[at[rank]]):
                done.update(("F" if action.kind == "F" else "I", action.stage, action.micro_batch)
                            for action in row[at[rank]] if action.kind != "W")  # fmt: skip
                at[rank] += 1
                moved = True
    return [
        f"rank {rank} waits for ever before {cell_text(table.cells[rank][at[rank]])}"
        for rank in range(place.ranks)
        if at[rank] < len(table.cells[rank])
    ]


def _ready(action: Action, table: ScheduleTable, done: set[tuple[str, int, int]]) -> bool:
    if action.kind == "W":
        return True
    source = table.placement.previous(action.stage) if action.kind == "F" else table.placement.next(action.stage)
    return source is None or ("F" if action.kind == "F" else "I", source, action.micro_batch) in done


def _needs(action: Action, place: StagePlacement) -> list[tuple[str, int]]:
    if action.kind == "W":
        return [("I", action.stage)]
    if action.kind == "F":
        source = place.previous(action.stage)
        return [] if source is None else [("F", source)]
    source = place.next(action.stage)
    return [("F", action.stage)] + ([] if source is None else [("I", source)])


def timing_violations(run: ScheduleTimeline, costs: PassTimes) -> tuple[str, ...]:
    """Return violations of a timeline: overlapping cells on a rank, a pass before its input, a wrong length."""
    found, table = [], run.table
    sizes, place = sizes_of(table.placement, costs), table.placement
    ends: dict[tuple[str, int, int], float] = {
        ("I" if action.kind == "B" else action.kind, action.stage, action.micro_batch): span.end_s
        for row in run.spans
        for span in row
        for action in span.cell
    }
    for rank, row in enumerate(run.spans):
        for one, other in pairwise(row):
            if other.start_s < one.end_s - _EPSILON:
                found.append(f"rank {rank} runs {cell_text(other.cell)} before {cell_text(one.cell)} has ended")
        for span in row:
            if abs(span.length_s - cell_s(span.cell, sizes, costs)) > _EPSILON:
                found.append(f"rank {rank} runs {cell_text(span.cell)} for {span.length_s:g}")
            for action in span.cell:
                for kind, stage in _needs(action, place):
                    away_s = costs.latency_s if place.rank_of(stage) != rank else 0.0
                    if span.start_s < ends[kind, stage, action.micro_batch] + away_s - _EPSILON:
                        found.append(f"rank {rank} runs {action} before {stage}{kind}{action.micro_batch} is there")
    return tuple(found)
