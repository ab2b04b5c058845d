"""Planned, measured, off by: the one small table that `jobs JOB`, `why` and `cost` print."""

from collections.abc import Iterable

from rich.table import Table
from rich.text import Text

from cordee.cli import terminal
from cordee.client import ComparisonView
from cordee.units import US_PER_S, format_bytes, format_duration

_HEADS = ("PLANNED", "MEASURED", "OFF BY")


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
    planned = _value(row.planned, row.unit)
    if row.low is not None and row.high is not None:
        planned += f" ({_value(row.low, row.unit)} to {_value(row.high, row.unit)})"
    off = "–" if row.off_by is None else f"{100 * row.off_by:+.0f} %"
    return planned, _value(row.measured, row.unit), Text(off, style="bold red" if row.missed else "")


def _value(value: float | None, unit: str) -> str:
    """Return a value as people read it.

    >>> _value(4.4e6, "us"), _value(63e9, "bytes"), _value(0.361, "fraction"), _value(None, "us")
    ('4.4 s', '63 GB', '36 %', '–')
    """
    if value is None:
        return "–"
    if unit == "bytes":
        return format_bytes(round(value))
    return format_duration(value / US_PER_S) if unit == "us" else f"{100 * value:.0f} %"
