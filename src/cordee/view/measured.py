"""Planned, measured, off by: values of a job as text, and as a table of a page."""

from collections.abc import Sequence
from typing import Protocol

from cordee.units import US_PER_S, format_bytes, format_count, format_duration
from cordee.view.tables import table_html

HEADS = ("planned", "measured", "off by")
TIMES = 9.0  # above ten times as much, a percentage is hard to read


class Compared(Protocol):
    """A value in `unit` (bytes, us, fraction or count) as it was planned, with its interval, and as it was measured."""

    @property
    def quantity(self) -> str: ...
    @property
    def unit(self) -> str: ...
    @property
    def planned(self) -> float | None: ...
    @property
    def low(self) -> float | None: ...
    @property
    def high(self) -> float | None: ...
    @property
    def measured(self) -> float | None: ...
    @property
    def off_by(self) -> float | None: ...


def compared_texts(row: Compared) -> tuple[str, str, str]:
    """Return what was planned, what was measured, and how far the one is off the other."""
    planned = value_text(row.planned, row.unit)
    if row.low is not None and row.high is not None:
        planned += f" ({value_text(row.low, row.unit)} to {value_text(row.high, row.unit)})"
    return planned, value_text(row.measured, row.unit), _off_text(row.off_by)


def _off_text(off_by: float | None) -> str:
    """Return how far a value is off.

    >>> _off_text(0.25), _off_text(-0.89), _off_text(131.0), _off_text(None)
    ('+25 %', '-89 %', '132 times', '–')
    """
    if off_by is None:
        return "–"
    return f"{100 * off_by:+.0f} %" if off_by < TIMES else f"{1 + off_by:.0f} times"


def value_text(value: float | None, unit: str) -> str:
    """Return a value as people read it.

    >>> value_text(4.4e6, "us"), value_text(63e9, "bytes"), value_text(0.361, "fraction"), value_text(None, "us")
    ('4.4 s', '63 GB', '36 %', '–')
    """
    if value is None:
        return "–"
    if unit == "bytes":
        return format_bytes(round(value))
    if unit == "count":
        return format_count(value)
    return format_duration(value / US_PER_S) if unit == "us" else f"{100 * value:.0f} %"


def compared_html(rows: Sequence[tuple[str, Compared]]) -> str:
    """Return the table of several jobs, each with its name."""
    columns = ["job", "value", *HEADS]
    return table_html(columns, [(name, row.quantity, *compared_texts(row)) for name, row in rows])
