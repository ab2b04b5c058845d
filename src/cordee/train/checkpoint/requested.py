"""The checkpoints that the script asks for, and the best of them, which stays: pinned in place of the one before."""

import logging
import math
import secrets

from cordee.errors import CheckpointError
from cordee.storage.files import Blobs
from cordee.storage.generations import BEST, Commit, pin
from cordee.storage.log import Log
from cordee.storage.sealed import Damaged

log = logging.getLogger("cordee")


class RequestedSaves:
    """The script's requests, the same on all ranks.

    Attributes:
        step: before which the newest requested checkpoint is made; None: there was no request.
    """

    def __init__(self, blobs: Blobs, rank: int) -> None:
        self._blobs, self._rank = blobs, rank
        self.step: int | None = None
        self._pinned: int | None = None  # generation
        self._lowest = math.inf
        self._values: dict[int, float] = {}  # by step, of checkpoints that are on their way and to be pinned

    def begin(self, best: tuple[int, float] | None) -> None:
        """Take generation and value of the best checkpoint of earlier attempts."""
        if best is not None:
            self._pinned, self._lowest = best

    def ask(self, step: int, value: float | None) -> None:
        """Ask for a checkpoint before this step; with a value, only if it is the lowest of the job."""
        if value is None:
            self.step = step
        elif value < self._lowest:
            self.step, self._lowest = step, value
            self._values[step] = value

    def committed(self, commit: Commit) -> None:
        """Pin the checkpoint if its value is the lowest so far; called on the uploader's listener."""
        value = self._values.pop(commit.step, None)
        if value is None or self._rank != 0:
            return
        try:
            visit = Log.visit(self._blobs, nonce=secrets.token_hex(8))
            pin(visit, commit.generation, BEST, value)
            if self._pinned is not None:
                pin(visit, self._pinned, None)
        except (CheckpointError, Damaged) as error:
            log.warning("the best checkpoint, of step %d, is not pinned: %s", commit.step, error)
            return
        self._pinned = commit.generation
        log.info("best so far: %g, kept as %s (step %d)", value, BEST, commit.step)
