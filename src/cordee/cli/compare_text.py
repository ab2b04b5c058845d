"""Runs beside each other, as tables for a terminal and as a page with charts."""

import math
from collections.abc import Sequence

from rich.table import Table

from cordee.answers.metrics import CurveView
from cordee.cli import terminal
from cordee.cli.metrics_text import BUSY, small_curve, written
from cordee.compared import ComparedRun, Difference, common_curves, differences, labels
from cordee.units import US_PER_S, format_duration, format_micro_usd
from cordee.view.chart import Axis, ChartLine, chart_html
from cordee.view.report import HtmlReport, Section, report_html
from cordee.view.tables import table_html

_CURVE_MIN, _CURVE_MAX = 12, 60
_VALUE_MAX = 40
_CHARTS_MAX = 12


def outcome_rows(runs: Sequence[ComparedRun]) -> list[tuple[str, list[str]]]:
    """Return what became of each run: a name, and its value for each."""
    rows = [
        ("state", [run.job.state for run in runs]),
        ("GPUs", [f"{run.job.gpus} x {run.job.gpu_name}" if run.job.gpu_name else str(run.job.gpus) for run in runs]),
        ("step", ["–" if run.job.step is None else f"{run.job.step:,}" for run in runs]),
        ("time", ["–" if run.run_us is None else format_duration(run.run_us / US_PER_S) for run in runs]),
        ("attempts", [str(len(run.job.attempts)) for run in runs]),
        ("cost", [format_micro_usd(run.cost.row.micro_usd.held) for run in runs]),
        ("$/1M tokens", [_dollars(run.cost.row.micro_usd_per_million_tokens) for run in runs]),
        ("tokens/s", [_newest(run, "measured/tokens_per_s") for run in runs]),
        ("MFU", [_newest(run, "measured/mfu") for run in runs]),
        ("GPU busy", [_newest(run, "gpu/busy") for run in runs]),
        ("energy", ["–" if run.cost.energy_j is None else f"{run.cost.energy_j / 3.6e6:,.3f} kWh" for run in runs]),
    ]
    return [(name, values) for name, values in rows if any(value != "–" for value in values)]


def _dollars(micro_usd: int | None) -> str:
    return "–" if micro_usd is None else format_micro_usd(micro_usd)


def _newest(run: ComparedRun, name: str) -> str:
    curve = run.curve(name)
    return "–" if curve is None else written(name, curve.values[-1])


def print_comparison(runs: Sequence[ComparedRun]) -> None:
    """Print the differences, what became of each run, and the common curves."""
    console, names = terminal.stdout(), labels(runs)
    found = differences(runs)
    if found:
        console.print(_differences(found, names))
    else:
        console.print("no setting differs: same command, environment and files", highlight=False)
    outcome = terminal.table("", *names, right=names, folds=names)
    for name, values in outcome_rows(runs):
        outcome.add_row(name, *values)
    console.print(outcome)
    curves = common_curves(runs)
    if not curves:
        console.print("no metric is common to them; job.log(loss=...) makes one", highlight=False)
        return
    console.print(_curves(runs, names, curves, min(console.width, 160)))


def _differences(found: Sequence[Difference], names: Sequence[str]) -> Table:
    rows = terminal.table("SETTING", *names, folds=("SETTING", *names))
    for each in found:
        rows.add_row(each.name, *(_short(value) for value in each.values))
    return rows


def _short(value: str | None) -> str:
    if value is None:
        return "–"
    return value if len(value) <= _VALUE_MAX else f"{value[: _VALUE_MAX - 1]}…"


def _curves(runs: Sequence[ComparedRun], names: Sequence[str], curves: Sequence[str], width: int) -> Table:
    """Return a row for each run under each metric; the curves of one metric share their axes."""
    rows = terminal.table("METRIC", "RUN", "NEWEST", "BEST", "CURVE", right=("NEWEST", "BEST"), folds=("METRIC", "RUN"))
    cells = max(_CURVE_MIN, min(_CURVE_MAX, width - 20 - 2 * 10 - max(map(len, names)) - max(map(len, curves))))
    for metric in curves:
        drawn = [(name, curve) for name, run in zip(names, runs, strict=True) if (curve := run.curve(metric))]
        scale = _scale([curve for _, curve in drawn])
        for at, (name, curve) in enumerate(drawn):
            finite = [value for value in curve.values if value is not None]
            lowest = written(metric, min(finite)) if finite else "–"
            newest = written(metric, curve.values[-1])
            rows.add_row("" if at else metric, name, newest, lowest, small_curve(curve, cells, scale))
        rows.add_section()
    rows.columns[3].header = "LOWEST"
    return rows


def _scale(curves: Sequence[CurveView]) -> tuple[int, int, float, float]:
    values = [value for curve in curves for value in curve.values if value is not None]
    return (
        min(curve.steps[0] for curve in curves),
        max(curve.steps[-1] for curve in curves),
        min(values, default=0.0),
        max(values, default=0.0),
    )


def comparison_page(runs: Sequence[ComparedRun]) -> str:
    """Return the comparison as one HTML page."""
    names = labels(runs)
    found = differences(runs)
    sections = [
        Section(
            "What differs",
            "Flags of the command, keys of the job file, the commit of the files, the environment."
            if found
            else "Nothing: the same command, environment and files.",
            [table_html(["setting", *names], [[each.name, *(value or "–" for value in each.values)] for each in found])]
            if found
            else [],
        ),
        Section(
            "What became of them",
            "Time is that of all attempts; dollars are those of all GPU time held, lost time too.",
            [table_html(["", *names], [[name, *values] for name, values in outcome_rows(runs)])],
        ),
    ]
    for metric in common_curves(runs)[:_CHARTS_MAX]:
        lines = [line for name, run in zip(names, runs, strict=True) if (line := _line(name, run.curve(metric)))]
        if lines:
            sections.append(Section(metric, _lead(metric), [_chart(metric, lines)]))
    facts = [(str(len(runs)), "runs"), (format_micro_usd(sum(run.cost.row.micro_usd.held for run in runs)), "spent")]
    return report_html(HtmlReport(f"{' and '.join(names)} compared", "Runs beside each other.", sections, facts))


def _lead(metric: str) -> str:
    if metric == "gpu/busy":
        return f"gpu/busy is {BUSY}."
    return "By step; a gap is a value that is not finite."


def _line(name: str, curve: CurveView | None) -> ChartLine | None:
    points = (
        []
        if curve is None
        else [
            (float(step), value)
            for step, value in zip(curve.steps, curve.values, strict=True)
            if value is not None and math.isfinite(value)
        ]
    )
    return ChartLine(name, points) if points else None


def _chart(metric: str, lines: Sequence[ChartLine]) -> str:
    return chart_html(
        lines, Axis("step", lambda x: f"{x:,.0f}"), Axis(metric, lambda y: written(metric, y)), label=metric
    )
