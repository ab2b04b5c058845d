"""The page of `cordee pipeline`, the picture of one schedule, and its Chrome trace."""

from cordee.plan.pipeline.answer import (
    PLACED,
    PipelineAnswer,
    Rehearsal,
    costs_text,
    format_time,
    overlap_text,
    ran_text,
    room_text,
    row_note,
    verdict,
)
from cordee.plan.pipeline.measured import RecordedStep
from cordee.plan.pipeline.table import Action, StagePlacement
from cordee.plan.pipeline.timeline import CellSpan, ScheduleTimeline
from cordee.view.chrome import Flow, Slice, Track, chrome_trace_text
from cordee.view.pipeline import Block, RankRow, pipeline_html
from cordee.view.report import HtmlReport, Section, report_html
from cordee.view.tables import table_html

US = 1_000_000
# A unit of time without a name is a millisecond in a trace, since viewers show real time.
UNIT_US = 1_000
KINDS = {"F": "forward", "I": "gradient of the input", "W": "gradient of the weights", "B": "backward"}


def picture(run: ScheduleTimeline, in_seconds: bool, *, end: float | None = None) -> str:
    """Return one schedule as SVG."""
    step, bubble = (format_time(value, in_seconds) for value in (run.makespan_s, run.bubble_s))
    aside = f"step {step}, bubble {bubble}, {run.peak:g} activations"
    lines = [
        RankRow(f"rank {rank}", [block for span in row for block in _blocks(span, run.table.placement, in_seconds)])
        for rank, row in enumerate(run.spans)
    ]
    return pipeline_html(run.table.name, lines, aside=aside, end=end)


def _blocks(span: CellSpan, place: StagePlacement, in_seconds: bool) -> list[Block]:
    """Return the blocks of a cell; an overlapped one is two halves, one above the other."""
    halves: tuple[int | None, ...] = (None,) if len(span.cell) == 1 else (0, 1)
    return [
        Block(
            action.kind, str(action.micro_batch), _about(action, span, in_seconds), span.start_s, span.end_s, half,
            second=place.chunks > 1 and action.stage >= place.ranks,
        )
        for half, action in zip(halves, span.cell, strict=True)
    ]  # fmt: skip


def _about(action: Action, span: CellSpan, in_seconds: bool) -> str:
    times = f"{format_time(span.start_s, in_seconds)} to {format_time(span.end_s, in_seconds)}"
    return f"{KINDS[action.kind]} of micro-batch {action.micro_batch} on stage {action.stage}: {times}"


def pipeline_page(answer: PipelineAnswer) -> str:
    """Return the page: all schedules on one time axis."""
    compared = answer.compared
    runs = [row.timeline for row in compared.rows if row.timeline is not None]
    end = max(run.makespan_s for run in runs)
    names = ("schedule", "step", "bubble", "idle", "peak activations", "gap to bound", "")
    rows = []
    for row in compared.rows:
        if row.timeline is None:
            rows.append([row.schedule, "", "", "", "", "", row.misfit or ""])
            continue
        gap = "" if row.gap is None else f"{max(0.0, row.gap):.1%}"
        notes = ["recommended"] if row is compared.choice else []
        note = ", ".join(part for part in (*notes, row_note(row, answer.in_seconds)) if part)
        rows.append([row.schedule, *_figures(row.timeline, answer.in_seconds), gap, note])
    for found in compared.found:
        note = "optimal: it meets the lower bound" if found.optimal else ""
        name = f"searched: {PLACED[found.timeline.table.placement.shape]}"
        rows.append([name, *_figures(found.timeline, answer.in_seconds), f"{max(0.0, found.gap):.1%}", note])
    lead = "The gap is to a lower bound that holds for any order with the same placement and memory."
    table = table_html(names, rows)
    sections = [Section("Schedules", lead, (table,), notes=verdict(answer))]
    drawings = [picture(run, answer.in_seconds, end=end) for run in runs]
    best = compared.best
    if best is not None and best.timeline.makespan_s < min(run.makespan_s for run in runs) - 1e-9:
        drawings.append(picture(best.timeline, answer.in_seconds, end=end))
    what = "All on one time axis. A block is a pass with its micro-batch; two that overlap share the height."
    sections.append(Section("Timelines", what, drawings))
    if answer.ran is not None:
        sections.append(_rehearsed(answer.ran))
    choice = compared.choice
    facts = [(f"{compared.ranks} x {compared.micro_batches}", "ranks x micro-batches")]
    if choice is not None and choice.timeline is not None:
        facts += [
            (choice.schedule, "recommended"),
            (
                format_time(choice.timeline.makespan_s, answer.in_seconds),
                f"a step, {choice.timeline.idle_fraction:.1%} of it idle",
            ),
            (f"{choice.timeline.peak:g}", "activations on the fullest rank"),
        ]
    return report_html(
        HtmlReport(
            title="Pipeline schedules", lead=f"{costs_text(compared.costs, answer.in_seconds)}; {room_text(compared)}.",
            sections=sections, facts=facts, footer=overlap_text(compared),
        )
    )  # fmt: skip


