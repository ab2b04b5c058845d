"""Lines over two axes as SVG: how speed grows with GPUs, when owning overtakes renting, memory over a step.

Light and dark, no script. Lines are named where they end, so that nobody has to match colours with a legend.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cordee.view.markup import num, palette_css, text

WIDTH, HEIGHT = 1080, 400
LEFT, RIGHT, TOP, BOTTOM = 92, 190, 24, 52
INKS = (
    *("var(--accent)", "var(--useful)", "var(--restart)", "var(--checkpoint)"),
    *("var(--ink)", "var(--stall)", "var(--lost)", "var(--soft)"),
)


@dataclass(frozen=True, slots=True)
class Line:
    """A line through points (x, y); dashed for what is only ideal."""

    name: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False


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


def chart_svg(lines: Sequence[Line], x: Axis, y: Axis, marks: Sequence[Mark] = (), label: str = "") -> str:
    """The lines as a self-contained SVG."""
    points = [point for line in lines for point in line.points]
    across = _Scale.of([px for px, _ in points], x, LEFT, WIDTH - RIGHT)
    up = _Scale.of([py for _, py in points] + ([] if y.log else [0.0]), y, HEIGHT - BOTTOM, TOP)
    drawn = _grid(across, up, x, y)
    drawn += [_line(line, index, across, up) for index, line in enumerate(lines)]
    drawn += [_names(lines, up)]
    drawn += [_mark(mark, across, up) for mark in marks]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" class="chart" role="img" '
        f'aria-label="{text(label or y.name)}"><style>{palette_css()}{_CSS}</style>{"".join(drawn)}</svg>'
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
            share = math.log(value / self.low) / math.log(self.high / self.low)
        else:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

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
    drawn = []
    for tick in up.ticks(y.ticks):
        at = num(up.at(tick))
        drawn.append(f'<path class="rule" d="M{LEFT} {at}H{WIDTH - RIGHT}"/>')
        drawn.append(
            f'<text class="tick" x="{LEFT - 10}" y="{at}" dy="4" text-anchor="end">{text(y.write(tick))}</text>'
        )
    for tick in across.ticks(x.ticks):
        at = num(across.at(tick))
        drawn.append(
            f'<text class="tick" x="{at}" y="{HEIGHT - BOTTOM + 20}" text-anchor="middle">{text(x.write(tick))}</text>'
        )
    drawn.append(f'<text class="axis" x="{LEFT}" y="{TOP - 10}">{text(y.name)}</text>')
    drawn.append(f'<text class="axis" x="{WIDTH - RIGHT}" y="{HEIGHT - 8}" text-anchor="end">{text(x.name)}</text>')
    return drawn


def _line(line: Line, index: int, across: _Scale, up: _Scale) -> str:
    path = "L".join(f"{num(across.at(px))} {num(up.at(py))}" for px, py in line.points)
    style = f'style="stroke:{INKS[index % len(INKS)]}{";stroke-dasharray:5 5;stroke-width:1.5" if line.dashed else ""}"'
    dots = "" if line.dashed or len(line.points) > 16 else "".join(
        f'<circle cx="{num(across.at(px))}" cy="{num(up.at(py))}" r="3.5" style="fill:{INKS[index % len(INKS)]}"/>'
        for px, py in line.points
    )  # fmt: skip
    return f'<path class="line" {style} d="M{path}"/>{dots}'


def _names(lines: Sequence[Line], up: _Scale) -> str:
    """Names at the lines' ends, kept apart where the lines end close together."""
    ends = sorted((up.at(line.points[-1][1]), index, line.name) for index, line in enumerate(lines))
    places: list[float] = []
    for at, *_ in ends:
        places.append(max(at, places[-1] + 18 if places else -math.inf))
    lowest = float(HEIGHT - BOTTOM)
    for number in reversed(range(len(places))):  # and none below the axis
        places[number] = min(places[number], lowest)
        lowest = places[number] - 18
    return "".join(
        f'<text class="name" style="fill:{INKS[index % len(INKS)]}" x="{WIDTH - RIGHT + 10}" y="{num(at)}" dy="4">'
        f"{text(name)}</text>"
        for at, (_, index, name) in zip(places, ends, strict=True)
    )


def _mark(mark: Mark, across: _Scale, up: _Scale) -> str:
    at_x, at_y = across.at(mark.x), up.at(mark.y)
    left = at_x > (LEFT + WIDTH - RIGHT) / 2
    anchor, shift = ("end", -12) if left else ("start", 12)
    return (
        f'<path class="drop" d="M{num(at_x)} {num(at_y)}V{HEIGHT - BOTTOM}"/>'
        f'<circle class="mark" cx="{num(at_x)}" cy="{num(at_y)}" r="7"/>'
        f'<text class="mark-name" x="{num(at_x + shift)}" y="{num(at_y - 12)}" text-anchor="{anchor}">'
        f"{text(mark.name)}</text>"
    )


_CSS = (
    ".chart text{font:13px system-ui,-apple-system,'Segoe UI',Roboto,sans-serif;fill:var(--ink);"
    "font-variant-numeric:tabular-nums}.chart .tick,.chart .axis{fill:var(--soft)}"
    ".chart .rule{stroke:var(--rule);fill:none}.chart .line{fill:none;stroke-width:2.5;stroke-linejoin:round}"
    ".chart .drop{stroke:var(--soft);stroke-dasharray:2 4;fill:none}"
    ".chart .mark{fill:none;stroke:var(--ink);stroke-width:2}.chart .name,.chart .mark-name{font-weight:600}"
)
