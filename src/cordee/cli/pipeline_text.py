"""The text of `cordee pipeline`: the schedules side by side, a picture of one, and the recommendation."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from cordee.cli.plan_text import console, indented, title
from cordee.plan.pipeline import (
    PassTimes,
    ScheduleTable,
    ScheduleTimeline,
)
from cordee.plan.pipeline.answer import (
    PLACED,
    PipelineAnswer,
    costs_text,
    format_time,
    ran_text,
    room_text,
    row_note,
    verdict,
)

STYLES = {"F": "white on blue", "I": "black on green", "W": "black on yellow", "B": "white on dark_green"}
RANKS_DRAWN = 16


def print_comparison(answer: PipelineAnswer) -> None:
    """Print all schedules, a picture of the chosen one, and the recommendation."""
    out, compared = console(), answer.compared
    costs = compared.costs
    out.print(
        Text.assemble((f"{compared.ranks} ranks", "bold"), ", ", (f"{compared.micro_batches} micro-batches", "bold"))
    )
    out.print(f"{costs_text(costs, answer.in_seconds)}, {room_text(compared)}", style="dim")
    title(out, "Schedules", "with a barrier after each step; peak: activations of micro-batches over a rank's layers")
    out.print(_grid(answer))
    title(
        out,
        f"{answer.chosen.table.name}",
        f"{PLACED[answer.chosen.table.placement.shape]} placement; numbers are micro-batches",
    )
    for line in drawn(answer.chosen, out.width):
        out.print(line, no_wrap=True, overflow="crop")
    _key(out, answer.chosen)
    title(out, "Recommendation")
    for sentence in verdict(answer):
        indented(out, sentence, style="")
    if answer.ran is not None:
        title(out, "Rehearsal", f"{compared.ranks} gloo ranks of this machine; passes are timed waits")
        indented(out, ran_text(answer.ran), style="")


def _grid(answer: PipelineAnswer) -> Grid:
    compared = answer.compared
    table = Grid(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("  schedule", no_wrap=True)
    for name in ("step", "bubble", "idle", "peak", "gap"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for row in compared.rows:
        if row.timeline is None:
            table.add_row(Text(f"  {row.schedule}", "dim"), "", "", "", "", "", Text(row.misfit or "", "dim"))
            continue
        chosen = row is compared.choice
        style = "bold" if chosen else ("" if row.fits else "dim")
        note = ("recommended; " if chosen else "") + row_note(row, answer.in_seconds)
        table.add_row(
            Text(f"  {row.schedule}", style),
            *_cells(row.timeline, row.gap, answer.in_seconds, style),
            note.removesuffix("; "),
        )
    for found in compared.found:
        where = PLACED[found.timeline.table.placement.shape]
        note = "optimal" if found.optimal else ""
        cells = _cells(found.timeline, found.gap, answer.in_seconds, "cyan")
        table.add_row(Text(f"  searched: {where}", "cyan"), *cells, Text(note, "cyan"))
    return table


def _cells(run: ScheduleTimeline, gap: float | None, in_seconds: bool, style: str) -> list[Text]:
    over = "" if gap is None else f"{max(0.0, gap):.1%}"
    cells = [
        format_time(run.makespan_s, in_seconds),
        format_time(run.bubble_s, in_seconds),
        f"{run.idle_fraction:.1%}",
        f"{run.peak:g}",
    ]
    return [Text(cell, style) for cell in (*cells, over)]


def drawn(run: ScheduleTimeline, width: int) -> list[Text]:
    """Return the timeline as lines of text, one for each rank: micro-batches in the colours of their passes."""
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
            # An overlapped cell shows its forward in its first half, its backward in the second.
            late = len(span.cell) > 1 and (time_s - span.start_s) * len(span.cell) >= span.length_s
            action = span.cell[1 if late else 0]
            line.append(str(action.micro_batch % 10), STYLES[action.kind])
        lines.append(line)
    if len(run.spans) > RANKS_DRAWN:
        lines.append(Text(f"  and {len(run.spans) - RANKS_DRAWN} more ranks", "dim"))
    return lines


def _key(out: Console, run: ScheduleTimeline) -> None:
    seen = {action.kind for row in run.spans for span in row for action in span.cell}
    key = Text("  ")
    for kind, name in (("F", "forward"), ("I", "input gradient"), ("W", "weight gradient"), ("B", "backward")):
        if kind in seen:
            key.append(f" {kind} ", STYLES[kind])
            key.append(f" {name}  ", "dim")
    out.print(key.append("· bubble", "dim"))


def print_own(
    own: ScheduleTable, wrong: Sequence[str], run: ScheduleTimeline | None, costs: PassTimes, *, in_seconds: bool
) -> None:
    """Print the check and the timeline of the user's own table."""
    out = console()
    place = own.placement
    out.print(
        Text.assemble((own.name, "bold"), f": {place.ranks} ranks, {place.stages} stages, {PLACED[place.shape]} "
                      f"placement, {own.micro_batches} micro-batches")
    )  # fmt: skip
    out.print(costs_text(costs, in_seconds), style="dim")
    for each in wrong[:8]:
        out.print(f"  violation: {each}", style="red")
    if len(wrong) > 8:
        out.print(f"  and {len(wrong) - 8} more violations", style="red")
    if run is not None:
        step, bubble = (format_time(value, in_seconds) for value in (run.makespan_s, run.bubble_s))
        out.print(f"  valid: {step} a step, bubble {bubble}, {run.peak:g} activations")
        for line in drawn(run, out.width):
            out.print(line, no_wrap=True, overflow="crop")
