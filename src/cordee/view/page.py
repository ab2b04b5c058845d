"""HTML by Jinja2: one environment, which escapes everything that this room has not made itself.

Templates lie in `templates/`. A page extends `base.html.j2`, which brings the palette, the style sheet and the header;
parts of pages are macros in `macros.html.j2`. Drawings are made in Python and go in with `|safe`.
"""

from functools import cache
from typing import TYPE_CHECKING

from cordee.units import format_bytes, format_count, format_duration, format_gb, format_whole_usd
from cordee.view.markup import SPAN_COLOURS, palette_css, printable

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
    )
    made.globals.update(palette_css=Markup(palette_css()), fills_css=Markup(fills))
    return made


def page(template: str, **values: object) -> str:
    """Return a whole page."""
    return environment().get_template(template).render(**values)


def part(macro: str, *values: object) -> str:
    """Return what a macro of `macros.html.j2` makes of the values: HTML for a figure of a page."""
    return str(getattr(environment().get_template("macros.html.j2").module, macro)(*values)).strip()
