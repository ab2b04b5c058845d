"""Measured kernels of a GPU, as grids over their sizes.

Products, attention and experts are stored as percentages of the nameplate roofline, so that GPUs with the same chip can
use them too; collectives are microseconds. `load.py` reads them from data/kernels.csv.
"""

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import exp, log, prod


@dataclass(frozen=True)
class Grid:
    """Positive values at the points of ascending axes, the last axis fastest."""

    axes: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.values) == prod(len(axis) for axis in self.axes), "a grid has a value for each of its points"

    @cached_property
    def _logs(self) -> tuple[tuple[float, ...], ...]:
        return tuple(tuple(log(at) for at in axis) for axis in self.axes)

    @cached_property
    def _log_values(self) -> tuple[float, ...]:
        return tuple(log(value) for value in self.values)

    def at(self, *point: float) -> float:
        """Return the value at a point, interpolated in logarithms; beyond an axis its end holds.

        >>> Grid(((1, 4), (10,)), (1.0, 4.0)).at(2, 99)
        2.0
        """
        corners = []
        for size, logs in zip(point, self._logs, strict=True):
            where = min(max(log(size) if size > 0 else logs[0], logs[0]), logs[-1])
            low = min(max(bisect_right(logs, where) - 1, 0), max(len(logs) - 2, 0))
            high = min(low + 1, len(logs) - 1)
            part = (where - logs[low]) / (logs[high] - logs[low]) if high > low else 0.0
            corners.append(((low, 1 - part), (high, part)) if part else ((low, 1.0),))
        total = 0.0
        for corner in product(*corners):
            index, weight = 0, 1.0
            for (position, part), logs in zip(corner, self._logs, strict=True):
                index, weight = index * len(logs) + position, weight * part
            total += weight * self._log_values[index]
        return round(exp(total), 12)

    def fraction(self, *point: float) -> float:
        """Return the fraction of the roofline at a point, for a grid of percentages; at most 1.

        A measurement that repeats one kernel finds its bytes in the L2 cache and may exceed the memory's rate (380 % on
        L40S). In a model every layer has other bytes.

        >>> Grid(((1, 4),), (50.0, 380.0)).fraction(1), Grid(((1, 4),), (50.0, 380.0)).fraction(4)
        (0.5, 1.0)
        """
        return min(1.0, self.at(*point) / 100)


@dataclass(frozen=True, slots=True)
class Kernels:
    """The measured grids of one GPU, by kernel and format. `source` and `gpu` are empty where nothing was measured."""

    source: str = ""
    grids: Mapping[tuple[str, str], Grid] = field(default_factory=dict, hash=False)
    gpu: str = ""

    def find(self, kernel: str, *formats: str) -> Grid | None:
        """Return the grid of this kernel in the first of these formats that was measured."""
        return next((self.grids[kernel, each] for each in formats if (kernel, each) in self.grids), None)
