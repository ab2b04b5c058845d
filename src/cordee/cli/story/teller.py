"""Tells the demo twice: on the terminal as it happens, and as sections of the report."""

import io
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.padding import Padding
from rich.status import Status
from rich.table import Table
from rich.text import Text

from cordee.view.report import Claim, Section

PIPED_WIDTH = 100
INDENT = 3


class Teller:
    """Prints parts, lines and claims, and keeps them."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or _console()
        self.sections: list[Section] = []
        self._title, self._lead = "", ""
        self._claims: list[Claim] = []
        self._figures: list[str] = []
        self._notes: list[str] = []
        self._status: Status | None = None
        self._signs = ("✓", "·") if self.console.encoding.lower().startswith("utf") else ("ok", "-")

    @contextmanager
    def part(self, title: str, lead: str) -> Iterator[None]:
        """One numbered part; it becomes a section of the report when it is over."""
        self._title, self._lead = title, lead
        self._claims, self._figures, self._notes = [], [], []
        self.console.print()
        self.console.print(Text.assemble((f"{len(self.sections) + 1}  ", "bold cyan"), (title, "bold")))
        self.say(lead)
        yield
        section = Section(title, lead, tuple(self._figures), tuple(self._claims), tuple(self._notes))
        self.sections.append(section)

    def say(self, text: str, style: str = "") -> None:
        """A paragraph, indented and wrapped."""
        self._print(Text(text, style))

    def line(self, at_s: float | None, text: str | Text, style: str = "") -> None:
        """Something that happened, with the seconds since the live part began."""
        clock = f"{at_s:6.1f} s" if at_s is not None else self._signs[1]
        self._hang(Text(clock, "dim"), Text(text, style) if isinstance(text, str) else text)

    def claim(self, claim: Claim) -> None:
        """Something that was checked just now."""
        said = Text.assemble(claim.says, "\n", (claim.measured, "dim"))
        self._hang(Text(self._signs[0], "bold green"), said)
        self._claims.append(claim)

    def note(self, text: str) -> None:
        """A remark that qualifies what was shown."""
        self._print(Text(text, "dim"))
        self._notes.append(text)

    def figure(self, html: str) -> None:
        """A picture, for the report only."""
        self._figures.append(html)

    @contextmanager
    def waiting(self, text: str) -> Iterator[None]:
        """Show on a terminal that something goes on; a pipe is not told."""
        if not self.console.is_terminal:
            yield
            return
        with self.console.status(Text(text, "dim"), spinner="line") as self._status:
            yield
        self._status = None

    def progress(self, text: str) -> None:
        """What goes on now, in place of what was said before."""
        if self._status is not None:
            self._status.update(Text(text, "dim"))

    def _print(self, text: Text) -> None:
        self.console.print(Padding(text, (0, 0, 0, INDENT)))

    def _hang(self, sign: Text, text: Text) -> None:
        """Text with its sign in front, wrapped beside it and not below it."""
        grid = Table.grid(padding=(0, 1))
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_row(sign, text)
        self.console.print(Padding(grid, (0, 0, 0, INDENT)))

    @property
    def ascii_only(self) -> bool:
        """Whether the terminal takes nothing but ASCII."""
        return self._signs[0] == "ok"


def bars(rows: Sequence[tuple[str, float, str]], width: int = 40, *, ascii_only: bool = False) -> list[str]:
    """Rows of (name, size, amount) as bars to one scale.

    >>> bars([("a", 2.0, "$2"), ("bb", 1.0, "$1")], width=4, ascii_only=True)
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
        sys.stdout.reconfigure(line_buffering=True)  # what is told as it happens is also read as it happens
    return Console(highlight=False, width=PIPED_WIDTH)
