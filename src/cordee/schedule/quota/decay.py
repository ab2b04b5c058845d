"""A clock that runs ever faster: use counted by it decays by half with each half-life, without visiting any queue.

Holdings from t0 to t1 count held x (at(t1) - at(t0)). Only comparisons at one time are meaningful; they are those of
an exponential decay. All numbers are integers: sums do not depend on their order and can be taken back.
"""

from functools import cache
from math import isqrt

_STEPS = 1024
"""Steps of a half-life; within a step the clock is linear, which is off by less than 0.04 %."""

_BITS = 60


class Decay:
    """The clock of one half-life; it is not asked about times before `origin_us`."""

    def __init__(self, half_life_us: int, origin_us: int) -> None:
        assert half_life_us > 0, "usage decays over some time"
        self.half_life_us, self.origin_us = half_life_us, origin_us
        self._rates, self._sums = _tables()
        self.begin = self._sums[_STEPS] * half_life_us  # the reading at the origin
        self._last = (origin_us, self.begin)

    def at(self, now_us: int) -> int:
        """Return the reading; it doubles with each half-life.

        >>> clock = Decay(1000, 0)
        >>> clock.at(5000) == 2 * clock.at(4000) == 4 * clock.at(3000)
        True
        """
        if now_us != self._last[0]:
            halves, rest = divmod(max(0, now_us - self.origin_us), self.half_life_us)
            step, part = divmod(rest * _STEPS, self.half_life_us)
            within = (self._sums[_STEPS] + self._sums[step]) * self.half_life_us + self._rates[step] * part
            self._last = (now_us, within << halves)
        return self._last[1]


@cache
def _tables() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return 2^(step/steps) in fixed point, and the sums of all steps before each."""
    bits = 4 * _BITS
    root = 2 << bits
    for _ in range(_STEPS.bit_length() - 1):
        root = isqrt(root << bits)
    rates, sums, exact = [], [0], 1 << bits
    for _ in range(_STEPS):
        rates.append(exact >> (bits - _BITS))
        sums.append(sums[-1] + rates[-1])
        exact = exact * root >> bits
    return tuple(rates), tuple(sums)
