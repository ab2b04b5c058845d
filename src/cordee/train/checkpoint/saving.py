"""The saves of one attempt: when one is due, that it is made, and what became of it.

Captures are made on the main thread, between two steps; uploading them is `checkpointer.py`'s. That all ranks save at
the same boundary is for `stop/agreement.py`, and how a rank leaves for `stop/rank_exit.py`.
"""

import logging
import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from cordee.errors import CheckpointError, FencedError
from cordee.events import SpanClass
from cordee.storage.destination import places
from cordee.storage.generations import Commit
from cordee.train.checkpoint import rank_state
from cordee.train.checkpoint.cadence import MEMORY, Cadence
from cordee.train.checkpoint.checkpointer import Checkpointer
from cordee.train.checkpoint.restore import Loaded
from cordee.train.report import Reporter, process_start_us
from cordee.train.settings import Settings
from cordee.train.step_timer import StepTimer
from cordee.train.stop.deadline import LevelTiming, Situation
from cordee.units import format_duration

if TYPE_CHECKING:
    from cordee.plan.interval import Interval, Measured

log = logging.getLogger("cordee")

AUTO_FIRST_S = 5.0  # the first save tells what a save costs, and that the destination works
TOLD_CHANGE = 1 / 3  # an estimate that has moved by more is told


