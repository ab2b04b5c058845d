"""Forecasts of the jobs that wait, made together, and only as often as they are affordable while somebody looks.

They run beside the requests in one thread; a page shows the last ones and never waits for them.
"""

import threading
import time
from collections.abc import Sequence

import structlog

from cordee.control.forecast import Forecast, forecast
from cordee.control.operations import Operations
from cordee.control.questions import Asking
from cordee.ids import JobId
from cordee.schedule.forecast.snapshot import Snapshot
from cordee.schedule.state.records import Phase

JOBS_MAX = 50
_EVERY_S = 20.0
_FRACTION = 0.05  # of a processor
_BUDGET_S = 1.0
_DRAWS = 16


class Forecasts:
    """The newest forecasts of waiting jobs."""

    def __init__(self, operations: Operations) -> None:
        self._operations, self._found = operations, dict[JobId, Forecast]()
        self._due_s, self._thread = 0.0, threading.Lock()
        self.number = 0  # of the forecasts that were made

    def of(self, waiting: Sequence[JobId]) -> dict[JobId, Forecast]:
        """Return what is known of these jobs, the head of the queue; begin new forecasts if they are due."""
        first = list(waiting[:JOBS_MAX])
        if first and time.monotonic() >= self._due_s and self._thread.acquire(blocking=False):
            threading.Thread(target=self._make, args=(first,), name="forecasts", daemon=True).start()
        return {job_id: self._found[job_id] for job_id in first if job_id in self._found}

    def _make(self, job_ids: list[JobId]) -> None:
        from_s = time.thread_time()
        try:
            with self._operations.forecasting:
                state, now_us = self._operations.copy()
                records = state.jobs
                watch = [each for each in job_ids if each in records and records[each].phase is Phase.QUEUED]
                if watch and not state.shutting_down:
                    left = self._operations.steps_left(state)
                    clock = Asking(self._operations.control.precedence).cpu_s
                    self._found = forecast(
                        Snapshot(state), now_us, watch, left, draws=_DRAWS, budget_s=_BUDGET_S, clock=clock
                    )
                    self.number += 1
        except Exception:  # a page without forecasts is better than none
            structlog.get_logger().exception("the forecasts of a page failed")
        finally:
            self._due_s = time.monotonic() + max(_EVERY_S, (time.thread_time() - from_s) / _FRACTION)
            self._thread.release()
