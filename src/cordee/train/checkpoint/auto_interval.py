"""The `auto` intervals of a job, from the measured costs of its saves and its failures.

What was not measured yet (the first restart, the upload of a save that failed first) is as the job's plan expects it.
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from cordee.events import Estimate
from cordee.storage.history import PastAttempt
from cordee.train.checkpoint.cadence import Cadence
from cordee.train.settings import Every
from cordee.units import format_duration

if TYPE_CHECKING:
    from cordee.plan.interval import Interval, SaveCost

log = logging.getLogger("cordee")

LOGGED_CHANGE = 1 / 3  # an interval that has moved by more is logged


class AutoInterval:
    """The setter of a cadence's intervals after each save, on rank 0.

    Args:
        cadence: the cadence to set.
        every: the job's interval of checkpoints.
        ranks: number of ranks of the gang.
        past: returns the earlier attempts.
        estimate: the plan's; None: the job has none.

    Attributes:
        restart_s: time from the start of the process until the state was loaded; planned, until one was.
    """

    def __init__(
        self,
        cadence: Cadence,
        every: Every,
        ranks: int,
        past: Callable[[], Sequence[PastAttempt]],
        estimate: Estimate | None = None,
    ) -> None:
        self.restart_s = estimate.restart_us / 1e6 if estimate else 0.0
        self._planned_save_s = estimate.save_us / 1e6 if estimate else 0.0
        self._cadence, self._every, self._ranks, self._past = cadence, every, ranks, past
        self._began_s = time.monotonic()
        self._stall_s = 0.0  # of the newest capture
        self._costs_s: deque[tuple[float, float]] = deque(maxlen=5)  # (stall, upload) of the last checkpoints
        self._captured_s: float | None = None  # when the newest checkpoint was captured
        self._between_s: float | None = None  # between the two newest checkpoints
        self._logged_s: float | None = None  # the interval that was logged last

    def captured(self, stall_s: float, now_s: float, *, in_memory: bool) -> None:
        """Record a capture."""
        self._stall_s = stall_s
        if not in_memory:
            self._between_s = now_s - self._captured_s if self._captured_s is not None else None
            self._captured_s = now_s

    def committed(self, stall_s: float, upload_s: float) -> bool:
        """Record a checkpoint; return whether the intervals may have changed."""
        self._costs_s.append((stall_s, upload_s))
        stalls_s, uploads_s = zip(*self._costs_s, strict=True)
        return self._update(statistics.median(stalls_s), statistics.median(uploads_s), logs=True)

    def failed(self) -> bool:
        """Record a failed checkpoint: its stall counts, and unreachable storage is not tried too often."""
        upload_s = 0.0 if self._costs_s else max(0.0, self._planned_save_s - self._stall_s)
        return self._update(self._stall_s, upload_s, logs=False)

    def _update(self, stall_s: float, upload_s: float, *, logs: bool) -> bool:
        saves, captures = self._cadence.estimates
        if not (saves or captures):
            return False
        from cordee.plan.interval import Lived, SaveCost, interval  # the plan's libraries are not needed to start

        given_s = None if saves else self._every.seconds or self._between_s
        if not saves and given_s is None:
            return False  # counted by steps, and how long these take is not known yet
        history = [Lived(each.ranks, each.seconds, not each.left) for each in self._past()]
        history.append(Lived(self._ranks, time.monotonic() - self._began_s, failed=False))
        cost = SaveCost(stall_s, upload_s, self.restart_s)
        found = interval(history, self._ranks, cost, save_s=given_s)
        if captures:
            self._cadence.memory_s = found.hold_s
        if saves:
            self._cadence.save_s = found.save_s
            if logs:
                self._log(found, cost, sum(each.failed for each in history))
        return True

    def _log(self, found: "Interval", cost: "SaveCost", failures: int) -> None:
        before_s = self._logged_s
        if before_s is not None and before_s / (1 + LOGGED_CHANGE) <= found.save_s <= before_s * (1 + LOGGED_CHANGE):
            return
        self._logged_s = found.save_s
        log.info(
            "saving every %s%s: a save stops training for %s and is durable after %s; a failure is expected every %s"
            " (%d in earlier attempts)",
            format_duration(found.save_s),
            "" if before_s is None else f" (was {format_duration(before_s)})",
            format_duration(cost.stall_s),
            format_duration(cost.upload_s),
            format_duration(found.mtbi_s),
            failures,
        )
