"""Two lines in the user's own loop: `with cordee.job(state) as job: for step in job.steps(n): ...`

A job restores before its first step, saves as it goes, and on a notice leaves with all its ranks at one agreed step.
The loop stays the user's; nothing here runs a collective for a step. How ranks agree is in `stop.py`, what a checkpoint
is in `checkpoint.py`.
"""

import itertools
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from cordee.errors import EXIT_CHECKPOINTED, CheckpointError, FencedError, StopError
from cordee.events import SpanClass
from cordee.storage.generations import Commit
from cordee.train import own
from cordee.train.checkpoint import Checkpointer
from cordee.train.notice import Notices
from cordee.train.report import Reporter, process_start_us, speak
from cordee.train.settings import Settings, settings
from cordee.train.stop import Agreement, Verdict
from cordee.units import format_duration

log = logging.getLogger("cordee")

AUTO_FIRST_S = 5.0  # the first save tells what a save costs, and that the destination works
AUTO_MAX_S = 1800.0
_NO_LIMIT_S = 86_400.0  # A drain bounds itself; this only keeps a lost one from being waited for without end.
_numbers = itertools.count()


class Preempted(SystemExit):
    """The rank leaves at the agreed step: no line after the loop runs.

    The code is 75 when its checkpoint is durable, 60 when it is not, and 0 in place of 75 under torchrun, which would
    take any other for a failure and exits with 1 itself.
    """


def job(
    state: dict[str, Any],
    *,
    to: str | Path | None = None,
    every: str | int | None = None,
    keep: str | int | None = None,
    grace: str | None = None,
    base: str | Path | None = None,
) -> "Job":
    """A training job over this state.

    Args:
        state: what makes the training: modules, optimizers, objects with state_dict() and load_state_dict(), and plain
            values, which are replaced in this dict when a checkpoint is loaded.
        to: where checkpoints go: a folder, s3://, gs:// or az://, or several with commas between, the nearest first and
            the one that lasts at the end. Without one the job runs unprotected.
        every: how often to save: a time ("10m"), a number of steps, or "auto" (the default): the interval that costs
            the least time, from how long a save holds training up.
        keep: how many generations stay, at least 2; or `"3, every 10, 7d"`: each 10th and those of a week besides.
        grace: from a notice (SIGTERM, or SIGUSR1 under Slurm) to the end; 30s by default.
        base: another destination; what its pinned checkpoint has too is not stored again.

    Under a Cordee agent its settings win over these arguments.
    """
    return Job(state, settings(to=to, every=every, keep=keep, grace=grace, base=base))


