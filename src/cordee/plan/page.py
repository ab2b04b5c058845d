"""The plan as one HTML page to forward: memory over the step, the layouts, survival and money, with their sources."""

from typing import TYPE_CHECKING

from cordee.hardware.catalog import Gpu
from cordee.plan.answer import Candidate
from cordee.plan.curve import WORTH, Curve
from cordee.plan.rent_or_buy import Comparison
from cordee.plan.step import step_interval_s
from cordee.units import format_bytes, format_count, format_duration, format_gb, format_whole_usd
from cordee.view.chart import Axis, Line, Mark, chart_html
from cordee.view.memory import MemoryBar, memory_svg
from cordee.view.report import Report, Section, report_html
from cordee.view.tables import Column, table_html
from cordee.workload.model import ModelShape

if TYPE_CHECKING:
    from cordee.plan.ask import Answer

SHOWN = 8


def plan_page(plan: "Answer") -> str:
    """Return the whole page, self-contained."""
    best, shape, gpu = plan.best, plan.request.shape, plan.request.gpu
    sections = [_memory(plan, plan.nearest), _layouts(plan)]
    sections += [_survival(plan)] if plan.fits else []
    if plan.why is not None:
        notes = (plan.why.hint,) if plan.why.hint else ()
        sections.append(Section(f"Why not {plan.why.asked}", plan.why.message, notes=notes))
    if plan.longest_contexts:
        rows = [
            [str(each.layout), f"{each.seq_tokens:,}", format_bytes(each.peak_bytes)] for each in plan.longest_contexts
        ]
        table = table_html([Column("layout"), Column("tokens"), Column("fullest GPU")], rows)
        sections.append(
            Section(
                "The longest context of each layout",
                "One sequence in a micro-batch, and no more of them than fill the pipeline twice.",
                (table,),
            )
        )
    if plan.run is not None:
        cost = "" if plan.run.usd is None else f", {format_whole_usd(plan.run.usd)}"
        lead = (
            f"{plan.run.steps:,} steps in {format_duration(plan.run.run_s)}: "
            f"{plan.run.gpu_hours:,.0f} GPU-hours{cost}, with {plan.survival.goodput:.1%} of the time useful."
        )
        sections.append(Section(f"Training on {format_count(plan.run.tokens)} tokens", lead))
    if plan.rent_or_buy is not None:
        sections.append(_own(plan.rent_or_buy))
    verdict = "fits" if best is not None else "does not fit"
    report = Report(
        title=f"{shape.name} on {plan.request.gpus} x {gpu.name}: it {verdict}",
        lead=(
            f"Sequences of {plan.training.seq_tokens:,} tokens, {plan.training.global_batch:,} in a step, "
            f"{plan.training.precision}, {plan.training.optimizer.name}."
        ),
        sections=sections,
        facts=_facts(plan),
        footer=_sources(plan),
    )
    return report_html(report)


def curve_page(curve: Curve, shape: ModelShape, gpu: Gpu) -> str:
    """The scaling curve on a page of its own."""
    known = [point for point in curve.points if point.candidate is not None and point.tokens_per_s]
    rows = []
    for point in known:
        found = point.candidate
        assert found is not None and found.mfu is not None and point.added_fraction is not None, "it fits"
        price = found.usd_per_billion_tokens
        cells = [f"{point.gpus:,}", str(found.layout), f"{point.tokens_per_s:,.0f}", f"{point.added_fraction:.0%}"]
        rows.append([*cells, f"{found.mfu:.0%}", "" if price is None else f"${price:,.0f}"])
    names = ("GPUs", "layout", "tokens/s", "each added", "MFU", "$ per 1B tokens")
    knee = "No knee in this range." if curve.knee is None else f"The knee is at {curve.knee.gpus} GPUs."
    lead = f"{knee} Beyond the knee an added GPU brings less than {WORTH:.0%} of what one brings at its best."
    figures = (curve_svg(curve), table_html([Column(name) for name in names], rows)) if known else ()
    return report_html(
        Report(
            title=f"{shape.name}: how speed grows with {gpu.name}s",
            lead=(
                f"The same step on every size: {curve.training.global_batch:,} sequences of "
                f"{curve.training.seq_tokens:,} tokens."
            ),
            sections=[Section("Scaling", lead if known else "Nothing fits in this range.", figures)],
            footer=f"{gpu.name}: {gpu.source}",
        )
    )


