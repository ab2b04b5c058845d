"""What `cordee pipeline` prints: the schedules beside each other, the chosen one drawn, what to use; and its JSON."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from cordee.cli.plan_text import console, indented, title
from cordee.plan.pipeline import Comparison, Costs, Found, Row, Table, Timeline
from cordee.plan.pipeline.measured import Measured, Step

STYLES = {"F": "white on blue", "I": "black on green", "W": "black on yellow", "B": "white on dark_green"}
PLACED = {"line": "in line", "loop": "in a loop", "vee": "in a V", "two-way": "two ways"}
RANKS_DRAWN = 16


@dataclass(frozen=True)
class Ran:
    """A step on real ranks beside the one that was predicted from the steps before."""

    step: Step
    predicted: Timeline
    measured: Measured
    gradient_error: float

    @property
    def off(self) -> float:
        """The bubble measured, over the one predicted."""
        return self.measured.bubble_s / self.predicted.bubble_s - 1 if self.predicted.bubble_s else 0.0


@dataclass(frozen=True)
class Asked:
    """The comparison, the schedule that is shown, and whether times are seconds or just a unit."""

    compared: Comparison
    chosen: Timeline
    in_seconds: bool
    ran: Ran | None = None


def said(value: float, in_seconds: bool) -> str:
    """A time for people.

    >>> said(0.0123, True), said(63.5, False), said(2.0, True)
    ('12.3 ms', '63.5', '2 s')
    """
    if not in_seconds:
        return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value / 1e-6:.4g} us" if value else "0 s"


def print_comparison(asked: Asked) -> None:
    """All schedules, the chosen one as a picture, and the verdict."""
    out, compared = console(), asked.compared
    costs = compared.costs
    out.print(
        Text.assemble((f"{compared.ranks} ranks", "bold"), ", ", (f"{compared.micro_batches} micro-batches", "bold"))
    )
    out.print(f"{costs_text(costs, asked.in_seconds)}, {room_text(compared)}", style="dim")
    title(out, "Schedules", "a step after which all ranks meet; activations of one micro-batch over a rank's layers")
    out.print(_grid(asked))
    title(out, f"{asked.chosen.table.name}", f"{PLACED[asked.chosen.table.placement.shape]}; numbers are micro-batches")
    for line in drawn(asked.chosen, out.width):
        out.print(line, no_wrap=True, overflow="crop")
    _key(out, asked.chosen)
    title(out, "Which")
    for sentence in verdict(asked):
        indented(out, sentence, style="")
    if asked.ran is not None:
        title(out, "Rehearsed", f"{compared.ranks} gloo ranks of this machine, waits for passes")
        indented(out, ran_text(asked.ran), style="")


def costs_text(costs: Costs, in_seconds: bool) -> str:
    """What is assumed of times."""
    parts = [f"F {said(costs.forward_s, in_seconds)}", f"B {said(costs.inner_s, in_seconds)}",
             f"W {said(costs.weight_s, in_seconds)}"]  # fmt: skip
    if costs.overlapped_s is not None:
        parts.append(f"F&B overlapped {said(costs.overlapped_s, in_seconds)} (saves {saving(costs):.1%})")
    else:
        parts.append("nothing gained by overlap")
    parts.append(f"latency {said(costs.latency_s, in_seconds)}" if costs.latency_s else "no latency")
    if costs.depth:
        parts.append(f"slices {', '.join(f'{size:g}' for size in costs.depth)}")
    return ", ".join(parts)


def saving(costs: Costs) -> float:
    """The share of F and B that an overlapped cell saves."""
    return 1 - costs.both_s / costs.whole_s


def room_text(compared: Comparison) -> str:
    """The memory limit in words."""
    return "any memory" if compared.room is None else f"room for {compared.room.activations:.4g} activations"


def _grid(asked: Asked) -> Grid:
    compared = asked.compared
    table = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("  schedule", no_wrap=True)
    for name in ("step", "bubble", "idle", "peak", "over bound"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in compared.rows:
        if row.timeline is None:
            table.add_row(Text(f"  {row.schedule}", "dim"), "", "", "", "", "", Text(row.why_not or "", "dim"))
            continue
        chosen = row is compared.choice
        style = "bold" if chosen else ("" if row.fits else "dim")
        note = ("<- use this; " if chosen else "") + row_note(row, asked.in_seconds)
        table.add_row(
            Text(f"  {row.schedule}", style),
            *_cells(row.timeline, row.gap, asked.in_seconds, style),
            note.removesuffix("; "),
        )
    for found in compared.found:
        where = PLACED[found.timeline.table.placement.shape]
        note = "no order is faster" if found.optimal else ""
        cells = _cells(found.timeline, found.gap, asked.in_seconds, "cyan")
        table.add_row(Text(f"  best {where}", "cyan"), *cells, Text(note, "cyan"))
    return table


def row_note(row: Row, in_seconds: bool) -> str:
    """What has to be said of a schedule beside its numbers."""
    assert row.timeline is not None, "it runs"
    if not row.fits and row.room is not None:
        return f"{row.timeline.peak - row.room:.4g} too many"
    notes = []
    if row.timeline.table.placement.chains == 2:
        notes.append("2 copies of the weights")
    if row.timeline.bubble_apart_s < row.timeline.bubble_s - 1e-9:
        notes.append(f"{said(row.timeline.bubble_apart_s, in_seconds)} without a barrier")
    return ", ".join(notes)


def _cells(run: Timeline, gap: float | None, in_seconds: bool, style: str) -> list[Text]:
    over = "" if gap is None else f"{max(0.0, gap):.1%}"
    cells = [
        said(run.makespan_s, in_seconds),
        said(run.bubble_s, in_seconds),
        f"{run.idle_fraction:.1%}",
        f"{run.peak:g}",
    ]
    return [Text(cell, style) for cell in (*cells, over)]


def drawn(run: Timeline, width: int) -> list[Text]:
    """The timeline in cells of a terminal: a line for each rank, the passes' micro-batches in their colours."""
    columns = max(20, width - 10)
    step_s = run.makespan_s / columns
    lines = []
    for rank, row in enumerate(run.spans[:RANKS_DRAWN]):
        line = Text(f"  rank {rank:<2} " if len(run.spans) > 9 else f"  rank {rank} ")
        at = 0
        for column in range(columns):
            time_s = (column + 0.5) * step_s
            while at < len(row) and row[at].end_s <= time_s:
                at += 1
            if at == len(row) or row[at].start_s > time_s:
                line.append("·", "dim")
                continue
            span = row[at]
            # An overlapped cell shows its forward first, then its backward.
            late = len(span.cell) > 1 and (time_s - span.start_s) * len(span.cell) >= span.length_s
            action = span.cell[1 if late else 0]
            line.append(str(action.micro_batch % 10), STYLES[action.kind])
        lines.append(line)
    if len(run.spans) > RANKS_DRAWN:
        lines.append(Text(f"  and {len(run.spans) - RANKS_DRAWN} ranks more", "dim"))
    return lines


