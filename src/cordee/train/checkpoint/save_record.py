"""The outcome of each save of one rank, from the uploader's events; shared by the loop and the uploader's listener."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from cordee.errors import CheckpointError, FencedError
from cordee.storage.generations import Commit
from cordee.train.checkpoint.cadence import LevelSchedule, SaveStatus

logger = logging.getLogger("cordee.train")
T = TypeVar("T")


@dataclass(frozen=True)
class _Upload:
    """A capture on its way to storage."""

    step: int
    reach: int
    captured_s: float


class SaveRecord:
    """The outcome of every save of this rank.

    Args:
        schedule: the schedule of storage levels, which learns which levels have a checkpoint.
        n_levels: number of storage levels of the destination.
        on_commit, on_failure: called on the listener's thread.

    Attributes:
        fenced: a newer attempt owns the log; nothing may be written any more.
    """

    def __init__(
        self,
        schedule: LevelSchedule,
        n_levels: int,
        on_commit: Callable[[Commit], None] | None,
        on_failure: Callable[[CheckpointError], None] | None,
    ) -> None:
        self.fenced: FencedError | None = None
        self._schedule = schedule
        self._on_commit, self._on_failure = on_commit, on_failure
        self._changed = threading.Condition()
        self._uploads: dict[int, _Upload] = {}  # by save
        self._upload_s: list[float | None] = [None] * n_levels
        self._outcomes: dict[int, Commit | CheckpointError] = {}
        self._awaited = 0  # the newest save that was handed over for storage
        self._unreported: CheckpointError | None = None
        self._newest: Commit | None = None

    @property
    def newest(self) -> Commit | None:
        """The newest generation that this attempt has loaded or committed, or the one that it reads."""
        with self._changed:
            return self._newest

    def read(self, commit: Commit | None) -> None:
        """Note which generation is read; None: it was found to be damaged."""
        with self._changed:
            self._newest = commit

    def opened(self, commit: Commit) -> None:
        """Take the upload time of the generation found as a first measure for its levels."""
        farthest = len(self._upload_s) - 1
        self._upload_s[farthest - min(commit.missing_levels, farthest)] = commit.uploaded_us / 1e6

    def handed_over(self, number: int, step: int, reach: int, captured_s: float) -> None:
        """Note that a capture goes to the uploader, for `reach` levels."""
        self._awaited = number
        with self._changed:
            self._schedule.captured()
            self._uploads[number] = _Upload(step, reach, captured_s)

    def committed(self, number: int, commit: Commit) -> None:
        """Note that a save is durable in its levels."""
        _call(self._on_commit, commit)  # First, so that the commit is reported before a waiting thread may exit.
        with self._changed:
            self._newest = commit
            if upload := self._uploads.get(number):
                self._upload_s[upload.reach - 1] = commit.uploaded_us / 1e6
                self._schedule.arrived(upload.reach, upload.captured_s)
            self._settle(number, commit)

    def failed(self, number: int | None, error: CheckpointError) -> None:
        """Note that a save has failed, or (None) the uploader itself."""
        with self._changed:
            self._unreported = error
            if isinstance(error, FencedError):
                self.fenced = error
            if number is not None:
                self._settle(number, error)

    def report(self, error: CheckpointError) -> None:
        """Log a failure, and call `on_failure`."""
        logger.warning("checkpoint failed: %s", error)
        _call(self._on_failure, error)

    def take_unreported(self) -> CheckpointError | None:
        """Return the failure that no save has reported yet, once."""
        with self._changed:
            error, self._unreported = self._unreported, None
            return error

    def wait(self, timeout_s: float) -> Commit:
        """Wait until the newest save is durable and committed.

        Raises:
            CheckpointError: it failed, or the time ran out.
        """
        number = self._awaited
        with self._changed:
            if not self._changed.wait_for(lambda: number in self._outcomes, timeout_s):
                raise CheckpointError(
                    f"save {number} is not committed after {timeout_s:.1f} s",
                    hint="its uploader goes on; the generation before it is intact",
                )
            outcome = self._outcomes[number]
            if isinstance(outcome, CheckpointError):
                self._unreported = None
                raise outcome
            return outcome

    def has_failed(self) -> bool:
        """Return whether the newest save failed, as far as this rank knows."""
        with self._changed:
            return isinstance(self._outcomes.get(self._awaited), CheckpointError)

    def status(self, memory_step: int | None) -> SaveStatus:
        """Return the measured costs, and the steps of the newest captures."""
        with self._changed:
            newest = self._newest
            return SaveStatus(
                newest.bytes if newest else None,
                newest.stall_us / 1e6 if newest else None,
                tuple(self._upload_s),
                memory_step,
                max((upload.step for upload in self._uploads.values()), default=None),
                newest.step if newest else None,
            )

    def _settle(self, number: int, outcome: Commit | CheckpointError) -> None:
        self._outcomes = {number: outcome}
        self._uploads.pop(number, None)
        self._changed.notify_all()


def _call(callback: Callable[[T], None] | None, value: T) -> None:
    if callback is None:
        return
    try:
        callback(value)
    except Exception:  # The listener must go on, or every later save would hang.
        logger.exception("a checkpoint callback failed")