def curve_svg(curve: Curve) -> str:
    """Tokens a second over GPUs, both logarithmic, against a line of constant speed for each GPU."""
    points = [(float(point.gpus), point.tokens_per_s) for point in curve.points if point.tokens_per_s]
    if not points:
        return ""
    most = max(speed / gpus for gpus, speed in points)
    marks = []
    if curve.knee is not None and curve.knee.tokens_per_s:
        marks = [Mark(curve.knee.gpus, curve.knee.tokens_per_s, f"knee: {curve.knee.gpus} GPUs")]
    lines = (Line("planned", points), Line("all at the best speed", [(gpus, gpus * most) for gpus, _ in points], True))
    return chart_html(
        lines,
        Axis("GPUs", lambda value: f"{value:,.0f}", log=True),
        Axis("tokens/s", format_count, log=True),
        marks,
        label="tokens a second over GPUs",
    )


def _facts(plan: "Answer") -> list[tuple[str, str]]:
    best, shape = plan.best, plan.request.shape
    shown = [(format_bytes(plan.state_bytes), f"{shape.parameters:,} parameters with gradients and optimizer")]
    if best is None or best.step is None or best.mfu is None or best.tokens_per_s is None:
        return [
            *shown,
            (format_bytes(plan.rejected[0].shortfall_bytes), "too much on the nearest layout's fullest GPU"),
        ]
    shown += [
        (
            format_bytes(best.peak_bytes),
            f"on the fullest GPU of {best.layout}, of {format_bytes(best.gpu_memory_bytes)}",
        ),
        (f"{best.step.total_s:,.1f} s", f"a step: {format_count(best.tokens_per_s)} tokens/s at {best.mfu:.0%} MFU"),
    ]
    if best.usd_per_billion_tokens is not None:
        shown.append((format_whole_usd(best.usd_per_billion_tokens), f"for a billion tokens, {plan.request.capacity}"))
    return shown


def _memory(plan: "Answer", candidate: Candidate) -> Section:
    """The events of the fullest rank, each a bar against the wall."""
    memory = candidate.memory
    bars = []
    for moment in memory.timelines[memory.worst_stage]:
        names = ("weights", "gradients", "optimizer", "activations", "loss", "buffers")
        parts = {name: round(float(getattr(moment, f"{name}_bytes"))) for name in names}
        worst = memory.worst
        parts |= {"fragmentation": worst.fragmentation_bytes, "context": worst.context_bytes}
        bars.append(MemoryBar(moment.event, parts, "peak" if moment.event == memory.peak_event else ""))
    lead = (
        f"One step of {candidate.layout} on the fullest GPU (stage {memory.worst_stage} of {candidate.layout.pp}), "
        f"event after event. What is allocated at {memory.peak_event} decides: {format_gb(candidate.peak_bytes)} of "
        f"{format_gb(candidate.gpu_memory_bytes)}, allocator and CUDA context included."
    )
    return Section("Memory over the step", lead, (memory_svg(bars, plan.request.gpu.memory_bytes),))


def _layouts(plan: "Answer") -> Section:
    shown = (*plan.fitting[:SHOWN], *plan.rejected[: 2 if plan.fitting else SHOWN])
    bars = [
        MemoryBar(
            str(each.layout), each.memory.worst.parts(),
            f"{each.step.total_s:,.1f} s" if each.step is not None else f"+{format_gb(each.shortfall_bytes)}",
        )
        for each in shown
    ]  # fmt: skip
    lead = (
        f"{len(plan.fitting)} meshes fit and {len(plan.rejected)} do not, out of {plan.layouts.candidates:,} "
        "candidates; the fastest first. A step's interval holds nine of ten."
    )
    figures = [memory_svg(bars, plan.request.gpu.memory_bytes)]
    if plan.fitting:
        figures.append(layouts_html(plan.fitting[:SHOWN]))
    return Section("Layouts", lead, figures, notes=[str(each) for each in plan.remedies])


