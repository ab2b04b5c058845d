"""What `cordee experts` prints for people: balance against its bound, the answer, and the load of each GPU drawn."""

import math
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cordee.cli.plan_text import console, indented, title
from cordee.plan.experts import Fleet, Placement, Rebalance
from cordee.plan.experts.moves import aligned
from cordee.plan.experts.shape import Floats
from cordee.units import format_bytes
from cordee.view.chart import Axis, Line, chart_html
from cordee.view.report import Report, Section, report_html
from cordee.view.tables import table_html

HEIGHT = 6
"""Lines of a drawing."""
EIGHTHS = " ▁▂▃▄▅▆▇█"
HIGH = 1.1
"""Loads above the mean by this are drawn in another colour."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What was asked and found. `fresh` is a plan from scratch, `found` the answer to `--from`."""

    name: str
    loads: Floats
    fleet: Fleet
    before: Placement
    placement: Placement
    fresh: Placement
    bound: Floats
    found: Rebalance | None

    @property
    def rows(self) -> list[tuple[str, Floats, int | None]]:
        """(what, balance of each layer, slots that differ from the present ones)."""
        loads, rows = self.loads, list[tuple[str, Floats, int | None]]()
        if self.found is None:
            rows.append(("one after the other", self.before.balance(loads), None))
            rows.append(("this plan", self.placement.balance(loads), None))
        else:
            rows.append(("at present", self.before.balance(loads), 0))
            rows.append(("few moves", self.found.balance_found, self.found.moved_slots))
            fresh = int((aligned(self.before.slots, self.fresh.slots) != self.before.slots).sum())
            rows.append(("all anew", self.fresh.balance(loads), fresh))
        return [*rows, ("no placement exceeds", self.bound, None)]

    @property
    def drawn(self) -> Placement:
        """The placement that is drawn beside the present one."""
        return self.placement if self.found is None else self.found.found

    @property
    def worst_layer(self) -> int:
        """The layer that is least balanced before."""
        return int(self.before.balance(self.loads).argmin())


def print_outcome(outcome: Outcome) -> None:
    """The whole, as wide as the terminal."""
    out = console()
    fleet, (layers, experts) = outcome.fleet, outcome.loads.shape
    heading = f" on {fleet.gpus} GPUs" + (f" of {fleet.nodes} nodes" if fleet.nodes > 1 else "")
    out.print(Text.assemble((f"{experts} experts in {layers} layers", "bold"), (heading, "bold")))
    kept = f"{fleet.groups} groups, each on one node" if fleet.domains > 1 else "an expert may go to any GPU"
    say = f"{outcome.name}; {fleet.slots} slots a GPU, {fleet.replicas - experts} replicas beyond one of each; {kept}"
    out.print(say, style="dim")
    _balance(out, outcome)
    if outcome.found is not None:
        style = "bold green" if outcome.found.pays else "bold"
        out.print()
        indented(out, outcome.found.says[0].upper() + outcome.found.says[1:] + ".", style=style)
        _noise(out, outcome.found, layers)
    _drawings(out, outcome)


def _balance(out: Console, outcome: Outcome) -> None:
    title(out, "Balance", "mean over max of the GPUs' loads; 1 is perfect")
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    columns = ["mean", "worst layer", *(["slots moved"] if outcome.found else [])]
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for what, balance, moved in outcome.rows:
        cells = [f"{balance.mean():.4f}", f"{balance.min():.4f}"]
        if outcome.found:
            cells.append("" if moved is None else f"{moved:,} ({moved / outcome.before.slots.size:.0%})")
        table.add_row("  " + what, *cells, style="dim" if what == outcome.rows[-1][0] else "")
    out.print(table)


def _noise(out: Console, found: Rebalance, layers: int) -> None:
    noisy = layers - found.layers_beyond_noise
    if noisy:
        indented(
            out, f"{noisy} of {layers} layers are no fuller than the noise of so few tokens makes them: left alone."
        )
    if found.moved_slots:
        indented(out, f"{format_bytes(found.moved_bytes)} in all; an expert moves to a GPU that has not got it.")


def _drawings(out: Console, outcome: Outcome) -> None:
    layer = outcome.worst_layer
    before = outcome.before.gpu_loads(outcome.loads)[layer]
    after = outcome.drawn.gpu_loads(outcome.loads)[layer]
    top = float(max(before.max(), after.max()))
    title(out, f"Load of each GPU, layer {layer}", "the least balanced one; the line is the mean")
    ascii_only = not out.encoding.lower().startswith("utf")
    for name, loads in (("before", before), ("after", after)):
        mean = float(loads.mean())
        out.print(f"  {name}: fullest {loads.max():,.0f} tokens, mean {mean:,.0f}", style="dim")
        for line in columns(loads, top, out.width - 4, ascii_only=ascii_only):
            out.print(Text("  ").append_text(line), no_wrap=True)
        out.print()


def columns(loads: Floats, top: float, width: int, *, ascii_only: bool = False) -> list[Text]:
    """A column for each GPU from the top line down; where there is no room for all, the fullest of neighbours."""
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


def experts_page(outcome: Outcome) -> str:
    """The same as one HTML page."""
    loads, layer = outcome.loads, outcome.worst_layer
    layers = range(len(loads))
    names = ["", "mean", "worst layer", *(["slots moved"] if outcome.found else [])]
    rows = []
    for what, balance, moved in outcome.rows:
        cells = [what, f"{balance.mean():.4f}", f"{balance.min():.4f}"]
        rows.append([*cells, *(["" if moved is None else f"{moved:,}"] if outcome.found else [])])
    figures = [table_html(names, rows)]
    if len(loads) > 1:
        lines = [
            Line(what, [(float(at), float(balance[at])) for at in layers], dashed=what == outcome.rows[-1][0])
            for what, balance, _ in outcome.rows
        ]
        axes = Axis("layer", lambda value: f"{value:.0f}"), Axis("balance", lambda value: f"{value:.2f}")
        figures.append(chart_html(lines, *axes, label="balance of each layer"))
    sorted_loads = [
        Line(name, [(float(at), float(load)) for at, load in enumerate(np.sort(found.gpu_loads(loads)[layer])[::-1])])
        for name, found in (("before", outcome.before), ("after", outcome.drawn))
    ]
    drawn = []
    if outcome.fleet.gpus > 1:
        axes = Axis("GPUs, fullest first", lambda value: f"{value:.0f}"), Axis("tokens", lambda value: f"{value:,.0f}")
        drawn = [chart_html(sorted_loads, *axes, label="load of each GPU")]
    answer = "Mean over max of the GPUs' loads: 1 is perfect."
    if outcome.found is not None:
        answer = f"{outcome.found.says[0].upper()}{outcome.found.says[1:]}. {answer}"
    fleet = outcome.fleet
    return report_html(
        Report(
            title=f"{loads.shape[1]} experts on {fleet.gpus} GPUs",
            lead=f"{outcome.name}: {len(loads)} layers, {fleet.slots} slots a GPU, {fleet.replicas} replicas.",
            sections=[
                Section("Balance", answer, figures),
                Section(f"Load of each GPU, layer {layer}", "The layer that is least balanced before.", drawn),
            ],
            facts=[
                (f"{outcome.before.balance(loads).mean():.3f}", "balance before"),
                (f"{outcome.drawn.balance(loads).mean():.3f}", "balance after"),
                (f"{outcome.bound.mean():.3f}", "no placement exceeds"),
            ],
        )
    )
