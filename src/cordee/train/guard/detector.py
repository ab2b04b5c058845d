"""Detect losses that leave their usual range: pure, one value after the other.

The usual range is the median of the last values and their median absolute deviation (MAD), which a spike does not move.
A single value above it is suspicious, and several in a row are a spike; a value that is not finite is one at once.
"""

import math
import statistics
from collections import deque
from dataclasses import dataclass

WINDOW = 64
"""Values that make the usual range."""

WARM_UP = 32
"""Values before one counts as unusual: at the beginning a loss moves quickly."""

CONFIRM = 3
"""Unusual values in a row that are a spike."""

DEVIATIONS = 8.0
"""Standard deviations above the median from which a value is unusual, by the MAD."""

_MAD_TO_SIGMA = 1.4826  # of normally distributed values
_SIGMA_MIN = 0.01  # of the median: a loss that hardly moves has no MAD


@dataclass(frozen=True, slots=True)
class Spike:
    """A spike of the loss.

    Attributes:
        step: the first one whose loss was unusual.
        seen: the step whose loss confirmed it.
        value: that of `seen`; it may be NaN or infinite.
        median: the usual loss; NaN before the warm-up is over.
        sigma: the standard deviation of usual losses, likewise.
    """

    step: int
    seen: int
    value: float
    median: float = math.nan
    sigma: float = math.nan

    def sentence(self) -> str:
        """Say what was found.

        >>> Spike(10, 12, 9.5, 2.5, 0.25).sentence()
        'the loss of step 12 is 9.5, usual is 2.5 ± 0.25; it began in step 10'
        >>> Spike(10, 10, math.nan).sentence()
        'the loss of step 10 is nan'
        """
        usual = "" if math.isnan(self.median) else f", usual is {self.median:.4g} ± {self.sigma:.2g}"
        since = "" if self.step == self.seen else f"; it began in step {self.step}"
        return f"the loss of step {self.seen} is {self.value:.4g}{usual}{since}"


class SpikeDetector:
    """The detector of one rank.

    Args:
        finite: detect spikes of finite values too, and not only values that are not finite.
    """

    def __init__(self, *, finite: bool = True) -> None:
        self._finite = finite
        self._usual: deque[tuple[int, float]] = deque(maxlen=WINDOW)  # steps and losses
        self._unusual: list[int] = []  # steps in a row
        self._lost = False  # the last value was not finite: one spike, however long it lasts

    @property
    def is_suspicious(self) -> bool:
        """Return whether the last value was unusual."""
        return bool(self._unusual) or self._lost

    def take(self, step: int, value: float) -> Spike | None:
        """Take the loss of a step, and return a spike when it is confirmed; once for each."""
        if not math.isfinite(value):
            first, is_new = self._unusual[0] if self._unusual else step, not self._lost
            self._lost, self._unusual = True, []
            return Spike(first, step, value, *self.usual()) if is_new else None
        self._lost = False
        if not self._finite:
            return None
        median, sigma = self.usual()
        if math.isnan(median) or value <= median + DEVIATIONS * sigma:
            self._unusual = []
            self._usual.append((step, value))
            return None
        self._unusual.append(step)
        if len(self._unusual) < CONFIRM:
            return None
        found = Spike(self._unusual[0], step, value, median, sigma)
        self._unusual = []
        self._usual.clear()  # if nothing is done about it, this is the new range
        return found

    def usual(self) -> tuple[float, float]:
        """Return the median and the standard deviation of usual losses; NaN before the warm-up is over."""
        if len(self._usual) < WARM_UP:
            return math.nan, math.nan
        values = [value for _, value in self._usual]
        median = statistics.median(values)
        mad = statistics.median(abs(value - median) for value in values)
        return median, max(_MAD_TO_SIGMA * mad, _SIGMA_MIN * abs(median), 1e-12)

    def back(self, usual: "SpikeDetector", step: int) -> None:
        """Go on at this step with the range that another detector knew."""
        self._usual = deque(((at, value) for at, value in usual._usual if at < step), maxlen=WINDOW)
        self._unusual, self._lost = [], False

    def copy(self) -> "SpikeDetector":
        """Return a detector that knows the same."""
        made = SpikeDetector(finite=self._finite)
        made._usual = deque(self._usual, maxlen=WINDOW)
        return made
