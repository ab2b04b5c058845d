"""How far each checkpoint goes, where farther places get them more rarely; and when the next capture is due.

Clocks are read by the caller, on rank 0; the ranks agree on the answer when they save.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cordee.storage.destination import Place

MEMORY = 0
"""The reach of a capture that is only held: 1 is the nearest place, and so on to the home."""


class Outward:
    """Which places are due; a checkpoint that goes to one goes to all nearer ones too.

    The first of an attempt goes everywhere: it shows that each place works, and what it takes.
    """

    def __init__(self, places: Sequence[Place]) -> None:
        self._places = tuple(places)
        self._count = [math.inf] * len(self._places)  # checkpoints since this place had one
        self._at_s = [-math.inf] * len(self._places)

    def reach(self, now_s: float) -> int:
        """How many places the next checkpoint goes to, the nearest first."""
        due = [number for number, place in enumerate(self._places, 1) if self._is_due(number - 1, place, now_s)]
        return max(due, default=1)

    def captured(self) -> None:
        """A checkpoint is on its way."""
        self._count = [count + 1 for count in self._count]

    def arrived(self, reach: int, captured_s: float) -> None:
        """It is durable in so many places; only then these are no longer due."""
        for at in range(reach):
            self._count[at], self._at_s[at] = 0, captured_s

    def _is_due(self, at: int, place: Place, now_s: float) -> bool:
        if place.every_s is not None:
            return now_s - self._at_s[at] >= place.every_s
        return self._count[at] + 1 >= (place.every or 1)


@dataclass(frozen=True)
class Standing:
    """What a save costs, as measured, and what a death or a notice could still make of it. None: not known yet.

    Attributes:
        bytes: of the newest checkpoint, all ranks together.
        stall_s: how long it held training up, on the slowest rank.
        drain_s: until it was durable, by reach: the first for the nearest place alone, the last for all of them.
        held_step: of the newest capture that is in memory only, whole on this rank.
        draining_step: of the checkpoint that is on its way.
        durable_step: of the newest checkpoint that is committed.
    """

    bytes: int | None
    stall_s: float | None
    drain_s: tuple[float | None, ...]
    held_step: int | None
    draining_step: int | None
    durable_step: int | None
