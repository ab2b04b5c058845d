"""HTML by Jinja2: one environment, which escapes everything that this room has not made itself.

Templates lie in `templates/`. A page extends `base.html.j2`, which brings the palette, the style sheet and the header;
parts of pages are macros in `macros.html.j2`. Drawings are made in Python and go in with `|safe`.
"""

from functools import cache
from typing import TYPE_CHECKING

from cordee.units import (
    US_PER_S,
    format_bytes,
    format_count,
    format_duration,
    format_gb,
    format_micro_usd,
    format_whole_usd,
    plural,
)
from cordee.view.markup import SPAN_COLOURS, class_label, num, palette_css, printable

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def environment() -> "Environment":
    """Return the environment of all templates; Jinja2 is imported only where a page is made."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    made = Environment(
        loader=PackageLoader("cordee.view"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(value),
    )
    fills = "".join(f".stack .{name},.dot.{name}{{background-color:var(--{name})}}" for name in SPAN_COLOURS)
    made.filters.update(
        bytes=format_bytes,
        gb=format_gb,
        count=format_count,
        duration=format_duration,
        percent=lambda fraction: f"{fraction:.0%}",
        usd=lambda usd: "no price" if usd is None else format_whole_usd(usd),
        month=lambda month: "never" if month is None else str(month),
        money=format_micro_usd,
        span=lambda us: format_duration(round(us / US_PER_S) if us >= US_PER_S else us / US_PER_S),
        wait=format_wait,
        class_label=class_label,
        num=num,
        utc=_utc,
    )
    made.globals.update(palette_css=Markup(palette_css()), fills_css=Markup(fills), plural=plural)
    return made


def format_wait(us: float) -> str:
    """Return a wait in a queue in microseconds, in whole seconds.

    >>> format_wait(402_300), format_wait(31_600_000), format_wait(0)
    ('0 s', '32 s', '0 s')
    """
    return format_duration(seconds) if (seconds := round(us / US_PER_S)) else "0 s"


def _utc(us: int) -> str:
    """Return a moment as a date and a time of UTC, by the calendar's cycle of 146,097 days from a March on.

    >>> _utc(1_795_392_000_000_000), _utc(951_825_660_000_000)
    ('2026-11-23 00:00', '2000-02-29 12:01')
    """
    days, seconds = divmod(us // US_PER_S, 86_400)
    era, day = divmod(days + 719_468, 146_097)
    year = (day - day // 1460 + day // 36_524 - day // 146_096) // 365
    of_year = day - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153  # 0 is March
    of_month = of_year - (153 * month + 2) // 5 + 1
    year += 400 * era + (month >= 10)
    return (
        f"{year}-{month + 3 if month < 10 else month - 9:02}-{of_month:02} {seconds // 3600:02}:{seconds // 60 % 60:02}"
    )


def page(template: str, **values: object) -> str:
    """Return a whole page."""
    return environment().get_template(template).render(**values)


def part(macro: str, *values: object, template: str = "macros.html.j2") -> str:
    """Return what a macro of a template makes of the values: HTML for a figure, or for a part of a page."""
    return str(getattr(environment().get_template(template).module, macro)(*values)).strip()
