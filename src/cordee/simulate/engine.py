"""Virtual time: a heap of actions keyed (time, priority, sequence), and the Clock that reads it.

Not for decisions: those are the control plane's, which cannot tell this clock from a real one.
"""

import heapq
from collections.abc import Callable
from typing import Any


class Engine:
    """Actions in the order of their time, then priority, then the order in which they were scheduled."""

    def __init__(self, start_us: int = 0) -> None:
        self._now_us = start_us
        self._heap: list[tuple[int, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._sequence = 0

    def now_us(self) -> int:
        """Return the virtual time (this makes the engine a `Clock`)."""
        return self._now_us

    def at(self, at_us: int, action: Callable[..., None], *args: Any, priority: int = 0) -> None:
        """Do `action(*args)` at `at_us`; a lower priority goes first among those of the same time."""
        assert at_us >= self._now_us, f"an action at {at_us} lies before now, {self._now_us}"
        self._sequence += 1
        heapq.heappush(self._heap, (at_us, priority, self._sequence, action, args))

    def next_us(self) -> int | None:
        """Return when the next action is due; None if there is none."""
        return self._heap[0][0] if self._heap else None

    @property
    def scheduled(self) -> int:
        """Return the number of actions that are to come."""
        return len(self._heap)

    def advance(self, to_us: int) -> None:
        """Advance to `to_us`, and do everything that is due until then, in order."""
        assert to_us >= self._now_us, "virtual time does not go backwards"
        heap = self._heap
        while heap and heap[0][0] <= to_us:
            self._now_us, _, _, action, args = heapq.heappop(heap)
            action(*args)
        self._now_us = to_us
