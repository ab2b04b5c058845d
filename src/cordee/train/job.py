"""Two lines in the user's own loop: `with cordee.job(state) as job: for step in job.steps(n): ...` (`entry.py`).

A job restores before its first step, saves as it goes, and on a notice leaves with all its ranks at one agreed step.
The loop stays the user's; nothing here runs a collective in a step. Saves are in `checkpoint/`; notices, the deadline
and the ranks' agreement in `stop/`.
"""

import itertools
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cordee.errors import CordeeError, DivergedError, InputError, StopError
from cordee.events import Estimate, SpanClass
from cordee.plan.layout import Layout
from cordee.train import torch_version  # noqa: F401 - raises where torch is too old for the rest
from cordee.train.checkpoint import rank_state
from cordee.train.checkpoint.saver import Saver, synchronize
from cordee.train.guard.react import Diverged, agreed_spike, failed_code, go_back, no_final_checkpoint
from cordee.train.measure import Meter
from cordee.train.mesh import layout_mesh, rank_and_world_size
from cordee.train.preempted import Preempted
from cordee.train.rank_exit import RankExit, beside, durable_name, goes_on_from
from cordee.train.reading import Reading
from cordee.train.rehearsal import Rehearsal, rehearsal
from cordee.train.report import Reporter, set_up_logging
from cordee.train.settings import Settings
from cordee.train.software import software_changed
from cordee.train.step_timer import StepTimer
from cordee.train.stop.agreement import Agreement, BoundaryAction
from cordee.train.stop.deadline import Choice
from cordee.train.trackers import CLOSE_S
from cordee.train.trial import rungs
from cordee.train.watch.watch import RankWatch
from cordee.units import format_duration

log = logging.getLogger("cordee")

_NO_LIMIT_S = 86_400.0  # An uploader limits itself; this ends the wait for one that is lost.
_numbers = itertools.count()


