"""Rows as an HTML table: words to the left, numbers to the right."""

from collections.abc import Sequence
from dataclasses import dataclass

from cordee.view.markup import text


@dataclass(frozen=True, slots=True)
class Column:
    """A heading; the first column of a table is its row's name."""

    title: str


def table_html(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> str:
    """A table in a frame of its own that scrolls where the page is narrow."""
    head = "".join(f"<th>{text(column.title)}</th>" for column in columns)
    body = "".join(
        "<tr>" + "".join(f"<td>{text(cell)}</td>" if at else f'<th scope="row">{text(cell)}</th>'
                         for at, cell in enumerate(row)) + "</tr>"
        for row in rows
    )  # fmt: skip
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'
