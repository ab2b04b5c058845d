"""Rows as an HTML table: words to the left, numbers to the right."""

from collections.abc import Sequence
from dataclasses import dataclass

from cordee.view.page import part


@dataclass(frozen=True, slots=True)
class Column:
    """A heading; the first column of a table is its row's name."""

    title: str


def table_html(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in a frame of its own that scrolls where the page is narrow."""
    return part("table", [column.title for column in columns], rows)