def _survival(plan: "Answer") -> Section:
    one = plan.expectations[0].survival
    rows = []
    for survivor in plan.expectations:
        kept = survivor.survival
        dollars = (kept.lost_usd_with_notice, kept.lost_usd_expected, kept.lost_usd_worst)
        money = ["no price" if each is None else format_whole_usd(each) for each in dollars]
        cells = [survivor.capacity, format_duration(kept.mtbi_s), format_duration(kept.period_s), f"{kept.goodput:.1%}"]
        rows.append([*cells, *money])
    names = ("capacity", "stopped every", "save every", "goodput", "with notice", "expected", "at worst")
    lead = (
        f"A checkpoint is {format_bytes(one.checkpoint_bytes)} and takes {format_duration(one.checkpoint_s)} at "
        f"{format_bytes(plan.request.assumed.storage_bytes_per_s)}/s a node, of which the ranks wait "
        f"{format_duration(one.stall_s)}. The dollars are what one preemption loses."
    )
    times = [f"{save.level} {format_duration(save.seconds)} (outlives {save.outlives})" for save in plan.level_saves]
    notes = ["A checkpoint by level, assumed: " + ", ".join(times)]
    captures = [format_bytes(plan.capture_bytes_per_node(held=held)) for held in (False, True)]
    notes.append(f"Captures take {captures[0]} of a node's host memory; {captures[1]} if some are held there (ram)")
    notes += [f"{survivor.capacity} interruptions: {survivor.mtbi_source}" for survivor in plan.expectations]
    return Section("Surviving", lead, (table_html([Column(name) for name in names], rows),), notes=notes)


def _own(own: Comparison) -> Section:
    assumed = own.assumed
    months = int(assumed.life_months)
    rent = [(float(month), assumed.rent_usd_per_month * month) for month in (0, months)]
    bought = [(float(month), assumed.purchase_usd + assumed.running_usd_per_month * month) for month in (0, months)]
    marks = []
    if own.break_even_month is not None:
        month = own.break_even_month
        marks = [Mark(month, assumed.rent_usd_per_month * month, f"month {month}")]
    chart = chart_html(
        (Line("rent", rent), Line("own", bought)),
        Axis("month", lambda value: f"{value:.0f}"),
        Axis("dollars spent", lambda value: f"${format_count(value) if value else 0}"),
        marks,
        label="dollars spent over months, rented and owned",
    )
    rows = []
    for each in own.swings:
        moves = (each.low_month, own.break_even_month, each.high_month)
        rows.append([each.name, f"{each.value:g}", *("never" if month is None else str(month) for month in moves)])
    names = ("assumption", "value", "a fifth less", "as assumed", "a fifth more")
    table = table_html([Column(name) for name in names], rows)
    needed = f"{assumed.gpus} GPUs, needed {assumed.busy_fraction:.0%} of the time for {assumed.life_years:g} years"
    rented = f"rent {format_whole_usd(assumed.rent_usd_per_gpu_hour)} a GPU-hour"
    monthly = format_whole_usd(assumed.running_usd_per_month)
    owned = f"{format_whole_usd(assumed.purchase_usd)} at once and {monthly} a month to own"
    notes = [
        f"{needed}; {rented}; {owned}",
        f"Owned, a used GPU-hour costs {format_whole_usd(own.own_usd_per_gpu_hour)}.",
        "The table has the break-even month as each assumption moves; no interest, no tax.",
    ]
    return Section("Rent or buy", own.verdict, (chart, table), notes=notes)


def _sources(plan: "Answer") -> str:
    gpu = plan.request.gpu
    low, high = step_interval_s(1.0, gpu)
    told = [f"{gpu.name}: {gpu.source}"]
    for each in plan.expectations:
        if each.price is not None:
            told.append(f"{each.capacity} ${each.price.usd_per_gpu_hour:.2f} a GPU-hour: {each.price.source}")
    told.append(f"step time: {gpu.efficiency.source}; nine of ten within {low - 1:+.0%} and {high - 1:+.0%}")
    return ". ".join(told)


def layouts_html(candidates: tuple[Candidate, ...]) -> str:
    """The ranked table, as HTML; empty without a layout that fits."""
    if not candidates:
        return ""
    priced = candidates[0].usd_per_billion_tokens is not None
    columns = [
        Column("layout"),
        Column("fullest GPU"),
        Column("step"),
        Column("nine of ten"),
        Column("MFU"),
        Column("tokens/s"),
    ]
    columns += [Column("$ per 1B tokens")] if priced else []
    rows = []
    for candidate in candidates:
        assert candidate.step is not None and candidate.mfu is not None and candidate.tokens_per_s is not None, (
            "it fits"
        )
        low, high = candidate.step_interval_s or (candidate.step.total_s, candidate.step.total_s)
        cells = [
            str(candidate.layout),
            format_bytes(candidate.peak_bytes),
            f"{candidate.step.total_s:,.2f} s",
            f"{low:,.2f} to {high:,.2f} s",
            f"{candidate.mfu:.0%}",
            f"{candidate.tokens_per_s:,.0f}",
        ]
        rows.append(cells + ([f"${candidate.usd_per_billion_tokens:,.0f}"] if priced else []))
    return table_html(columns, rows)
