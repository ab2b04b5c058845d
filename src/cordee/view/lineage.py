"""The lineage of one version of an artifact as SVG: what it was made from, itself, what was made from it or used it.

Three columns that follow time from left to right; on a narrow page three rows. Light and dark, no script.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cordee.view.markup import num, palette_css, text, twins

WIDE_PX, NARROW_PX = 1080, 400
_BOX_HEIGHT, _GAP, _PAD = 44, 14, 24
_SHOWN = 8  # boxes of a column
_CHARS_PX = 7.4  # of the font, about


@dataclass(frozen=True, slots=True)
class Relative:
    """A box beside the version: the name of what it is, and how it is related."""

    name: str
    how: str


def lineage_html(version: str, maker: str, before: Sequence[Relative], after: Sequence[Relative], label: str) -> str:
    """Return the drawing for wide and for narrow pages.

    Args:
        version: the name of the version in the middle.
        maker: the job that made it; "": not known.
        before: what it was made from.
        after: what was made from it, and jobs that used it.
        label: for readers who do not see it.
    """
    columns = [_cut(before), [Relative(version, f"by {maker}" if maker else "")], _cut(after)]
    return twins(_drawn(columns, label, wide=True), _drawn(columns, label, wide=False))


def _cut(relatives: Sequence[Relative]) -> list[Relative]:
    if len(relatives) <= _SHOWN:
        return list(relatives)
    return [*relatives[: _SHOWN - 1], Relative(f"and {len(relatives) - _SHOWN + 1} more", "")]


def _drawn(columns: Sequence[Sequence[Relative]], label: str, *, wide: bool) -> str:
    width = WIDE_PX if wide else NARROW_PX
    box_width = (WIDE_PX - 2 * _PAD) / 3 - 60 if wide else NARROW_PX - 2 * _PAD
    rows = max(len(column) for column in columns) if wide else sum(map(len, columns))
    extra = 0 if wide else 2 * _PAD
    height = 2 * _PAD + rows * (_BOX_HEIGHT + _GAP) - _GAP + extra
    boxes: list[list[tuple[float, float, Relative]]] = []
    y = float(_PAD)
    for at, column in enumerate(columns):
        if wide:
            x = _PAD + at * ((WIDE_PX - 2 * _PAD - box_width) / 2)
            y = (height - (len(column) * (_BOX_HEIGHT + _GAP) - _GAP)) / 2
        else:
            x = float(_PAD)
            y += _PAD if at and column else 0
        boxes.append([])
        for relative in column:
            boxes[-1].append((x, y, relative))
            y += _BOX_HEIGHT + _GAP
    lines = _lines(boxes, box_width, wide=wide)
    drawn = [
        _box(x, y, box_width, relative, is_self=at == 1) for at, column in enumerate(boxes) for x, y, relative in column
    ]
    frame = "wide" if wide else "narrow"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {num(height)}" class="lineage {frame}" '
        f'role="img" aria-label="{text(label)}"><style>{palette_css()}{_CSS}</style>'
        f"{''.join(lines)}{''.join(drawn)}</svg>"
    )


def _lines(boxes: Sequence[Sequence[tuple[float, float, Relative]]], box_width: float, *, wide: bool) -> list[str]:
    """Return curves from each box before to the version, and from there to each after."""
    [(x, y, _)] = boxes[1]
    made = []
    for side, column in ((0, boxes[0]), (2, boxes[2])):
        for bx, by, _ in column:
            if wide:
                start = (bx + box_width, by + _BOX_HEIGHT / 2) if side == 0 else (x + box_width, y + _BOX_HEIGHT / 2)
                end = (x, y + _BOX_HEIGHT / 2) if side == 0 else (bx, by + _BOX_HEIGHT / 2)
                middle = (start[0] + end[0]) / 2
                bend = f"C{num(middle)} {num(start[1])} {num(middle)} {num(end[1])} "
            else:
                start, end = (
                    ((bx + 12, by + _BOX_HEIGHT), (x + 12, y))
                    if side == 0
                    else ((x + 12, y + _BOX_HEIGHT), (bx + 12, by))
                )
                bend = "L"
            made.append(f'<path class="edge" d="M{num(start[0])} {num(start[1])}{bend}{num(end[0])} {num(end[1])}"/>')
    return made


def _box(x: float, y: float, width: float, relative: Relative, *, is_self: bool) -> str:
    room = int((width - 24) / _CHARS_PX)
    kind = "self" if is_self else "other"
    middle = y + (_BOX_HEIGHT / 2 + 5 if not relative.how else 19)
    how = f'<text class="how" x="{num(x + 12)}" y="{num(y + 35)}">{text(_short(relative.how, room))}</text>'
    return (
        f'<rect class="box {kind}" x="{num(x)}" y="{num(y)}" width="{num(width)}" height="{_BOX_HEIGHT}" rx="6"/>'
        f'<text class="name" x="{num(x + 12)}" y="{num(middle)}">{text(_short(relative.name, room))}'
        f"<title>{text(relative.name)}</title></text>{how if relative.how else ''}"
    )


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
    ".lineage .box.self{stroke:var(--accent);stroke-width:2.5}"
    ".lineage .edge{fill:none;stroke:var(--soft);stroke-width:1.5}"
    ".lineage .name{font:600 12.5px ui-monospace,Menlo,Consolas,monospace;fill:var(--ink)}"
    ".lineage .how{fill:var(--soft)}"
)
