"""The saves of one attempt: decide when one is due, make it, and record its outcome.

Captures are made on the main thread, between two steps; `checkpointer.py` uploads them. `stop/agreement.py` makes all
ranks save at the same boundary; `train/rank_exit.py` ends a rank.
"""

import logging
import time
from collections.abc import Callable

import torch

from cordee.errors import CheckpointError, FencedError
from cordee.events import SpanClass
from cordee.storage.destination import level_urls
from cordee.storage.generations import Commit
from cordee.train.checkpoint import rank_state
from cordee.train.checkpoint.auto_interval import AutoInterval
from cordee.train.checkpoint.cadence import MEMORY, Cadence
from cordee.train.checkpoint.checkpointer import Checkpointer, Save
from cordee.train.checkpoint.consensus import NotFiniteError
from cordee.train.checkpoint.requested import RequestedSaves
from cordee.train.checkpoint.restore import Loaded
from cordee.train.report import Reporter, process_start_us
from cordee.train.settings import Settings
from cordee.train.step_timer import StepTimer
from cordee.train.stop.deadline import LevelTiming, Situation
from cordee.units import plural

log = logging.getLogger("cordee")

AUTO_FIRST_S = 5.0  # the first save shows what a save costs, and that the destination works


class Saver:
    """The saves of one rank.

    Args:
        on_estimate: called on another thread when `wait_s` may have changed.

    Attributes:
        checkpointer: where the saves go.
        tried_step: step of the newest capture tried, the same on all ranks.
        durable_step: step of the newest checkpoint in all storage levels; 0: there is none.
        requested: what the script asks for.
    """

    def __init__(
        self,
        state: dict[str, object],
        settings: Settings,
        to: str,
        *,
        rank: int,
        world_size: int,
        reporter: Reporter,
        on_estimate: Callable[[], None] = lambda: None,
    ) -> None:
        self.tried_step: int | None = None
        self.durable_step = 0
        self._state, self._reporter, self._on_estimate = state, reporter, on_estimate
        self._start_step = 0
        self._is_open = False  # whether the checkpoint to load is known
        self._rng: dict[str, object] | None = None  # restored when the loop begins
        # The newest of this rank, and another rank may have failed at its step; or the reason why no rank saves.
        self._last: Save | NotFiniteError | None = None
        self._handed_over_s = 0.0  # time of the newest hand-over to the uploader
        self._settings = settings
        self._cadence = Cadence(settings.every, settings.ram, first_s=AUTO_FIRST_S)
        self.checkpointer = Checkpointer(
            to,
            rank=rank,
            world_size=world_size,
            epoch=settings.epoch,
            keep=settings.keep,
            base=settings.base,
            grace_s=settings.grace_s,
            on_commit=self._on_commit,
            on_failure=self._on_failure,
        )
        self.requested = RequestedSaves(self.checkpointer.blobs, rank)
        self._auto = AutoInterval(
            self._cadence, settings.every, world_size, lambda: self.checkpointer.past, settings.planned.estimate
        )

    @property
    def _levels(self) -> tuple[str, ...]:
        return level_urls(self.checkpointer.to)

    @property
    def uploading(self) -> bool:
        """Return whether a capture is on its way to storage."""
        return self.checkpointer.status().uploading_step is not None

    def kept_step(self, *, machine_stays: bool) -> int:
        """Return the step that a new attempt would start with; 0 if there is no checkpoint."""
        newest = self.checkpointer.newest()
        return newest.step if newest and machine_stays else self.durable_step

    # -- at the beginning and the end ----------------------------------------------------------------------

    def find(self) -> int:
        """Return the step that `load` will start from, before there is a state; `load` reads the generation again."""
        self.checkpointer.open()
        self._is_open = True
        return self._found()

    def load(self) -> int:
        """Put the newest generation that verifies into the state, and return the step to start from; 0 for a new job.

        Raises:
            InputError, CheckpointError: something in the state cannot be saved.
        """
        rank_state.enter(self._state)
        script_rates = rank_state.learning_rates(self._state)
        if not self._is_open:
            loaded = self.checkpointer.resume(self._state)
        else:
            found = self.checkpointer.newest()
            loaded = self.checkpointer.load(self._state, found) if found else None
        step = self._found()
        rank = self.checkpointer.rank
        if loaded is not None:
            self._rng = loaded.rng
            if loaded.extras is not None:
                rank_state.restore(self._state, loaded.extras)
            elif rank == 0:
                self._log_resharding(loaded)
        rank_state.loaded(self._state)
        if loaded is not None or self._settings.planned.estimate is None:
            self._auto.restart_s = time.time() - process_start_us() / 1e6
        self._cadence.begin(time.monotonic())
        if rank == 0:
            where = self.checkpointer.to
            log.info("resumed at step %d from %s" if loaded else "starting at step %d; saving to %s", step, where)
        newest = self.checkpointer.newest()
        self._reporter.restored(step, newest.generation if newest else None)
        if loaded is not None and rank == 0:
            self._log_learning_rates(script_rates)
        return step

    def restore_rng(self) -> None:
        """Restore the random number generators of the checkpoint, once."""
        rng, self._rng = self._rng, None
        if rng is not None:
            rank_state.restore_rng(rng)

    def _found(self) -> int:
        newest = self.checkpointer.newest()
        self.requested.begin(self.checkpointer.best)
        self._start_step = newest.step if newest else 0
        if newest is not None and not newest.missing_levels:
            self.durable_step = newest.step
        return self._start_step

    def _log_resharding(self, loaded: Loaded) -> None:
        if loaded.rng is not None:
            log.info(
                "saved by %s, resumed on %d: random numbers are seeded anew",
                plural(loaded.world_size, "rank"),
                self.checkpointer.world_size,
            )
        if loaded.differed:
            log.warning(
                "%s had a different value on each of %d ranks; all ranks now have rank 0's",
                ", ".join(loaded.differed),
                loaded.world_size,
            )

    def _log_learning_rates(self, script: dict[str, list[float]]) -> None:
        """Warn where the checkpoint's rate differs from the script's, which it overrides."""
        for name, rates in rank_state.learning_rates(self._state).items():
            if rates != script.get(name, rates):
                saved, mine = (", ".join(f"{rate:g}" for rate in dict.fromkeys(each)) for each in (rates, script[name]))
                log.warning("%s: the checkpoint's learning rate (%s) wins over the script's (%s)", name, saved, mine)

    def close(self, *, failed: bool) -> None:
        """Let the uploader finish, and release the user's state."""
        self.checkpointer.close(failed=failed)
        self._state = {}

    # -- when, and how far ---------------------------------------------------------------------------------

    def at_step(self, step: int, holds: Callable[[], bool] = lambda: False) -> None:
        """Capture if one is due by steps, or was requested, which all ranks know without an agreement.

        `holds`: asked just before, on all ranks, whether it has to wait.
        """
        if step == self._start_step + 1:
            self.checkpointer.prepare(self._state, in_memory=self._cadence.captures_in_memory)
        if step == self.requested.step and step not in (self._start_step, self.tried_step) and not holds():
            self.save(step, len(self._levels))
        reach = self._cadence.at_step(step)
        if reach is not None and step not in (self._start_step, self.tried_step) and not holds():
            by_schedule = MEMORY if reach == MEMORY else None
            self.save(step, len(self._levels) if self._cadence.is_urgent else by_schedule)

    def is_due(self) -> bool:
        """Return whether a capture is due by rank 0's clock."""
        return self._cadence.now(time.monotonic(), uploading=self.uploading) is not None

    def wait_s(self) -> float | None:
        """Return the time until one may be due by rank 0's clock; None: nothing is due by time."""
        return self._cadence.wait_s(time.monotonic(), uploading=self.uploading)

    def asked(self) -> int | None:
        """Return the reach of the capture that the ranks have agreed on, by rank 0's choice; None: as `to` says."""
        if self._cadence.is_urgent:
            return len(self._levels)
        if self.checkpointer.rank != 0:
            return None
        now = self._cadence.now(time.monotonic(), uploading=self.uploading)
        late = (
            now is None and self._cadence.memory_s is not None
        )  # a save by steps came between and may still be uploading
        return MEMORY if now == MEMORY or late else None

    def hasten(self) -> None:
        """Make a checkpoint in all levels due now: this rank's machine may go, and the nearer levels with it."""
        self._cadence.hasten()

    # -- saves ---------------------------------------------------------------------------------------------

    def save(self, step: int, reach: int | None = None, *, last: bool = False) -> bool:
        """Capture the state for `reach` levels; log a failure and go on.

        `last`: the attempt ends with this save, so none of its work is lost.
        """
        self.tried_step = step
        self._reporter.switch(SpanClass.CHECKPOINT, step)
        synchronize()
        reached = 1 if reach is None else reach
        try:
            extras, problem = self._extras(step)
            save = self.checkpointer.save(
                self._state, step=step, extras=extras, problem=problem, reach=reach, last=last
            )
            reached = save.reach  # another rank may have asked for more levels
        except FencedError:
            raise
        except CheckpointError as error:
            log.error("no checkpoint of step %d: %s", step, error)
            if isinstance(error, NotFiniteError):
                self._last = error
            return False
        finally:
            self._reporter.switch(SpanClass.USEFUL, step)
            now_s = time.monotonic()
            self._cadence.captured(reached, now_s)
        self._last = save
        self._auto.captured(save.stall_us / 1e6, now_s, in_memory=save.reach == MEMORY)
        if save.reach:
            self._handed_over_s = now_s
        return True

    def _extras(self, step: int) -> tuple[dict[str, object], CheckpointError | None]:
        """Return the state of this rank alone, or the error to report to the other ranks."""
        try:
            if self._settings.telemetry.on_spike != "off":
                rank_state.check_finite(self._state)
            return rank_state.capture(self._state, step), None
        except CheckpointError as error:
            return {}, error

    @property
    def state(self) -> dict[str, object]:
        """Return the user's state."""
        return self._state

    def go_back(self, before: int, left_s: float) -> Commit | None:
        """Put the newest checkpoint of an earlier step into the state, and return it; None: there is none. All ranks.

        The save that is under way is finished first. `restore_rng` has the generators of the checkpoint.
        """
        self.finish(left_s)
        self._reporter.switch(SpanClass.RESTART, before)
        found = self.checkpointer.go_back(self._state, before)
        self._reporter.switch(SpanClass.USEFUL, before)
        if found is None:
            return None
        commit, loaded = found
        self._rng = loaded.rng
        if loaded.extras is not None:
            rank_state.restore(self._state, loaded.extras)
        rank_state.loaded(self._state)
        self.tried_step = None
        return commit

    def save_now(self, step: int, left_s: float) -> None:
        """Save, and wait until the checkpoint is durable; log a failure and go on."""
        if self.save(step, len(self._levels)):
            try:
                self.checkpointer.wait(left_s)
            except FencedError:
                raise
            except CheckpointError as error:
                log.error("step %d is not durable: %s", step, error)

    def make_durable(self, step: int, left_s: Callable[[], float], reach: int | None = None) -> bool:
        """Commit a checkpoint of this step in `reach` levels (None: all) within the time left; return success."""
        reach = reach or len(self._levels)
        again = self._must_save(step, reach)
        if again is None or (again and not self.save(step, reach, last=True)):
            return False
        if not again and step == self.durable_step:
            return True  # already committed or loaded
        self._reporter.switch(SpanClass.CHECKPOINT, step)
        try:
            self.checkpointer.wait(left_s())
        except FencedError:
            raise
        except CheckpointError as error:
            log.error("step %d is not durable: %s", step, error)
            return False
        return True

    def is_captured(self, step: int, reach: int) -> bool:
        """Return whether this rank has captured this step for `reach` levels; another rank may have failed."""
        return isinstance(self._last, Save) and self._last.step == step and self._last.reach >= reach

    @property
    def has_diverged(self) -> bool:
        """Return whether the newest save failed since weights are not finite, the same on all ranks."""
        return isinstance(self._last, NotFiniteError)

    def is_coming(self, step: int, reach: int) -> bool:
        """Return whether that capture is durable, or may become so, as far as this rank knows."""
        return step == self.durable_step or (self.is_captured(step, reach) and not self.checkpointer.has_failed())

    def _must_save(self, step: int, reach: int) -> bool | None:
        """Return whether any rank has to capture the step: then all do, since none may save alone.

        Return None if this rank has to and another rank does not answer; no rank saves then.
        """
        must = not self.is_coming(step, reach)
        try:
            return self.checkpointer.any_rank(must)
        except CheckpointError as error:
            log.warning("it is not known whether all ranks have captured step %d: %s", step, error)
            return None if must else False

    def finish(self, left_s: float) -> None:
        """Let the uploader finish its save; it uploads captures in memory after this process has ended."""
        if self.uploading:
            try:
                self.checkpointer.wait(left_s)
            except CheckpointError as error:
                log.error("the save before is not durable: %s", error)

    def leave(self, left_s: Callable[[], float]) -> None:
        """Wait until the uploader has uploaded the captures in memory: the process ends, even if its loop runs."""
        self.checkpointer.leave(left_s)

    def situation(self, timer: StepTimer, *, left_s: float, at_boundary: bool, machine_stays: bool) -> Situation:
        """Return the measured figures for the decision at a notice."""
        status = self.checkpointer.status()
        newest = self.checkpointer.newest()
        estimate = self._settings.planned.estimate
        planned_s = estimate.save_us / 1e6 if estimate and estimate.save_us else None
        upload_s = next((each for each in reversed(status.upload_s) if each is not None), planned_s or 0.0)
        busy_s = 0.0
        if status.uploading_step is not None:
            late_s = time.monotonic() - self._handed_over_s - upload_s
            busy_s = abs(late_s)  # an overdue upload may take as long again
        return Situation(
            left_s=left_s,
            step=timer.step + (timer.inside and not at_boundary),
            levels=tuple(
                LevelTiming(name=name, upload_s=each) for name, each in zip(self._levels, status.upload_s, strict=True)
            ),
            boundary_s=0.0 if at_boundary else timer.boundary_s(),
            step_s=timer.step_s(),
            stall_s=status.stall_s or 0.0,
            planned_save_s=planned_s,
            size_bytes=status.bytes or 0,
            busy_s=busy_s,
            uploading_step=status.uploading_step,
            memory_step=status.memory_step,
            durable_step=self.durable_step,
            near_step=newest.step if newest else 0,
            machine_stays=machine_stays,
        )

    # -- on the uploader's listener ------------------------------------------------------------------------

    def _on_commit(self, commit: Commit) -> None:
        if not commit.missing_levels:
            self.durable_step = commit.step
        self._reporter.committed(commit)
        self.requested.committed(commit)
        if self.checkpointer.rank == 0 and self._auto.committed(commit.stall_us / 1e6, commit.uploaded_us / 1e6):
            self._on_estimate()

    def _on_failure(self, error: CheckpointError) -> None:
        if self.checkpointer.rank == 0 and self._auto.failed():
            self._on_estimate()


def synchronize() -> None:
    """Wait until the GPU has done its work."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
