"""The time in which the gateway looked at its connections: time in which it stood still says nothing about a replica.

Where its process gets no CPU, or one call takes long, what replicas have sent lies unread, and the clock goes on.
Time-outs of requests to a replica, which take several turns of the loop, leave such time out.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

TICK_S = 0.1
KEPT = 600
"""Pauses that are remembered: those of the last minute at least."""


class Attention:
    """The pauses of the gateway's event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._looked_s: float | None = None  # When the loop turned last; None: nobody has it measured.
        self._pauses = deque[tuple[float, float]](maxlen=KEPT)  # Start and length of each.

    async def measure(self) -> None:
        """Note the pauses of this event loop, for ever."""
        self._looked_s = self._clock()
        while True:
            await asyncio.sleep(TICK_S)
            self.look()

    def look(self) -> None:
        """Note that the loop turns, and the pause that it made since the last time."""
        now_s = self._clock()
        if self._looked_s is not None and (pause := self._pause(self._looked_s, now_s)):
            self._pauses.append(pause)
        self._looked_s = now_s

    def since(self, at_s: float) -> float:
        """Return the seconds since a time in which the gateway was attentive."""
        now_s = self._clock()
        lost_s = 0.0
        if self._looked_s is not None and (pause := self._pause(self._looked_s, now_s)):
            lost_s += _after(at_s, *pause)
        for start_s, length_s in reversed(self._pauses):
            if start_s + length_s <= at_s:
                break
            lost_s += _after(at_s, start_s, length_s)
        return now_s - at_s - lost_s

    @asynccontextmanager
    async def timeout(self, limit_s: float) -> AsyncIterator[None]:
        """Limit the attentive time of a block.

        Raises:
            TimeoutError: it took longer.
        """
        loop, began_s = asyncio.get_running_loop(), self._clock()
        handle: asyncio.TimerHandle
        async with asyncio.timeout(None) as timeout:

            def look() -> None:
                nonlocal handle
                left_s = limit_s - self.since(began_s)
                if left_s > 0:
                    handle = loop.call_later(max(left_s, TICK_S / 10), look)
                else:
                    timeout.reschedule(loop.time())

            handle = loop.call_later(limit_s, look)
            try:
                yield
            finally:
                handle.cancel()

    def _pause(self, looked_s: float, now_s: float) -> tuple[float, float] | None:
        """Return start and length of the pause between two looks; None: they are as far apart as they shall be."""
        length_s = now_s - looked_s - TICK_S
        return (looked_s + TICK_S, length_s) if length_s > TICK_S / 2 else None


def _after(at_s: float, start_s: float, length_s: float) -> float:
    """Return the seconds of a pause that came after a time."""
    return min(length_s, start_s + length_s - at_s)
