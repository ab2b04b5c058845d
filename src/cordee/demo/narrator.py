"""The narrator shows each part of the demo on a screen as it happens, and keeps it as a section of the report."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

from cordee.answers.services import UsageView
from cordee.view.memory import MemoryBar
from cordee.view.report import Claim, Section

Amount = tuple[str, float, str]
"""A name, its size on the common scale, and the size in words."""


class Screen(Protocol):
    """Where the demo is shown while it runs."""

    def title(self, number: int, title: str) -> None:
        """Show the title of a part."""

    def paragraph(self, text: str, style: str = "") -> None:
        """Show a paragraph."""

    def line(self, at_s: float | None, text: str) -> None:
        """Show an event, with the seconds since the live part began."""

    def claim(self, claim: Claim) -> None:
        """Show a claim that was checked."""

    def memory(self, bars: Sequence[tuple[MemoryBar, str, bool]], gpu_memory_bytes: int) -> None:
        """Show layouts against the memory of a GPU: each with its verdict, and whether it fits."""

    def amounts(self, rows: Sequence[Amount]) -> None:
        """Show amounts as bars on one scale."""

    def usage(self, usage: UsageView) -> None:
        """Show the GPU time and dollars of services and of training."""

    def waiting(self, text: str) -> AbstractContextManager[None]:
        """Show that something runs until the context ends."""

    def progress(self, text: str) -> None:
        """Replace the text of `waiting`."""


class Narrator:
    """The parts of the demo so far; `screen` shows them."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.sections: list[Section] = []
        self._claims: list[Claim] = []
        self._figures: list[str] = []
        self._notes: list[str] = []

    @contextmanager
    def part(self, title: str, lead: str) -> Iterator[None]:
        """Begin a numbered part; it becomes a section of the report when it is over."""
        self._claims, self._figures, self._notes = [], [], []
        self.screen.title(len(self.sections) + 1, title)
        self.screen.paragraph(lead)
        yield
        section = Section(title, lead, tuple(self._figures), tuple(self._claims), tuple(self._notes))
        self.sections.append(section)

    def claim(self, claim: Claim) -> None:
        """Add a claim that was checked just now."""
        self.screen.claim(claim)
        self._claims.append(claim)

    def note(self, text: str) -> None:
        """Add a remark that qualifies what was shown."""
        self.screen.paragraph(text, "dim")
        self._notes.append(text)

    def figure(self, html: str) -> None:
        """Add a picture to the report."""
        self._figures.append(html)
