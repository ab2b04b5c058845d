"""Measurements of a calibration on one device: rates over sizes, single numbers, the fingerprint they hold for.

A `Table` has work a second at the points of a grid: FLOP of products and attention, elements of small operations, bytes
of traffic. Whoever plans asks for seconds; a table that was not measured is None, and the catalogue's formula counts.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np

from cordee.hardware.arrays import Floats, Ints, Real

Point = tuple[float, ...]
SPEED_MOVED = 0.06
"""Of a reference product's time: a device that is slower by more than this fraction runs at another speed."""


class Sample(NamedTuple):
    """One point of one table as a probe measured it; seconds are the median of the runs, beside their quartiles.

    The lower quartile is what counts: others make runs longer, and luck makes few of them shorter.
    """

    table: str
    at: Point
    work: float
    seconds: float
    p25_s: float
    p75_s: float
    runs: int

    @property
    def rate(self) -> float:
        """Work a second in quiet runs."""
        return self.work / self.p25_s

    @property
    def spread(self) -> float:
        """The distance between the quartiles, over the median."""
        return (self.p75_s - self.p25_s) / self.seconds

    @property
    def doubt(self) -> float:
        """The standard error of the median, relative: 1.25 standard deviations over the root of the runs.

        Of a normal distribution the quartiles stand 1.35 standard deviations apart.

        >>> round(Sample("copy fp32", (8.0,), 8.0, 1.0, 0.9, 1.1, 25).doubt, 3)
        0.037
        """
        return float(1.25 / 1.35 * self.spread / self.runs**0.5)


class Refused(NamedTuple):
    """Work that a device or its software cannot do, and their reason; plans keep the catalogue's formula for it."""

    what: str
    why: str


@dataclass(frozen=True)
class Table:
    """Work a second at the points of ascending axes, the last axis fastest.

    Between points it is interpolated in logarithms. Beyond the last one the rate stays; before the first one the
    seconds do, since latency rules there.
    """

    axes: tuple[tuple[float, ...], ...]
    rates: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.rates) == prod(len(axis) for axis in self.axes), "a table has a rate for each of its points"

    def rate(self, *at: Real) -> Real:
        """Return the work a second at a point, or at each of an array of points.

        >>> float(Table(((1.0, 4.0),), (1.0, 4.0)).rate(2)), float(Table(((1.0, 4.0),), (1.0, 4.0)).rate(99))
        (2.0, 4.0)
        """
        logs = np.log(np.asarray(self.rates, dtype=float)).reshape([len(axis) for axis in self.axes])
        corners = [_between(np.asarray(axis, dtype=float), size) for axis, size in zip(self.axes, at, strict=True)]
        total: Real = 0.0
        for chosen in product(*corners):
            weight: Real = 1.0
            for _, part in chosen:
                weight = weight * part
            total = total + weight * logs[tuple(index for index, _ in chosen)]
        return np.exp(total)

    def seconds(self, work: Real, *at: Real) -> Real:
        """Return the seconds of so much work at a point.

        >>> table = Table(((10.0, 1000.0),), (1e6, 1e8))
        >>> [round(float(table.seconds(n, n)), 9) for n in (1, 10, 1000, 10_000)]
        [1e-05, 1e-05, 1e-05, 0.0001]
        """
        for axis, size in zip(self.axes, at, strict=True):
            work = work * np.maximum(1.0, axis[0] / np.maximum(size, 1e-9))
        return work / self.rate(*at)

    @property
    def best(self) -> float:
        """The highest rate of all."""
        return max(self.rates)


def _between(axis: Floats, size: Real) -> list[tuple[Ints | int, Real]]:
    """Return the two neighbours of a size on an axis, by index, with their weights."""
    if len(axis) == 1:
        return [(0, 1.0)]
    logs = np.log(axis)
    where = np.clip(np.log(np.maximum(size, 1e-9)), logs[0], logs[-1])
    low = np.clip(np.searchsorted(logs, where, side="right") - 1, 0, len(axis) - 2)
    part = (where - logs[low]) / (logs[low + 1] - logs[low])
    return [(low, 1 - part), (low + 1, part)]


@dataclass(frozen=True, slots=True)
class Measured:
    """All that a calibration found on a device.

    Attributes:
        tables: by name: `product fp32 forward` over (tokens, outputs, inputs), `norm fp32 backward` over elements, ...
        numbers: by name, with the unit in it: `context_bytes`, `write_bytes_per_s`, ...
        fingerprint: driver, clocks, power limit, software: what the numbers hold for.
        as_of: the day.
    """

    tables: Mapping[str, Table] = field(default_factory=dict, hash=False)
    numbers: Mapping[str, float] = field(default_factory=dict, hash=False)
    fingerprint: Mapping[str, str] = field(default_factory=dict, hash=False)
    as_of: str = ""

    def find(self, *name: str) -> Table | None:
        """Return a table by the words of its name: `find("norm", "fp32", "forward")`."""
        return self.tables.get(" ".join(name))


def stale(kept: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Return what has changed since a calibration: `torch 2.12.0 -> 2.13.0`; only what both sides know counts.

    >>> stale({"torch": "2.12.0", "driver": "580"}, {"torch": "2.13.0"})
    ('torch 2.12.0 -> 2.13.0',)
    """
    return tuple(f"{key} {kept[key]} -> {now[key]}" for key in kept if key in now and kept[key] != now[key])


def tables_of(samples: Sequence[Sample]) -> dict[str, Table]:
    """Return the tables of samples: each whose points form a whole grid.

    >>> found = tables_of([Sample("copy fp32", (8.0,), 8.0, 2.0, 2.0, 2.0, 5)])
    >>> found["copy fp32"]
    Table(axes=((8.0,),), rates=(4.0,))
    """
    by_name: dict[str, dict[Point, float]] = {}
    for each in samples:
        by_name.setdefault(each.table, {})[each.at] = each.rate
    found = {}
    for name, rates in by_name.items():
        axes = tuple(tuple(sorted(set(values))) for values in zip(*rates, strict=True))
        points = list(product(*axes))
        if all(point in rates for point in points):
            found[name] = Table(axes, tuple(rates[point] for point in points))
    return found


def left_out(table: Table) -> list[float]:
    """Return measured over interpolated seconds of each inner point of each axis, as if it had not been measured.

    The spread of their logarithms is what sizes between the points must be expected to miss by.
    """
    ratios = []
    for axis_at, axis in enumerate(table.axes):
        for inner in axis[1:-1]:
            gap = bisect_left(axis, inner)
            kept = (*axis[:gap], *axis[gap + 1 :])
            axes = (*table.axes[:axis_at], kept, *table.axes[axis_at + 1 :])
            thinner = Table(axes, tuple(float(table.rate(*point)) for point in product(*axes)))
            for others in product(*(each for at, each in enumerate(table.axes) if at != axis_at)):
                point = (*others[:axis_at], inner, *others[axis_at:])
                ratios.append(float(thinner.rate(*point)) / float(table.rate(*point)))
    return ratios