class Saving:
    """One rank's saves.

    Args:
        on_estimate: `wait_s` may be another one now; called on another thread.

    Attributes:
        checkpointer: where they go.
        tried_step: of the newest capture that was tried: the same on all ranks.
        saved_step: of the newest that this rank has made; another one may have failed there.
        durable_step: of the newest checkpoint that all stores have; 0: there is none.
    """

    def __init__(
        self,
        state: dict[str, Any],
        told: Settings,
        to: str,
        *,
        rank: int,
        world_size: int,
        reporter: Reporter,
        on_estimate: Callable[[], None] = lambda: None,
    ) -> None:
        self._state, self._told, self._rank, self._world_size = state, told, rank, world_size
        self._reporter, self._on_estimate = reporter, on_estimate
        self._restart_s = 0.0
        self._start_step = 0
        self._has_looked = False  # for what there is to load
        self._began_s = time.monotonic()
        self._rhythm = Cadence(told.every, told.ram, first_s=AUTO_FIRST_S)
        self._told_save_s: float | None = None
        self._stall_s = 0.0
        self._costs_s: deque[tuple[float, float]] = deque(maxlen=5)  # stall and drain of the last checkpoints
        self._last_s: float | None = None  # when the newest checkpoint was captured
        self._between_s: float | None = None  # the two newest
        self._stores = places(to)
        self._saved_reach = 0
        self._handed_s = 0.0  # when the drain got what it has
        self.tried_step: int | None = None
        self.saved_step: int | None = None
        self.durable_step = 0
        self.checkpointer = Checkpointer(
            to,
            rank=rank,
            world_size=world_size,
            epoch=told.epoch,
            keep=told.keep,
            base=told.base,
            grace_s=told.grace_s,
            on_commit=self._on_commit,
            # What it costs is known also then: a store that is away is not tried all the time.
            on_failure=lambda error: self._estimate(self._stall_s, 0.0, told=False),
        )

    @property
    def uploading(self) -> bool:
        """Whether a capture is on its way to the stores."""
        return self.checkpointer.standing().uploading_step is not None

    def kept_step(self, *, machine_stays: bool) -> int:
        """The step that a new attempt would start with; 0 if there is no checkpoint."""
        newest = self.checkpointer.newest()
        return newest.step if newest and machine_stays else self.durable_step

    def find(self) -> int:
        """The step that `load` will start from, before there is a state to load into: it is read twice then."""
        self.checkpointer.open()
        self._has_looked = True
        return self._found()

    def load(self) -> tuple[int, Any]:
        """Put the newest generation that verifies into the state.

        The step to start from, 0 of a new job, and the random numbers to go on from, for when the loop begins.
        """
        rank_state.enter(self._state)
        if not self._has_looked:
            loaded = self.checkpointer.resume(self._state)
        else:
            found = self.checkpointer.newest()
            loaded = self.checkpointer.load(self._state, found) if found else None
        step = self._found()
        if loaded is not None:
            if loaded.extras is not None:
                rank_state.restore(self._state, loaded.extras)
            elif self._rank == 0:
                self._tell_elsewhere(loaded)
        self._restart_s = time.time() - process_start_us() / 1e6
        self._rhythm.begin(time.monotonic())
        if self._rank == 0:
            log.info("step %d %s %s", step, "restored from" if loaded else "of a new job in", self.checkpointer.to)
        newest = self.checkpointer.newest()
        self._reporter.restored(step, newest.generation if newest else None)
        return step, loaded.rng if loaded else None

    def _found(self) -> int:
        newest = self.checkpointer.newest()
        self._start_step = newest.step if newest else 0
        if newest is not None and not newest.missing_levels:
            self.durable_step = newest.step
        return self._start_step

    def close(self, *, failed: bool) -> None:
        """Let the drain finish; the state is the user's again."""
        self.checkpointer.close(failed=failed)
        self._state = {}

    def _tell_elsewhere(self, loaded: Loaded) -> None:
        if loaded.rng is not None:
            log.info("saved by %d ranks, now %d: random numbers are seeded anew", loaded.world_size, self._world_size)
        if loaded.differed:
            log.warning(
                "%s had another value on each of %d ranks; all ranks have rank 0's now",
                ", ".join(loaded.differed),
                loaded.world_size,
            )

    # -- when, and how far ---------------------------------------------------------------------------------

    def at_step(self, step: int) -> None:
        """Capture if it is time by the count of steps: the same on every rank, so there is nothing to agree on."""
        if step == self._start_step + 1:
            self.checkpointer.prepare(self._state, hold=self._rhythm.holds)
        reach = self._rhythm.at_step(step)
        if reach is not None and step not in (self._start_step, self.tried_step):
            here = MEMORY if reach == MEMORY else None
            self.save(step, len(self._stores) if self._rhythm.hastened else here)

    def is_due(self) -> bool:
        """By rank 0's clock."""
        return self._rhythm.now(time.monotonic(), uploading=self.uploading) is not None

    def wait_s(self) -> float | None:
        """Until it may be due by rank 0's clock; None: nothing is by time."""
        return self._rhythm.wait_s(time.monotonic(), uploading=self.uploading)

    def asked(self) -> int | None:
        """The reach of the capture that the ranks have agreed on: rank 0 says, None for what `to` says."""
        if self._rhythm.hastened:
            return len(self._stores)
        if self._rank != 0:
            return None
        now = self._rhythm.now(time.monotonic(), uploading=self.uploading)
        late = now is None and self._rhythm.hold_s is not None  # one by steps has come between: it may still drain
        return MEMORY if now == MEMORY or late else None

    def hasten(self) -> None:
        """A checkpoint in all stores is due now: this rank's machine may go, and the nearer ones with it."""
        self._rhythm.hasten()

    def save(self, step: int, reach: int | None = None, *, last: bool = False) -> bool:
        """Capture the state, for so many of the stores; a failure is told and training goes on.

        `last`: the attempt ends with it, so nothing that it has done is lost.
        """
        self.tried_step = step
        self._reporter.switch(SpanClass.CHECKPOINT, step)
        _synchronize()
        reached = 1 if reach is None else reach
        try:
            extras, problem = self._extras(step)
            save = self.checkpointer.save(
                self._state, step=step, extras=extras, problem=problem, reach=reach, last=last
            )
            reached = save.reach  # another rank may have asked for more
        except FencedError:
            raise
        except CheckpointError as error:
            log.error("no checkpoint of step %d: %s", step, error)
            return False
        finally:
            self._reporter.switch(SpanClass.USEFUL, step)
            now_s = time.monotonic()
            self._rhythm.captured(reached, now_s)
        self.saved_step, self._saved_reach = step, save.reach
        self._stall_s = save.stall_us / 1e6
        if save.reach:
            self._handed_s = now_s
            self._between_s = now_s - self._last_s if self._last_s is not None else None
            self._last_s = now_s
        return True

    def _extras(self, step: int) -> tuple[dict[str, Any], CheckpointError | None]:
        """What is this rank's own, or why there is none; then the other ranks have to be told."""
        try:
            return rank_state.capture(self._state, step), None
        except CheckpointError as error:
            return {}, error

    def make_durable(self, step: int, left_s: Callable[[], float], reach: int | None = None) -> bool:
        """A committed checkpoint of this step in so many stores, else in all, within the time there is."""
        reach = reach or len(self._stores)
        again = self._lacks_anywhere(step, reach)
        if again is None or (again and not self.save(step, reach, last=True)):
            return False
        if not again and step == self.durable_step:
            return True  # committed already, or loaded
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
        """Whether this rank has made a capture of this step for so many stores; another one may have failed."""
        return self.saved_step == step and self._saved_reach >= reach

    def is_coming(self, step: int, reach: int) -> bool:
        """Whether this rank knows of no reason why that capture should not become durable, or not be so already."""
        return step == self.durable_step or (self.is_captured(step, reach) and not self.checkpointer.has_failed())

    def _lacks_anywhere(self, step: int, reach: int) -> bool | None:
        """Whether some rank has to capture the step, so that all do: none may save alone, whatever it knows by now.

        None: this rank would have to, and another one does not answer. It would not save either.
        """
        lacks = not self.is_coming(step, reach)
        try:
            return self.checkpointer.anywhere(lacks)
        except CheckpointError as error:
            log.warning("whether all ranks have captured step %d is not known: %s", step, error)
            return None if lacks else False

    def finish(self, left_s: float) -> None:
        """Let the drain bring what it has. What is only held it brings when this process has ended."""
        if self.uploading:
            try:
                self.checkpointer.wait(left_s)
            except CheckpointError as error:
                log.error("what was captured before is not durable: %s", error)

    def leave(self, left_s: Callable[[], float]) -> None:
        """The process ends, whatever its loop does: wait until the drain has brought all that is in memory."""
        self.checkpointer.leave(left_s)

    def situation(self, pace: StepTimer, *, left_s: float, at_boundary: bool, machine_stays: bool) -> Situation:
        """What there is to decide on."""
        standing = self.checkpointer.standing()
        newest = self.checkpointer.newest()
        upload_s = next((each for each in reversed(standing.upload_s) if each is not None), 0.0)
        busy_s = 0.0
        if standing.uploading_step is not None:
            late_s = time.monotonic() - self._handed_s - upload_s
            busy_s = abs(late_s)  # one that is overdue may be as late again
        return Situation(
            left_s=left_s,
            step=pace.step + (pace.inside and not at_boundary),
            stores=tuple(
                LevelTiming(name=name, upload_s=each)
                for name, each in zip(self._stores, standing.upload_s, strict=True)
            ),
            boundary_s=0.0 if at_boundary else pace.boundary_s(),
            step_s=pace.step_s(),
            stall_s=standing.stall_s or 0.0,
            size_bytes=standing.bytes or 0,
            busy_s=busy_s,
            uploading_step=standing.uploading_step,
            held_step=standing.held_step,
            durable_step=self.durable_step,
            near_step=newest.step if newest else 0,
            machine_stays=machine_stays,
        )

    def _estimate(self, stall_s: float, upload_s: float, *, told: bool = True) -> None:
        """The plan's interval for what is measured by now, and for how this job has fared so far."""
        saves, holds = self._rhythm.estimates
        if self._rank != 0 or not (saves or holds):
            return
        from cordee.plan.interval import Lived, Measured, interval  # the plan's libraries are not needed to start

        given_s = None if saves else self._told.every.seconds or self._between_s
        if not saves and given_s is None:
            return  # counted by steps, and how long these take is not known yet
        past = self.checkpointer.past
        history = [Lived(each.ranks, each.seconds, not each.left) for each in past]
        history.append(Lived(self._world_size, time.monotonic() - self._began_s, failed=False))
        measured = Measured(stall_s, upload_s, self._restart_s)
        found = interval(history, self._world_size, measured, save_s=given_s)
        if holds:
            self._rhythm.hold_s = found.hold_s
        if saves:
            self._rhythm.save_s = found.save_s
            if told:
                self._tell(found, measured, sum(each.failed for each in history))
        self._on_estimate()

    def _tell(self, found: "Interval", measured: "Measured", failures: int) -> None:
        before_s = self._told_save_s
        if before_s is not None and before_s / (1 + TOLD_CHANGE) <= found.save_s <= before_s * (1 + TOLD_CHANGE):
            return
        self._told_save_s = found.save_s
        log.info(
            "saving every %s%s: a save holds training up for %s and is durable after %s; a failure is expected"
            " every %s (%d in the attempts before)",
            format_duration(found.save_s),
            "" if before_s is None else f" (was {format_duration(before_s)})",
            format_duration(measured.stall_s),
            format_duration(measured.upload_s),
            format_duration(found.mtbi_s),
            failures,
        )

    def _on_commit(self, commit: Commit) -> None:
        if not commit.missing_levels:
            self.durable_step = commit.step
        self._reporter.committed(commit)
        self._costs_s.append((commit.stall_us / 1e6, commit.uploaded_us / 1e6))
        stalls_s, uploads_s = zip(*self._costs_s, strict=True)
        self._estimate(statistics.median(stalls_s), statistics.median(uploads_s))


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
