"""The server's clock as an agent knows it: an offset from the machine's own, by Cristian's algorithm.

Of a question and its answer the agent knows when it sent one and received the other; the server's time lies between.
The shortest round trip bounds the error best (F. Cristian, Probabilistic clock synchronization, 1989).
"""

import logging
import time

from cordee.units import US_PER_S

TOLERATED_US = 100_000
"""Smaller offsets are left: they are within what round trips and NTP explain."""

WARNED_US = 2 * US_PER_S

_TIMES = ("at_us", "from_us", "since_us")
"""The fields of rank reports that hold times."""

_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)

_log = logging.getLogger("cordee.agent")


def monotonic_s() -> float:
    """Return monotonic seconds that a suspended machine counts too: a lease runs out while a laptop sleeps."""
    return time.clock_gettime(_CLOCK)


class MachineClock:
    """The clocks of this machine."""

    def now_us(self) -> int:
        """Return microseconds since the Unix epoch."""
        return time.time_ns() // 1000

    def now_s(self) -> float:
        """Return monotonic seconds."""
        return monotonic_s()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        time.sleep(seconds)


class Clock:
    """The time of the server.

    Args:
        machine: the clocks of this machine.

    Attributes:
        machine: as given.
        offset_us: the server's time minus the machine's; 0 while it is within `TOLERATED_US`.
    """

    def __init__(self, machine: MachineClock | None = None) -> None:
        self.machine = machine or MachineClock()
        self.offset_us = 0
        self._best_us: int | None = None  # the shortest round trip of this connection
        self._warned_us = 0

    def now_us(self) -> int:
        """Return the server's time in microseconds since the Unix epoch."""
        return self.machine.now_us() + self.offset_us

    def now_s(self) -> float:
        """Return monotonic seconds."""
        return self.machine.now_s()

    def corrected(self, record: dict[str, object]) -> dict[str, object]:
        """Return a rank's report, written by the machine's clock, with its times on the server's."""
        if not self.offset_us:
            return record
        times = {name: record[name] for name in _TIMES if type(record.get(name)) is int}
        return record | {name: at_us + self.offset_us for name, at_us in times.items() if isinstance(at_us, int)}

    def begin(self) -> None:
        """Forget earlier round trips: this connection may lead to another server."""
        self._best_us = None

    def answered(self, server_us: int, sent_s: float) -> None:
        """Take in the answer to a question that was sent then; it carries the server's time."""
        now_us = self.machine.now_us()
        # Read last: where this thread stands still between the two, the round trip is longer and knows less.
        round_trip_us = round((self.machine.now_s() - sent_s) * US_PER_S)
        if self._best_us is not None and round_trip_us >= self._best_us:
            return
        self._best_us = round_trip_us
        offset_us = server_us + round_trip_us // 2 - now_us
        self.offset_us = offset_us if abs(offset_us) > TOLERATED_US + round_trip_us else 0
        if abs(self.offset_us) >= WARNED_US and abs(self.offset_us - self._warned_us) >= WARNED_US:
            self._warned_us = self.offset_us
            side = "behind" if self.offset_us > 0 else "ahead of"
            _log.warning(
                "this machine's clock is %.1f s %s the server's; times are corrected by that (hint: run an NTP client)",
                abs(self.offset_us) / US_PER_S,
                side,
            )
