"""Progress of this rank's loop, by its step count; the caller gives the times."""

from enum import StrEnum

from cordee.train.step_timer import StepTimer

USUAL_STEPS = 10  # a hang lasts longer than this many usual steps
FIRST_STEP = 10  # times the limit: the first step may compile


class Progress(StrEnum):
    """The finding of one look."""

    GOES_ON = "goes on"
    STANDS_STILL = "stands still"
    BECAME_STUCK = "became stuck"  # it stands still, and has just passed its limit
    RECOVERED = "recovered"  # it was stuck and has just gone on


class LoopProgress:
    """One rank's loop.

    Args:
        limit_s: the shortest time without a step that counts as stuck.

    Attributes:
        step: the step that runs.
        stuck: it has stood still for longer than its limit.
        running: the loop has begun and is not over.
    """

    def __init__(self, timer: StepTimer, limit_s: float, now_s: float) -> None:
        self.step = timer.step
        self.stuck = self.running = False
        self._timer, self._limit_s = timer, limit_s
        self._alive = False
        self._went_on_s = now_s
        self._longest_pause_s = 0.0  # of those that ended, such as an evaluation or a compilation

    def begin(self, now_s: float) -> None:
        """Start looking: the loop begins."""
        self.step, self._went_on_s, self.running = self._timer.step, now_s, True

    def keep_alive(self) -> None:
        """Count this moment as progress within a step."""
        self._alive = True

    def end(self) -> None:
        """Stop looking: the loop is over, and the rest has no limit."""
        self.running = False

    def still_s(self, now_s: float) -> float:
        """Return the time since the last progress."""
        return now_s - self._went_on_s

    def look(self, now_s: float) -> Progress:
        """Read the step count and return the finding."""
        step = self._timer.step
        if step != self.step or not self.running or self._alive:
            self._alive = False
            return self._go_on(step, now_s)
        if not self.stuck and self.still_s(now_s) >= self.limit_s():
            self.stuck = True
            return Progress.BECAME_STUCK
        return Progress.STANDS_STILL

    def _go_on(self, step: int, now_s: float) -> Progress:
        found = Progress.RECOVERED if self.stuck else Progress.GOES_ON
        if self.stuck:
            self.stuck = False
            self._longest_pause_s = max(self._longest_pause_s, self.still_s(now_s))
        self.step, self._went_on_s = step, now_s
        return found

    def limit_s(self) -> float:
        """Return how long the loop may stand still: several usual steps, and twice the longest pause that ended."""
        usual_s = self._timer.step_s()
        if usual_s is None:
            return FIRST_STEP * self._limit_s
        return max(self._limit_s, USUAL_STEPS * usual_s, 2 * self._longest_pause_s)
