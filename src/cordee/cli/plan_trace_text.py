"""A traced rank in a terminal: class by class and moment by moment, with the plan's numbers beside them."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cordee.cli.plan_text import console, indented, title
from cordee.train.trace_memory.answer import Traced
from cordee.train.trace_memory.comparison import TraceComparison
from cordee.units import format_bytes, format_gb, plural

_CODES = {"hf": "transformers' model code", "torchtitan": "torchtitan's model code", "megatron": ""}
_WEIGHTS = {
    "mixed": "fp32 weights, gathered in bf16",
    "autocast": "fp32 weights under autocast",
    "bf16": "weights, gradients and moments in bf16",
    "fp32": "everything in fp32",
}
# The plan counts tensors that live for a moment among its buffers.
_ROWS = (
    ("weights", ("weights",)),
    ("gradients", ("gradients",)),
    ("optimizer", ("optimizer",)),
    ("activations", ("activations",)),
    ("loss", ("loss",)),
    ("buffers, temporaries", ("buffers", "temporaries")),
)


def print_comparison(found: TraceComparison) -> None:
    """Print both peaks by class, every moment, and what follows for the GPU."""
    out = console()
    question, traced = found.question, found.traced
    code = "the function's model" if question.function is not None else _CODES[question.code]
    out.print(
        Text.assemble(
            (found.model, "bold"), " on ", (f"{found.gpus} x {found.gpu.name}", "bold"),
            f" of {format_bytes(found.gpu.visible_bytes)}, rank 0 of ", (str(found.layout), "bold"),
        )
    )  # fmt: skip
    tokens = f", sequences of {question.seq_tokens:,} tokens" if traced.reads_tokens else ""
    weights = _WEIGHTS[question.weights]
    if question.adapters is not None:
        weights = f"frozen weights in {question.adapters.base.name}, adapters of rank {question.adapters.rank} in fp32"
    code += ", each layer compiled" if question.compiled else ""
    out.print(f"{code}, {weights}{tokens}, micro-batches of {question.micro_batch}", style="dim")
    ran = plural(traced.layers_recorded, "layer") + (f" of {traced.layers}" if traced.layers else "")
    repeated = ", one of them repeated" if traced.layers_recorded < traced.layers else ""
    seconds = f"{traced.cpu_s:.1f} s of one CPU"
    if found.first is not None:
        out.print(f"not {found.first}, the plan's first: {found.why_not_first}", style="yellow")
    out.print(f"{traced.parameters:,} parameters; {ran} ran on fake tensors{repeated}: {seconds}", style="dim")
    _classes(out, found)
    _moments(out, found)
    out.print()
    _verdict(out, found)


def _classes(out: Console, found: TraceComparison) -> None:
    traced = found.traced
    title(out, "Fullest moment", f"traced at {traced.peak.phase}" + _planned_at(found))
    table = _table(found, "")
    planned = None if found.planned is None else found.planned.worst.parts()
    eager = found.eager
    for name, parts in _ROWS:
        of_plan = None if planned is None else sum(planned.get(part, 0) for part in parts)
        of_eager = None if eager is None else sum(eager.peak.parts[part] for part in parts)
        size = sum(traced.peak.parts[part] for part in parts)
        _row(table, name, of_plan, size, whole=traced.allocated_bytes, eager=of_eager)
    table.add_section()
    sums: tuple[int, ...] | None = None
    if found.planned is not None:
        worst = found.planned.worst
        sums = (worst.allocated_bytes, worst.reserved_bytes, worst.held_bytes)
    traced_sums, eager_sums = _sums(traced), None if eager is None else _sums(eager)
    for index, name in enumerate(("allocated", "reserved, at least", "reserved, with room")):
        of_plan, of_eager = (None if each is None else each[index] for each in (sums, eager_sums))
        style, whole = "" if index else "bold", traced.allocated_bytes
        _row(table, name, of_plan, traced_sums[index], whole=whole, eager=of_eager, style=style)
    out.print(table)


def _sums(traced: Traced) -> tuple[int, int, int]:
    return traced.allocated_bytes, traced.reserve.needed_bytes, traced.reserve.reserved_bytes


def _planned_at(found: TraceComparison) -> str:
    return "" if found.planned is None else f", planned at {found.planned.peak_event}"


def _moments(out: Console, found: TraceComparison) -> None:
    title(out, "Moments of the step", "allocated at the fullest of each")
    table = _table(found, "")
    planned = {} if found.planned is None else {each.event: each for each in found.planned.worst_timeline}
    eager = {} if found.eager is None else {each.phase: each.allocated_bytes for each in found.eager.moments}
    for moment in found.traced.moments:
        of_plan = planned.get(moment.phase)
        size = None if of_plan is None else round(float(of_plan.allocated_bytes))
        whole = found.traced.allocated_bytes
        _row(table, moment.phase, size, moment.allocated_bytes, whole=whole, eager=eager.get(moment.phase))
    out.print(table)


def _table(found: TraceComparison, first: str) -> Table:
    table = Table(box=None, padding=(0, 3, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("  " + first, no_wrap=True, min_width=24)
    if found.planned is not None:
        table.add_column("plan", justify="right", no_wrap=True)
    if found.eager is not None:
        table.add_column("eager", justify="right", no_wrap=True)
    table.add_column("trace" if found.eager is None else "compiled", justify="right", no_wrap=True)
    if found.planned is not None:
        table.add_column("plan is off by", justify="right", no_wrap=True)
    return table


def _row(
    table: Table, name: str, planned: float | None, traced: float, *, whole: int, eager: float | None = None,
    style: str = "",
) -> None:  # fmt: skip
    headers = [column.header for column in table.columns]
    cells = ["  " + name]
    if "plan" in headers:
        cells.append("" if planned is None else format_gb(planned))
    if "eager" in headers:
        cells.append("" if eager is None else format_gb(eager))
    cells.append(format_gb(traced))
    if "plan" in headers:
        cells.append("" if planned is None else _off(planned, traced, whole))
    table.add_row(*cells, style=style)


def _off(planned: float, traced: float, whole: float) -> str:
    """Return the plan's error in the trace's per cent; bytes where that is next to nothing of the whole.

    >>> _off(11e9, 10e9, 60e9), _off(2e9, 0, 60e9), _off(1.1e9, 0.1e9, 60e9), _off(0.11e9, 0.1e9, 60e9)
    ('+10.0 %', '+2.0 GB', '+1.0 GB', '')
    """
    difference = planned - traced
    if traced < whole / 100:
        small = abs(difference) < 0.05e9
        return "" if small else f"{'+' if difference > 0 else '-'}{format_gb(abs(difference))}"
    return f"{difference / traced:+.1%}".replace("%", " %")


def _verdict(out: Console, found: TraceComparison) -> None:
    memory = found.gpu.visible_bytes
    needed, kept = (
        found.needed_bytes,
        found.needed_bytes + (found.traced.reserve.reserved_bytes - found.traced.reserve.needed_bytes),
    )
    left = f"{format_gb(memory - needed)} free" if found.fits else f"{format_gb(needed - memory)} too much"
    room = f" Where there is room it keeps {format_gb(kept)}." if kept - needed > 0.05e9 else ""
    text = f"It needs {format_gb(needed)} of {format_bytes(memory)} with the CUDA context: {left}.{room}"
    indented(out, text, style="" if found.fits else "red")
