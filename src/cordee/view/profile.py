"""Pictures of a profile: the activity of streams over time, and the breakdown of the span as one bar.

The input is fractions of equal slots of time, so a picture of a million kernels is as small as one of ten.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cordee.view.frame import ROW, Frame, framed, key
from cordee.view.markup import num, palette_css, text

WIDE, NARROW = Frame("wide", 1080, 132, 16), Frame("narrow", 420, 92, 4)
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


def strips_html(strips: Sequence[Strip], span: float, ticks: Sequence[tuple[float, str]], label: str) -> str:
    """Return the streams one below the other on one axis, for wide pages and for narrow ones.

    Args:
        strips: the streams.
        span: the length of the axis.
        ticks: marks on the axis, in the unit of `span`.
        label: for readers who do not see it.
    """
    return framed(lambda frame: _strips(strips, span, ticks, label, frame), WIDE, NARROW)


def _strips(strips: Sequence[Strip], span: float, ticks: Sequence[tuple[float, str]], label: str, frame: Frame) -> str:
    bottom = TOP + LANE * len(strips)
    parts, free = list[str](), -1.0
    for at, name in ticks:
        x, half = frame.at(at / span if span else 0.0), 3.6 * len(name)
        parts.append(f'<path class="grid" d="M{num(x)} {TOP}V{num(bottom)}"/>')
        if x - half > free and x + half <= frame.width + 8:
            parts.append(f'<text class="tick" x="{num(x)}" y="{num(bottom + 16)}">{text(name)}</text>')
            free = x + half
    letters = 20 if frame.name == "wide" else 13
    for index, strip in enumerate(strips):
        top = TOP + LANE * index
        parts.append(f'<text class="name" x="0" y="{num(top + 15)}">{text(strip.name[:letters])}</text>')
        parts.append(
            f'<rect class="ground" x="{frame.left}" y="{num(top)}" width="{frame.inner}" height="{BAR}" rx="3">'
            f"<title>{text(strip.about)}</title></rect>"
        )
        parts += _runs(strip, top, frame)
    explained, more = key(_entries(strips), frame, bottom + AXIS + LEGEND - 8)
    height = num(bottom + AXIS + LEGEND + more)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="strips {frame.name}" '
        f'viewBox="0 0 {frame.width} {height}" role="img" '
        f'aria-label="{text(label)}"><style>{palette_css()}{_css()}</style>{"".join(parts)}{explained}</svg>'
    )


def _runs(strip: Strip, top: float, frame: Frame) -> list[str]:
    """Return one box for neighbouring slots that look the same; a slot has the colour of its longest kind."""
    kinds = list(strip.fractions)
    slots = len(strip.fractions[kinds[0]]) if kinds else 0
    step = frame.inner / slots if slots else 0.0
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
                x, width = frame.left + begun * step, (slot - begun) * step
                shade = "" if looked[1] == SHADES else f' fill-opacity="{looked[1] / SHADES:g}"'
                size = f'x="{num(x)}" y="{num(top)}" width="{num(width)}" height="{BAR}"'
                boxes.append(f'<rect class="{looked[0]}" {size}{shade}/>')
            begun, looked = slot, look
    return boxes


def _entries(strips: Sequence[Strip]) -> list[tuple[str, str]]:
    seen = {kind for strip in strips for kind, fractions in strip.fractions.items() if any(fractions)}
    entries = [(kind, words) for kind, (words, _) in KINDS.items() if kind in seen]
    return [*entries, ("", "paler: part of the time; blank: idle")]


def breakdown_html(parts: Mapping[str, tuple[float, str]], label: str) -> str:
    """Return the span as one bar, for wide pages and for narrow ones; each part has a length and its text."""
    return framed(lambda frame: _breakdown(parts, label, frame), Frame("wide", 1080, 0, 0), Frame("narrow", 420, 0, 0))


def _breakdown(parts: Mapping[str, tuple[float, str]], label: str, frame: Frame) -> str:
    total = sum(length for length, _ in parts.values()) or 1.0
    drawn, x = [], 0.0
    for name, (length, amount) in parts.items():
        width = length / total * frame.width
        if length > 0:
            drawn.append(
                f'<rect class="{name}" x="{num(x)}" y="0" width="{num(max(1.0, width - 1))}" height="34" rx="3">'
                f"<title>{text(PARTS[name][0])}: {text(amount)}</title></rect>"
            )
            if width > 90:
                drawn.append(f'<text class="in in-{name}" x="{num(x + 10)}" y="22">{length / total:.1%}</text>')
        x += width
    entries = [(name, f"{PARTS[name][0]} {amount}") for name, (length, amount) in parts.items() if length > 0]
    explained, more = key(entries, frame, 40 + ROW)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="strips {frame.name}" '
        f'viewBox="0 0 {frame.width} {num(48 + ROW + more)}" role="img" '
        f'aria-label="{text(label)}"><style>{palette_css()}{_css()}</style>{"".join(drawn)}{explained}</svg>'
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
