"""A picture of a pipeline's step: a row for each rank, a block for each pass, the bubble as background.

The input is rows and blocks; passes and their times are known to the caller.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cordee.view.frame import Frame, framed, key
from cordee.view.markup import num, palette_css, text

WIDE, NARROW = Frame("wide", 1080, 76, 16), Frame("narrow", 420, 56, 4)
LINE, BAR, TOP, BOTTOM = 26, 21, 30, 52
# Forward, input gradient, weight gradient, both: (light, dark); they differ in lightness too.
COLOURS = {
    "F": ("#4e7fb5", "#6fa0d8"),
    "I": ("#2f8f6f", "#4bb08d"),
    "W": ("#e3a72f", "#e9b949"),
    "B": ("#1f6f54", "#37957a"),
}
NAMES = {"F": "forward", "I": "input gradient", "W": "weight gradient", "B": "backward"}
LABELLED = 11.0


@dataclass(frozen=True, slots=True)
class Block:
    """A pass in a row; two that overlap have half the height each (`half` 0 above, 1 below)."""

    kind: str
    label: str
    about: str
    start: float
    end: float
    half: int | None = None
    second: bool = False


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank."""

    name: str
    blocks: Sequence[Block]


def pipeline_html(title: str, lines: Sequence[RankRow], *, aside: str = "", end: float | None = None) -> str:
    """Return the rows twice, for wide pages and for narrow ones.

    Args:
        title: the name of the schedule.
        lines: the ranks in their order.
        aside: a remark beside the title.
        end: the end of the time axis, the same for pictures that are compared.
    """
    return framed(lambda frame: _pipeline(title, lines, aside, end, frame), WIDE, NARROW)


def _pipeline(title: str, lines: Sequence[RankRow], aside: str, end: float | None, frame: Frame) -> str:
    last = max(block.end for line in lines for block in line.blocks)
    scale = frame.inner / (end if end is not None else last)
    parts = [f'<text class="title" x="0" y="17">{text(title)}{_beside(aside, frame)}</text>']
    for index, line in enumerate(lines):
        top = TOP + LINE * index
        parts.append(f'<text class="soft" x="0" y="{num(top + 15)}">{text(line.name)}</text>')
        parts.append(
            f'<rect class="idle" x="{frame.left}" y="{top}" width="{num(last * scale)}" height="{BAR}" rx="2"/>'
        )
        parts += [_block(block, top, scale, frame) for block in line.blocks]
    bottom = TOP + LINE * len(lines)
    explained, more = key(_entries(lines), frame, bottom + BOTTOM - 16)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {frame.width} {num(bottom + BOTTOM + more)}" '
        f'class="pipeline {frame.name}" role="img" '
        f'aria-label="{text(title)}"><style>{palette_css()}{_css()}</style>{"".join(parts)}{explained}</svg>'
    )


def _beside(aside: str, frame: Frame) -> str:
    """Return the remark beside the title, or, where that has no room, none: the table above has its numbers."""
    return f'<tspan class="soft" dx="10">{text(aside)}</tspan>' if frame.name == "wide" or len(aside) < 42 else ""


def _block(block: Block, top: float, scale: float, frame: Frame) -> str:
    x, width = frame.left + block.start * scale, (block.end - block.start) * scale
    tall = BAR if block.half is None else BAR / 2
    y = top + (BAR / 2 if block.half == 1 else 0)
    shown = max(0.4, width - min(1.0, width / 5))
    second = " second" if block.second else ""
    drawn = (
        f'<rect class="{block.kind}{second}" x="{num(x)}" y="{num(y)}" width="{num(shown)}" height="{num(tall)}" rx="2"'
    )
    drawn += f"><title>{text(block.about)}</title></rect>" if frame.name == "wide" else "/>"
    if width >= LABELLED and block.half is None:
        drawn += (
            f'<text class="in in-{block.kind}" x="{num(x + shown / 2)}" y="{num(y + 14)}">{text(block.label)}</text>'
        )
    return drawn


def _entries(lines: Sequence[RankRow]) -> list[tuple[str, str]]:
    seen = {block.kind for line in lines for block in line.blocks}
    entries = [(kind, NAMES[kind]) for kind in COLOURS if kind in seen] + [("idle", "bubble")]
    if any(block.second for line in lines for block in line.blocks):
        entries.append(("F second", "faded: the rank's second stage"))
    return entries


def _css() -> str:
    light = "".join(f".pipeline .{kind}{{fill:{pair[0]}}}" for kind, pair in COLOURS.items())
    dark = "".join(f".pipeline .{kind}{{fill:{pair[1]}}}" for kind, pair in COLOURS.items())
    return f"{_CSS}{light}@media (prefers-color-scheme:dark){{{dark}}}@media print{{{light}}}"


_CSS = (
    ".pipeline{width:100%;height:auto;font:12.5px system-ui,-apple-system,'Segoe UI',sans-serif;fill:var(--ink);"
    "font-variant-numeric:tabular-nums}.pipeline .title{font-size:14.5px;font-weight:650}"
    ".pipeline .soft,.pipeline .key{fill:var(--soft);font-size:12px;font-weight:400}.pipeline .idle{fill:var(--idle)}"
    ".pipeline .second{fill-opacity:.66}"
    ".pipeline .in{fill:#fff;font-size:9.5px;text-anchor:middle;pointer-events:none}.pipeline .in-W{fill:#2d2200}"
)
