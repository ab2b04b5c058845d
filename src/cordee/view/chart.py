"""Lines over two axes as SVG: how speed grows with GPUs, when owning overtakes renting, GPUs held over time.

Light and dark, no script. Lines are named where they end, so that no reader has to match colours with a legend; on a
narrow page, where there is no room beside them, the names stand below.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cordee.view.frame import Frame, framed
from cordee.view.markup import num, palette_css, text

TOP, BOTTOM, NAME = 24, 52, 18
INKS = (
    *("var(--accent)", "var(--useful)", "var(--restart)", "var(--checkpoint)", "var(--ink)"),
    *("var(--stall)", "var(--serving)", "var(--soft)", "var(--draining)", "var(--lost)"),
)
"""Of the lines, in turn; further lines begin again, dotted."""


@dataclass(frozen=True, slots=True)
class ChartLine:
    """A line through points (x, y); dashed if it is only an ideal.

    With `steps` a value holds until the next point, as a number of GPUs does.
    """

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    steps: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A point that is named, such as a knee or a crossing."""

    x: float
    y: float
    name: str


@dataclass(frozen=True, slots=True)
class Axis:
    """A name, how its numbers are written, and whether each step multiplies."""

    name: str
    write: Callable[[float], str]
    log: bool = False
    ticks: Sequence[float] = ()  # where it is named; empty: where round numbers are


WIDE = Frame("wide", 1080, 92, 190, 400)
NARROW = Frame("narrow", 420, 64, 0, 300)  # without a margin at the right, where lines are named: they are named below


def chart_html(lines: Sequence[ChartLine], x: Axis, y: Axis, marks: Sequence[Mark] = (), label: str = "") -> str:
    """Return the chart twice: the page shows the one that its width has room for."""
    return framed(lambda frame: chart_svg(lines, x, y, marks, label, frame=frame), WIDE, NARROW)


def chart_svg(
    lines: Sequence[ChartLine], x: Axis, y: Axis, marks: Sequence[Mark] = (), label: str = "", *, frame: Frame = WIDE
) -> str:
    """Return the lines as a self-contained SVG."""
    points = [point for line in lines for point in line.points]
    across = _Scale.of([px for px, _ in points], x, frame.left, frame.width - (frame.right or 14))
    up = _Scale.of([py for _, py in points] + ([] if y.log else [0.0]), y, frame.height - BOTTOM, TOP)
    drawn = _grid(across, up, x, y)
    drawn += [_line(line, index, across, up) for index, line in enumerate(lines)]
    drawn += [_names(lines, up, frame.width - frame.right) if frame.right else _legend(lines, frame)]
    drawn += _marks(marks, across, up, y)
    height = frame.height + (0 if frame.right else NAME * sum(bool(line.name) for line in lines))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {frame.width} {height}" class="chart {frame.name}" '
        f'role="img" aria-label="{text(label or y.name)}"><style>{palette_css()}{_CSS}</style>{"".join(drawn)}</svg>'
    )


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    log: bool

    @classmethod
    def of(cls, values: Sequence[float], axis: Axis, start: float, end: float) -> "_Scale":
        low, high = min(values), max(values)
        if high == low:
            high = low * 2 if low else 1.0
        return cls(low, high, start, end, axis.log)

    def at(self, value: float) -> float:
        if self.log:
            fraction = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            fraction = (value - self.low) / (self.high - self.low)
        return self.start + fraction * (self.end - self.start)

    def ticks(self, wanted: Sequence[float] = ()) -> list[float]:
        if wanted:
            return [tick for tick in wanted if self.low <= tick <= self.high]
        if self.log and not math.log2(self.high / self.low).is_integer():
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            found = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
            return [tick for tick in found if self.low <= tick <= self.high]
        if self.log:
            step = max(1, math.ceil(math.log2(self.high / self.low) / 8))
            count = int(math.log2(self.high / self.low) / step + 1e-9)
            return [self.low * 2.0 ** (step * index) for index in range(count + 1)]
        rough = (self.high - self.low) / 5
        base = 10.0 ** math.floor(math.log10(rough))
        size = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough)
        first = math.ceil(self.low / size - 1e-9)
        return [size * index for index in range(first, int(self.high / size + 1e-9) + 1)]


def _grid(across: _Scale, up: _Scale, x: Axis, y: Axis) -> list[str]:
    left, right, bottom, drawn = num(across.start), num(across.end), up.start, []
    for tick in up.ticks(y.ticks):
        row = num(up.at(tick))
        drawn.append(f'<path class="rule" d="M{left} {row}H{right}"/>')
        drawn.append(
            f'<text class="tick" x="{num(across.start - 10)}" y="{row}" dy="4" text-anchor="end">'
            f"{text(y.write(tick))}</text>"
        )
    free = -math.inf
    for tick in across.ticks(x.ticks):
        at, name = across.at(tick), x.write(tick)
        half = 3.8 * len(name)  # of its width at 13 pixels
        if at - half > free:
            drawn.append(
                f'<text class="tick" x="{num(at)}" y="{num(bottom + 20)}" text-anchor="middle">{text(name)}</text>'
            )
            free = at + half
    drawn.append(f'<text class="axis" x="{left}" y="{TOP - 10}">{text(y.name)}</text>')
    drawn.append(f'<text class="axis" x="{right}" y="{num(bottom + 44)}" text-anchor="end">{text(x.name)}</text>')
    return drawn


