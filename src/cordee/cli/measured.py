"""Planned, measured, off by: the one small table that `jobs JOB`, `why` and `cost` print."""

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from cordee.answers.jobs import ComparisonView
from cordee.cli import terminal
from cordee.view.measured import HEADS, compared_texts

_HEADS = tuple(head.upper() for head in HEADS)


def comparisons(rows: Iterable[ComparisonView]) -> Table:
    """Return the table of one attempt."""
    table = terminal.table("", *_HEADS, right=_HEADS)
    for row in rows:
        table.add_row(row.quantity, *_cells(row))
    return table


def comparisons_by_key(of: str, rows: Iterable[tuple[str, ComparisonView]]) -> Table:
    """Return the table of several jobs or attempts; each key stands once."""
    table = terminal.table(of.upper(), "", *_HEADS, right=_HEADS)
    before = None
    for key, row in rows:
        table.add_row("" if key == before else key, row.quantity, *_cells(row))
        before = key
    return table


def _cells(row: ComparisonView) -> tuple[str, str, Text]:
    planned, measured, off = compared_texts(row)
    return planned, measured, Text(off, style="bold red" if row.missed else "")
