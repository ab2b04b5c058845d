"""The step that the loop is in, and the time of its steps."""

import statistics
import time
from collections import deque

_STEPS = 20


class StepTimer:
    """Written by the loop's thread, read by the others.

    Args:
        rungs: steps before which the loop leaves until its sweep promotes it.

    Attributes:
        step: the one that runs, or the next one.
        undone: steps that were done and rolled back.
        inside: a step runs.
        points: safe points since the boundary before.
    """

    def __init__(self, rungs: tuple[int, ...] = ()) -> None:
        self.rungs = rungs
        self.step = self.undone = 0
        self.inside = False
        self.points = 0
        self._began_s = 0.0
        self._took_s: deque[float] = deque(maxlen=_STEPS)

    def began(self) -> None:
        """Note that the step begins."""
        self._began_s = time.monotonic()
        self.inside = True

    def ended(self) -> None:
        """Note that the step is over."""
        if self.inside:
            self._took_s.append(time.monotonic() - self._began_s)
        self.inside = False
        self.step += 1

    def back(self, step: int) -> None:
        """Note that the steps from this one on are done again."""
        self.undone += self.step - step
        self.step = step

    @property
    def boundary(self) -> int:
        """Return the number of the boundary before the step, which grows even where steps are done again."""
        return (self.step + self.undone) << 20

    def step_s(self) -> float | None:
        """Return the median time of the last steps, which an evaluation now and then does not move."""
        took_s = list(self._took_s)
        return statistics.median(took_s) if took_s else None

    def boundary_s(self) -> float:
        """Estimate the time until the step that runs is over; one that is overdue may be as late again."""
        step_s = self.step_s()
        return abs(self._began_s + step_s - time.monotonic()) if self.inside and step_s is not None else 0.0

    def is_overdue(self) -> bool:
        """Return whether the step that runs already takes twice the usual time."""
        step_s = self.step_s()
        return self.inside and (step_s is None or time.monotonic() - self._began_s > 2 * step_s)
