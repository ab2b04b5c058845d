"""How a rank leaves: the notice, the deadline that follows from it, the record and the exit code.

Notices come on other threads than the loop's. Which step the ranks leave at is agreed on in `stop.py`; the save at
that step is the loop's. What is here still works when the loop never comes back.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from cordee.errors import StopError
from cordee.train.notice import Notices
from cordee.train.report import Reporter
from cordee.train.saving import Saving
from cordee.train.settings import Settings
from cordee.train.stop import Agreement
from cordee.units import format_duration

log = logging.getLogger("cordee")


class Leaving:
    """One rank's end.

    Args:
        step: the step that the loop is at.

    Attributes:
        by_s: until when this rank has to be gone, on time.monotonic(); None without a notice.
        exit_code: once this rank has said how it leaves.
        saving, agreement: set when they are there; a notice may come before.
    """

    def __init__(self, told: Settings, rank: int, reporter: Reporter, step: Callable[[], int]) -> None:
        self._told, self._rank, self._reporter, self._step = told, rank, reporter, step
        self._lock = threading.Lock()
        self.by_s: float | None = None
        self.exit_code: int | None = None
        self.saving: Saving | None = None
        self.agreement: Agreement | None = None
        caught = [signal.SIGTERM, signal.SIGUSR1] if told.slurm else [signal.SIGTERM]
        self.notices = Notices(caught, self._on_signal)

    def left_s(self, otherwise_s: float) -> float:
        """Seconds until this rank has to be gone."""
        return otherwise_s if self.by_s is None else max(0.0, self.by_s - time.monotonic())

    def say(self, how: str, exit_code: int) -> None:
        """The record of how this rank leaves; the first stands."""
        with self._lock:
            if self.exit_code is None:
                self.exit_code = exit_code
                self._reporter.left(how, self._step())

    def request(self) -> None:
        """Ask all ranks to leave at one step."""
        if self.agreement is not None:
            beside(partial(self.agreement.request, leave_in_s=self.left_s(self._told.grace_s)))

    def within(self, left_s: float) -> None:
        """This rank has to be gone after so many seconds."""
        with self._lock:
            if self.by_s is None:
                self.by_s = time.monotonic() + left_s
                self.notices.at("deadline", self.by_s, self.abort)

    def abort(self) -> None:
        """The time is up: leave on the newest generation that is durable. Does not return."""
        with self._lock:
            said = self.exit_code
        if said is None:
            durable = name(self.saving)
            log.error("rank %d: not done by the deadline at step %d; durable: %s", self._rank, self._step(), durable)
            self.say("aborted", StopError.exit_code)
            if self.agreement is not None:
                beside(self.agreement.abort).join(timeout=0.5)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self.exit_code or 0)

    def _on_signal(self, number: int) -> None:
        if self.by_s is not None:
            return  # the first deadline stands
        grace_s = self._told.grace_s
        log.info("rank %d: %s, %s to leave", self._rank, signal.Signals(number).name, format_duration(grace_s))
        self.within(grace_s - min(2.0, grace_s / 10))  # this process has to be gone before the SIGKILL
        self.request()


def name(saving: Saving | None) -> str:
    """What is durable, in words."""
    newest = saving.checkpointer.newest() if saving else None
    return f"step {newest.step}" if newest else "nothing"


def beside(call: Callable[[], Any]) -> threading.Thread:
    """On a thread of its own: a store that hangs must not hold the deadline up."""

    def run() -> None:
        try:
            call()
        except (RuntimeError, StopError) as error:
            log.warning("the ranks' store does not answer: %s", error)

    thread = threading.Thread(target=run, name="cordee-request", daemon=True)
    thread.start()
    return thread
