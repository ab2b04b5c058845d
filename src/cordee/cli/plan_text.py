"""What `cordee plan` prints for people: the bill, the layouts against the wall, survival, and its sources."""

import os
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cordee.hardware.catalog import Capacity, Price
from cordee.plan.search import Candidate, Plan
from cordee.plan.survive import Survival
from cordee.units import GB, format_bytes, format_duration, format_usd
from cordee.view.memory import PARTS, WALL, MemoryBar, full_scale_bytes, memory_cells

SHOWN = 8
PIPED_WIDTH = 100
NARROWEST = 20
COLOURS = {
    "weights": "blue",
    "gradients": "green",
    "optimizer": "magenta",
    "activations": "yellow",
    "other": "bright_black",
    "wall": "bold",
}


@dataclass(frozen=True)
class Survivor:
    """What one kind of capacity costs and has to expect."""

    capacity: Capacity
    price: Price | None
    mtbi_source: str
    survival: Survival


@dataclass(frozen=True)
class Facts:
    """All that is shown."""

    plan: Plan
    capacity: Capacity
    survivors: tuple[Survivor, ...]
    storage_per_node: str


def print_plan(facts: Facts, *, show_all: bool) -> None:
    """Print the whole plan on standard output."""
    console = _console()
    _header(console, facts.plan)
    _bill(console, facts.plan)
    _layouts(console, facts.plan, show_all)
    _survival(console, facts)
    _sources(console, facts)


def _console() -> Console:
    console = Console(highlight=False)
    if console.is_terminal:
        return console
    # A pipe has no width of its own, unless COLUMNS says so: wide enough for every table.
    columns = os.environ.get("COLUMNS", "")
    return Console(highlight=False, width=max(NARROWEST, int(columns)) if columns.isdecimal() else PIPED_WIDTH)


def _title(console: Console, text: str, aside: str = "") -> None:
    console.print()
    console.print(Text.assemble((text, "bold"), ("  " + aside if aside else "", "dim")))


def _header(console: Console, plan: Plan) -> None:
    training = plan.training
    console.print(
        Text.assemble((plan.shape.name, "bold"), " on ", (f"{plan.gpus} x {plan.gpu.name}", "bold"),
                      f" of {format_bytes(plan.gpu.memory_bytes)}")
    )  # fmt: skip
    console.print(
        f"sequences of {training.seq_tokens:,} tokens, {training.global_batch:,} in a step "
        f"({_count(training.tokens_per_step)} tokens), {training.precision}, {training.optimizer.name}",
        style="dim",
    )


def _bill(console: Console, plan: Plan) -> None:
    optimizer, shape = plan.training.optimizer, plan.shape
    _title(console, "The bill")
    each = f"{optimizer.bytes_per_parameter:g}"
    console.print(
        Text.assemble(f"  {shape.parameters:,} parameters x {each} bytes = ", (format_bytes(plan.state_bytes), "bold"))
    )
    terms = (
        ("weights", optimizer.weight_bytes),
        ("gradients", optimizer.gradient_bytes),
        ("fp32 master", optimizer.master_bytes),
        ("moments", optimizer.moment_bytes),
    )
    console.print("  " + " + ".join(f"{name} {size:g}" for name, size in terms if size), style="dim")
    if shape.experts is not None:
        console.print(f"  {shape.active_parameters:,} of them are active for one token", style="dim")
    have = format_bytes(plan.gpus * plan.gpu.memory_bytes)
    hold = "1 GPU" if plan.fewest_gpus == 1 else f"{plan.fewest_gpus} GPUs"
    console.print(f"  {hold} only to hold it; {plan.gpus} {'has' if plan.gpus == 1 else 'have'} {have}")


