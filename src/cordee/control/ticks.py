"""The ticks of the control loop: how long each took, and the error that keeps the loop from working."""

from bisect import bisect_left
from dataclasses import dataclass, field

BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the histogram; a tick that lasted as long as a bound is below it."""


@dataclass(slots=True)
class Ticks:
    """Figures of the control loop, which alone writes here.

    Attributes:
        problem: the error that keeps the loop from working now; None: it works.
        counts: ticks by the first bound that they did not exceed; the last count is of those above all bounds.
        sum_s: their time, waiting for the state's lock included.
    """

    problem: str | None = None
    counts: list[int] = field(default_factory=lambda: [0] * (len(BOUNDS_S) + 1))
    sum_s: float = 0.0

    def add(self, took_s: float) -> None:
        """Count a tick.

        >>> ticks = Ticks()
        >>> for took_s in (0.001, 0.002, 60.0):
        ...     ticks.add(took_s)
        >>> ticks.counts[0], ticks.counts[1], ticks.counts[-1], ticks.sum_s
        (1, 1, 1, 60.003)
        """
        self.counts[bisect_left(BOUNDS_S, took_s)] += 1
        self.sum_s += took_s
