"""A picture of a pipeline's step: a row for each rank, a block for each pass, the bubble as background.

The input is rows and blocks; passes and their times are known to the caller.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from cordee.view.markup import num, palette_css, text

WIDTH, GUTTER, RIGHT = 1080, 76, 16
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


def pipeline_svg(title: str, lines: Sequence[RankRow], *, aside: str = "", end: float | None = None) -> str:
    """Return the rows as a self-contained SVG; `end` is the end of the time axis, the same for compared pictures."""
    last = max(block.end for line in lines for block in line.blocks)
    scale = (WIDTH - GUTTER - RIGHT) / (end if end is not None else last)
    height = TOP + LINE * len(lines) + BOTTOM
    parts = [f'<text class="title" x="0" y="17">{text(title)}<tspan class="soft" dx="10">{text(aside)}</tspan></text>']
    for index, line in enumerate(lines):
        top = TOP + LINE * index
        parts.append(f'<text class="soft" x="0" y="{num(top + 15)}">{text(line.name)}</text>')
        parts.append(f'<rect class="idle" x="{GUTTER}" y="{top}" width="{num(last * scale)}" height="{BAR}" rx="2"/>')
        parts += [_block(block, top, scale) for block in line.blocks]
    parts.append(_legend(lines, height - 16))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" class="pipeline" role="img" '
        f'aria-label="{text(title)}"><style>{palette_css()}{_css()}</style>{"".join(parts)}</svg>'
    )


def _block(block: Block, top: float, scale: float) -> str:
    x, width = GUTTER + block.start * scale, (block.end - block.start) * scale
    tall = BAR if block.half is None else BAR / 2
    y = top + (BAR / 2 if block.half == 1 else 0)
    shown = max(0.4, width - min(1.0, width / 5))
    second = " second" if block.second else ""
    drawn = (
        f'<rect class="{block.kind}{second}" x="{num(x)}" y="{num(y)}" width="{num(shown)}" '
        f'height="{num(tall)}" rx="2">'
        f"<title>{text(block.about)}</title></rect>"
    )
    if width >= LABELLED and block.half is None:
        drawn += (
            f'<text class="in in-{block.kind}" x="{num(x + shown / 2)}" y="{num(y + 14)}">{text(block.label)}</text>'
        )
    return drawn


def _legend(lines: Sequence[RankRow], y: float) -> str:
    seen = {block.kind for line in lines for block in line.blocks}
    second = any(block.second for line in lines for block in line.blocks)
    parts, x = [], float(GUTTER)
    for kind in COLOURS:
        if kind in seen:
            parts.append(f'<rect class="{kind}" x="{num(x)}" y="{num(y - 10)}" width="12" height="12" rx="2"/>')
            parts.append(f'<text class="soft" x="{num(x + 18)}" y="{num(y)}">{NAMES[kind]}</text>')
            x += 36 + 7 * len(NAMES[kind])
    parts.append(f'<rect class="idle" x="{num(x)}" y="{num(y - 10)}" width="12" height="12" rx="2"/>')
    parts.append(f'<text class="soft" x="{num(x + 18)}" y="{num(y)}">bubble</text>')
    if second:
        x += 88
        parts.append(f'<rect class="F second" x="{num(x)}" y="{num(y - 10)}" width="12" height="12" rx="2"/>')
        parts.append(f'<text class="soft" x="{num(x + 18)}" y="{num(y)}">faded: the rank\'s second stage</text>')
    return "".join(parts)


def _css() -> str:
    light = "".join(f".pipeline .{kind}{{fill:{pair[0]}}}" for kind, pair in COLOURS.items())
    dark = "".join(f".pipeline .{kind}{{fill:{pair[1]}}}" for kind, pair in COLOURS.items())
    return f"{_CSS}{light}@media (prefers-color-scheme:dark){{{dark}}}@media print{{{light}}}"


_CSS = (
    ".pipeline{width:100%;height:auto;font:12.5px system-ui,-apple-system,'Segoe UI',sans-serif;fill:var(--ink);"
    "font-variant-numeric:tabular-nums}.pipeline .title{font-size:14.5px;font-weight:650}"
    ".pipeline .soft{fill:var(--soft);font-size:12px;font-weight:400}.pipeline .idle{fill:var(--idle)}"
    ".pipeline .second{fill-opacity:.66}"
    ".pipeline .in{fill:#fff;font-size:9.5px;text-anchor:middle;pointer-events:none}.pipeline .in-W{fill:#2d2200}"
)
