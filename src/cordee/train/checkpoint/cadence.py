"""How far each checkpoint goes, where farther places get them more rarely; and when the next capture is due.

Clocks are read by the caller, on rank 0; the ranks agree on the answer when they save.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cordee.storage.destination import Level
from cordee.train.settings import Every

MEMORY = 0
"""The reach of a capture that is only held: 1 is the nearest place, and so on to the home."""

LOOK_S = 0.1  # between two looks whether the drain is done


class LevelSchedule:
    """Which places are due; a checkpoint that goes to one goes to all nearer ones too.

    The first of an attempt goes everywhere: it shows that each place works, and what it takes.
    """

    def __init__(self, places: Sequence[Level]) -> None:
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

    def _is_due(self, at: int, place: Level, now_s: float) -> bool:
        if place.every_s is not None:
            return now_s - self._at_s[at] >= place.every_s
        return self._count[at] + 1 >= (place.every or 1)


class Cadence:
    """When a checkpoint is due, and when a capture in memory between them.

    By steps: every rank knows. By time: rank 0's clock says, and the ranks agree on the step.

    Args:
        every: of checkpoints; neither steps nor seconds: `save_s` is estimated.
        ram: of captures in memory; None: none are made; neither steps nor seconds: `hold_s` is estimated.
        first_s: until the first checkpoint, while nothing is estimated yet.

    Attributes:
        save_s: between two checkpoints; None: they are counted by steps.
        hold_s: between two captures; None: none are made by time.
        hastened: a checkpoint is due, whatever the times say.
    """

    def __init__(self, every: Every, ram: Every | None, *, first_s: float) -> None:
        self._every, self._ram = every, ram
        self.save_s = None if every.steps else every.seconds or first_s
        self.hold_s = ram.seconds if ram else None
        self._saved_s = self._captured_s = 0.0
        self.hastened = False

    @property
    def estimates(self) -> tuple[bool, bool]:
        """Whether the interval of checkpoints, and that of captures in memory, is left to us."""
        every, ram = self._every, self._ram
        return every.steps is None and every.seconds is None, ram is not None and ram.steps is ram.seconds is None

    @property
    def holds(self) -> bool:
        """Whether captures in memory are sure to come."""
        return self._ram is not None and bool(self._ram.steps or self._ram.seconds)

    def at_step(self, step: int) -> int | None:
        """By steps: the reach of a capture that is due here, 1 for a checkpoint; None: none is."""
        if self._every.steps and step % self._every.steps == 0:
            return 1
        return MEMORY if self._ram and self._ram.steps and step % self._ram.steps == 0 else None

    def now(self, now_s: float, *, uploading: bool) -> int | None:
        """By time: the same. A store slower than the interval decides the interval: it gets none while it drains."""
        if self._save_left_s(now_s) <= 0 and not uploading:
            return 1
        return MEMORY if self._hold_left_s(now_s) <= 0 else None

    def wait_s(self, now_s: float, *, uploading: bool) -> float | None:
        """Until it is worth asking again; None: nothing is due by time."""
        save_s = max(self._save_left_s(now_s), LOOK_S if uploading else 0.0)
        left_s = min(save_s, self._hold_left_s(now_s))
        return None if math.isinf(left_s) else max(0.0, left_s)

    def begin(self, now_s: float) -> None:
        """The training begins: the first capture is due an interval later."""
        self._saved_s = self._captured_s = now_s

    def captured(self, reach: int, now_s: float) -> None:
        """A capture was made, or tried."""
        self._captured_s = now_s
        if reach != MEMORY:
            self._saved_s, self.hastened = now_s, False

    def hasten(self) -> None:
        """A checkpoint is due now."""
        self.hastened = True

    def _save_left_s(self, now_s: float) -> float:
        if self.hastened:
            return 0.0
        return math.inf if self.save_s is None else self._saved_s + self.save_s - now_s

    def _hold_left_s(self, now_s: float) -> float:
        return math.inf if self.hold_s is None else self._captured_s + self.hold_s - now_s


@dataclass(frozen=True)
class SaveStatus:
    """What a save costs, as measured, and what a death or a notice could still make of it. None: not known yet.

    Attributes:
        bytes: of the newest checkpoint, all ranks together.
        stall_s: how long it held training up, on the slowest rank.
        upload_s: until it was durable, by reach: the first for the nearest place alone, the last for all of them.
        held_step: of the newest capture that is in memory only, whole on this rank.
        uploading_step: of the checkpoint that is on its way.
        durable_step: of the newest checkpoint that is committed.
    """

    bytes: int | None
    stall_s: float | None
    upload_s: tuple[float | None, ...]
    held_step: int | None
    uploading_step: int | None
    durable_step: int | None
