"""The frame of a drawing, wide and narrow, and the key to its colours.

A drawing with a time axis is made for both frames, and the page shows the one that its width has room for. Narrow ones
have no tool tips: a page that is narrow is touched.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cordee.view.markup import num, text, twins

ROW = 20  # of the key
BOX = 12


@dataclass(frozen=True, slots=True)
class Frame:
    """The size of a drawing, and the margins beside its axes, in pixels; without a height its rows give it one."""

    name: str
    width: int
    left: int
    right: int
    height: int = 0

    @property
    def inner(self) -> int:
        """The length of the axis."""
        return self.width - self.left - self.right

    def at(self, fraction: float) -> float:
        """Return the place of a fraction of the axis."""
        return self.left + fraction * self.inner


def framed(draw: Callable[[Frame], str], wide: Frame, narrow: Frame) -> str:
    """Return the drawing in both frames, of which a page shows one."""
    return twins(draw(wide), draw(narrow))


def key(entries: Sequence[tuple[str, str]], frame: Frame, y: float) -> tuple[str, float]:
    """Return the key as SVG, in as many rows as the frame's width asks for, and the height of the rows after the first.

    Args:
        entries: CSS classes of a box, or "" for words alone, and the words beside it.
        frame: of the drawing; a narrow one begins the key at its edge.
        y: the base line of the first row.
    """
    first = float(frame.left if frame.name == "wide" else 0)
    parts, x, row = list[str](), first, 0
    for classes, words in entries:
        width = 7.0 * len(words) + (18 if classes else 0)
        if x > first and x + width > frame.width:
            x, row = first, row + 1
        at = y + ROW * row
        if classes:
            parts.append(
                f'<rect class="{classes}" x="{num(x)}" y="{num(at - 11)}" width="{BOX}" height="{BOX}" rx="2"/>'
            )
        parts.append(f'<text class="key" x="{num(x + (18 if classes else 0))}" y="{num(at)}">{text(words)}</text>')
        x += width + 22
    return "".join(parts), float(ROW * row)
