"""The demo on a terminal: titles, lines, claims and bars as they come."""

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.padding import Padding
from rich.status import Status
from rich.table import Table
from rich.text import Text

from cordee.answers.services import UsageView
from cordee.cli.cost_text import class_table, token_table
from cordee.cli.plan_text import COLOURS
from cordee.demo.narrator import Amount
from cordee.view.memory import LIMIT, PARTS, MemoryBar, full_scale_bytes, memory_cells
from cordee.view.report import Claim

PIPED_WIDTH = 100
INDENT = 3
MEMORY_BAR_WIDTH = 26
AMOUNT_BAR_WIDTH = 24


class Terminal:
    """A `Screen` on a console."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or _console()
        self._status: Status | None = None
        self._signs = ("✓", "·") if self.console.encoding.lower().startswith("utf") else ("ok", "-")

    def title(self, number: int, title: str) -> None:
        """Print the title of a part."""
        self.console.print()
        self.console.print(Text.assemble((f"{number}  ", "bold cyan"), (title, "bold")))

    def paragraph(self, text: str, style: str = "") -> None:
        """Print a paragraph, indented and wrapped."""
        self.console.print(Padding(Text(text, style), (0, 0, 0, INDENT)))

    def line(self, at_s: float | None, text: str | Text) -> None:
        """Print an event, with the seconds since the live part began."""
        clock = f"{at_s:6.1f} s" if at_s is not None else self._signs[1]
        self._hang(Text(clock, "dim"), Text(text) if isinstance(text, str) else text)

    def claim(self, claim: Claim) -> None:
        """Print a claim that was checked."""
        self._hang(Text(self._signs[0], "bold green"), Text.assemble(claim.says, "\n", (claim.measured, "dim")))

    def memory(self, bars: Sequence[tuple[MemoryBar, str, bool]], gpu_memory_bytes: int) -> None:
        """Print layouts as bars against the memory of a GPU."""
        names = max(len(bar.label) for bar, _, _ in bars)
        scale_bytes = full_scale_bytes([bar for bar, _, _ in bars], gpu_memory_bytes)
        for bar, verdict, fits in bars:
            row = Text(f"{bar.label:<{names}}  ")
            for part, cells in memory_cells(bar, gpu_memory_bytes, scale_bytes, MEMORY_BAR_WIDTH):
                glyph = LIMIT[self.ascii_only] if part == "limit" else PARTS[part][1][self.ascii_only] if part else " "
                row.append(glyph * cells, COLOURS.get(part, ""))
            self.line(None, row.append(f"  {verdict}", "" if fits else "red"))

    def amounts(self, rows: Sequence[Amount]) -> None:
        """Print amounts as bars on one scale."""
        for row in amount_bars(rows, AMOUNT_BAR_WIDTH, ascii_only=self.ascii_only):
            self.line(None, row)

    def usage(self, usage: UsageView) -> None:
        """Print the tables of `cordee cost --by service`."""
        width = self.console.width - INDENT
        for table in (class_table(usage, width), token_table(usage, width)):
            self.console.print(Padding(table, (0, 0, 0, INDENT)))

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show on a terminal that something runs; a pipe gets nothing."""
        if not self.console.is_terminal:
            yield
            return
        with self.console.status(Text(text, "dim"), spinner="line") as self._status:
            yield
        self._status = None

    def progress(self, text: str) -> None:
        """Replace the text of `waiting`."""
        if self._status is not None:
            self._status.update(Text(text, "dim"))

    def _hang(self, sign: Text, text: Text) -> None:
        """Print text with its sign in front, wrapped beside it and not below it."""
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_row(sign, text)
        self.console.print(Padding(grid, (0, 0, 0, INDENT)))

    @property
    def ascii_only(self) -> bool:
        """Return whether the terminal shows nothing but ASCII."""
        return self._signs[0] == "ok"


def amount_bars(rows: Sequence[Amount], width: int, *, ascii_only: bool = False) -> list[str]:
    """Return rows of (name, size, amount) as bars on one scale.

    >>> amount_bars([("a", 2.0, "$2"), ("bb", 1.0, "$1")], width=4, ascii_only=True)
    ['a   ####  $2', 'bb  ##  $1']
    """
    longest = max(size for _, size, _ in rows) or 1.0
    names = max(len(name) for name, _, _ in rows)
    full = "#" if ascii_only else "█"
    return [
        f"{name:<{names}}  {full * max(1, round(size / longest * width)) if size else ''}  {amount}"
        for name, size, amount in rows
    ]


def _console() -> Console:
    if sys.stdout.isatty():
        return Console(highlight=False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a reader of the pipe sees each line when it is printed
    return Console(highlight=False, width=PIPED_WIDTH)
