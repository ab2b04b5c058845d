"""The answer of all ranks to a spike, at the boundary where they meet for it: go back, or end with the reason."""

import logging
from collections.abc import Callable

from cordee.errors import CheckpointError, DivergedError
from cordee.events import RolledBack
from cordee.train.checkpoint import rank_state
from cordee.train.checkpoint.saver import Saver
from cordee.train.guard.detector import Spike
from cordee.train.guard.guard import ROLLBACKS_MAX, LossGuard
from cordee.train.rank_exit import durable_name
from cordee.train.report import Reporter
from cordee.train.step_timer import StepTimer
from cordee.units import plural

log = logging.getLogger("cordee")


class Diverged(SystemExit):
    """The exit of a rank whose job was told to stop at a spike of the loss, or that cannot go back: code 61."""


def agreed_spike(guard: LossGuard, saving: Saver) -> Spike | None:
    """Return the spike that began first on any rank, the same on all; None: no rank has found one. A collective."""
    if not saving.checkpointer.any_rank(guard.found is not None):
        return None
    found = saving.checkpointer.of_all_ranks(guard.found)
    return min((each for each in found if each is not None), key=lambda each: (each.step, each.seen))


def go_back(
    guard: LossGuard, spike: Spike, saving: Saver, timer: StepTimer, reporter: Reporter, left_s: Callable[[], float]
) -> str | None:
    """Put the checkpoint before the spike into the state, with other batches to come; return why that cannot be.

    All ranks call it at one boundary. The new position is durable when this returns, so that a run which dies here goes
    on in the same way.
    """
    state, rank = saving.state, saving.checkpointer.rank
    done, ahead = timer.step, rank_state.positions(state)
    before = max(guard.rollbacks, rank_state.detours(state))
    if before >= ROLLBACKS_MAX:
        return f"it has gone back {plural(before, 'time')} already"
    commit = saving.go_back(spike.step, left_s())
    if commit is None:
        return f"there is no checkpoint of a step before {spike.step}"
    first = max(commit.step, spike.step - 1)  # the step whose update spoilt the loss of the next one
    moved = rank_state.detour(state, ahead, commit.step, first, done, reorder=guard.on_spike == "reorder")
    guard.back(commit.step)
    timer.back(commit.step)
    reporter.rolled_back(commit.step)
    rank_state.begin(state, commit.step)
    saving.restore_rng()
    if rank == 0:
        what = {"rollback": "without", "reorder": "later with"}[guard.on_spike]
        batches = f"{what} the {plural(moved, 'batch', 'batches')} of steps {first} to {done - 1}"
        log.warning(
            "%s: back from step %d to step %d (generation %d), %s; time %d of %d",
            spike.sentence(),
            done,
            commit.step,
            commit.generation,
            batches if moved else "and the same batches again, since no ElasticBatchSampler is in the state",
            before + 1,
            ROLLBACKS_MAX,
        )
        reporter.append(
            RolledBack,
            rank=rank,
            step=done,
            to_step=commit.step,
            generation=commit.generation,
            batches=moved,
            reordered=guard.on_spike == "reorder",
            why=spike.sentence(),
        )
    saving.save_now(commit.step, left_s())
    return None


def failed_code(saving: Saver | None) -> int:
    """Return the exit code of a rank whose final checkpoint failed; 61 if its weights are not finite."""
    return DivergedError.exit_code if saving is not None and saving.has_diverged else CheckpointError.exit_code


def no_final_checkpoint(saving: Saver | None, step: int) -> BaseException:
    """Return what to raise where the final checkpoint failed; 61 if weights are not finite: no start would help."""
    code = failed_code(saving)
    what = f"the final checkpoint, of step {step}, failed; durable: {durable_name(saving)}"
    if code == DivergedError.exit_code:
        if saving is not None and saving.checkpointer.rank == 0:
            log.error("the training has diverged: %s", what)
        return Diverged(code)
    hint = "the lines above say why; start the job again, and it goes on from what is durable"
    return CheckpointError(what, hint=hint)
