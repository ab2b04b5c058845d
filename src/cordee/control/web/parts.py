"""Parts of pages, drawn once for all browsers that see the same, and no more often than the server can afford.

One thread at a time draws, so that pages use at most one processor; what took long to draw is kept longer.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import NamedTuple

Parts = dict[str, str]
"""HTML by the id of the element that holds it, in the order of the page."""

FRACTION = 0.05
"""The fraction of the time that drawing one page again and again may take."""

_FRESH_S = 0.5
_KEPT = 64


class _Drawn(NamedTuple):
    at_s: float
    took_s: float
    parts: Parts


class Drawings:
    """The parts that were drawn last."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._drawn: OrderedDict[Hashable, _Drawn] = OrderedDict()
        self._drawing, self._lock = threading.Lock(), threading.Lock()

    def get(self, key: Hashable, draw: Callable[[], Parts], *, fresh_s: float = _FRESH_S) -> Parts:
        """Return the parts of this key: those of last time while they are fresh enough, else drawn again."""
        if (found := self.fresh(key, fresh_s)) is not None:
            return found
        with self._drawing:
            if (found := self.fresh(key, fresh_s)) is not None:  # another thread drew them meanwhile
                return found
            from_s, from_cpu_s = self._clock(), time.thread_time()
            parts = draw()
            drawn = _Drawn(from_s, time.thread_time() - from_cpu_s, parts)
            with self._lock:
                self._drawn[key] = drawn
                self._drawn.move_to_end(key)
                while len(self._drawn) > _KEPT:
                    self._drawn.popitem(last=False)
            return parts

    def fresh(self, key: Hashable, fresh_s: float = _FRESH_S) -> Parts | None:
        """Return the parts of this key of last time; None: they are not fresh enough, or not there."""
        with self._lock:
            found = self._drawn.get(key)
        if found is None or self._clock() - found.at_s > max(fresh_s, found.took_s / FRACTION):
            return None
        return found.parts
