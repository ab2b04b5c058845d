"""The lineage of one version of an artifact as SVG: what it was made from, the job, itself, what was made from it.

Columns that follow time from left to right, of which those in the middle have one box; on a narrow page they are rows.
Boxes may be links. Light and dark, no script.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cordee.view.markup import num, palette_css, text, twins

WIDE_PX, NARROW_PX = 1080, 400
_BOX_HEIGHT, _GAP, _PAD, _BETWEEN = 44, 14, 24, 64
_SHOWN = 8  # boxes of a column
_CHARS_PX = 7.6  # of the font, about


@dataclass(frozen=True, slots=True)
class Box:
    """A box of the drawing: the name of what it is, how it is related, and the page about it, if there is one."""

    name: str
    how: str = ""
    href: str = ""
    is_self: bool = False


@dataclass(frozen=True, slots=True)
class _Placed:
    box: Box
    x: float
    y: float
    width: float

    @property
    def middle(self) -> float:
        return self.y + _BOX_HEIGHT / 2


def lineage_html(columns: Sequence[Sequence[Box]], label: str) -> str:
    """Return the drawing for wide and for narrow pages.

    Args:
        columns: boxes in the order of time; of two columns beside each other, one has one box. Empty ones are left out.
        label: for readers who do not see it.
    """
    cut = [_cut(column) for column in columns if column]
    return twins(_drawn(cut, label, wide=True), _drawn(cut, label, wide=False))


def _cut(boxes: Sequence[Box]) -> list[Box]:
    if len(boxes) <= _SHOWN:
        return list(boxes)
    return [*boxes[: _SHOWN - 1], Box(f"and {len(boxes) - _SHOWN + 1} more")]


def _drawn(columns: Sequence[Sequence[Box]], label: str, *, wide: bool) -> str:
    placed, height = _wide(columns) if wide else _narrow(columns)
    edges = [_edge(one, other, wide=wide) for before, after in pairwise(placed) for one in before for other in after]
    boxes = [_box(each) for column in placed for each in column]
    frame, width = ("wide", WIDE_PX) if wide else ("narrow", NARROW_PX)
    role = "group" if any(each.href for column in columns for each in column) else "img"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {num(height)}" class="lineage {frame}" '
        f'role="{role}" aria-label="{text(label)}"><style>{palette_css()}{_CSS}</style>'
        f"{''.join(edges)}{''.join(boxes)}</svg>"
    )


def _wide(columns: Sequence[Sequence[Box]]) -> tuple[list[list[_Placed]], float]:
    step = _BOX_HEIGHT + _GAP
    height = 2 * _PAD + max(map(len, columns)) * step - _GAP
    box_width = (WIDE_PX - 2 * _PAD - (len(columns) - 1) * _BETWEEN) / len(columns)
    placed = []
    for at, column in enumerate(columns):
        x, y = _PAD + at * (box_width + _BETWEEN), (height - (len(column) * step - _GAP)) / 2
        placed.append([_Placed(box, x, y + row * step, box_width) for row, box in enumerate(column)])
    return placed, height


def _narrow(columns: Sequence[Sequence[Box]]) -> tuple[list[list[_Placed]], float]:
    y, placed = float(_PAD), list[list[_Placed]]()
    for column in columns:
        placed.append([])
        for box in column:
            placed[-1].append(_Placed(box, _PAD, y, NARROW_PX - 2 * _PAD))
            y += _BOX_HEIGHT + _GAP
        y += _PAD
    return placed, y - _GAP


def _edge(one: _Placed, other: _Placed, *, wide: bool) -> str:
    if wide:
        x, y = one.x + one.width, one.middle
        middle = (x + other.x) / 2
        bend = f"C{num(middle)} {num(y)} {num(middle)} {num(other.middle)} "
        return f'<path class="edge" d="M{num(x)} {num(y)}{bend}{num(other.x)} {num(other.middle)}"/>'
    x = one.x + 12
    return f'<path class="edge" d="M{num(x)} {num(one.y + _BOX_HEIGHT)}L{num(x)} {num(other.y)}"/>'


def _box(placed: _Placed) -> str:
    box, x, y = placed.box, placed.x, placed.y
    room = int((placed.width - 24) / _CHARS_PX)
    how = f'<text class="how" x="{num(x + 12)}" y="{num(y + 35)}">{text(_short(box.how, room))}</text>'
    drawn = (
        f'<rect class="box{" self" if box.is_self else ""}" x="{num(x)}" y="{num(y)}" width="{num(placed.width)}" '
        f'height="{_BOX_HEIGHT}" rx="6"/>'
        f'<text class="name" x="{num(x + 12)}" y="{num(y + (19 if box.how else _BOX_HEIGHT / 2 + 5))}">'
        f"{text(_short(box.name, room))}<title>{text(box.name)}</title></text>{how if box.how else ''}"
    )
    return f'<a href="{text(box.href)}">{drawn}</a>' if box.href else drawn


def _short(words: str, room: int) -> str:
    """Return words that fit, without their middle if they do not.

    >>> _short("a-long-name-of-a-model:12", 12)
    'a-long…el:12'
    """
    if len(words) <= room:
        return words
    return f"{words[: room // 2]}…{words[-(room - room // 2 - 1) :]}"


_CSS = (
    ".lineage text{font:12px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif}"
    ".lineage .box{fill:var(--card);stroke:var(--rule);stroke-width:1.5}"
    ".lineage .self{stroke:var(--accent);stroke-width:2.5}"
    ".lineage .edge{fill:none;stroke:var(--soft);stroke-width:1.5}"
    ".lineage .name{font:600 12.5px ui-monospace,Menlo,Consolas,monospace;fill:var(--ink)}"
    ".lineage .how{fill:var(--soft)}.lineage.wide{max-width:1400px}"
    ".lineage a .name{text-decoration:underline;text-decoration-color:var(--soft);text-underline-offset:3px}"
    ".lineage a:hover .box{stroke:var(--accent)}"
)
