"""The pipeline's schedules drawn: one page, one picture, or a trace that Perfetto opens."""

from cordee.cli.pipeline_text import (
    PLACED,
    Asked,
    Ran,
    costs_text,
    overlap_text,
    ran_text,
    room_text,
    row_note,
    said,
    verdict,
)  # fmt: skip
from cordee.plan.pipeline import Placement, Timeline
from cordee.plan.pipeline.measured import Step
from cordee.plan.pipeline.table import Action
from cordee.plan.pipeline.timeline import Span
from cordee.view.chrome import Flow, Slice, Track, chrome_trace_text
from cordee.view.pipeline import Block, Line, pipeline_svg
from cordee.view.report import Report, Section, report_html
from cordee.view.tables import table_html

US = 1_000_000
# A bare unit of time is a millisecond in a trace: viewers know no other than real time.
UNIT_US = 1_000
KINDS = {"F": "forward", "I": "gradient of the input", "W": "gradient of the weights", "B": "backward"}


def picture(run: Timeline, in_seconds: bool, *, end: float | None = None) -> str:
    """One schedule as SVG."""
    aside = (
        f"step {said(run.makespan_s, in_seconds)}, bubble {said(run.bubble_s, in_seconds)}, {run.peak:g} activations"
    )
    lines = [
        Line(f"rank {rank}", [block for span in row for block in _blocks(span, run.table.placement, in_seconds)])
        for rank, row in enumerate(run.spans)
    ]
    return pipeline_svg(run.table.name, lines, aside=aside, end=end)


def _blocks(span: Span, place: Placement, in_seconds: bool) -> list[Block]:
    """A cell; one that overlaps is two halves, one above the other."""
    halves: tuple[int | None, ...] = (None,) if len(span.cell) == 1 else (0, 1)
    return [
        Block(
            action.kind, str(action.micro_batch), _about(action, span, in_seconds), span.start_s, span.end_s, half,
            second=place.chunks > 1 and action.stage >= place.ranks,
        )
        for half, action in zip(halves, span.cell, strict=True)
    ]  # fmt: skip


def _about(action: Action, span: Span, in_seconds: bool) -> str:
    times = f"{said(span.start_s, in_seconds)} to {said(span.end_s, in_seconds)}"
    return f"{KINDS[action.kind]} of micro-batch {action.micro_batch} on stage {action.stage}: {times}"


def pipeline_page(asked: Asked) -> str:
    """All schedules on one page, on one time axis."""
    compared = asked.compared
    runs = [row.timeline for row in compared.rows if row.timeline is not None]
    end = max(run.makespan_s for run in runs)
    names = ("schedule", "step", "bubble", "idle", "peak activations", "over the bound", "")
    rows = []
    for row in compared.rows:
        if row.timeline is None:
            rows.append([row.schedule, "", "", "", "", "", row.why_not or ""])
            continue
        gap = "" if row.gap is None else f"{max(0.0, row.gap):.1%}"
        notes = ["use this"] if row is compared.choice else []
        note = ", ".join(part for part in (*notes, row_note(row, asked.in_seconds)) if part)
        rows.append([row.schedule, *_figures(row.timeline, asked.in_seconds), gap, note])
    for found in compared.found:
        note = "proven: no order is faster" if found.optimal else ""
        name = f"best found {PLACED[found.timeline.table.placement.shape]}"
        rows.append([name, *_figures(found.timeline, asked.in_seconds), f"{max(0.0, found.gap):.1%}", note])
    lead = "The bound is a time that no order of the passes can beat where the stages lie so, within the memory."
    table = table_html(names, rows)
    sections = [Section("Side by side", lead, (table,), notes=verdict(asked))]
    drawings = [picture(run, asked.in_seconds, end=end) for run in runs]
    best = compared.best
    if best is not None and best.timeline.makespan_s < min(run.makespan_s for run in runs) - 1e-9:
        drawings.append(picture(best.timeline, asked.in_seconds, end=end))
    what = "One time axis for all. A block is a pass with its micro-batch; where two overlap they share the height."
    sections.append(Section("Drawn", what, drawings))
    if asked.ran is not None:
        sections.append(_rehearsed(asked.ran))
    choice = compared.choice
    facts = [(f"{compared.ranks} x {compared.micro_batches}", "ranks x micro-batches")]
    if choice is not None and choice.timeline is not None:
        facts += [
            (choice.schedule, "to use"),
            (
                said(choice.timeline.makespan_s, asked.in_seconds),
                f"a step, {choice.timeline.idle_fraction:.1%} of it idle",
            ),
            (f"{choice.timeline.peak:g}", "activations on the fullest rank"),
        ]
    return report_html(
        Report(
            title="Pipeline schedules", lead=f"{costs_text(compared.costs, asked.in_seconds)}; {room_text(compared)}.",
            sections=sections, facts=facts, footer=overlap_text(compared),
        )
    )  # fmt: skip


