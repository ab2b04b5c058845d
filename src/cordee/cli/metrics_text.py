"""Curves and rates as text: a table of a job's metrics with small curves, and how single values are written."""

import math
from collections.abc import Sequence

from rich.table import Table

from cordee.answers.metrics import CurveView, MetricsView
from cordee.cli import terminal
from cordee.units import format_bytes, format_count

CELLS = "▁▂▃▄▅▆▇█"
LOST = "×"
CURVE_CELLS, CURVE_CELLS_NARROW = 32, 16
NARROW_COLUMNS = 100
BUSY = 'NVML\'s "utilisation": any kernel ran; MFU says how much of the GPU it used'


def metrics_table(found: MetricsView, width: int) -> Table:
    """Return the metrics of a job with their newest and lowest values and a small curve."""
    cells = CURVE_CELLS_NARROW if width < NARROW_COLUMNS else CURVE_CELLS
    rows = terminal.table(
        "METRIC", "NEWEST", "LOWEST", "HIGHEST", "STEP", "CURVE", right=("NEWEST", "LOWEST", "HIGHEST", "STEP")
    )
    for curve in found.curves:
        finite = [value for value in curve.values if value is not None]
        ends = (written(curve.name, min(finite)), written(curve.name, max(finite))) if finite else ("–", "–")
        newest = written(curve.name, curve.values[-1])
        rows.add_row(curve.name, newest, *ends, f"{curve.steps[-1]:,}", small_curve(curve, cells))
    return rows


def remarks(found: MetricsView) -> list[str]:
    """Return what has to be said beside the table."""
    names = {curve.name for curve in found.curves}
    lines = [f"gpu/busy is {BUSY}"] if "gpu/busy" in names else []
    if found.energy_j is not None:
        lines.append(f"energy of its GPUs: {found.energy_j / 3.6e6:,.3f} kWh")
    return lines


def written(name: str, value: float | None) -> str:
    """Return a value of a metric as people read it; None is one that is not finite.

    >>> written("loss", 2.34567), written("gpu/memory_bytes", 8e10), written("measured/mfu", 0.412)
    ('2.3457', '80 GB', '41.2 %')
    >>> written("lr", 0.00012), written("tokens", 1234567.0), written("loss", None)
    ('0.00012', '1.23M', 'not finite')
    """
    if value is None:
        return "not finite"
    if name.endswith("_bytes"):
        return format_bytes(round(value))
    if name in ("measured/mfu", "gpu/busy"):
        return f"{100 * value:.1f} %"
    if value and (abs(value) < 1e-3 or abs(value) >= 1e15):
        return f"{value:.3g}"
    if abs(value) >= 100_000:
        return format_count(round(value))
    return f"{value:,.0f}" if value == round(value) else f"{value:,.4f}" if abs(value) < 100 else f"{value:,.1f}"


def small_curve(curve: CurveView, cells: int, scale: tuple[int, int, float, float] | None = None) -> str:
    """Return a curve in one line, each cell the mean of its part of the steps; one with a value not finite is ×.

    `scale` has the first and last step and the lowest and highest value of the axes; by default the curve's own.

    >>> small_curve(CurveView(name="a", steps=[0, 1, 2, 3], at_us=[0] * 4, values=[1.0, 2.0, None, 3.0]), 4)
    '▁▅×█'
    """
    first, last = (curve.steps[0], curve.steps[-1]) if scale is None else scale[:2]
    span = max(1, last - first)
    count = min(cells, len(curve.steps) if scale is None else span + 1)
    parts: list[list[float]] = [[] for _ in range(count)]
    for step, value in zip(curve.steps, curve.values, strict=True):
        parts[min(count - 1, (step - first) * count // span)].append(math.nan if value is None else value)
    means = [math.fsum(part) / len(part) if part else None for part in parts]
    while scale is not None and means and means[-1] is None:
        means.pop()  # a shorter run
    finite = [mean for mean in means if mean is not None and math.isfinite(mean)]
    low, high = (min(finite, default=0.0), max(finite, default=0.0)) if scale is None else scale[2:]
    return "".join(_cells(means, low, high))


def _cells(means: Sequence[float | None], low: float, high: float) -> list[str]:
    drawn: list[str] = []
    for mean in means:
        if mean is None:
            drawn.append(drawn[-1] if drawn else " ")
        elif not math.isfinite(mean):
            drawn.append(LOST)
        else:
            level = 0.5 if high == low else (mean - low) / (high - low)
            drawn.append(CELLS[min(len(CELLS) - 1, int(level * len(CELLS)))])
    return drawn