def _layouts(console: Console, plan: Plan, show_all: bool) -> None:
    fitting = plan.fitting if show_all else plan.fitting[:SHOWN]
    rejected = plan.rejected if show_all else plan.rejected[:SHOWN]
    scale = _Scale.of(console, plan, (*fitting, *rejected))
    if fitting:
        _title(console, f"Layouts that fit: {len(plan.fitting)}", "fastest first")
        speeds = ("step", "MFU", "tok/s", "$/1B tok")
        table = _table(scale, *(name for name in speeds if name in scale.columns))
        for candidate in fitting:
            table.add_row(*_judged(candidate, scale), *_speed(candidate, scale))
        console.print(table)
        _more(console, len(plan.fitting) - len(fitting))
    if rejected:
        _title(console, f"Layouts that do not: {len(plan.rejected)}", "nearest first")
        table = _table(scale, "too much")
        for candidate in rejected:
            table.add_row(*_judged(candidate, scale), Text(f"+{_gb(candidate.shortfall_bytes)}", "red"))
        console.print(table)
        _more(console, len(plan.rejected) - len(rejected))
    console.print(_legend(plan, scale.ascii_only))
    if plan.remedies:
        _title(console, "What would fit")
        for remedy in plan.remedies:
            peak = format_bytes(remedy.candidate.peak_bytes)
            console.print(f"  {remedy.change}: {remedy.candidate.layout}, {peak}")


@dataclass(frozen=True)
class _Scale:
    """One scale for both tables, so that their walls stand in one line."""

    name_width: int
    bar_width: int
    full_bytes: int
    ascii_only: bool
    columns: frozenset[str]

    @classmethod
    def of(cls, console: Console, plan: Plan, shown: Sequence[Candidate]) -> "_Scale":
        names = max(len(str(candidate.layout)) for candidate in shown) + 2
        # A narrow terminal gives its room to the bars; tokens a second follow from the step.
        widths = {"step": 9, "MFU": 4} | ({"tok/s": 6} if console.width >= 100 else {})
        widths |= {"$/1B tok": 9} if plan.price is not None else {}
        left = console.width - names - sum(widths.values()) - 12
        full_bytes = full_scale_bytes([_bar(candidate) for candidate in shown], plan.gpu.memory_bytes)
        ascii_only = not console.encoding.lower().startswith("utf")
        return cls(names, max(10, min(60, left)), full_bytes, ascii_only, frozenset(widths))


def _table(scale: _Scale, *others: str) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("  layout", no_wrap=True, min_width=scale.name_width)
    table.add_column("fullest GPU"[: scale.bar_width], no_wrap=True, min_width=scale.bar_width)
    table.add_column("", justify="right", no_wrap=True, min_width=8)
    for name in others:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _judged(candidate: Candidate, scale: _Scale) -> tuple[str, Text, str]:
    """The columns that both tables share."""
    return f"  {candidate.layout}", _drawn(candidate, scale), _gb(candidate.peak_bytes)


def _gb(n_bytes: int) -> str:
    """One unit and one digit for a whole column."""
    return f"{n_bytes / GB:.1f} GB"


def _bar(candidate: Candidate) -> MemoryBar:
    return MemoryBar(str(candidate.layout), candidate.memory.worst.parts())


def _drawn(candidate: Candidate, scale: _Scale) -> Text:
    drawn = Text()
    for part, cells in memory_cells(_bar(candidate), candidate.wall_bytes, scale.full_bytes, scale.bar_width):
        drawn.append(_glyph(part, scale.ascii_only) * cells, COLOURS.get(part, ""))
    return drawn


def _glyph(part: str, ascii_only: bool) -> str:
    if part == "wall":
        return WALL[ascii_only]
    return PARTS[part][1][ascii_only] if part else " "


def _legend(plan: Plan, ascii_only: bool) -> Text:
    legend = Text("  ")
    for part in PARTS:
        legend.append(_glyph(part, ascii_only), COLOURS[part])
        legend.append(f" {part}  ", "dim")
    legend.append(_glyph("wall", ascii_only), "bold")
    legend.append(f" {format_bytes(plan.gpu.memory_bytes)}", "dim")
    return legend


