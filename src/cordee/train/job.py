"""Two lines in the user's own loop: `with cordee.job(state) as job: for step in job.steps(n): ...`

A job restores before its first step, saves as it goes, and on a notice leaves with all its ranks at one agreed step.
The loop stays the user's; nothing here runs a collective for a step. Saves are in `checkpoint/`,
notices, the deadline and how ranks agree in `stop/`.
"""

import itertools
import logging
import os
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from cordee.errors import CheckpointError, CordeeError, StopError
from cordee.events import Estimate, SpanClass
from cordee.plan.layout import Layout
from cordee.train import torch_version  # noqa: F401 - raises where torch is too old for the rest
from cordee.train.checkpoint import rank_state
from cordee.train.checkpoint.saving import Saving
from cordee.train.measure import Meter
from cordee.train.mesh import layout_mesh
from cordee.train.report import Reporter, speak
from cordee.train.settings import Settings, settings
from cordee.train.step_timer import StepTimer
from cordee.train.stop.agreement import Agreement, BoundaryAction
from cordee.train.stop.deadline import Choice
from cordee.train.stop.rank_exit import RankExit, beside, name
from cordee.train.watch.watch import RankWatch
from cordee.units import format_duration

log = logging.getLogger("cordee")

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
    ram: str | int | None = None,
    hang: str | None = None,
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
        ram: how often to capture the state in memory between checkpoints, as `every`: what outlives the death of a
            process, not that of its machine. "auto" (the default) does it where it pays, "off" never; it takes twice
            the memory for captures.
        hang: after so long without a step all ranks end and start again from the newest checkpoint; never by default.

    Under a Cordee agent its settings win over these arguments.
    """
    return Job(state, settings(to=to, every=every, keep=keep, grace=grace, base=base, ram=ram, hang=hang))


class Job:
    """One attempt of a training job, as its rank sees it."""

    def __init__(self, state: dict[str, Any], told: Settings) -> None:
        self.state = state
        self.start_step = 0  # the step this attempt starts with
        self.rank, self.world_size = _rank_and_world_size()
        self._told = told
        self._pace = StepTimer()
        self._points = 0  # safe points since the boundary before
        self._finished = self._closed = False
        self._final_failed = False
        self._rng: Any = None  # to go on from, when the loop begins
        self._saving: Saving | None = None
        self._leaving: RankExit | None = None
        self._agreement: Agreement | None = None
        self._watch: RankWatch | None = None
        self._reporter = Reporter(told, self.rank)
        self._meter = Meter(self._reporter, self._pace, self.rank, told.estimate)

    # -- the user's side -----------------------------------------------------------------------------------

    @property
    def layout(self) -> Layout | None:
        """The planned layout of this attempt (CORDEE_LAYOUT); None where nothing was planned."""
        return self._told.layout

    @property
    def estimate(self) -> Estimate | None:
        """The plan's answer for this attempt; None where nothing was planned."""
        return self._told.estimate

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
        """From here on a notice is heard; nothing is read before `find` or `load`."""
        speak(quiet=self._told.quiet or self.rank != 0)
        if self._told.to is None:
            if self.rank == 0:
                log.warning("no checkpoint destination: this job is unprotected (cordee.job(state, to=...) names one)")
            return
        self._leaving = leaving = RankExit(self._told, self.rank, self._reporter, self._pace, self._hinted)
        try:
            self._saving = leaving.saving = Saving(
                self.state,
                self._told,
                self._told.to,
                rank=self.rank,
                world_size=self.world_size,
                reporter=self._reporter,
                on_estimate=self._plan_save,
            )
        except BaseException:
            self._close()
            raise

    def find(self) -> None:
        """Find what to start from, so that `start_step` is known before there is a state: it is read twice then."""
        if self._saving is None:
            return
        try:
            self.start_step = self._pace.step = self._saving.find()
        except BaseException:
            self._close()
            raise

    def load(self) -> None:
        """Put the newest checkpoint into the state; now `start_step` is known, and a notice can be agreed on."""
        if self._saving is None or self._leaving is None:
            self._reporter.restored(0, None)
            return
        leaving = self._leaving
        try:
            self.start_step, self._rng = self._saving.load()
            self._pace.step = self.start_step
            self._agreement = leaving.agreement = Agreement(
                first_step=_boundary_number(self.start_step - 1),
                rank=self.rank,
                world_size=self.world_size,
                store=dist.distributed_c10d._get_default_store() if self.world_size > 1 else None,
                prefix=f"stop/{self._told.epoch or 0}.{next(_numbers)}",
                on_leave=leaving.follow,
                on_abort=leaving.abort,
            )
        except BaseException:
            self._close()
            raise
        if leaving.by_s is not None:
            leaving.request()  # a notice came while the checkpoint was read
        self._plan_save()

    def steps(self, n: int) -> Iterator[int]:
        """The steps from the restored one to n - 1. After the last one a final checkpoint is made.

        If that one fails, what follows in the `with` block still runs; then the block raises CheckpointError, since
        a job is not finished while its last steps are nowhere.

        Raises:
            Preempted: out of the loop, at the agreed step.
        """
        self._meter.steps_total = n
        self.begin()
        while self._pace.step < n:
            self.boundary()
            yield self._pace.step
            self.stepped()
        self.finish()

    # What `steps` is made of, for a loop that is not ours: begin, then boundary and stepped around each step, finish.

    def begin(self) -> None:
        """Just before the first step: the generators are put back, since what came before may have drawn numbers."""
        if self._rng is not None:
            rank_state.restore_rng(self._rng)
            self._rng = None
        rank_state.begin(self.state, self._pace.step)
        self._finished = False
        self._reporter.switch(SpanClass.USEFUL, self._pace.step)
        if self._watch is None and self._told.hang_report_s:
            self._watch = RankWatch(
                self._told,
                rank=self.rank,
                world_size=self.world_size,
                store=dist.distributed_c10d._get_default_store() if self.world_size > 1 else None,
                prefix=f"watch/{self._told.epoch or 0}.{next(_numbers)}",
                pace=self._pace,
                reporter=self._reporter,
                on_hung=self._hung,
            )
        if self._watch is not None:
            self._watch.on()

    def boundary(self) -> None:
        """Before a step: save if it is time, and leave if that was agreed.

        Raises:
            Preempted: the rank leaves at this step.
        """
        self._stay()
        saving = self._saving
        if saving is not None:
            saving.at_step(self._pace.step)
            self._meet(saving, _boundary_number(self._pace.step))
        self._points = 0
        self._pace.began()

    def stepped(self) -> None:
        """After a step."""
        self._reporter.stepped(self._pace.step)
        self._pace.ended()
        self._meter.stepped()

    def safe_point(self) -> None:
        """Here the state is whole, in the middle of a step or outside of the loop: leave if a notice asks for it.

        For what takes long and does not train: a warm-up, an evaluation after the step's training. All ranks call it
        equally often in a step. If they leave here, the step counts as done: what was to come of it does not run again.

        Raises:
            Preempted: the rank leaves.
        """
        self._points += 1
        if self._watch is not None:
            self._watch.alive()
        if self._saving is not None:
            last = self._pace.step + self._pace.inside - 1  # the step whose training is done
            self._meet(self._saving, _boundary_number(last) + self._points)

    def finish(self) -> None:
        """After the last step: the final checkpoint. If it fails, the end of the `with` block says so."""
        self._stay()
        if self._watch is not None:
            self._watch.off()
        if (saving := self._saving) is not None and (leaving := self._leaving) is not None:
            self._final_failed = not saving.make_durable(self._pace.step, lambda: leaving.left_s(_NO_LIMIT_S))
        self._finished = True
        self._meter.report()
        self._reporter.switch(SpanClass.RESTART, self._pace.step)

    def log(self, *, loss: Any = None, tokens: int = 0) -> None:
        """Tell about the step that runs: its loss, and the tokens of the whole gang in it."""
        self._reporter.log(loss, tokens)
        self._meter.log(tokens)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stay()
        leaving, step = self._leaving, self._pace.step
        if kind is None:
            if not self._finished and self.rank == 0:
                log.info("the loop was left at step %d before its end: no final checkpoint", step)
            self._say_left(*(("aborted", CheckpointError.exit_code) if self._final_failed else ("finished", 0)))
            self._count_out(_NO_LIMIT_S)
        failed = kind is not None and issubclass(kind, Exception) and not issubclass(kind, CordeeError)
        broken = failed and leaving is not None and leaving.exit_code is None and self._is_leaving(leaving)
        if broken and leaving is not None:
            # Whoever leaves breaks the collectives of those that have not: that is no failure of the script.
            log.error("rank %d failed in step %d on its way out; durable: %s", self.rank, step, name(self._saving))
            log.error("it failed with this:", exc_info=error)
            leaving.say_notice(durable=False)
        self._close(failed=failed)
        if broken:
            raise Preempted(StopError.exit_code) from error
        if kind is None and self._final_failed:
            raise CheckpointError(
                f"the final checkpoint, of step {step}, failed; durable is {name(self._saving)}",
                hint="the lines above say why; the same job, started again, goes on from what is durable",
            )

    # -- at a boundary, on the main thread -----------------------------------------------------------------

    def _meet(self, saving: Saving, number: int) -> None:
        """All ranks pass the same boundaries in the same order; at one they may save, or leave."""
        agreement = self._agreement
        assert agreement is not None, "enter the job first"
        step = self._pace.step + self._pace.inside  # within a step its training is done, or this were no boundary
        while (verdict := agreement.at(number)) is BoundaryAction.SAVE:
            if step != saving.tried_step:  # not saved_step: all ranks save here, or none
                saving.save(step, saving.asked())
            agreement.conclude()
            self._plan_save()
        if verdict is BoundaryAction.LEAVE:
            if self._pace.inside:
                self.stepped()
            self._leave(saving, agreement)

    def _leave(self, saving: Saving, agreement: Agreement) -> None:
        leaving, step = self._leaving, self._pace.step
        assert leaving is not None, "an unprotected job is never asked to leave"
        choice, reach = leaving.decide(saving, agreement)
        durable = choice is Choice.DURABLE
        if choice in (Choice.SAVE, Choice.TRY):
            durable = saving.make_durable(step, lambda: leaving.left_s(self._told.grace_s), reach)
        elif choice is Choice.FINISH:
            saving.finish(leaving.left_s(self._told.grace_s))
        self._meter.report()
        leaving.say_notice(durable=durable)
        if self.rank == 0:
            log.info(
                "left at step %d: %s", step, "its checkpoint is durable" if durable else f"durable is {name(saving)}"
            )
        self._count_out(self._told.grace_s)
        raise Preempted(leaving.exit_code)

    def _count_out(self, limit_s: float) -> None:
        if self._watch is not None:
            self._watch.close()  # while the ranks' store is surely there
        if self._agreement is None or self._leaving is None:
            return
        try:
            self._agreement.count_out(self._leaving.left_s(limit_s))
        except (RuntimeError, StopError) as error:  # This rank has said how it leaves; a peer that has not is its own.
            log.warning("rank %d leaves before the others: %s", self.rank, error)

    def _stay(self) -> None:
        if self._leaving is not None:
            self._leaving.stay()

    def _is_leaving(self, leaving: RankExit) -> bool:
        """Whether there was a notice; this rank may fail of it before it is told."""
        if leaving.by_s is not None or self._agreement is None:
            return leaving.by_s is not None
        heard: list[bool] = []
        agreement = self._agreement
        beside(lambda: heard.append(agreement.is_leaving())).join(timeout=1.0)
        return any(heard)

    def _say_left(self, how: str, exit_code: int) -> None:
        if self._leaving is not None:
            self._leaving.say(how, exit_code)
        else:
            self._reporter.left(how, self._pace.step)

    # -- periodic saves: rank 0's timer --------------------------------------------------------------------

    def _plan_save(self) -> None:
        """Set the timer of the next capture that the ranks have to agree on."""
        if self.rank == 0 and self._leaving is not None and self._saving is not None:
            wait_s = self._saving.wait_s()
            if wait_s is not None:
                self._leaving.notices.at("save", time.monotonic() + wait_s, self._request_save)

    def _request_save(self) -> None:
        if self._saving is not None and not self._saving.is_due():
            self._plan_save()
        elif self._agreement is not None:
            beside(self._agreement.request)

    def _hinted(self) -> None:
        """The machine may go soon; the hint may come before there is anything to save."""
        if self._saving is not None and self._agreement is not None:
            self._saving.hasten()
            beside(self._agreement.request)

    # -- the end -------------------------------------------------------------------------------------------

    def _hung(self, still_s: float) -> None:
        """No step for so long: all ranks find out alike, and start again. Does not return, unless it leaves anyway."""
        if self._leaving is not None and self._leaving.by_s is not None:
            return  # its deadline will do
        after = format_duration(still_s)
        log.error("rank %d: no step for %s: it ends itself; durable: %s", self.rank, after, name(self._saving))
        self._say_left("hung", StopError.exit_code)
        if self._leaving is not None:
            self._leaving.abort()
        os._exit(StopError.exit_code)

    def _close(self, *, failed: bool = False) -> None:
        if self._closed:  # by what failed within `find` or `load`, whose caller leaves the `with` block after that
            return
        self._closed = True
        if self._watch is not None:
            self._watch.close()
        if self._agreement is not None:
            self._agreement.close()
        if self._saving is not None:
            self._saving.close(failed=failed)
        # The parts of a job know each other: until the collector finds them, they would hold what is in the state.
        self.state = {}
        if self._leaving is not None:
            self._leaving.close()
        self._reporter.close()


def _boundary_number(step: int) -> int:
    """Of the boundary before a step. Behind it is room for those within the step, which all ranks count from anew."""
    return step << 20


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
