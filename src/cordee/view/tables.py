"""Rows as an HTML table: words to the left, numbers to the right."""

from collections.abc import Sequence

from cordee.view.page import part


def table_html(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table in a frame of its own that scrolls where the page is narrow; the first column names its row."""
    return part("table", columns, rows)
