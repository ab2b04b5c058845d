"""A service beside training jobs on a terminal: one cluster against two, and its GPUs over the day."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from cordee.cli.plan_text import console, indented, title
from cordee.simulate.services.answer import GOAL, GpuSample, TogetherAnswer
from cordee.simulate.services.rows import result_rows
from cordee.units import plural

LINES = 8
"""Lines of the drawing."""
WIDEST = 96


def print_together(answer: TogetherAnswer) -> None:
    """Print the comparison as wide as the terminal; the summary comes last."""
    out = console()
    hours = "a day" if answer.hours == 24 else f"{answer.hours:.3g} hours"
    where = f"{answer.nodes:,} nodes with {plural(answer.one.gpus, 'GPU')}"
    out.print(Text.assemble((answer.service, "bold"), " beside ", (answer.jobs, "bold"), f" for {hours} on {where}"))
    indented(
        out,
        f"{answer.model} on {answer.layout} of {answer.gpu} in each replica; {answer.requests}: "
        f"{answer.one.serving.requests:,} requests; {answer.slo}",
    )
    _results(out, answer)
    _drawing(out, answer)
    for line in _remarks(answer):
        indented(out, line)
    out.print()
    for line in filter(None, (answer.summary, answer.saving)):
        indented(out, line[0].upper() + line[1:] + ".", style="bold")


def _results(out: Console, answer: TogetherAnswer) -> None:
    columns = [("one cluster", answer.one), ("two clusters", answer.two)]
    columns += [("two, as good", answer.enough)] if answer.enough is not None else []
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    for name, _ in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for name, show in result_rows():
        cells = [show(result) for _, result in columns] if show else []
        table.add_row(*([Text(name, "bold")] if show is None else ["  " + name, *cells]))
    out.print()
    out.print(table)


def _drawing(out: Console, answer: TogetherAnswer) -> None:
    """Draw the GPUs of serving and of training over time, one above the other."""
    if len(answer.samples) < 2:
        return
    title(out, "GPUs of the one cluster", "over time")
    label = len(f"{answer.one.gpus:,}")
    width = min(WIDEST, out.width - label - 4)
    columns = [_column(answer.samples, number, width) for number in range(width)]
    per_line = answer.one.gpus / LINES
    for line in range(LINES, 0, -1):
        row = Text(f"  {round(line * per_line):>{label},} " if line % 2 == 0 else " " * (label + 3))
        for serving, training in columns:
            middle = (line - 0.5) * per_line
            cell = ("█", "cyan") if middle <= serving else ("▒", "green") if middle <= serving + training else (" ", "")
            row.append(*cell)
        out.print(row, no_wrap=True, overflow="crop")
    end = f"{answer.hours:.3g} h"
    out.print(f"  {'0':>{label}} 0 h{' ' * max(1, width - 3 - len(end))}{end}", style="dim", no_wrap=True)
    out.print(Text.assemble("  ", ("█", "cyan"), " serving  ", ("▒", "green"), " training"))


def _column(samples: Sequence[GpuSample], number: int, width: int) -> tuple[float, float]:
    """Return the mean GPUs of serving and of training in one column of the drawing."""
    low = number * len(samples) // width
    part = samples[low : max(low + 1, (number + 1) * len(samples) // width)]
    return sum(each.serving for each in part) / len(part), sum(each.training for each in part) / len(part)


def _remarks(answer: TogetherAnswer) -> list[str]:
    lines = []
    if answer.one.serving.refused:
        refused = f"{answer.one.serving.refused:,} of {answer.one.serving.requests:,} requests"
        lines.append(f"{refused} are longer than the context, and miss the SLO")
    if answer.one.serving.worst_hour < GOAL:
        lines.append(f"the one cluster misses {GOAL:.0%} of the requests within the SLO in its worst hour")
    if answer.enough is None:
        lines.append("no two clusters of up to twice the GPUs do as well as the one")
    return ["", *lines, *(f"price: {source}" for source in answer.price_sources)]