def _figures(run: ScheduleTimeline, in_seconds: bool) -> list[str]:
    times = [format_time(run.makespan_s, in_seconds), format_time(run.bubble_s, in_seconds)]
    return [*times, f"{run.idle_fraction:.1%}", f"{run.peak:g}"]


def _rehearsed(ran: Rehearsal) -> Section:
    start_s = min(row[0][3] for row in ran.step)
    place = ran.predicted.table.placement
    lines = [
        RankRow(f"rank {rank}", [
            Block(kind, str(each), f"{KINDS[kind]} of micro-batch {each} on stage {stage}", at_s - start_s,
                  to_s - start_s, second=place.chunks > 1 and stage >= place.ranks)
            for stage, kind, each, at_s, to_s in row
        ])
        for rank, row in enumerate(ran.step)
    ]  # fmt: skip
    end = max(ran.predicted.makespan_s, ran.measured.makespan_s)
    aside = f"step {format_time(ran.measured.makespan_s, True)}, bubble {format_time(ran.measured.bubble_s, True)}"
    drawings = [picture(ran.predicted, True, end=end), pipeline_html("measured", lines, aside=aside, end=end)]
    return Section("Rehearsal", f"On gloo ranks of this machine; passes are timed waits: {ran_text(ran)}.", drawings)


def pipeline_chrome_trace(answer: PipelineAnswer) -> str:
    """Return the chosen timeline as a Chrome trace, with the rehearsed step if there is one."""
    scale = US if answer.in_seconds else UNIT_US
    predicted = answer.ran.predicted if answer.ran is not None else answer.chosen
    slices, flows = _predicted_slices(predicted, US if answer.ran is not None else scale)
    if answer.ran is not None:
        slices += _measured_slices(answer.ran.step, first_group=predicted.table.placement.ranks)
    about = {"schedule": answer.chosen.table.name, "timeUnit": "s" if answer.in_seconds else "1 unit = 1 ms"}
    return chrome_trace_text(slices, flows, about)


def _predicted_slices(run: ScheduleTimeline, scale: float) -> tuple[list[Slice], list[Flow]]:
    """Return the passes, and an arrow for each message between ranks."""
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
        to = place.next(stage) if kind == "F" else place.previous(stage) if kind == "I" else None
        if to is not None and place.rank_of(to) != place.rank_of(stage):
            name = f"{'activation' if kind == 'F' else 'gradient'} {number}"
            flows.append(Flow(name, source, made[kind, to, number]))
    return slices, flows


def _measured_slices(step: RecordedStep, *, first_group: int) -> list[Slice]:
    start_s = min(row[0][3] for row in step)
    return [
        Slice(
            Track(first_group + rank, 0, f"rank {rank}, measured", "passes"), f"{stage}{kind}{each}", KINDS[kind],
            round((at_s - start_s) * US), round((to_s - at_s) * US), {"stage": stage, "micro_batch": each},
        )
        for rank, row in enumerate(step)
        for stage, kind, each, at_s, to_s in row
    ]  # fmt: skip