def _speed(candidate: Candidate, scale: _Scale) -> list[str]:
    """The columns of a layout that fits, as far as there is room."""
    assert candidate.step is not None and candidate.mfu is not None and candidate.tokens_per_s is not None, "it fits"
    usd = candidate.usd_per_billion_tokens
    cells = {
        "step": f"{candidate.step.total_s:,.1f} s",
        "MFU": f"{candidate.mfu:.0%}",
        "tok/s": _count(candidate.tokens_per_s),
        "$/1B tok": _usd(usd) if usd is not None else "",
    }
    return [cell for name, cell in cells.items() if name in scale.columns]


def _more(console: Console, hidden: int) -> None:
    if hidden > 0:
        console.print(f"  and {hidden} more: --all", style="dim")


def _survival(console: Console, facts: Facts) -> None:
    survivors = facts.survivors
    one = survivors[0].survival
    plan = facts.plan
    each = plan.training.optimizer.checkpoint_bytes_per_parameter
    _title(console, "Surviving")
    size, time = format_bytes(one.checkpoint_bytes), format_duration(one.checkpoint_s)
    weight = Text.assemble("  a checkpoint is ", (size, "bold"), f" ({each:g} bytes a parameter): ", (time, "bold"))
    console.print(weight.append(f" at {facts.storage_per_node} a node"))
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("  capacity", no_wrap=True)
    for name in ("stopped every", "save every", "goodput", "with notice", "expected", "at worst"):
        table.add_column(name, justify="right", no_wrap=True)
    for survivor in survivors:
        expected = survivor.survival
        table.add_row(
            f"  {survivor.capacity}", format_duration(expected.mtbi_s),
            format_duration(expected.period_s), f"{expected.goodput:.1%}", *_losses(expected),
        )  # fmt: skip
    console.print(table)
    _indented(console, f"The dollars are what one preemption loses: with {_notice(plan, one)} only the restart; "
              "without, on average half a period, at worst a whole one.")  # fmt: skip
    chosen = next(survivor for survivor in survivors if survivor.capacity == facts.capacity)
    rate = chosen.survival.usd_per_hour
    if rate is not None:
        line = f"Without checkpoints it loses all since the start: {_usd(rate)} an hour, {_usd(24 * rate)} a day."
        _indented(console, line, style="")


def _notice(plan: Plan, expected: Survival) -> str:
    """What the ranks need to leave in order: they end the step they are in, and write a checkpoint."""
    needed = expected.notice_needed_s
    if plan.best is None or plan.best.step is None:
        return f"{format_duration(needed)} of notice (a checkpoint)"
    return f"{format_duration(plan.best.step.total_s + needed)} of notice (a step and a checkpoint)"


def _losses(expected: Survival) -> list[str]:
    sizes = (expected.lost_usd_with_notice, expected.lost_usd_expected, expected.lost_usd_worst)
    return ["no price" if size is None else _usd(size) for size in sizes]


def _usd(usd: float) -> str:
    """Whole dollars once there are a hundred: a column that can be compared."""
    return f"${usd:,.0f}" if usd >= 100 else format_usd(usd)


def _sources(console: Console, facts: Facts) -> None:
    _title(console, "Sources")
    gpu = facts.plan.gpu
    for survivor in facts.survivors:
        price = survivor.price
        what = f"${price.usd_per_gpu_hour:.2f} a GPU-hour: {price.source}" if price else "no price known: give --prices"
        _indented(console, f"{survivor.capacity} {what}")
    for survivor in facts.survivors:
        _indented(console, f"{survivor.capacity} interruptions: {survivor.mtbi_source}")
    _indented(console, f"{gpu.name}: {gpu.source}")
    _indented(
        console, "step time: first principles, not calibrated; MFU counts causal attention once, no recomputation"
    )


def _indented(console: Console, text: str, style: str = "dim") -> None:
    for line in textwrap.wrap(text, max(NARROWEST, console.width) - 2):
        console.print("  " + line, style=style, no_wrap=True)


def _count(number: float) -> str:
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"
