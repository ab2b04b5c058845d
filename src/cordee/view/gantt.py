"""Nodes as lanes, attempts on their GPUs as bars: a picture of a cluster's full and fragmented hours.

A lane is as high as its node has GPUs, so that a gang of eight covers it and a job of one is a thin line. Light and
dark, no script.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cordee.units import US_PER_S, format_duration
from cordee.view.frame import Frame, framed, key
from cordee.view.markup import num, palette_css, text

WIDE, NARROW = Frame("wide", 1080, 92, 12), Frame("narrow", 420, 84, 8)
TOP, AXIS, LEGEND = 8, 26, 26
LANE, GAP = 12, 2
KINDS = {  # meaning of a bar's colour: (class of the palette, words)
    "finished": ("useful", "finished"),
    "left": ("checkpoint", "saved and left for another job"),
    "cut": ("lost", "lost, failed or killed"),
    "runs": ("restart", "still runs after this window"),
}
_TICKS_S = (60, 300, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 345600, 604800, 1209600, 2592000)


@dataclass(frozen=True, slots=True)
class Bar:
    """GPUs of one lane, from when to when; `kind` is one of `KINDS`."""

    lane: str
    gpus: tuple[int, ...]
    from_us: int
    to_us: int
    kind: str
    about: str


def gantt_html(lanes: Mapping[str, int], bars: Sequence[Bar], from_us: int, to_us: int, label: str) -> str:
    """Return the lanes twice, for wide pages and for narrow ones."""
    return framed(lambda frame: _gantt(lanes, bars, (from_us, to_us), label, frame), WIDE, NARROW)


def _gantt(lanes: Mapping[str, int], bars: Sequence[Bar], window_us: tuple[int, int], label: str, frame: Frame) -> str:
    """Return the lanes in their order, each with its number of GPUs, over a stretch of time."""
    tops = {name: TOP + index * (LANE + GAP) for index, name in enumerate(lanes)}
    bottom = TOP + len(tops) * (LANE + GAP)
    drawn = [_axis(window_us, frame, bottom)]
    every = max(1, -(-len(tops) // 32))
    for index, (name, top) in enumerate(tops.items()):
        drawn.append(f'<rect class="lane" x="{frame.left}" y="{num(top)}" width="{frame.inner}" height="{LANE}"/>')
        if index % every == 0:
            drawn.append(f'<text class="name" x="{frame.left - 8}" y="{num(top + LANE - 2)}">{text(name[-12:])}</text>')
    drawn += [_bar(bar, tops[bar.lane], lanes[bar.lane], window_us, frame) for bar in bars if bar.lane in tops]
    seen = {bar.kind for bar in bars}
    explained, more = key([each for kind, each in KINDS.items() if kind in seen], frame, bottom + AXIS + LEGEND - 8)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="gantt {frame.name}" '
        f'viewBox="0 0 {frame.width} {num(bottom + AXIS + LEGEND + more)}" role="img" '
        f'aria-label="{text(label)}"><style>{palette_css()}{_css()}</style>{"".join(drawn)}{explained}</svg>'
    )


def _bar(bar: Bar, top: float, lane_gpus: int, window_us: tuple[int, int], frame: Frame) -> str:
    """Draw neighbouring GPUs as one box; there may be several."""
    from_us, to_us = window_us
    scale = frame.inner / max(1, to_us - from_us)
    x1 = frame.left + (max(bar.from_us, from_us) - from_us) * scale
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
    about = f"><title>{text(bar.about)}</title></path>" if frame.name == "wide" else "/>"
    return f'<path class="{KINDS[bar.kind][0]}" d="{"".join(boxes)}"{about}'


def _axis(window_us: tuple[int, int], frame: Frame, bottom: float) -> str:
    from_us, to_us = window_us
    length_s = max(1, to_us - from_us) / US_PER_S
    most = 10 if frame.name == "wide" else 4
    step_s = next((step for step in _TICKS_S if length_s / step <= most), _TICKS_S[-1])
    parts = []
    for tick in range(int(length_s // step_s) + 1):
        x = num(frame.at(tick * step_s / length_s))
        parts.append(f'<path class="grid" d="M{x} {TOP}V{num(bottom)}"/>')
        at = text(format_duration(tick * step_s) if tick else "0")
        parts.append(f'<text class="tick" x="{x}" y="{num(bottom + 16)}">{at}</text>')
    return "".join(parts)


def _css() -> str:
    fills = "".join(f".gantt .{name}{{fill:var(--{name})}}" for name, _ in KINDS.values())
    return (
        ".gantt{width:100%;height:auto;font:12px system-ui,-apple-system,'Segoe UI',sans-serif}"
        ".gantt text{fill:var(--soft)}.gantt .name{text-anchor:end;font-size:10px}"
        ".gantt .tick{text-anchor:middle;font-variant-numeric:tabular-nums}"
        ".gantt .lane{fill:var(--idle)}.gantt .grid{stroke:var(--rule);stroke-dasharray:1 4}" + fills
    )
