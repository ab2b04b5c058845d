"""Parallel coordinates as SVG: one axis a quantity, one line a trial, the best ones on top and in colour.

Light and dark, no script. On a narrow page the axes lie below each other.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cordee.view.markup import num, palette_css, text, twins

PAD, WIDE_PX, NARROW_PX = 28, 1080, 400
WIDE_HEIGHT_PX, ROW_PX = 420, 76
BEST = 5  # lines that are drawn in colour


@dataclass(frozen=True, slots=True)
class Coordinate:
    """One axis: its name, and named places along it, from 0 to 1."""

    name: str
    ticks: Sequence[tuple[float, str]]


@dataclass(frozen=True, slots=True)
class Polyline:
    """One line: its name, and its place on each axis, from 0 to 1; None: it ends before this axis."""

    name: str
    places: Sequence[float | None]


def parallel_html(axes: Sequence[Coordinate], lines: Sequence[Polyline], label: str) -> str:
    """Return the drawing, with upright axes and with lying ones: the page shows the one that it has room for.

    Args:
        axes: from left to right.
        lines: the best one first.
        label: for readers who do not see it.
    """
    return twins(_drawn(axes, lines, label, upright=True), _drawn(axes, lines, label, upright=False))


def _drawn(axes: Sequence[Coordinate], lines: Sequence[Polyline], label: str, *, upright: bool) -> str:
    width = WIDE_PX if upright else NARROW_PX
    height = WIDE_HEIGHT_PX if upright else PAD + ROW_PX * len(axes)
    made = [_axis(each, at, len(axes), upright) for at, each in enumerate(axes)]
    drawn = [_line(each, rank, len(axes), upright) for rank, each in enumerate(lines)]
    frame = "wide" if upright else "narrow"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" class="parallel {frame}" role="img" '
        f'aria-label="{text(label)}"><style>{palette_css()}{_CSS}</style>{"".join(reversed(drawn))}{"".join(made)}</svg>'
    )


def _place(at: int, axes: int, fraction: float, upright: bool) -> tuple[float, float]:
    """Return the point at a fraction of an axis; upright axes rise, lying ones go to the right."""
    if upright:
        left, right = 70, WIDE_PX - 70
        across = (left + right) / 2 if axes == 1 else left + (right - left) * at / (axes - 1)
        low, high = WIDE_HEIGHT_PX - PAD, 2 * PAD
        return across, low + fraction * (high - low)
    return PAD + fraction * (NARROW_PX - 2 * PAD), PAD + ROW_PX * at + 10


def _axis(axis: Coordinate, at: int, axes: int, upright: bool) -> str:
    (x1, y1), (x2, y2) = (_place(at, axes, end, upright) for end in (0.0, 1.0))
    made = [f'<path class="rule" d="M{num(x1)} {num(y1)}L{num(x2)} {num(y2)}"/>']
    if upright:
        made.append(
            f'<text class="axis" x="{num(x2)}" y="{num(y2 - 24)}" text-anchor="middle">{text(axis.name)}</text>'
        )
    else:
        made.append(f'<text class="axis" x="{num(x1)}" y="{num(y1 - 12)}">{text(axis.name)}</text>')
    for fraction, name in axis.ticks:
        x, y = _place(at, axes, fraction, upright)
        anchor = "start" if upright or fraction < 0.25 else "end" if fraction > 0.75 else "middle"
        shift = (6.0, -6.0) if upright else (0.0, 18.0)
        made.append(
            f'<text class="tick" x="{num(x + shift[0])}" y="{num(y + shift[1])}" text-anchor="{anchor}">'
            f"{text(name)}</text>"
        )
    return "".join(made)


def _line(line: Polyline, rank: int, axes: int, upright: bool) -> str:
    points = [_place(at, axes, place, upright) for at, place in enumerate(line.places) if place is not None]
    path = "L".join(f"{num(x)} {num(y)}" for x, y in points)
    look = "best" if rank == 0 else "good" if rank < BEST else "other"
    return f'<path class="{look}" d="M{path}"><title>{text(line.name)}</title></path>'


_CSS = (
    ".parallel text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:var(--ink);"
    "font-variant-numeric:tabular-nums;paint-order:stroke;stroke:var(--card);stroke-width:3px}"
    ".parallel .tick{fill:var(--soft)}.parallel .axis{font-weight:600}"
    ".parallel .rule{stroke:var(--soft);stroke-width:1.5;fill:none}.parallel path{fill:none;stroke-linejoin:round}"
    ".parallel .other{stroke:var(--soft);stroke-width:1.2;opacity:.35}"
    ".parallel .good{stroke:var(--useful);stroke-width:1.8;opacity:.8}"
    ".parallel .best{stroke:var(--accent);stroke-width:3.5}"
)
