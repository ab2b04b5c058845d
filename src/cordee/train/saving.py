"""The saves of one attempt: when one is due, that it is made, and what became of it.

Captures are made on the main thread, between two steps; draining them is `checkpoint.py`'s. That all ranks save at
the same boundary is for `stop.py`, and how a rank leaves for `leaving.py`.
"""

import logging
import time
from collections.abc import Callable
from typing import Any

import torch

from cordee.errors import CheckpointError, FencedError
from cordee.events import SpanClass
from cordee.storage.generations import Commit
from cordee.train import own
from cordee.train.checkpoint import Checkpointer
from cordee.train.report import Reporter, process_start_us
from cordee.train.settings import Settings

log = logging.getLogger("cordee")

AUTO_FIRST_S = 5.0  # the first save tells what a save costs, and that the destination works
AUTO_MAX_S = 1800.0


class Saving:
    """One rank's saves.

    Attributes:
        checkpointer: where they go.
        saved_step: of the newest capture that this attempt has made.
        draining: whether a capture is on its way to the store.
        period_s: between two saves, where the user did not count steps.
    """

    def __init__(
        self, state: dict[str, Any], told: Settings, to: str, *, rank: int, world_size: int, reporter: Reporter
    ) -> None:
        self._state, self._told, self._rank, self._world_size = state, told, rank, world_size
        self._reporter = reporter
        self._restart_s = 0.0
        self.saved_step: int | None = None
        self.draining = False
        self.period_s = told.every.seconds or AUTO_FIRST_S
        self.checkpointer = Checkpointer(
            to,
            rank=rank,
            world_size=world_size,
            epoch=told.epoch,
            keep=told.keep,
            base=told.base,
            grace_s=told.grace_s,
            on_commit=self._on_commit,
            on_failure=lambda error: self._drained(),
        )

    @property
    def durable_step(self) -> int:
        """The step that a new attempt would start with now; 0 if there is no checkpoint."""
        newest = self.checkpointer.newest()
        return newest.step if newest else 0

    def open(self) -> Commit | None:
        """Find the newest generation that verifies; None if this is a new job."""
        return self.checkpointer.open()

    def load(self, commit: Commit | None) -> dict[str, Any] | None:
        """Put it into the state; this rank's own extras, if the world has the same size."""
        loaded = None
        if commit is not None:
            loaded = self.checkpointer.load(self._state, commit)
            if loaded.extras is not None:
                own.restore(self._state, loaded.extras)
            elif self._rank == 0:
                log.warning(
                    "restored from %d ranks to %d: random numbers and per-rank values start anew",
                    loaded.world_size,
                    self._world_size,
                )
        self._restart_s = time.time() - process_start_us() / 1e6
        step = loaded.step if loaded else 0
        if self._rank == 0:
            log.info("step %d %s %s", step, "restored from" if commit else "of a new job in", self.checkpointer.to)
        self._reporter.restored(step, commit.generation if commit else None)
        return loaded.extras if loaded else None

    def save(self, step: int) -> bool:
        """Capture the state; a failure is told and training goes on."""
        self._reporter.switch(SpanClass.CHECKPOINT, step)
        _synchronize()
        try:
            self.draining = True
            save = self.checkpointer.save(self._state, step=step, extras=own.capture(self._state))
        except FencedError:
            raise
        except CheckpointError as error:
            self.draining = False
            log.error("no checkpoint of step %d: %s", step, error)
            return False
        finally:
            self._reporter.switch(SpanClass.USEFUL, step)
        self.saved_step = step
        if self._told.every.steps is None and self._told.every.seconds is None:
            self.period_s = self._best_period_s(save.stall_us / 1e6)
        return True

    def make_durable(self, step: int, left_s: Callable[[], float]) -> bool:
        """A committed checkpoint of this step, within the time there is."""
        if step == self.durable_step:
            return True
        if self.saved_step != step and not self.save(step):
            return False
        self._reporter.switch(SpanClass.CHECKPOINT, step)
        try:
            self.checkpointer.wait(left_s())
        except FencedError:
            raise
        except CheckpointError as error:
            log.error("step %d is not durable: %s", step, error)
            return False
        return True

    def _best_period_s(self, stall_s: float) -> float:
        """The plan's optimum for what a save costs the loop, with the restart this attempt has measured."""
        from cordee.plan.survive import LLAMA3_MTBI_GPU_HOURS, best_period_s

        mtbi_s = LLAMA3_MTBI_GPU_HOURS / self._world_size * 3600
        return min(AUTO_MAX_S, best_period_s(mtbi_s, self._restart_s, stall_s))

    def _on_commit(self, commit: Commit) -> None:
        self._reporter.committed(commit)
        self._drained()

    def _drained(self) -> None:
        self.draining = False


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