def _key(out: Console, run: Timeline) -> None:
    seen = {action.kind for row in run.spans for span in row for action in span.cell}
    key = Text("  ")
    for kind, name in (("F", "forward"), ("I", "gradient of input"), ("W", "of weights"), ("B", "whole backward")):
        if kind in seen:
            key.append(f" {kind} ", STYLES[kind])
            key.append(f" {name}  ", "dim")
    out.print(key.append("· idle", "dim"))


def verdict(asked: Asked) -> list[str]:
    """Which to use and why, what a search adds, and from what saving on overlap pays."""
    compared, choice, best = asked.compared, asked.compared.choice, asked.compared.best
    lines = []
    if choice is not None and choice.timeline is not None:
        run = choice.timeline
        proven = ": no order of its stages is faster" if choice.gap is not None and choice.gap <= 1e-9 else ""
        lines.append(
            f"Use {choice.schedule}: {said(run.makespan_s, asked.in_seconds)} a step, "
            f"{run.idle_fraction:.1%} of it idle, {run.peak:g} activations{proven}."
        )
        faster = _faster(best, run)
        if faster is not None and best is not None:
            place = best.timeline.table.placement
            copies = "" if place.chains == 1 else " and 2 copies of the weights"
            lines.append(
                f"A searched order {PLACED[place.shape]} is {faster:.1%} faster, with "
                f"{best.timeline.peak:g} activations{copies}: --schedule best --csv FILE writes "
                "its table, and cordee.train.pipeline.runtime runs it on torch."
            )
    else:
        lines.append(
            "No named schedule fits this memory; a searched order does: --schedule best --csv FILE writes its table."
        )
    lines.append(overlap_text(compared))
    return lines


def _faster(best: Found | None, run: Timeline) -> float | None:
    if best is None or best.timeline.makespan_s >= run.makespan_s * (1 - 5e-4):
        return None
    return 1 - best.timeline.makespan_s / run.makespan_s


