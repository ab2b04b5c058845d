"""The agent's lease: after `lease_s` without an answer of a server its ranks are gone, so that others may start there.

Pure arithmetic on monotonic times (docs/decisions/0013). The time counts from the sending of the last beat that was
answered; the server counts from its receipt, and waits a margin longer.
"""

import math
from collections import deque
from dataclasses import dataclass, field

BEATS_MISSED = 3
"""After this many beats without an answer the agent dials again: the server may be frozen, or another took over."""

CLAIM_S = 30.0
"""After this time without an answer to its claim the agent dials again: the server may be frozen."""

_SENT_MAX = 64


@dataclass(slots=True)
class Lease:
    """The lease of one agent; before the first welcome it never ends.

    Attributes:
        next_beat_s: when the next beat is due, or the answer to a claim; infinite without a connection.
        lapsed: it ended, and no server has welcomed the agent since.
        lease_s: the time for which it lasts.
    """

    next_beat_s: float = math.inf
    lapsed: bool = False
    lease_s: float = math.inf
    _beat_s: float = math.inf
    _since_s: float = math.inf  # the sending of the last answered beat
    _number: int = 0
    _sent: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=_SENT_MAX))

    @property
    def ends_s(self) -> float:
        """The time at which the ranks must be gone."""
        return self._since_s + self.lease_s

    def notice_s(self, grace_s: float) -> float:
        """Return the time at which ranks with this grace period get notice: in the lease's second half at the most."""
        return self.ends_s - min(grace_s, self.lease_s / 2)

    def welcome(self, lease_s: float, beat_s: float, claimed_s: float, now_s: float) -> None:
        """Begin the lease that a server grants in answer to a claim sent at `claimed_s`."""
        self.lease_s, self._beat_s, self._since_s, self.lapsed = lease_s, beat_s, claimed_s, False
        self.next_beat_s = now_s + beat_s
        self._sent.clear()

    def claimed(self, now_s: float) -> None:
        """Wait for the answer to a claim that is sent now, for `CLAIM_S`."""
        self.next_beat_s = now_s + CLAIM_S

    def beat(self, now_s: float) -> int:
        """Return the number of the beat that is sent now."""
        self._number += 1
        self._sent.append((self._number, now_s))
        self.next_beat_s = now_s + self._beat_s
        return self._number

    def answered(self, number: int) -> float | None:
        """Extend the lease, since a beat was answered; return the time of its sending, None if it is not known."""
        while self._sent and self._sent[0][0] <= number:
            answered, sent_s = self._sent.popleft()
            if answered == number:
                self._since_s = max(self._since_s, sent_s)
                return sent_s
        return None

    @property
    def unanswered(self) -> bool:
        """Return whether so many beats have no answer that the connection is worth nothing."""
        return len(self._sent) >= BEATS_MISSED

    def disconnected(self) -> None:
        """Send no beats until the next welcome; the lease counts on."""
        self.next_beat_s = math.inf
        self._sent.clear()

    def no_server(self, at_s: float) -> None:
        """Extend the lease, since no server ran at that time: the next one grants every node a fresh lease."""
        if not self.lapsed and self._since_s < at_s:
            self._since_s = at_s