def _figures(run: Timeline, in_seconds: bool) -> list[str]:
    times = [said(run.makespan_s, in_seconds), said(run.bubble_s, in_seconds)]
    return [*times, f"{run.idle_fraction:.1%}", f"{run.peak:g}"]


def _rehearsed(ran: Ran) -> Section:
    start_s = min(row[0][3] for row in ran.step)
    place = ran.predicted.table.placement
    lines = [
        Line(f"rank {rank}", [
            Block(kind, str(each), f"{KINDS[kind]} of micro-batch {each} on stage {stage}", at_s - start_s,
                  to_s - start_s, second=place.chunks > 1 and stage >= place.ranks)
            for stage, kind, each, at_s, to_s in row
        ])
        for rank, row in enumerate(ran.step)
    ]  # fmt: skip
    end = max(ran.predicted.makespan_s, ran.measured.makespan_s)
    aside = f"step {said(ran.measured.makespan_s, True)}, bubble {said(ran.measured.bubble_s, True)}"
    drawings = [picture(ran.predicted, True, end=end), pipeline_svg("measured", lines, aside=aside, end=end)]
    return Section("Rehearsed", f"On gloo ranks of this machine, with waits for passes: {ran_text(ran)}.", drawings)


def trace_text(asked: Asked) -> str:
    """The chosen timeline as a Chrome trace; a rehearsed step lies beside it."""
    scale = US if asked.in_seconds else UNIT_US
    predicted = asked.ran.predicted if asked.ran is not None else asked.chosen
    slices, flows = _predicted_slices(predicted, US if asked.ran is not None else scale)
    if asked.ran is not None:
        slices += _measured_slices(asked.ran.step, first_group=predicted.table.placement.ranks)
    about = {"schedule": asked.chosen.table.name, "timeUnit": "s" if asked.in_seconds else "1 unit = 1 ms"}
    return chrome_trace_text(slices, flows, about)


def _predicted_slices(run: Timeline, scale: float) -> tuple[list[Slice], list[Flow]]:
    """Passes, and an arrow for each message from rank to rank."""
    place = run.table.placement
    slices, made = [], {}
    for rank, row in enumerate(run.spans):
        for span in row:
            for half, action in enumerate(span.cell):
                line = 0 if len(span.cell) == 1 else half
                track = Track(rank, line, f"rank {rank}, {run.table.name}", "overlapped" if line else "passes")
                each = Slice(
                    track, str(action), KINDS[action.kind], round(span.start_s * scale), round(span.length_s * scale),
                    {"stage": action.stage, "micro_batch": action.micro_batch},
                )  # fmt: skip
                slices.append(each)
                made["I" if action.kind == "B" else action.kind, action.stage, action.micro_batch] = each
    flows = []
    for (kind, stage, number), source in made.items():
        to = place.after(stage) if kind == "F" else place.before(stage) if kind == "I" else None
        if to is not None and place.rank_of(to) != place.rank_of(stage):
            name = f"{'activation' if kind == 'F' else 'gradient'} {number}"
            flows.append(Flow(name, source, made[kind, to, number]))
    return slices, flows


def _measured_slices(step: Step, *, first_group: int) -> list[Slice]:
    start_s = min(row[0][3] for row in step)
    return [
        Slice(
            Track(first_group + rank, 0, f"rank {rank}, measured", "passes"), f"{stage}{kind}{each}", KINDS[kind],
            round((at_s - start_s) * US), round((to_s - at_s) * US), {"stage": stage, "micro_batch": each},
        )
        for rank, row in enumerate(step)
        for stage, kind, each, at_s, to_s in row
    ]  # fmt: skip
