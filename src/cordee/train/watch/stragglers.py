"""Find the rank that holds the others up, from the ranks' signs of life; pure functions, without a clock.

A rank that stands still outside a collective is the one that the others, inside theirs, wait for. A slow rank is the
one that waits least: in synchronous training a step takes equally long on all ranks, so a rank that computes longer
spends less time in collectives. `exchange.py` passes the signs on.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from cordee.events import Behind

SLOW_FRACTION = 0.1  # of the time that the others wait for a slow rank, at least
SLOW_WINDOWS = 3  # in a row
WINDOW_STEPS = 5  # at least, so that a window holds whole steps
ENDED = -1  # the beat of a rank that has left


@dataclass(frozen=True, slots=True, kw_only=True)
class Sign:
    """A sign of life of one rank.

    Attributes:
        beat: counts up while the rank's watch lives.
        step: the step that it runs.
        still_s: time since its loop made progress.
        stuck: it has stood still for longer than its own limit.
        waits: a collective is under way; None: not known.
        begun: number of collectives begun.
        waited_s: time in collectives since the watch began.
        watched_s: time that collectives were watched; 0 where the flight recorder is off.
        host, pid: of its process.
    """

    beat: int
    step: int
    still_s: float
    stuck: bool
    waits: bool | None
    begun: int
    waited_s: float
    watched_s: float
    host: str
    pid: int


def find_stuck(signs: Mapping[int, Sign], silent: Mapping[int, float]) -> list[tuple[int, Behind]]:
    """Return the ranks that hold the gang up; several if the signs do not distinguish them.

    Args:
        signs: the newest sign of each rank.
        silent: ranks whose sign has stopped changing.
    """
    stuck = {rank: sign for rank, sign in signs.items() if sign.stuck and rank not in silent}
    if silent:
        return [(rank, Behind.SILENT) for rank in sorted(silent)]
    outside = [rank for rank, sign in stuck.items() if sign.waits is False]
    # Hosts run ahead of their GPUs and of each other, so being outside all collectives counts more than being behind.
    among = {rank: stuck[rank] for rank in outside} or stuck
    first = min((sign.step, sign.begun) for sign in among.values()) if among else None
    return [(rank, Behind.STUCK) for rank, sign in sorted(among.items()) if (sign.step, sign.begun) == first]


@dataclass(frozen=True, slots=True)
class SlowRank:
    """A rank, and the fraction of the time that the others wait for it; 0: it is no longer slow."""

    rank: int
    waited: float


class SlowRankDetector:
    """A detector of a slow rank: several windows in a row have to agree, since any rank is late now and then."""

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._from: dict[int, Sign] = {}
        self._suspect: int | None = None
        self._windows = 0
        self._reported: int | None = None

    def look(self, signs: Mapping[int, Sign]) -> SlowRank | None:
        """Return the slow rank when it should be reported, and again when it is no longer slow."""
        if len(signs) < 2 or any(sign.beat == ENDED or sign.watched_s == 0 for sign in signs.values()):
            self._from = {}
            return None
        if self._from.keys() != signs.keys():
            self._from = dict(signs)
            return None
        done = min(sign.step - self._from[rank].step for rank, sign in signs.items())
        seen_s = min(sign.watched_s - self._from[rank].watched_s for rank, sign in signs.items())
        if done < WINDOW_STEPS or seen_s < self._window_s:
            return None
        waited = {
            rank: (sign.waited_s - self._from[rank].waited_s) / (sign.watched_s - self._from[rank].watched_s)
            for rank, sign in signs.items()
        }
        self._from = dict(signs)
        return self._judge(waited)

    def _judge(self, waited: Mapping[int, float]) -> SlowRank | None:
        """Compare the fractions of the time that each rank waited."""
        least = min(waited, key=lambda rank: (waited[rank], rank))
        excess = median(part for rank, part in waited.items() if rank != least) - waited[least]
        suspect = least if excess >= SLOW_FRACTION else None
        self._windows = self._windows + 1 if suspect == self._suspect else 1
        self._suspect = suspect
        if self._windows < SLOW_WINDOWS or suspect == self._reported:
            return None
        over, self._reported = self._reported, suspect
        return SlowRank(over, 0.0) if suspect is None and over is not None else SlowRank(least, excess)
