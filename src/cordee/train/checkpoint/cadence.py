"""When the next checkpoint is due, and to how many storage levels it goes.

The caller reads the clock, on rank 0; the ranks agree on the answer when they save.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from cordee.storage.destination import Level
from cordee.train.settings import Every

MEMORY = 0
"""The reach of a capture that stays in memory; 1 is the nearest storage level."""

LOOK_S = 0.1  # between two checks whether the uploader is done


class LevelSchedule:
    """The storage levels that are due; a checkpoint that goes to one goes to all nearer ones too.

    The first checkpoint of an attempt goes to all levels: it shows that each works, and its upload time.
    """

    def __init__(self, levels: Sequence[Level]) -> None:
        self._levels = tuple(levels)
        self._count = [math.inf] * len(self._levels)  # checkpoints since this level had one
        self._at_s = [-math.inf] * len(self._levels)

    def reach(self, now_s: float) -> int:
        """Return the number of levels that the next checkpoint goes to, nearest first."""
        due = [number for number, level in enumerate(self._levels, 1) if self._is_due(number - 1, level, now_s)]
        return max(due, default=1)

    def captured(self) -> None:
        """Count a checkpoint that is being uploaded."""
        self._count = [count + 1 for count in self._count]

    def arrived(self, reach: int, captured_s: float) -> None:
        """Record that a checkpoint is durable in `reach` levels, which are no longer due."""
        for at in range(reach):
            self._count[at], self._at_s[at] = 0, captured_s

    def _is_due(self, at: int, level: Level, now_s: float) -> bool:
        if level.every_s is not None:
            return now_s - self._at_s[at] >= level.every_s
        return self._count[at] + 1 >= (level.every or 1)


class Cadence:
    """The times of checkpoints, and of captures in memory between them.

    By steps, every rank knows when one is due. By time, rank 0's clock decides, and the ranks agree on the step.

    Args:
        every: the interval of checkpoints; without steps and seconds `save_s` is estimated.
        ram: the interval of captures in memory, likewise; None: none are made.
        first_s: time until the first checkpoint, before there is an estimate.

    Attributes:
        save_s: time between two checkpoints; None: they are counted by steps.
        memory_s: time between two captures; None: none are made by time.
        is_urgent: a checkpoint is due at once, in all levels.
    """

    def __init__(self, every: Every, ram: Every | None, *, first_s: float) -> None:
        self._every, self._ram = every, ram
        self.save_s = None if every.steps else every.seconds or first_s
        self.memory_s = ram.seconds if ram else None
        self._saved_s = self._captured_s = 0.0
        self.is_urgent = False

    @property
    def estimates(self) -> tuple[bool, bool]:
        """Return whether the interval of checkpoints, and that of captures in memory, is `auto`."""
        every, ram = self._every, self._ram
        return every.steps is None and every.seconds is None, ram is not None and ram.steps is ram.seconds is None

    @property
    def captures_in_memory(self) -> bool:
        """Return whether captures in memory are made without an estimate."""
        return self._ram is not None and bool(self._ram.steps or self._ram.seconds)

    def at_step(self, step: int) -> int | None:
        """Return the reach of a save that is due by steps: 1 for a checkpoint, MEMORY for a capture; else None."""
        if self._every.steps and step % self._every.steps == 0:
            return 1
        return MEMORY if self._ram and self._ram.steps and step % self._ram.steps == 0 else None

    def now(self, now_s: float, *, uploading: bool) -> int | None:
        """Return the same by time. While an upload is under way no checkpoint is due: storage sets the pace."""
        if self._save_left_s(now_s) <= 0 and not uploading:
            return 1
        return MEMORY if self._memory_left_s(now_s) <= 0 else None

    def wait_s(self, now_s: float, *, uploading: bool) -> float | None:
        """Return the time until it is worth asking again; None: nothing is due by time."""
        save_s = max(self._save_left_s(now_s), LOOK_S if uploading else 0.0)
        left_s = min(save_s, self._memory_left_s(now_s))
        return None if math.isinf(left_s) else max(0.0, left_s)

    def begin(self, now_s: float) -> None:
        """Start counting time: the first capture is due an interval later."""
        self._saved_s = self._captured_s = now_s

    def captured(self, reach: int, now_s: float) -> None:
        """Record a capture that was made or tried."""
        self._captured_s = now_s
        if reach != MEMORY:
            self._saved_s, self.is_urgent = now_s, False

    def hasten(self) -> None:
        """Make a checkpoint due now."""
        self.is_urgent = True

    def _save_left_s(self, now_s: float) -> float:
        if self.is_urgent:
            return 0.0
        return math.inf if self.save_s is None else self._saved_s + self.save_s - now_s

    def _memory_left_s(self, now_s: float) -> float:
        return math.inf if self.memory_s is None else self._captured_s + self.memory_s - now_s


@dataclass(frozen=True)
class SaveStatus:
    """Measured costs of a save, and the newest captures. None: not known yet, or there is none.

    Attributes:
        bytes: size of the newest checkpoint, all ranks together.
        stall_s: time for which it stopped the training, on the slowest rank.
        upload_s: time until it was durable, by reach: the first for the nearest level alone, the last for all.
        memory_step: step of the newest capture that is only in memory, complete on this rank.
        uploading_step: step of the checkpoint that is being uploaded.
        durable_step: step of the newest committed checkpoint.
    """

    bytes: int | None
    stall_s: float | None
    upload_s: tuple[float | None, ...]
    memory_step: int | None
    uploading_step: int | None
    durable_step: int | None
