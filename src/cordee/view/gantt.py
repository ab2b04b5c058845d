"""Nodes as lanes, attempts on their GPUs as bars: a picture of a cluster's full and fragmented hours.

A lane is as high as its node has GPUs, so that a gang of eight covers it and a job of one is a thin line. Light and
dark, no script.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cordee.units import US_PER_S, format_duration
from cordee.view.markup import num, palette_css, text

WIDTH, GUTTER, RIGHT, TOP, AXIS, LEGEND = 1080, 92, 12, 8, 26, 26
LANE, GAP = 12, 2
KINDS = {  # meaning of a bar's colour: (class of the palette, words)
    "finished": ("useful", "finished"),
    "left": ("checkpoint", "saved and left for another job"),
    "cut": ("lost", "lost, failed or killed"),
    "runs": ("restart", "still runs after this window"),
}
_TICKS_S = (60, 300, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800, 2592000)


@dataclass(frozen=True, slots=True)
class Bar:
    """GPUs of one lane, from when to when; `kind` is one of `KINDS`."""

    lane: str
    gpus: tuple[int, ...]
    from_us: int
    to_us: int
    kind: str
    about: str


def gantt_svg(lanes: Mapping[str, int], bars: Sequence[Bar], from_us: int, to_us: int, label: str) -> str:
    """Return the lanes in their order, each with its number of GPUs, over a stretch of time."""
    tops = {name: TOP + index * (LANE + GAP) for index, name in enumerate(lanes)}
    bottom = TOP + len(tops) * (LANE + GAP)
    height = bottom + AXIS + LEGEND
    scale = (WIDTH - GUTTER - RIGHT) / max(1, to_us - from_us)
    drawn = [_axis(from_us, to_us, scale, bottom)]
    every = max(1, -(-len(tops) // 32))
    for index, (name, top) in enumerate(tops.items()):
        drawn.append(
            f'<rect class="lane" x="{GUTTER}" y="{num(top)}" width="{WIDTH - GUTTER - RIGHT}" height="{LANE}"/>'
        )
        if index % every == 0:
            drawn.append(f'<text class="name" x="{GUTTER - 8}" y="{num(top + LANE - 2)}">{text(name[-12:])}</text>')
    drawn += [_bar(bar, tops[bar.lane], lanes[bar.lane], (from_us, to_us)) for bar in bars if bar.lane in tops]
    drawn.append(_legend({bar.kind for bar in bars}, height - 8))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gantt" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{text(label)}"><style>{palette_css()}{_css()}</style>{"".join(drawn)}</svg>'
    )


def _bar(bar: Bar, top: float, lane_gpus: int, window_us: tuple[int, int]) -> str:
    """Draw neighbouring GPUs as one box; there may be several."""
    from_us, to_us = window_us
    scale = (WIDTH - GUTTER - RIGHT) / max(1, to_us - from_us)
    x1 = GUTTER + (max(bar.from_us, from_us) - from_us) * scale
    width = max(0.6, (min(bar.to_us, to_us) - max(bar.from_us, from_us)) * scale - 0.5)
    unit, boxes = LANE / max(1, lane_gpus), []
    gpus = sorted(bar.gpus)
    first = previous = gpus[0]
    for gpu in [*gpus[1:], -1]:
        if gpu != previous + 1:
            size = (previous + 1 - first) * unit
            boxes.append(f"M{num(x1)} {num(top + first * unit)}h{num(width)}v{num(size)}h{num(-width)}z")
            first = gpu
        previous = gpu
    return f'<path class="{KINDS[bar.kind][0]}" d="{"".join(boxes)}"><title>{text(bar.about)}</title></path>'


def _axis(from_us: int, to_us: int, scale: float, bottom: float) -> str:
    length_s = (to_us - from_us) / US_PER_S
    step_s = next((step for step in _TICKS_S if length_s / step <= 10), _TICKS_S[-1])
    parts = []
    for tick in range(int(length_s // step_s) + 1):
        x = num(GUTTER + tick * step_s * US_PER_S * scale)
        parts.append(f'<path class="grid" d="M{x} {TOP}V{num(bottom)}"/>')
        at = text(format_duration(tick * step_s) if tick else "0")
        parts.append(f'<text class="tick" x="{x}" y="{num(bottom + 16)}">{at}</text>')
    return "".join(parts)


def _legend(kinds: set[str], y: float) -> str:
    parts, x = [], float(GUTTER)
    for kind, (name, words) in KINDS.items():
        if kind in kinds:
            parts.append(f'<rect class="{name}" x="{num(x)}" y="{num(y - 11)}" width="12" height="12" rx="2"/>')
            parts.append(f'<text class="key" x="{num(x + 18)}" y="{num(y)}">{words}</text>')
            x += 42 + 7 * len(words)
    return "".join(parts)


def _css() -> str:
    fills = "".join(f".gantt .{name}{{fill:var(--{name})}}" for name, _ in KINDS.values())
    return (
        ".gantt{width:100%;height:auto;font:12px system-ui,-apple-system,'Segoe UI',sans-serif}"
        ".gantt text{fill:var(--soft)}.gantt .name{text-anchor:end;font-size:10px}"
        ".gantt .tick{text-anchor:middle;font-variant-numeric:tabular-nums}"
        ".gantt .lane{fill:var(--idle)}.gantt .grid{stroke:var(--rule);stroke-dasharray:1 4}" + fills
    )
