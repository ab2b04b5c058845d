"""One HTML file that holds everything it shows: no script, no font, no image from elsewhere.

It reads well in light and in dark, on a telephone and on paper. It knows no job and no event: its caller does.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cordee.view.page import page


@dataclass(frozen=True, slots=True)
class Claim:
    """A statement that was checked while the report was made."""

    says: str
    measured: str
    holds: bool = True


@dataclass(frozen=True, slots=True)
class Section:
    """One part of the report. `figures` are HTML of this room's own making; all else is plain text."""

    title: str
    lead: str
    figures: Sequence[str] = ()
    claims: Sequence[Claim] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class HtmlReport:
    """The whole page. `facts` stand large on top: (number, what it is)."""

    title: str
    lead: str
    sections: Sequence[Section]
    facts: Sequence[tuple[str, str]] = ()
    footer: str = ""


def report_html(report: HtmlReport) -> str:
    """Return the page, self-contained."""
    return page(
        "report.html.j2",
        title=report.title,
        lead=report.lead,
        facts=report.facts,
        sections=report.sections,
        footer=report.footer,
    )
