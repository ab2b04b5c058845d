"""The text and the page of `cordee experts`: balance and its bound, the answer, and the load of each GPU."""

import math

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cordee.cli.plan_text import console, indented, title
from cordee.hardware.arrays import Floats
from cordee.plan.experts import Rebalance
from cordee.plan.experts.answer import ExpertsAnswer
from cordee.units import format_bytes, plural
from cordee.view.chart import Axis, ChartLine, chart_html
from cordee.view.report import HtmlReport, Section, report_html
from cordee.view.tables import table_html

HEIGHT = 6
"""Lines of a chart."""
EIGHTHS = " ▁▂▃▄▅▆▇█"
HIGH = 1.1
"""Loads above this multiple of the mean have another colour."""


def print_answer(answer: ExpertsAnswer) -> None:
    """Print the answer as wide as the terminal."""
    out = console()
    fleet, (layers, experts) = answer.fleet, answer.loads.shape
    heading = f" on {plural(fleet.gpus, 'GPU')}" + (f" of {fleet.nodes} nodes" if fleet.nodes > 1 else "")
    out.print(Text.assemble((f"{experts} experts in {layers} layers", "bold"), (heading, "bold")))
    kept = f"{fleet.groups} groups, each on one node" if fleet.domains > 1 else "an expert may be on any GPU"
    say = f"{answer.name}; {fleet.slots} slots a GPU, {fleet.replicas - experts} redundant replicas; {kept}"
    out.print(say, style="dim")
    _balance(out, answer)
    if answer.found is not None:
        style = "bold green" if answer.found.pays else "bold"
        out.print()
        indented(out, answer.found.sentence[0].upper() + answer.found.sentence[1:] + ".", style=style)
        _noise(out, answer.found, layers)
    _drawings(out, answer)


def _balance(out: Console, answer: ExpertsAnswer) -> None:
    title(out, "Balance", "mean over max of the GPUs' loads; 1 is perfect")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    columns = ["mean", "worst layer", *(["slots moved"] if answer.found else [])]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for what, balance, moved in answer.rows:
        cells = [f"{balance.mean():.4f}", f"{balance.min():.4f}"]
        if answer.found:
            cells.append("" if moved is None else f"{moved:,} ({moved / answer.before.slots.size:.0%})")
        table.add_row("  " + what, *cells, style="dim" if what == answer.rows[-1][0] else "")
    out.print(table)


def _noise(out: Console, found: Rebalance, layers: int) -> None:
    noisy = layers - found.layers_beyond_noise
    if noisy:
        indented(
            out, f"{noisy} of {layers} layers are left alone: their imbalance is within the noise of so few tokens."
        )
    if found.moved_slots:
        indented(out, f"{format_bytes(found.moved_bytes)} of weights in all; experts move only to GPUs without them.")


def _drawings(out: Console, answer: ExpertsAnswer) -> None:
    layer = answer.worst_layer
    before = answer.before.gpu_loads(answer.loads)[layer]
    after = answer.drawn.gpu_loads(answer.loads)[layer]
    top = float(max(before.max(), after.max()))
    title(out, f"Load of each GPU, layer {layer}", "the layer with the least balance; the line is the mean")
    ascii_only = not out.encoding.lower().startswith("utf")
    for name, loads in (("before", before), ("after", after)):
        mean = float(loads.mean())
        out.print(f"  {name}: fullest {loads.max():,.0f} tokens, mean {mean:,.0f}", style="dim")
        for line in columns(loads, top, out.width - 4, ascii_only=ascii_only):
            out.print(Text("  ").append_text(line), no_wrap=True)
        out.print()


def columns(loads: Floats, top: float, width: int, *, ascii_only: bool = False) -> list[Text]:
    """Return a column for each GPU, from the top line down; neighbours share one, the fullest, if there are many."""
    shown = [float(part.max()) for part in np.array_split(loads, min(len(loads), width))]
    each = max(1, min(4, width // len(shown)))
    mean = float(loads.mean())
    line = min(HEIGHT - 1, int(mean / top * HEIGHT))
    found = []
    for row in reversed(range(max(1, math.ceil(max(shown) / top * HEIGHT - 1 / 16)))):
        text = Text()
        for load in shown:
            eighths = round(min(8.0, max(0.0, (load / top * HEIGHT - row) * 8)))
            glyph = EIGHTHS[eighths] if not ascii_only else "#" if eighths >= 4 else " "
            empty = glyph == " " and row == line
            wide = max(1, each - 1) if each > 1 else 1
            mark = ("-" if ascii_only else "╌") if row == line else " "
            style = "dim" if empty else "red" if load > HIGH * mean else "green"
            text.append((mark if empty else glyph) * wide, style)
            text.append(mark * (each - wide), "dim")
        found.append(text)
    return found


def experts_page(answer: ExpertsAnswer) -> str:
    """Return the answer as one HTML page."""
    loads, layer = answer.loads, answer.worst_layer
    layers = range(len(loads))
    names = ["", "mean", "worst layer", *(["slots moved"] if answer.found else [])]
    rows = []
    for what, balance, moved in answer.rows:
        cells = [what, f"{balance.mean():.4f}", f"{balance.min():.4f}"]
        rows.append([*cells, *(["" if moved is None else f"{moved:,}"] if answer.found else [])])
    figures = [table_html(names, rows)]
    if len(loads) > 1:
        lines = [
            ChartLine(what, [(float(at), float(balance[at])) for at in layers], dashed=what == answer.rows[-1][0])
            for what, balance, _ in answer.rows
        ]
        axes = Axis("layer", lambda value: f"{value:.0f}"), Axis("balance", lambda value: f"{value:.2f}")
        figures.append(chart_html(lines, *axes, label="balance of each layer"))
    sorted_loads = []
    for name, found in (("before", answer.before), ("after", answer.drawn)):
        sizes = np.sort(found.gpu_loads(loads)[layer])[::-1]
        points = [(float(at), float(load)) for at, load in enumerate([*sizes, sizes[-1]])]  # each GPU is one step wide
        sorted_loads.append(ChartLine(name, points, steps=True))
    drawn = []
    if answer.fleet.gpus > 1:
        axes = Axis("GPUs, fullest first", lambda value: f"{value:.0f}"), Axis("tokens", lambda value: f"{value:,.0f}")
        drawn = [chart_html(sorted_loads, *axes, label="load of each GPU")]
    words = "Mean over max of the GPUs' loads: 1 is perfect."
    if answer.found is not None:
        words = f"{answer.found.sentence[0].upper()}{answer.found.sentence[1:]}. {words}"
    fleet = answer.fleet
    return report_html(
        HtmlReport(
            title=f"{loads.shape[1]} experts on {plural(fleet.gpus, 'GPU')}",
            lead=f"{answer.name}: {plural(len(loads), 'layer')}, {plural(fleet.slots, 'slot')} a GPU, "
            f"{plural(fleet.replicas, 'replica')}.",
            sections=[
                Section("Balance", words, figures),
                Section(f"Load of each GPU, layer {layer}", "The layer with the least balance before.", drawn),
            ],
            facts=[
                (f"{answer.before.balance(loads).mean():.3f}", "balance before"),
                (f"{answer.drawn.balance(loads).mean():.3f}", "balance after"),
                (f"{answer.bound.mean():.3f}", "upper bound"),
            ],
        )
    )