class Job:
    """One attempt of a training job, as its rank sees it."""

    def __init__(self, state: dict[str, Any], told: Settings) -> None:
        self.state = state
        self.start_step = 0  # the step this attempt starts with
        self.rank, self.world_size = _rank_and_world_size()
        self._told = told
        self._step = 0  # the next to begin
        self._finished = False
        self._final_failed = False
        self._saved_step: int | None = None  # the newest capture's
        self._draining = False
        self._period_s = told.every.seconds or AUTO_FIRST_S
        self._leave_by_s: float | None = None  # on time.monotonic()
        self._exit_code: int | None = None  # once this rank has said how it leaves
        self._extras: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._checkpointer: Checkpointer | None = None
        self._agreement: Agreement | None = None
        self._notices: Notices | None = None
        self._reporter = Reporter(told, self.rank)

    # -- the user's side -----------------------------------------------------------------------------------

    def __enter__(self) -> "Job":
        speak(quiet=self._told.quiet or self.rank != 0)
        if self._told.to is None:
            if self.rank == 0:
                log.warning("no checkpoint destination: this job is unprotected (cordee.job(state, to=...) names one)")
            self._reporter.restored(0, None)
            return self
        caught = [signal.SIGTERM, signal.SIGUSR1] if self._told.slurm else [signal.SIGTERM]
        self._notices = Notices(caught, self._on_signal)
        try:
            self._restore(self._told.to)
            self._agreement = Agreement(
                first_step=self.start_step,
                rank=self.rank,
                world_size=self.world_size,
                store=dist.distributed_c10d._get_default_store() if self.world_size > 1 else None,
                prefix=f"stop/{self._told.epoch or 0}.{next(_numbers)}",
                on_leave=self._leave_within,
                on_abort=self._abort,
            )
        except BaseException:
            self._close()
            raise
        if self._leave_by_s is not None:
            self._request_leave()  # a notice came while the checkpoint was read
        self._plan_save()
        return self

    def steps(self, n: int) -> Iterator[int]:
        """The steps from the restored one to n - 1. After the last one a final checkpoint is made.

        If that one fails, what follows in the `with` block still runs; then the block raises CheckpointError, since
        a job is not finished while its last steps are nowhere.

        Raises:
            Preempted: out of the loop, at the agreed step.
        """
        if self._extras is not None:
            own.restore_rng(self._extras["rng"])  # here, since what comes before the loop may draw numbers too
            self._extras = None
        self._finished = False
        self._reporter.switch(SpanClass.USEFUL, self._step)
        while self._step < n:
            if self._agreement is not None:
                self._boundary(self._agreement, self._step)
            yield self._step
            self._reporter.stepped(self._step)
            self._step += 1
        self._final_failed = self._checkpointer is not None and not self._make_durable(_NO_LIMIT_S)
        self._finished = True
        self._reporter.switch(SpanClass.RESTART, self._step)

    def log(self, *, loss: Any = None, tokens: int = 0) -> None:
        """Tell about the step that runs: its loss, and the tokens of the whole gang in it."""
        self._reporter.log(loss, tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            if not self._finished and self.rank == 0:
                log.info("the loop was left at step %d before its end: no final checkpoint", self._step)
            self._say_left(*(("aborted", CheckpointError.exit_code) if self._final_failed else ("finished", 0)))
            self._count_out(_NO_LIMIT_S)
        self._close()
        if kind is None and self._final_failed:
            newest = self._checkpointer.newest() if self._checkpointer else None
            raise CheckpointError(
                f"the final checkpoint, of step {self._step}, failed; durable is {_name(newest)}",
                hint="the lines above say why; the same job, started again, goes on from what is durable",
            )

    # -- at a boundary, on the main thread -----------------------------------------------------------------

    def _boundary(self, agreement: Agreement, step: int) -> None:
        every = self._told.every.steps
        if every and step % every == 0 and step not in (self.start_step, self._saved_step):
            self._save()  # the same steps on every rank, so there is nothing to agree on
        while (verdict := agreement.at(step)) is Verdict.SAVE:
            if step != self._saved_step:
                self._save()
            agreement.conclude()
            self._plan_save()
        if verdict is Verdict.LEAVE:
            self._leave(step)

    def _save(self) -> bool:
        """Capture the state; a failure is told and training goes on."""
        assert self._checkpointer is not None, "an unprotected job never saves"
        self._reporter.switch(SpanClass.CHECKPOINT, self._step)
        _synchronize()
        try:
            self._draining = True
            save = self._checkpointer.save(self.state, step=self._step, extras=own.capture(self.state))
        except FencedError:
            raise
        except CheckpointError as error:
            self._draining = False
            log.error("no checkpoint of step %d: %s", self._step, error)
            return False
        finally:
            self._reporter.switch(SpanClass.USEFUL, self._step)
        self._saved_step = self._step
        if self._told.every.steps is None and self._told.every.seconds is None:
            self._period_s = self._best_period_s(save.stall_us / 1e6)
        return True

    def _best_period_s(self, stall_s: float) -> float:
        """The plan's optimum for what a save costs the loop, with the restart this attempt has measured."""
        from cordee.plan.survive import LLAMA3_MTBI_GPU_HOURS, best_period_s

        mtbi_s = LLAMA3_MTBI_GPU_HOURS / self.world_size * 3600
        return min(AUTO_MAX_S, best_period_s(mtbi_s, self._restart_s, stall_s))

    def _make_durable(self, limit_s: float) -> bool:
        """A committed checkpoint of the current step, within the time there is."""
        checkpointer = self._checkpointer
        assert checkpointer is not None, "an unprotected job never saves"
        newest = checkpointer.newest()
        if self._step == (newest.step if newest else 0) or (newest is None and self._step == self.start_step):
            return True
        if self._saved_step != self._step and not self._save():
            return False
        self._reporter.switch(SpanClass.CHECKPOINT, self._step)
        try:
            checkpointer.wait(self._left_s(limit_s))
        except FencedError:
            raise
        except CheckpointError as error:
            log.error("step %d is not durable: %s", self._step, error)
            return False
        return True

    def _leave(self, step: int) -> None:
        durable = self._make_durable(self._told.grace_s)
        done = 0 if self._told.torchelastic else EXIT_CHECKPOINTED
        self._say_left(*(("checkpointed", done) if durable else ("aborted", StopError.exit_code)))
        if self.rank == 0 and durable:
            log.info("left at step %d: its checkpoint is durable", step)
        self._count_out(self._told.grace_s)
        raise Preempted(self._exit_code)

    def _count_out(self, limit_s: float) -> None:
        if self._agreement is None:
            return
        try:
            self._agreement.count_out(self._left_s(limit_s))
        except (RuntimeError, StopError) as error:  # This rank has said how it leaves; a peer that has not is its own.
            log.warning("rank %d leaves before the others: %s", self.rank, error)

    def _say_left(self, how: str, exit_code: int) -> None:
        with self._lock:
            if self._exit_code is None:
                self._exit_code = exit_code
                self._reporter.left(how, self._step)

    # -- notices, on other threads -------------------------------------------------------------------------

    def _on_signal(self, number: int) -> None:
        if self._leave_by_s is not None:
            return  # the first deadline stands
        grace_s = self._told.grace_s
        log.info("rank %d: %s, %s to leave", self.rank, signal.Signals(number).name, format_duration(grace_s))
        self._leave_within(grace_s - min(2.0, grace_s / 10))  # this process has to be gone before the SIGKILL
        self._request_leave()

    def _leave_within(self, left_s: float) -> None:
        with self._lock:
            if self._leave_by_s is None and self._notices is not None:
                self._leave_by_s = time.monotonic() + left_s
                self._notices.at("deadline", self._leave_by_s, self._abort)

    def _left_s(self, otherwise_s: float) -> float:
        return otherwise_s if self._leave_by_s is None else max(0.0, self._leave_by_s - time.monotonic())

    def _request_leave(self) -> None:
        if self._agreement is not None:
            left_s = self._left_s(self._told.grace_s)
            _beside(partial(self._agreement.request, leave_in_s=left_s))

    def _plan_save(self) -> None:
        """Set the timer of the next save that the ranks have to agree on: rank 0's."""
        if self.rank == 0 and self._told.every.steps is None and self._notices is not None:
            self._notices.at("save", time.monotonic() + self._period_s, self._request_save)

    def _request_save(self) -> None:
        if self._draining and self._notices is not None:  # a store slower than the interval decides the interval
            self._notices.at("save", time.monotonic() + 0.1, self._request_save)
        elif self._agreement is not None:
            _beside(self._agreement.request)

    def _abort(self) -> None:
        """The time is up: leave on the newest generation that is durable. Does not return."""
        with self._lock:
            said = self._exit_code
        if said is None:
            newest = self._checkpointer.newest() if self._checkpointer else None
            log.error("rank %d: not done by the deadline at step %d; durable: %s", self.rank, self._step, _name(newest))
            self._say_left("aborted", StopError.exit_code)
            if self._agreement is not None:
                _beside(self._agreement.abort).join(timeout=0.5)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(self._exit_code or 0)

    # -- the beginning and the end -------------------------------------------------------------------------

    def _restore(self, to: str) -> None:
        self._checkpointer = checkpointer = Checkpointer(
            to,
            rank=self.rank,
            world_size=self.world_size,
            epoch=self._told.epoch,
            keep=self._told.keep,
            base=self._told.base,
            grace_s=self._told.grace_s,
            on_commit=self._on_commit,
            on_failure=lambda error: self._drained(),
        )
        commit = checkpointer.open()
        if commit is not None:
            loaded = checkpointer.load(self.state, commit)
            self.start_step = self._step = loaded.step
            self._extras = loaded.extras
            if loaded.extras is not None:
                own.restore(self.state, loaded.extras)
            elif self.rank == 0:
                log.warning(
                    "restored from %d ranks to %d: random numbers and per-rank values start anew",
                    loaded.world_size,
                    self.world_size,
                )
        self._restart_s = time.time() - process_start_us() / 1e6
        if self.rank == 0:
            log.info("step %d %s", self.start_step, f"restored from {to}" if commit else f"of a new job in {to}")
        self._reporter.restored(self.start_step, commit.generation if commit else None)

    def _on_commit(self, commit: Commit) -> None:
        self._reporter.committed(commit)
        self._drained()

    def _drained(self) -> None:
        self._draining = False

    def _close(self) -> None:
        if self._agreement is not None:
            self._agreement.close()
        if self._checkpointer is not None:
            self._checkpointer.close()
        if self._notices is not None:
            self._notices.close()
        self._reporter.close()


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        raise StopError(
            f"this is one of {world_size} ranks, and torch.distributed is not initialised",
            hint="call torch.distributed.init_process_group() before cordee.job()",
        )
    return 0, 1


def _name(newest: Commit | None) -> str:
    return f"step {newest.step}" if newest else "nothing"


def _synchronize() -> None:
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


def _beside(call: Callable[[], Any]) -> threading.Thread:
    """On a thread of its own: a store that hangs must not hold the deadline up."""

    def run() -> None:
        try:
            call()
        except (RuntimeError, StopError) as error:
            log.warning("the ranks' store does not answer: %s", error)

    thread = threading.Thread(target=run, name="cordee-request", daemon=True)
    thread.start()
    return thread
