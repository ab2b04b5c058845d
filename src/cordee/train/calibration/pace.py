"""A reference product, timed between probes: whether a device runs as fast as it has run.

A guest's processor slows down while its host is busy, by a third for half a minute, and every probe with it: each is as
steady as before, so that nothing but the reference tells.
"""

import time
from collections.abc import Callable, Sequence
from typing import Literal

from cordee.hardware.measured import SPEED_MOVED
from cordee.train.calibration.timing import Case, Device

BLOCK_S = 0.25  # of probes between two looks
LOOKS = 3  # of which the fastest counts: a neighbour lengthens one, a slow processor all
WAIT_S = 45.0  # of all waits together
PAUSE_S = 1.0
_FLOP = {"cpu": 2.0 * 256 * 512 * 512, "cuda": 2.0 * 4096**3}

Seen = Literal["same", "slower", "faster"]


class Pace:
    """The reference, its fastest time, and how often the device was slower.

    `known_s` is the reference's time in an earlier calibration of the same device.
    """

    def __init__(
        self, device: Device, cases: Sequence[Case], known_s: float | None = None,
        pause: Callable[[float], object] = time.sleep,
    ) -> None:  # fmt: skip
        products = [each for each in cases if each.table.startswith("product ")]
        self._reference = min(products, key=lambda each: abs(each.work - _FLOP[device.kind]))
        self._device, self._pause = device, pause
        self.known_s = known_s
        self._fastest_s = float("inf")  # here, whatever was known before
        self.best_s = min(self._look(), known_s or float("inf"))
        self.slowest, self.waited_s, self.repeated = 0.0, 0.0, 0

    def seen(self) -> Seen:
        """Time the reference, and say how it compares with its fastest time."""
        now_s = self._look()
        moved, self.best_s = now_s / self.best_s - 1, min(now_s, self.best_s)
        if moved < -SPEED_MOVED:
            return "faster"
        self.slowest = max(self.slowest, moved)
        return "slower" if moved > SPEED_MOVED else "same"

    def wait(self) -> bool:
        """Wait until the device is as fast as it was; return False once all waits together were too long."""
        while self.waited_s < WAIT_S:
            self._pause(PAUSE_S)
            self.waited_s += PAUSE_S
            if self.seen() != "slower":
                return True
        return False

    def numbers(self) -> dict[str, float]:
        """Return what was seen, by the names of a calibration's numbers."""
        found = {
            "reference_s": self._fastest_s, "slowed_fraction": self.slowest, "waited_s": self.waited_s,
            "repeated_runs": float(self.repeated),
        }  # fmt: skip
        return found if self.known_s is None else found | {"slower_than_before": self._fastest_s / self.known_s - 1}

    def _look(self) -> float:
        now_s = min(self._device.seconds(self._reference.run) for _ in range(LOOKS))
        self._fastest_s = min(self._fastest_s, now_s)
        return now_s
