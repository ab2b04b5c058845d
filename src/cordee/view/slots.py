"""The slots of a small cluster over time: which attempt held each, what it did, and the requests above them.

It draws the log, and the segments of time that the ledger concludes from it, as the timeline does; its lanes are slots
and not jobs, so it shows how training and services change places.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cordee.events import AttemptPlaced, Event, RanksEnded
from cordee.ids import JobId
from cordee.units import US_PER_S, format_duration
from cordee.view.markup import CLASSES, SPAN_COLOURS, class_label, num, palette_css, text
from cordee.view.timeline import Segments, joined

WIDTH, GUTTER, RIGHT, TOP = 1080, 92, 12, 40
LOAD, LANE, GAP, AXIS, LEGEND = 84, 26, 5, 30, 28
POINTS = 240
SMOOTH = 5
"""Points over which the rate of requests is averaged, on each side."""


@dataclass(frozen=True, slots=True)
class SlotMark:
    """A moment that is named above the lanes."""

    at_us: int
    text: str


@dataclass(frozen=True, slots=True)
class Holding:
    """A slot that an attempt held."""

    slot: tuple[str, int]
    job_id: JobId
    epoch: int
    from_us: int
    to_us: int


def holdings(events: Iterable[Event]) -> list[Holding]:
    """Return which attempt held each slot, from its placement until its ranks on the node had ended, or until now."""
    placed: dict[tuple[JobId, int, str], tuple[int, tuple[int, ...]]] = {}
    found, last_us = list[Holding](), 0
    for event in events:
        last_us = max(last_us, event.at_us)
        if isinstance(event, AttemptPlaced):
            placed |= {(event.job_id, event.epoch, each.node): (event.at_us, each.gpus) for each in event.leases}
        elif isinstance(event, RanksEnded):
            key = (event.job_id, event.epoch, event.node)
            from_us, gpus = placed.pop(key, (event.at_us, ()))
            found += [Holding((event.node, gpu), event.job_id, event.epoch, from_us, event.at_us) for gpu in gpus]
    for (job_id, epoch, node), (from_us, gpus) in placed.items():
        found += [Holding((node, gpu), job_id, epoch, from_us, last_us) for gpu in gpus]
    return found


def rates(requests: Sequence[tuple[int, int]], from_us: int, to_us: int) -> list[float]:
    """Return requests a second at `POINTS` times: each request is spread over the time that it was open.

    >>> round(sum(rates([(0, 10_000_000)], 0, 10_000_000)) / POINTS * 10, 1)
    1.0
    """
    step_us = (to_us - from_us) / POINTS
    found = [0.0] * POINTS
    for begun_us, ended_us in requests:
        per_us = 1 / max(1, ended_us - begun_us)
        first, last = (int((at_us - from_us) / step_us) for at_us in (begun_us, ended_us))
        for point in range(max(0, first), min(POINTS - 1, last) + 1):
            at_us = from_us + point * step_us
            part_us = min(ended_us, at_us + step_us) - max(begun_us, at_us)
            found[point] += max(0.0, part_us) * per_us
    per_s = [each / step_us * US_PER_S for each in found]
    return [_mean(per_s[max(0, at - SMOOTH) : at + SMOOTH + 1]) for at in range(POINTS)]


def slots_svg(
    events: Sequence[Event],
    segments: Segments,
    names: Mapping[JobId, str],
    requests: Sequence[tuple[int, int]],
    marks: Sequence[SlotMark] = (),
    *,
    title: str,
) -> str:
    """Return one SVG that stands alone or inline in a page.

    Args:
        events: the log.
        segments: of each attempt, from the ledger.
        names: by job, what its lanes call it.
        requests: the begin and end of each request, in microseconds.
        marks: named moments.
        title: for readers who do not see it.
    """
    held = holdings(events)
    lanes = {slot: index for index, slot in enumerate(sorted({each.slot for each in held}))}
    from_us = min((each.from_us for each in held), default=0)
    to_us = max((each.to_us for each in held), default=from_us + 1)
    scale = _Scale(from_us, to_us)
    lanes_top = TOP + LOAD + 22
    bottom = lanes_top + len(lanes) * (LANE + GAP)
    height = bottom + AXIS + LEGEND
    tops = {slot: lanes_top + index * (LANE + GAP) for slot, index in lanes.items()}
    drawn = [_axis(scale, bottom), _load(rates(requests, from_us, to_us), scale)]
    drawn += [
        f'<text class="lane-name" x="{GUTTER - 10}" y="{num(top + LANE / 2 + 4)}">slot {slot[1]}</text>'
        f'<rect class="free" x="{GUTTER}" y="{num(top)}" width="{WIDTH - GUTTER - RIGHT}" height="{LANE}" rx="3"/>'
        for slot, top in tops.items()
    ]
    drawn += [_held(each, tops[each.slot], segments, names, scale) for each in held]
    drawn += _marked(marks, scale, bottom)
    drawn.append(_legend(held, segments, height - 10))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="slots" viewBox="0 0 {WIDTH} {num(height)}" role="img" '
        f'aria-label="{text(title)}"><title>{text(title)}</title><style>{palette_css()}{_css()}</style>'
        f"{''.join(drawn)}</svg>"
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    from_us: int
    to_us: int

    def x(self, at_us: float) -> float:
        fraction = (min(max(at_us, self.from_us), self.to_us) - self.from_us) / (self.to_us - self.from_us)
        return GUTTER + fraction * (WIDTH - GUTTER - RIGHT)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _axis(scale: _Scale, bottom: float) -> str:
    length_s = (scale.to_us - scale.from_us) / US_PER_S
    step_s = next((step for step in (1, 2, 5, 10, 15, 30, 60, 120, 300, 600) if length_s / step <= 12), 3600)
    parts = []
    for tick in range(int(length_s // step_s) + 1):
        x = num(scale.x(scale.from_us + tick * step_s * US_PER_S))
        label = text(format_duration(tick * step_s) if tick else "0")
        parts.append(f'<text class="tick" x="{x}" y="{num(bottom + 16)}">{label}</text>')
    return "".join(parts)


def _load(per_s: Sequence[float], scale: _Scale) -> str:
    """Draw requests a second as an area, with the most of them at its left."""
    most = max([*per_s, 0.001])
    step_us = (scale.to_us - scale.from_us) / len(per_s)
    places = [
        f"{num(scale.x(scale.from_us + (index + 0.5) * step_us))} {num(TOP + LOAD * (1 - each / most))}"
        for index, each in enumerate(per_s)
    ]
    base, left = num(TOP + LOAD), GUTTER - 10
    return (
        f'<path class="load" d="M{GUTTER} {base}L{"L".join(places)}L{WIDTH - RIGHT} {base}z"/>'
        f'<path class="load-line" d="M{"L".join(places)}"/>'
        f'<path class="rule" d="M{GUTTER} {base}H{WIDTH - RIGHT}"/>'
        f'<text class="lane-name" x="{left}" y="{TOP + 5}">{most:.1f}/s</text>'
        f'<text class="lane-name" x="{left}" y="{TOP + LOAD // 2 + 4}">requests</text>'
        f'<text class="lane-name" x="{left}" y="{TOP + LOAD}">0</text>'
    )


def _held(each: Holding, top: float, segments: Segments, names: Mapping[JobId, str], scale: _Scale) -> str:
    x1, x2 = scale.x(each.from_us), scale.x(each.to_us)
    name = names.get(each.job_id, each.job_id)
    about = f"{name}, attempt {each.epoch}: {format_duration((each.to_us - each.from_us) / US_PER_S)}"
    parts = [f"<g><title>{text(about)}</title>"]
    for span in joined(segments.get((each.job_id, each.epoch), ())):
        left, right = scale.x(max(span.from_us, each.from_us)), scale.x(min(span.to_us, each.to_us))
        if right > left:
            parts.append(
                f'<rect class="{text(span.name)}" x="{num(left)}" y="{num(top)}" width="{num(right - left)}" '
                f'height="{LANE}"/>'
            )
    parts.append(f'<path class="edge" d="M{num(x1)} {num(top)}v{LANE}M{num(x2)} {num(top)}v{LANE}"/>')
    if x2 - x1 > 9 * len(name):
        parts.append(f'<text class="holder" x="{num(x1 + 8)}" y="{num(top + LANE / 2 + 4.5)}">{text(name)}</text>')
    return "".join(parts) + "</g>"


def _marked(marks: Sequence[SlotMark], scale: _Scale, bottom: float) -> list[str]:
    """Draw the named moments; a name that would run into the one before stands a line lower."""
    drawn, free = list[str](), [0.0, 0.0]
    for mark in sorted(marks, key=lambda each: each.at_us):
        x, width = scale.x(mark.at_us), 7.0 * len(mark.text) + 14
        left = x - width if x > WIDTH - width else x
        row = 0 if left >= free[0] else 1
        free[row] = left + width
        anchor, shift = ("end", -6) if left < x else ("start", 6)
        drawn.append(
            f'<path class="mark" d="M{num(x)} {12 * row + 2}V{num(bottom)}"/>'
            f'<text class="mark-name" x="{num(x + shift)}" y="{15 * row + 12}" text-anchor="{anchor}">'
            f"{text(mark.text)}</text>"
        )
    return drawn


def _legend(held: Sequence[Holding], segments: Segments, y: float) -> str:
    seen = {span.cls for each in held for span in segments.get((each.job_id, each.epoch), ())}
    parts, x = [], float(GUTTER)
    for name in CLASSES:
        if name in seen:
            label = class_label(name)
            parts.append(f'<rect class="{name}" x="{num(x)}" y="{num(y - 11)}" width="13" height="13" rx="3"/>')
            parts.append(f'<text class="key" x="{num(x + 19)}" y="{num(y)}">{label}</text>')
            x += 40 + 7.2 * len(label)
    return "".join(parts)


def _css() -> str:
    return _CSS + "".join(f".slots .{name}{{fill:var(--{name})}}" for name in SPAN_COLOURS)


_CSS = """
.slots{width:100%;height:auto;font:13px system-ui,-apple-system,'Segoe UI',sans-serif;fill:var(--ink)}
.slots .lane-name,.slots .tick,.slots .key{fill:var(--soft);font-size:12px;font-variant-numeric:tabular-nums}
.slots .lane-name{text-anchor:end}.slots .tick{text-anchor:middle}
.slots .free{fill:var(--rule);opacity:.45}
.slots .load{fill:var(--accent);opacity:.18}
.slots .load-line{fill:none;stroke:var(--accent);stroke-width:2;stroke-linejoin:round}
.slots .rule{stroke:var(--rule);fill:none}
.slots .edge{stroke:var(--card);stroke-width:1.5;fill:none}
.slots .holder{font-size:12px;font-weight:650;fill:#fff;paint-order:stroke;stroke:rgba(0,0,0,.35);stroke-width:2px}
.slots .mark{stroke:var(--ink);stroke-width:1;stroke-dasharray:2 4;fill:none}
.slots .mark-name{font-size:12px;font-weight:600}
"""
