"""Pictures of a profile: the activity of streams over time, and the breakdown of the span as one bar.

The input is fractions of equal slots of time, so a picture of a million kernels is as small as one of ten.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cordee.view.markup import num, palette_css, text

WIDTH, GUTTER, RIGHT = 1080, 132, 16
LANE, BAR, TOP, AXIS, LEGEND = 30, 22, 8, 26, 26
SLOTS = 720
# Kinds of activity: label, (light, dark); they differ in lightness as well as in hue.
KINDS = {
    "compute": ("compute", ("#4e7fb5", "#6fa0d8")),
    "transfer": ("transfer", ("#e3a72f", "#e9b949")),
    "waiting": ("waiting for peers", ("#cf4a3a", "#e8695a")),
    "memory": ("copies", ("#8d6fa8", "#b79fc9")),
}
PARTS = {
    "alone": ("compute alone", ("#4e7fb5", "#6fa0d8")),
    "hidden": ("communication behind compute", ("#2f8f6f", "#4bb08d")),
    "exposed-transfer": ("exposed transfer", ("#e3a72f", "#e9b949")),
    "exposed-waiting": ("exposed waiting", ("#cf4a3a", "#e8695a")),
    "nothing": ("idle", ("#d3cec2", "#434750")),
}
# Slots with less activity than this stay blank; the rest is drawn in so many steps of opacity.
LEAST, SHADES = 0.02, 4


@dataclass(frozen=True, slots=True)
class Strip:
    """One stream: for each kind, its fraction of each slot."""

    name: str
    about: str
    fractions: Mapping[str, Sequence[float]]


def strips_svg(strips: Sequence[Strip], span: float, ticks: Sequence[tuple[float, str]], label: str) -> str:
    """Return the streams one below the other on one axis; `ticks` are marks on it, in the unit of `span`."""
    bottom = TOP + LANE * len(strips)
    height = bottom + AXIS + LEGEND
    wide = WIDTH - GUTTER - RIGHT
    parts = []
    for at, name in ticks:
        x = num(GUTTER + at / span * wide if span else GUTTER)
        parts.append(f'<path class="grid" d="M{x} {TOP}V{num(bottom)}"/>')
        parts.append(f'<text class="tick" x="{x}" y="{num(bottom + 16)}">{text(name)}</text>')
    for index, strip in enumerate(strips):
        top = TOP + LANE * index
        parts.append(f'<text class="name" x="0" y="{num(top + 15)}">{text(strip.name[:20])}</text>')
        parts.append(
            f'<rect class="ground" x="{GUTTER}" y="{num(top)}" width="{wide}" height="{BAR}" rx="3">'
            f"<title>{text(strip.about)}</title></rect>"
        )
        parts += _runs(strip, top, wide)
    parts.append(_legend(strips, height - 8))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="strips" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{text(label)}"><style>{palette_css()}{_css()}</style>{"".join(parts)}</svg>'
    )


def _runs(strip: Strip, top: float, wide: float) -> list[str]:
    """Return one box for neighbouring slots that look the same; a slot has the colour of its longest kind."""
    kinds = list(strip.fractions)
    slots = len(strip.fractions[kinds[0]]) if kinds else 0
    step = wide / slots if slots else 0.0
    boxes, begun, looked = [], 0, ("", 0)
    for slot in range(slots + 1):
        look = ("", 0)
        if slot < slots:
            most = max(kinds, key=lambda kind: strip.fractions[kind][slot])
            total = min(1.0, sum(strip.fractions[kind][slot] for kind in kinds))
            if total >= LEAST:
                look = (most, max(1, round(total * SHADES)))
        if look != looked:
            if looked[0]:
                x, width = GUTTER + begun * step, (slot - begun) * step
                shade = "" if looked[1] == SHADES else f' fill-opacity="{looked[1] / SHADES:g}"'
                size = f'x="{num(x)}" y="{num(top)}" width="{num(width)}" height="{BAR}"'
                boxes.append(f'<rect class="{looked[0]}" {size}{shade}/>')
            begun, looked = slot, look
    return boxes


def _legend(strips: Sequence[Strip], y: float) -> str:
    seen = {kind for strip in strips for kind, fractions in strip.fractions.items() if any(fractions)}
    parts, x = [], float(GUTTER)
    for kind, (words, _) in KINDS.items():
        if kind in seen:
            parts.append(f'<rect class="{kind}" x="{num(x)}" y="{num(y - 11)}" width="12" height="12" rx="2"/>')
            parts.append(f'<text class="key" x="{num(x + 18)}" y="{num(y)}">{text(words)}</text>')
            x += 44 + 7 * len(words)
    parts.append(f'<text class="key" x="{num(x)}" y="{num(y)}">paler: part of the time; blank: idle</text>')
    return "".join(parts)


def breakdown_svg(parts: Mapping[str, tuple[float, str]], label: str) -> str:
    """Return the span as one bar; each part has a length and its text."""
    total = sum(length for length, _ in parts.values()) or 1.0
    drawn, x = [], 0.0
    for name, (length, amount) in parts.items():
        width = length / total * WIDTH
        if length > 0:
            drawn.append(
                f'<rect class="{name}" x="{num(x)}" y="0" width="{num(max(1.0, width - 1))}" height="34" rx="3">'
                f"<title>{text(PARTS[name][0])}: {text(amount)}</title></rect>"
            )
            if width > 90:
                drawn.append(f'<text class="in in-{name}" x="{num(x + 10)}" y="22">{length / total:.1%}</text>')
        x += width
    x = 0.0
    for name, (length, amount) in parts.items():
        words = f"{PARTS[name][0]} {amount}"
        if length > 0:
            drawn.append(f'<rect class="{name}" x="{num(x)}" y="49" width="12" height="12" rx="2"/>')
            drawn.append(f'<text class="key" x="{num(x + 18)}" y="60">{text(words)}</text>')
            x += 40 + 7 * len(words)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="strips" viewBox="0 0 {WIDTH} 68" role="img" '
        f'aria-label="{text(label)}"><style>{palette_css()}{_css()}</style>{"".join(drawn)}</svg>'
    )


def _css() -> str:
    every = {name: pair for name, (_, pair) in (KINDS | PARTS).items()}
    light = "".join(f".strips .{name}{{fill:{pair[0]}}}" for name, pair in every.items())
    dark = "".join(f".strips .{name}{{fill:{pair[1]}}}" for name, pair in every.items())
    return f"{_CSS}{light}@media (prefers-color-scheme:dark){{{dark}}}@media print{{{light}}}"


_CSS = (
    ".strips{width:100%;height:auto;font:12px system-ui,-apple-system,'Segoe UI',sans-serif}"
    ".strips text{fill:var(--soft)}.strips .name{fill:var(--ink);font-size:12.5px}"
    ".strips .tick{text-anchor:middle;font-variant-numeric:tabular-nums}"
    ".strips .ground{fill:var(--idle);fill-opacity:.55}"
    ".strips .grid{stroke:var(--rule);stroke-dasharray:1 4}.strips .in{fill:#fff;font-weight:650;font-size:13px}"
    ".strips .in-nothing{fill:var(--ink)}.strips .in-exposed-transfer{fill:#2d2200}"
)