def overlap_text(compared: Comparison) -> str:
    """When DualPipeV is worth it."""
    even = compared.break_even
    if even is None:
        if compared.micro_batches < 2 * compared.ranks:
            return f"DualPipeV needs {2 * compared.ranks} micro-batches to be compared with ZB-V."
        return "DualPipeV never beats ZB-V with these times, however much its overlapped cells save."
    if even == 0:
        return "DualPipeV is as fast as ZB-V with these times even if overlap saves nothing."
    return (
        f"DualPipeV beats ZB-V once an overlapped cell saves {even:.1%} of F and B; torch runs the two in turn, "
        "which saves nothing, unless a function is registered for the cell."
    )


def ran_text(ran: Ran) -> str:
    """What was measured."""
    return (
        f"bubble {said(ran.measured.bubble_s, True)} measured, {said(ran.predicted.bubble_s, True)} predicted "
        f"({ran.off:+.1%}); step {said(ran.measured.makespan_s, True)} and {said(ran.predicted.makespan_s, True)}; "
        f"gradients are off by {ran.gradient_error:.1e} of the unpipelined model's"
    )


def print_own(own: Table, wrong: Sequence[str], run: Timeline | None, costs: Costs, *, in_seconds: bool) -> None:
    """A table of the user's."""
    out = console()
    place = own.placement
    out.print(
        Text.assemble((own.name, "bold"), f": {place.ranks} ranks, {place.stages} stages {PLACED[place.shape]}, "
                      f"{own.micro_batches} micro-batches")
    )  # fmt: skip
    out.print(costs_text(costs, in_seconds), style="dim")
    for each in wrong[:8]:
        out.print(f"  wrong: {each}", style="red")
    if len(wrong) > 8:
        out.print(f"  and {len(wrong) - 8} faults more", style="red")
    if run is not None:
        out.print(
            f"  valid: {said(run.makespan_s, in_seconds)} a step, bubble {said(run.bubble_s, in_seconds)}, "
            f"{run.peak:g} activations"
        )
        for line in drawn(run, out.width):
            out.print(line, no_wrap=True, overflow="crop")


def own_json(own: Table, wrong: Sequence[str], run: Timeline | None, costs: Costs) -> dict[str, Any]:
    """A table of the user's, for programs."""
    return {
        "version": 1, "table": own.name, "ranks": own.placement.ranks, "placement": own.placement.shape,
        "micro_batches": own.micro_batches, "times": asdict(costs), "faults": list(wrong),
        "run": run and _run_json(run),
    }  # fmt: skip


def comparison_json(asked: Asked) -> dict[str, Any]:
    """Everything, for programs. Times are seconds, or the unit that they were given in."""
    compared, best, ran = asked.compared, asked.compared.best, asked.ran
    return {
        "version": 1,
        "ranks": compared.ranks,
        "micro_batches": compared.micro_batches,
        "unit": "s" if asked.in_seconds else "given",
        "times": asdict(compared.costs),
        "room_activations": compared.room and compared.room.activations,
        "schedules": [
            {
                "schedule": row.schedule, "why_not": row.why_not, "fits": row.fits, "bound_s": row.bound_s,
                "over_bound": row.gap, "run": row.timeline and _run_json(row.timeline),
            }
            for row in compared.rows
        ],
        "searched": [
            {"placement": found.timeline.table.placement.shape, "bound_s": found.bound_s, "over_bound": found.gap,
             "optimal": found.optimal, "orders_tried": found.tried, "run": _run_json(found.timeline)}
            for found in compared.found
        ],
        "use": compared.choice and compared.choice.schedule,
        "best_placement": best and best.timeline.table.placement.shape,
        "overlap_break_even": compared.break_even,
        "says": verdict(asked),
        "shown": asked.chosen.table.name,
        "rehearsed": ran and {
            "bubble_s_measured": ran.measured.bubble_s, "bubble_s_predicted": ran.predicted.bubble_s,
            "step_s_measured": ran.measured.makespan_s, "step_s_predicted": ran.predicted.makespan_s,
            "gradient_error": ran.gradient_error,
        },
    }  # fmt: skip


def _run_json(run: Timeline) -> dict[str, Any]:
    place = run.table.placement
    return {
        "placement": place.shape, "stages": place.stages, "weight_copies": place.chains, "step_s": run.makespan_s,
        "bubble_s": run.bubble_s, "bubble_s_without_barrier": run.bubble_apart_s, "idle_fraction": run.idle_fraction,
        "idle_s": list(run.idle_s), "peak_activations": list(run.peaks),
    }  # fmt: skip
