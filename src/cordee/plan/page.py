"""The answer and the curve as HTML pages: drawings are made here, the words stand in `view/templates/plan.html.j2`."""

from typing import Protocol

from cordee.hardware.catalog import Gpu
from cordee.plan.candidates import Candidate, Layouts
from cordee.plan.curve import WORTH, Curve
from cordee.plan.expect import Expectation
from cordee.plan.rent_or_buy import Comparison
from cordee.plan.request import Request
from cordee.plan.training import Training
from cordee.units import format_count, format_gb, plural
from cordee.view.chart import Axis, ChartLine, Mark, chart_html
from cordee.view.memory import MemoryBar, memory_html
from cordee.view.page import page
from cordee.view.report import HtmlReport, Section, report_html
from cordee.view.tables import table_html
from cordee.workload.model import ModelShape

SHOWN = 8


class Drawn(Protocol):
    """The parts of an answer that are drawn here; the template reads the others."""

    @property
    def request(self) -> Request: ...
    @property
    def layouts(self) -> Layouts: ...
    @property
    def expectations(self) -> tuple[Expectation, ...]: ...
    @property
    def rent_or_buy(self) -> Comparison | None: ...
    @property
    def training(self) -> Training: ...
    @property
    def fits(self) -> bool: ...
    @property
    def nearest(self) -> Candidate: ...


def plan_page(answer: Drawn, *, notebook: bool = False) -> str:
    """Return the page, self-contained, or its parts alone for the output of a notebook's cell."""
    request, training = answer.request, answer.training
    verdict = "fits" if answer.fits else "does not fit"
    return page(
        "plan.html.j2",
        frame="notebook.html.j2" if notebook else "base.html.j2",
        title=f"{request.shape.name} on {request.gpus} x {request.gpu.name}: it {verdict}",
        lead=(
            f"Sequences of {training.seq_tokens:,} tokens, {training.global_batch:,} in a step, "
            f"{training.precision}, {training.optimizer.name}."
        ),
        answer=answer,
        shown=SHOWN,
        timeline_svg=_timeline_svg(answer.nearest),
        layouts_svg=_layouts_svg(answer.layouts),
        spending_svg="" if answer.rent_or_buy is None else _spending_svg(answer.rent_or_buy),
        footer=_sources(answer),
    )


def curve_page(curve: Curve, shape: ModelShape, gpu: Gpu) -> str:
    """Return the scaling curve on a page of its own."""
    known = [point for point in curve.points if point.candidate is not None and point.tokens_per_s]
    rows = []
    for point in known:
        found = point.candidate
        assert found is not None and found.mfu is not None and point.added_fraction is not None, "it fits"
        price = found.usd_per_billion_tokens
        cells = [f"{point.gpus:,}", str(found.layout), f"{point.tokens_per_s:,.0f}", f"{point.added_fraction:.0%}"]
        rows.append([*cells, f"{found.mfu:.0%}", "" if price is None else f"${price:,.0f}"])
    names = ("GPUs", "layout", "tokens/s", "each added", "MFU", "$ per 1B tokens")
    knee = "No knee in this range." if curve.knee is None else f"The knee is at {plural(curve.knee.gpus, 'GPU')}."
    lead = f"{knee} Beyond the knee an added GPU brings less than {WORTH:.0%} of what one brings at its best."
    figures = (curve_svg(curve), table_html(names, rows)) if known else ()
    return report_html(
        HtmlReport(
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
    """Draw tokens a second over GPUs, both logarithmic, against a line of constant speed for each GPU."""
    points = [(float(point.gpus), point.tokens_per_s) for point in curve.points if point.tokens_per_s]
    if not points:
        return ""
    most = max(speed / gpus for gpus, speed in points)
    marks = []
    if curve.knee is not None and curve.knee.tokens_per_s:
        marks = [Mark(curve.knee.gpus, curve.knee.tokens_per_s, f"knee: {curve.knee.gpus} GPUs")]
    lines = (
        ChartLine("planned", points),
        ChartLine("all at the best speed", [(gpus, gpus * most) for gpus, _ in points], True),
    )
    return chart_html(
        lines,
        Axis("GPUs", lambda value: f"{value:,.0f}", log=True),
        Axis("tokens/s", format_count, log=True),
        marks,
        label="tokens a second over GPUs",
    )


def _timeline_svg(candidate: Candidate) -> str:
    """Draw each event of the fullest rank's step as a bar against the GPU's memory."""
    memory, worst = candidate.memory, candidate.memory.worst
    bars = []
    for moment in memory.worst_timeline:
        names = ("weights", "gradients", "optimizer", "activations", "loss", "buffers")
        parts = {name: round(float(getattr(moment, f"{name}_bytes"))) for name in names}
        parts |= {"fragmentation": worst.fragmentation_bytes, "context": worst.context_bytes}
        bars.append(MemoryBar(moment.event, parts, "peak" if moment.event == memory.peak_event else ""))
    return memory_html(bars, candidate.gpu_memory_bytes)


def _layouts_svg(layouts: Layouts) -> str:
    shown = (*layouts.fitting[:SHOWN], *layouts.rejected[: 2 if layouts.fitting else SHOWN])
    bars = [
        MemoryBar(
            str(each.layout),
            each.memory.worst.parts(),
            f"{each.step.total_s:,.1f} s" if each.step is not None else f"+{format_gb(each.shortfall_bytes)}",
        )
        for each in shown
    ]
    return memory_html(bars, layouts.case.gpu.visible_bytes)


def _spending_svg(own: Comparison) -> str:
    """Draw the dollars spent over months, rented and owned."""
    assumed = own.assumed
    months = int(assumed.life_months)
    rent = [(float(month), assumed.rent_usd_per_month * month) for month in (0, months)]
    bought = [(float(month), assumed.purchase_usd + assumed.running_usd_per_month * month) for month in (0, months)]
    month = own.break_even_month
    marks = [] if month is None else [Mark(month, assumed.rent_usd_per_month * month, f"month {month}")]
    return chart_html(
        (ChartLine("rent", rent), ChartLine("own", bought)),
        Axis("month", lambda value: f"{value:.0f}"),
        Axis("dollars spent", lambda value: f"${format_count(value) if value else 0}"),
        marks,
        label="dollars spent over months, rented and owned",
    )


def _sources(answer: Drawn) -> str:
    gpu = answer.request.gpu
    sources = [f"{gpu.name}: {gpu.source}"]
    for each in answer.expectations:
        if each.price is not None:
            sources.append(f"{each.capacity} ${each.price.usd_per_gpu_hour:.2f} a GPU-hour: {each.price.source}")
    sources.append(f"step time: {gpu.efficiency.source}{answer.nearest.expected}")
    return ". ".join(sources)
