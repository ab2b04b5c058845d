"""The serving answer as an HTML page: drawings are made here, the words stand in `view/templates/serve.html.j2`."""

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from cordee.plan.serving.curve import ServingCurve
from cordee.plan.serving.judge import ServingCandidate
from cordee.plan.serving.levers.renting import HourPrice
from cordee.plan.serving.request import ServingRequest
from cordee.units import format_count, format_digits_usd, format_gb, format_latency, plural
from cordee.view.chart import Axis, ChartLine, Mark, chart_html
from cordee.view.memory import SERVING_PARTS, MemoryBar, memory_html
from cordee.view.page import page

SHOWN = 8


class ServingDrawn(Protocol):
    """The parts of an answer that are drawn here; the template reads the others."""

    @property
    def request(self) -> ServingRequest: ...
    @property
    def serving(self) -> tuple[ServingCandidate, ...]: ...
    @property
    def late(self) -> tuple[ServingCandidate, ...]: ...
    @property
    def rejected(self) -> tuple[ServingCandidate, ...]: ...
    @property
    def best(self) -> ServingCandidate | None: ...
    @property
    def nearest(self) -> ServingCandidate: ...
    @property
    def fits(self) -> bool: ...
    @property
    def curve(self) -> ServingCurve | None: ...
    @property
    def hours(self) -> tuple[HourPrice, ...]: ...
    @property
    def sources(self) -> tuple[str, ...]: ...


def serving_page(answer: ServingDrawn, *, notebook: bool = False) -> str:
    """Return the page, self-contained, or its parts alone for the output of a notebook's cell."""
    request = answer.request
    traffic = request.traffic
    verdict = "it does not fit" if not answer.fits else "it misses the SLO" if answer.best is None else "it fits"
    curve = answer.curve
    return page(
        "serve.html.j2",
        frame="notebook.html.j2" if notebook else "base.html.j2",
        title=f"{request.shape.name} served on {request.gpus} x {request.gpu.name}: {verdict}",
        lead=(
            f"{request.engine.name} {request.engine.versions}, requests of {traffic.input_tokens:,} + "
            f"{traffic.output_tokens:,} tokens; {request.slo}."
        ),
        answer=answer,
        shown=SHOWN,
        milliseconds=format_latency,
        plural=plural,
        dollars=lambda usd: "no price" if usd is None else format_digits_usd(usd),
        memory_svg=_memory_svg(answer),
        curve_svg="" if curve is None or len(curve.points) < 2 else curve_svg(curve, answer),
        hour_rows=hour_rows(answer.hours),
        footer=". ".join(answer.sources),
    )


def hour_rows(hours: Sequence[HourPrice]) -> list[tuple[str, ...]]:
    """Return the prices of the hours of a day, one row for hours that follow each other with one load."""
    rows = []
    for _, group in groupby(hours, key=lambda each: (each.load, each.replicas)):
        first, *others = group
        last = others[-1] if others else first
        named = str(first.hour) if first is last else f"{first.hour} to {last.hour}"
        dollars = (
            "" if usd is None else format_digits_usd(usd) for usd in (first.usd_per_mtok, first.rented_usd_per_mtok)
        )
        rows.append((named, f"{first.load:.0%}", str(first.replicas), *dollars))
    return rows


def curve_svg(curve: ServingCurve, answer: ServingDrawn) -> str:
    """Draw tokens a second over the time per output token, with the knee and the limit."""
    points = [(1000 * point.tpot_s, point.output_tokens_per_s) for point in curve.points]
    points.sort()
    marks = []
    if curve.knee is not None:
        at = f"knee: concurrency {curve.knee.sequences}"
        marks = [Mark(1000 * curve.knee.tpot_s, curve.knee.output_tokens_per_s, at)]
    lines = [ChartLine("planned", points)]
    limit = answer.request.slo.tpot_s
    if limit is not None:
        lines.append(
            ChartLine(f"limit {1000 * limit:g} ms", [(1000 * limit, 0.0), (1000 * limit, points[-1][1])], True)
        )
    return chart_html(
        lines,
        Axis("ms per output token", lambda value: f"{value:,.0f}"),
        Axis("output tokens/s", lambda value: format_count(value) if value else "0"),
        marks,
        label="output tokens a second over time per output token",
    )


def _memory_svg(answer: ServingDrawn) -> str:
    shown = (*answer.serving[:SHOWN], *answer.late[:2], *answer.rejected[: 2 if answer.fits else SHOWN])
    bars = [MemoryBar(f"{each.replicas}x {each.name}", each.parts, _note(each), SERVING_PARTS) for each in shown]
    return memory_html(bars, answer.request.gpu.visible_bytes)


def _note(each: ServingCandidate) -> str:
    return f"concurrency up to {each.sequences:,}" if each.fits else f"short by {format_gb(each.shortfall_bytes)}"