class Job:
    """One attempt of a training job, as its rank sees it."""

    def __init__(self, state: dict[str, Any], settings: Settings) -> None:
        self.state = state
        self.start_step = 0  # the first step of this attempt
        self.rank, self.world_size = rank_and_world_size()
        self._settings = settings
        self._timer = StepTimer(rungs())
        self._final: bool | None = None  # whether the final checkpoint is durable; None: the loop is not over
        self._closed = False
        self._saving: Saver | None = None
        self._exit: RankExit | None = None
        self._agreement: Agreement | None = None
        self._watch: RankWatch | None = None
        self._reporter = Reporter(settings, self.rank)
        self._rehearsal = rehearsal(self.rank, self._reporter, settings.to)
        self._meter = Meter(self._reporter, self._timer, self.rank, settings)

    # -- the user's side -----------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout | None:
        """The planned layout of this attempt (CORDEE_LAYOUT); None without a plan."""
        return self._settings.planned.layout

    @property
    def estimate(self) -> Estimate | None:
        """The plan's estimate for this attempt; None without a plan."""
        return self._settings.planned.estimate

    def mesh(self, device_type: str | None = None) -> DeviceMesh:
        """Return the device mesh of the planned layout, with axes pp, dp, cp and tp; without a plan all ranks are dp.

        Raises:
            LayoutError: the layout is for another number of ranks.
        """
        return layout_mesh(self.layout or Layout(dp=self.world_size), self.world_size, device_type)

    def __enter__(self) -> "Job":
        self.open()
        self.load()
        return self

    def open(self) -> None:
        """Start to listen for notices; `find` and `load` read the checkpoint."""
        set_up_logging(self._settings.telemetry.log_level if self.rank == 0 else logging.WARNING)
        if self._settings.to is None:
            if self._meter.guard.acts:
                raise InputError(
                    f"on_spike={self._meter.guard.on_spike!r} needs checkpoints",
                    hint="name a destination: cordee.job(state, to=...)",
                )
            if self.rank == 0:
                log.warning("no checkpoint destination: this job is unprotected; name one: cordee.job(state, to=...)")
            return
        self._exit = rank_exit = RankExit(self._settings, self.rank, self._reporter, self._timer, self._on_hint)
        with self._closing_on_error():
            self._saving = rank_exit.saving = Saver(
                self.state,
                self._settings,
                self._settings.to,
                rank=self.rank,
                world_size=self.world_size,
                reporter=self._reporter,
                on_estimate=self._plan_save,
            )

    def find(self) -> None:
        """Find the checkpoint to start from, and its step, before there is a state; `load` reads it again."""
        if self._saving is None:
            return
        with self._closing_on_error():
            self.start_step = self._timer.step = self._saving.find()

    def load(self) -> None:
        """Put the newest checkpoint into the state and set `start_step`; from now on the ranks can agree to leave."""
        if self._saving is None or self._exit is None:
            self._reporter.restored(0, None)
            return
        rank_exit = self._exit
        with self._closing_on_error():
            self.start_step = self._timer.step = self._saving.load()
            newest = self._saving.checkpointer.newest()
            if self.rank == 0 and self._settings.spool is not None:
                changed = software_changed(self._settings.spool, newest.epoch if newest else None)
                if changed is not None:
                    log.warning("%s", changed)
            self._agreement = rank_exit.agreement = Agreement(
                first_step=self._timer.boundary - (1 << 20),
                rank=self.rank,
                world_size=self.world_size,
                store=self._store(),
                prefix=f"stop/{self._settings.epoch or 0}.{next(_numbers)}",
                on_leave=rank_exit.follow,
                on_abort=rank_exit.abort,
            )
        if rank_exit.by_s is not None:
            rank_exit.request()  # a notice came while the checkpoint was read
        self._plan_save()

    @contextmanager
    def _closing_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._close()
            raise

    def _store(self) -> dist.Store | None:
        return dist.distributed_c10d._get_default_store() if self.world_size > 1 else None

    def steps(self, n: int) -> Iterator[int]:
        """Yield the steps from the restored one to n - 1, then make a final checkpoint; a trial ends at its last rung.

        If that fails, the rest of the `with` block still runs, and the block then raises CheckpointError, since a job
        is not finished before its last steps are durable.

        Raises:
            Preempted: the rank leaves at the agreed step.
        """
        n = min([n, *self._timer.rungs[-1:]])
        self._meter.goes_back = True
        self.begin(n)
        while True:
            while self._timer.step < (self._meter.steps_total or 0):  # `stop` changes it
                self.boundary()
                yield self._timer.step
                self.stepped()
            if not self._goes_back_at_end():
                break
        self.finish()

    # The parts of `steps`, for other libraries' loops: begin, then boundary and stepped around each step, finish.

    def begin(self, steps_total: int | None = None) -> None:
        """Begin the loop: restore the random number generators, since earlier code may have drawn from them.

        Args:
            steps_total: the job is done after so many steps; None: the loop does not know.
        """
        if self._meter.guard.on_spike in ("rollback", "reorder") and not self._meter.goes_back:
            raise InputError(
                f"on_spike={self._meter.guard.on_spike!r} needs the loop of job.steps(), which can go back",
                hint='use on_spike="stop" or "warn" in a loop of another library',
            )
        self._meter.steps_total = self._reporter.progress.steps_total = steps_total
        rank_state.begin(self.state, self._timer.step)
        if self._saving is not None:
            self._saving.restore_rng()
        self._final = None
        self._reporter.switch(SpanClass.USEFUL, self._timer.step)
        if self._watch is None and self._settings.hang.report_s:
            self._watch = RankWatch(
                self._settings,
                rank=self.rank,
                world_size=self.world_size,
                store=self._store(),
                prefix=f"watch/{self._settings.epoch or 0}.{next(_numbers)}",
                timer=self._timer,
                reporter=self._reporter,
                on_hung=self._on_hung,
            )
        if self._watch is not None:
            self._watch.begin()

    def boundary(self) -> None:
        """Save before a step if a save is due, and leave if the ranks agreed to, or at a rung of the job's sweep.

        Raises:
            Preempted: the rank leaves at this step.
        """
        self._block_if_ending()
        saving = self._saving
        if self._rehearsal is not None and saving is not None:
            self._rehearse(self._rehearsal, saving)
        elif saving is not None:
            saving.at_step(self._timer.step, self._holds)
            self._ask_about_loss()
            self._meet(saving, self._timer.boundary)
            if self._timer.step in self._timer.rungs and self._timer.step > self.start_step:
                self._leave_at_rung(saving)
        self._timer.points = 0
        self._timer.began()

    def stepped(self) -> None:
        """Count a step that was run."""
        self._meter.epoch_of(self.state)
        self._reporter.stepped(self._timer.step)
        if self._rehearsal is not None:
            self._rehearsal.stepped()
        self._timer.ended()
        self._meter.stepped()

    def safe_point(self) -> None:
        """Leave if a notice asks for it, in the middle of a step or outside of the loop; the state must be consistent.

        For long code that does not train: a warm-up, an evaluation after the step's training. All ranks call it equally
        often in a step. If they leave here, the step counts as done, and its rest does not run again.

        Raises:
            Preempted: the rank leaves.
        """
        self._timer.points += 1
        if self._watch is not None:
            self._watch.keep_alive()
        if self._saving is not None:
            last = self._timer.inside - 1  # of the steps, the one whose training is done
            self._meet(self._saving, self._timer.boundary + (last << 20) + self._timer.points)

    def finish(self) -> None:
        """Make the final checkpoint, after the last step. If it fails, the end of the `with` block raises."""
        self._block_if_ending()
        if self._watch is not None:
            self._watch.end()
        self._final = True
        if (saving := self._saving) is not None and (rank_exit := self._exit) is not None:
            self._final = saving.make_durable(self._timer.step, lambda: rank_exit.left_s(_NO_LIMIT_S))
        self._meter.report()
        self._reporter.switch(SpanClass.RESTART, self._timer.step)

    def save(self, *, best: float | None = None) -> None:
        """Make a checkpoint as soon as the step that runs is over. All ranks call it in the same step.

        Args:
            best: a value of this step, such as a validation loss, the same on all ranks. A checkpoint is made only if
                it is the lowest of the job so far, and then stays, pinned as `best`, until a better one replaces it.
        """
        if self._saving is not None:
            self._saving.requested.ask(self._timer.step + self._timer.inside, best)

    def stop(self) -> None:
        """End the loop after the step that runs, with a final checkpoint. All ranks call it in the same step."""
        self._meter.steps_total = self._reporter.progress.steps_total = self._timer.step + self._timer.inside

    def log(self, *, loss: object = None, tokens: int = 0, **metrics: object) -> None:
        """Report the loss of the step that runs, the tokens of the whole gang in it, and metrics by any other names.

        A metric is a number, or a tensor with one element; one on a GPU is read once it is computed, and the loop waits
        for nothing. Points of its curve are reported every few seconds, and when the rank leaves.

        Raises:
            InputError: a metric has no such name or value.
        """
        found = None if loss is None else Reading("loss", loss)
        if found is not None:
            self._meter.guard.log(self._timer.step, found)
        self._reporter.log(found, tokens)
        best = self._settings.telemetry.keep_best
        if best is not None and best in metrics | {"loss": found}:
            value = found if best == "loss" and found is not None else Reading(best, metrics[best])
            self.save(best=value.number())
        self._meter.log(tokens, metrics if found is None else {"loss": found, **metrics})
        if self._rehearsal is not None:
            self._rehearsal.log(loss)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._block_if_ending()
        if kind is None:
            if self._final is None and self._meter.goes_back:  # `break`, on all ranks in one step
                if self._timer.inside:
                    self.stepped()
                self.finish()
            left = ("aborted", failed_code(self._saving)) if self._final is False else ("finished", 0)
            self._report_left(*left)
            self._count_out(_NO_LIMIT_S)
        elif issubclass(kind, KeyboardInterrupt) and self.rank == 0:
            log.info("interrupted %s; %s", self._where(), goes_on_from(self._saving))
        failed = kind is not None and issubclass(kind, Exception) and not issubclass(kind, CordeeError)
        broken = failed and self._breaks_on_leaving(error)
        self._close(failed=failed)
        if broken:
            raise Preempted(StopError.exit_code) from error
        if kind is None and self._final is False:
            raise no_final_checkpoint(self._saving, self._timer.step)

    def _where(self) -> str:
        return f"{'in' if self._timer.inside else 'before'} step {self._timer.step}"

    def _breaks_on_leaving(self, error: BaseException | None) -> bool:
        """Return whether the loop failed because ranks leave, which breaks the collectives of the others."""
        rank_exit = self._exit
        if rank_exit is None or rank_exit.exit_code is not None or not self._is_leaving(rank_exit):
            return False
        log.error(
            "rank %d failed on its way out, %s; durable: %s", self.rank, self._where(), durable_name(self._saving)
        )
        log.error("its error was:", exc_info=error)
        rank_exit.report_notice(durable=False)
        return True

    # -- at a boundary, on the main thread -----------------------------------------------------------------

    def _meet(self, saving: Saver, number: int) -> None:
        """Save or leave at this boundary, if the ranks agreed to; all pass the same boundaries in the same order."""
        agreement = self._agreement
        assert agreement is not None, "enter the job first"
        if self._rehearsal is not None and self._rehearsal.is_past_save:
            return
        step = self._timer.step + self._timer.inside  # within a step, its training is done at a boundary
        while (action := agreement.at(number)) is BoundaryAction.SAVE:
            if self._holds():
                self._react(saving)
            elif step != saving.tried_step:  # the same on all ranks, so that all save here or none
                saving.save(step, saving.asked())
            agreement.conclude()
            self._plan_save()
        if action is BoundaryAction.LEAVE:
            if self._timer.inside:
                self.stepped()
            self._leave(saving, agreement)

    # -- the guard of the loss -------------------------------------------------------------------------------

    def _ask_about_loss(self) -> None:
        """Ask the other ranks to meet if this one has found a spike that they have to act on."""
        guard = self._meter.guard
        guard.look()
        if guard.found is not None and not guard.asked and self._agreement is not None:
            guard.asked = True
            if self.world_size == 1:
                self._agreement.request()
            else:
                beside(self._agreement.request)

    def _holds(self) -> bool:
        """Return whether a save has to wait, since a rank's loss is not as usual. All ranks ask, at one boundary."""
        guard, saving = self._meter.guard, self._saving
        if not guard.acts or saving is None:
            return False
        synchronize()
        guard.look(wait=True)
        held = saving.checkpointer.any_rank(guard.is_suspicious)
        if held:
            saving.hasten()  # as soon as the loss is as usual again
            self._plan_save()
        return held

    def _react(self, saving: Saver) -> bool:
        """Act on the spike that any rank has found; return whether the ranks went back.

        Raises:
            Diverged: the job was told to stop, or cannot go back.
        """
        guard = self._meter.guard
        guard.asked = False
        if self._timer.inside or (spike := agreed_spike(guard, saving)) is None:
            return False
        rank_exit = self._exit
        assert rank_exit is not None, "only a protected job acts"
        left_s = partial(rank_exit.left_s, self._settings.grace_s)
        why_not: str | None = "the job was told to stop"
        if guard.on_spike != "stop":
            why_not = go_back(guard, spike, saving, self._timer, self._reporter, left_s)
        if why_not is None:
            return True
        if self.rank == 0:
            log.error("stopped: %s, and %s; durable: %s", spike.sentence(), why_not, durable_name(saving))
        self._meter.report()
        self._count_out(self._settings.grace_s)
        raise Diverged(DivergedError.exit_code)

    def _goes_back_at_end(self) -> bool:
        """Return whether the ranks went back because of a spike in the last steps; all come here at one step."""
        return self._saving is not None and self._holds() and self._react(self._saving)

    def _leave(self, saving: Saver, agreement: Agreement) -> None:
        rank_exit, step = self._exit, self._timer.step
        assert rank_exit is not None, "an unprotected job is never asked to leave"
        choice, reach = rank_exit.decide(saving, agreement)
        durable = choice is Choice.DURABLE
        if choice in (Choice.SAVE, Choice.TRY):
            durable = saving.make_durable(step, lambda: rank_exit.left_s(self._settings.grace_s), reach)
        elif choice is Choice.FINISH:
            saving.finish(rank_exit.left_s(self._settings.grace_s))
        self._meter.report()
        if durable and self._rehearsal is not None and self._rehearsal.goes_on(step):
            return
        rank_exit.report_notice(durable=durable)
        if self.rank == 0:
            kept = "its checkpoint is durable" if durable else f"durable: {durable_name(saving)}"
            again = "; start it again to go on" if self._settings.spool is None else ""
            log.info("left at step %d: %s%s", step, kept, again)
        self._count_out(self._settings.grace_s)
        raise Preempted(rank_exit.exit_code)

    def _rehearse(self, rehearsal: Rehearsal, saving: Saver) -> None:
        """Meet the other ranks before a step of a rehearsal, after its notice, or leave after its last step."""
        step, agreement, rank_exit = self._timer.step, self._agreement, self._exit
        assert agreement is not None and rank_exit is not None, "enter the job first"
        if rehearsal.is_over(step):
            rehearsal.report(self.state, step, self._meter.report)
            rank_exit.report("finished", 0) if rehearsal.resumed else rank_exit.report_notice(durable=True)
            self._count_out(self._settings.grace_s)
            raise Preempted(rank_exit.exit_code)
        meet = partial(self._meet, saving, self._timer.boundary)
        rehearsal.meet(step, agreement, self._meter, partial(saving.at_step, step, self._holds), meet)

    def _leave_at_rung(self, saving: Saver) -> None:
        """Save, and leave the GPUs to others; the job is paused until its sweep promotes it. All ranks come here."""
        rank_exit, step = self._exit, self._timer.step
        assert rank_exit is not None, "an unprotected job has no rungs"
        durable = saving.make_durable(step, lambda: rank_exit.left_s(_NO_LIMIT_S))
        self._meter.report()
        self._reporter.switch(SpanClass.RESTART, step)
        rank_exit.report_notice(durable=durable)
        if self.rank == 0:
            log.info("left at step %d, a rung of its sweep; durable: %s", step, durable_name(saving))
        self._count_out(_NO_LIMIT_S)
        raise Preempted(rank_exit.exit_code)

    def _count_out(self, limit_s: float) -> None:
        if self._watch is not None:
            self._watch.close()  # before the ranks' store may end
        if self._agreement is None or self._exit is None:
            return
        try:
            self._agreement.count_out(self._exit.left_s(limit_s))
        except (RuntimeError, StopError) as error:  # This rank has reported how it leaves.
            log.warning("rank %d leaves before the others: %s", self.rank, error)

    def _block_if_ending(self) -> None:
        if self._exit is not None:
            self._exit.block_if_ending()

    def _is_leaving(self, rank_exit: RankExit) -> bool:
        """Return whether there was a notice; this rank may fail because of it before it knows of it."""
        if rank_exit.by_s is not None or self._agreement is None:
            return rank_exit.by_s is not None
        heard: list[bool] = []
        agreement = self._agreement
        beside(lambda: heard.append(agreement.is_leaving())).join(timeout=1.0)
        return any(heard)

    def _report_left(self, how: str, exit_code: int) -> None:
        if self._exit is not None:
            self._exit.report(how, exit_code)
        else:
            self._reporter.left(how, self._timer.step)

    # -- periodic saves: rank 0's timer --------------------------------------------------------------------

    def _plan_save(self) -> None:
        """Set the timer of the next capture that the ranks have to agree on; rank 0's clock decides."""
        if self.rank == 0 and self._exit is not None and self._saving is not None:
            wait_s = self._saving.wait_s()
            if wait_s is not None:
                self._exit.notices.at("save", time.monotonic() + wait_s, self._request_save)

    def _request_save(self) -> None:
        if self._saving is not None and not self._saving.is_due():
            self._plan_save()
        elif self._agreement is not None:
            beside(self._agreement.request)

    def _on_hint(self) -> None:
        """Save soon, since the machine may go; do nothing before there is something to save."""
        if self._saving is not None and self._agreement is not None:
            self._saving.hasten()
            beside(self._agreement.request)

    # -- the end -------------------------------------------------------------------------------------------

    def _on_hung(self, still_s: float) -> None:
        """End the process, as all ranks do, after `still_s` seconds without a step; return only if it leaves anyway."""
        if self._exit is not None and self._exit.by_s is not None:
            return  # the deadline ends it
        after = format_duration(still_s)
        log.error("rank %d: no step for %s, so it ends; durable: %s", self.rank, after, durable_name(self._saving))
        self._report_left("hung", StopError.exit_code)
        if self._exit is not None:
            self._exit.abort()
        os._exit(StopError.exit_code)

    def _close(self, *, failed: bool = False) -> None:
        if self._closed:  # by `find` or `load`, which failed within the `with` block
            return
        self._closed = True
        for part in (self._watch, self._agreement):
            if part is not None:
                part.close()
        if self._saving is not None:
            self._saving.close(failed=failed)
        # The parts of a job refer to each other and would keep the state until garbage collection.
        self.state = {}
        self._meter.close(CLOSE_S if self._exit is None else self._exit.left_s(2 * CLOSE_S) / 2)
        if self._exit is not None:
            self._exit.close()
        self._reporter.close()
