"""A queue's use within the last 24 hours, exact at every microsecond, and the time at which it crosses a mark.

Use is a broken line with a point for each change of holdings. Use within a day is the line now less the line a day ago.
"""

from bisect import bisect_right
from collections.abc import Iterator
from operator import itemgetter

from cordee.units import US_PER_HOUR

DAY_US = 24 * US_PER_HOUR

_EVER_US = -(1 << 62)

Pair = tuple[int, int]
"""Thousandths of a GPU and nano-dollars per hour, or either times microseconds."""


class Day:
    """The broken line of one queue."""

    _points: list[tuple[int, Pair, Pair]]

    def __init__(self) -> None:
        self._points = [(_EVER_US, (0, 0), (0, 0))]  # since when, used till then, held

    def add(self, at_us: int, change: Pair) -> None:
        """Change the holdings; the exact opposite at the same time undoes it."""
        since_us, used, held = self._points[-1]
        if change == (0, 0):
            return
        after = (held[0] + change[0], held[1] + change[1])
        if at_us <= since_us:
            self._points[-1] = (since_us, used, after)
            if len(self._points) > 1 and self._points[-2][2] == after:
                self._points.pop()
        else:
            self._points.append((at_us, self._until(len(self._points) - 1, at_us), after))

    def used(self, now_us: int) -> Pair:
        """Return the use of GPU time and of money within the day before now."""
        now, before = (
            self._until(len(self._points) - 1, now_us),
            self._until(self._at(now_us - DAY_US), now_us - DAY_US),
        )
        return (now[0] - before[0], now[1] - before[1])

    def crosses_us(self, which: int, mark: int, now_us: int, *, falling: bool) -> int | None:
        """Return the first time at which a use is at or below the mark (not falling: at or above), if holdings stay."""
        sign = 1 if falling else -1
        for from_us, to_us, used, slope in self._ahead(which, now_us):
            above, climb = sign * (used - mark), sign * slope
            if above <= 0:
                return from_us
            if climb < 0 and (at_us := from_us - above // climb) <= to_us:
                return at_us
        return None

    def forget(self, now_us: int) -> None:
        """Drop the points that no later day reaches."""
        del self._points[: max(0, self._at(now_us - DAY_US))]

    def value(self, since_us: int = _EVER_US) -> object:
        """Return the line since then, to compare; earlier forgotten points do not matter."""
        first = self._at(since_us)
        gpu, nano = self._until(first, since_us)
        later = ((at_us, (used[0] - gpu, used[1] - nano), held) for at_us, used, held in self._points[first + 1 :])
        return ((since_us, (0, 0), self._points[first][2]), *later)

    def _at(self, at_us: int) -> int:
        return max(0, bisect_right(self._points, at_us, key=itemgetter(0)) - 1)

    def _until(self, index: int, at_us: int) -> Pair:
        since_us, used, held = self._points[index]
        past_us = max(0, at_us - since_us)
        return (used[0] + held[0] * past_us, used[1] + held[1] * past_us)

    def _ahead(self, which: int, now_us: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield the pieces of the next day: from, to, use at first, and its slope."""
        used, held, from_us = self.used(now_us)[which], self._points[-1][2][which], now_us
        for index in range(self._at(now_us - DAY_US), len(self._points)):
            last = index + 1 == len(self._points)
            to_us = now_us + DAY_US if last else self._points[index + 1][0] + DAY_US
            slope = held - self._points[index][2][which]
            yield from_us, to_us, used, slope
            used, from_us = used + slope * (to_us - from_us), to_us