def _line(line: ChartLine, index: int, across: _Scale, up: _Scale) -> str:
    places = [(num(across.at(px)), num(up.at(py))) for px, py in line.points]
    if line.steps:
        path = f"{places[0][0]} {places[0][1]}" + "".join(f"H{at_x}V{at_y}" for at_x, at_y in places[1:])
    else:
        path = "L".join(f"{at_x} {at_y}" for at_x, at_y in places)
    ink = INKS[index % len(INKS)]
    again = f";stroke-dasharray:1 {4 * (index // len(INKS))};stroke-linecap:round" if index >= len(INKS) else ""
    style = f'style="stroke:{ink}{";stroke-dasharray:5 5;stroke-width:1.5" if line.dashed else again}"'
    bare = line.dashed or line.steps or len(line.points) > 16
    dots = [f'<circle cx="{at_x}" cy="{at_y}" r="3.5" style="fill:{ink}"/>' for at_x, at_y in places if not bare]
    return f'<path class="line" {style} d="M{path}"/>{"".join(dots)}'


def _names(lines: Sequence[ChartLine], up: _Scale, right: float) -> str:
    """Draw names at the lines' ends, kept apart where the lines end close together."""
    ends = sorted((up.at(line.points[-1][1]), index, line.name) for index, line in enumerate(lines) if line.name)
    places: list[float] = []
    for at, *_ in ends:
        places.append(max(at, places[-1] + NAME if places else -math.inf))
    lowest = up.start
    for number in reversed(range(len(places))):  # and none below the axis
        places[number] = min(places[number], lowest)
        lowest = places[number] - NAME
    return "".join(
        f'<text class="name" style="fill:{INKS[index % len(INKS)]}" x="{num(right + 10)}" y="{num(at)}" dy="4">'
        f"{text(name)}</text>"
        for at, (_, index, name) in zip(places, ends, strict=True)
    )


def _legend(lines: Sequence[ChartLine], frame: Frame) -> str:
    return "".join(
        f'<text class="name" style="fill:{INKS[index % len(INKS)]}" x="{frame.left}" '
        f'y="{frame.height + NAME * index}" dy="4">{text(line.name)}</text>'
        for index, line in enumerate(lines)
    )


_LETTER, _LINE = 7.5, 15.0
"""Width and height of a letter of a mark's name, at most."""


def _marks(marks: Sequence[Mark], across: _Scale, up: _Scale, y: Axis) -> list[str]:
    """Draw marks; each name stands where it covers no other name, no mark and not the name of the axis."""
    points = [(across.at(mark.x), up.at(mark.y)) for mark in marks]
    taken = [(across.start, 0.0, across.start + _LETTER * len(y.name), float(TOP) - 6)]
    taken += [(at_x - 7, at_y - 7, at_x + 7, at_y + 7) for at_x, at_y in points]
    drawn = []
    for mark, (at_x, at_y) in zip(marks, points, strict=True):
        boxes = list(_boxes(at_x, at_y, _LETTER * len(mark.name), prefers_left=at_x > (across.start + across.end) / 2))
        box = next((each for each in boxes if not any(_cover(each, other) for other in taken)), boxes[0])
        taken.append(box)
        left, _, right, base = box
        anchor, text_x = ("start", left) if left >= at_x else ("end", right)
        drawn.append(
            f'<path class="drop" d="M{num(at_x)} {num(at_y)}V{num(up.start)}"/>'
            f'<circle class="mark" cx="{num(at_x)}" cy="{num(at_y)}" r="7"/>'
            f'<text class="mark-name" x="{num(text_x)}" y="{num(base)}" text-anchor="{anchor}">{text(mark.name)}</text>'
        )
    return drawn


_Box = tuple[float, float, float, float]  # left, top, right, bottom


def _boxes(at_x: float, at_y: float, width: float, *, prefers_left: bool) -> Iterator[_Box]:
    """Yield places of a name: above, below and further off, on the side with more room and then on the other one."""
    for base in (at_y - 12, at_y + 22, at_y - 28, at_y + 38):
        for is_left in (prefers_left, not prefers_left):
            left = at_x - 12 - width if is_left else at_x + 12
            yield left, base - _LINE, left + width, base


def _cover(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


_CSS = (
    ".chart text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:var(--ink);"
    "font-variant-numeric:tabular-nums}.chart .tick,.chart .axis{fill:var(--soft)}"
    ".chart .rule{stroke:var(--rule);fill:none}.chart .line{fill:none;stroke-width:2.5;stroke-linejoin:round}"
    ".chart .drop{stroke:var(--soft);stroke-dasharray:2 4;fill:none}"
    ".chart .mark{fill:none;stroke:var(--ink);stroke-width:2}.chart .name,.chart .mark-name{font-weight:600}"
)
