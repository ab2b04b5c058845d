"""The end of a rank: the notice, its deadline, the last save, the report and the exit code.

Notices come from signals, the agent, the cloud and other ranks, on threads other than the loop's. The ranks agree in
`agreement.py` on the boundary to leave at, and the loop saves there. This file works even if the loop hangs.
"""

import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

from cordee.errors import EXIT_CHECKPOINTED, StopError
from cordee.storage.rescue import RESCUE_S_MAX
from cordee.telemetry.cloud import CloudWatch, Hint, Reclaim
from cordee.telemetry.notices import read_hint, read_notice
from cordee.train.checkpoint.saver import Saver
from cordee.train.report import Reporter
from cordee.train.settings import Settings
from cordee.train.step_timer import StepTimer
from cordee.train.stop import deadline
from cordee.train.stop.agreement import Agreement
from cordee.train.stop.deadline import Choice, Situation
from cordee.train.stop.notice import Notices
from cordee.units import format_duration

log = logging.getLogger("cordee")

MARGIN_S_MAX = 2.0  # from a rank's end until it would be killed; a tenth of the notice if that is less
TURN_S = 0.05  # between two checks whether the step that runs is overdue
HINT_LOOK_S = 5.0  # as often as the clouds are asked
REPEATED_S = 0.5  # two SIGINT within this time are one Ctrl-C, which a launcher passed on
LOOK_S = 0.5  # between two looks at the agent's notice, once there was one


class RankExit:
    """One rank's end.

    Args:
        on_hint: called when the machine may go; no rank has to leave.

    Attributes:
        by_s: time by which this rank has to end, on time.monotonic(); None without a notice.
        exit_code: None until this rank has reported how it leaves.
        saving, agreement: set once they exist; a notice may come before.
        notices: signals and timers.
    """

    def __init__(
        self,
        settings: Settings,
        rank: int,
        reporter: Reporter,
        timer: StepTimer,
        on_hint: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._rank, self._reporter, self._timer = settings, rank, reporter, timer
        self._lock = threading.Lock()
        self._machine_stays = True
        self._decided = False
        self._ending = threading.Event()
        self.by_s: float | None = None
        self.exit_code: int | None = None
        self.saving: Saver | None = None
        self.agreement: Agreement | None = None
        self.notices = Notices(settings.signals, self._on_signal)
        self._hints = _Hints(self, on_hint, settings.spool if os.environ.get("LOCAL_RANK", "0") == "0" else None)
        self._cloud_watch = None
        if settings.cloud is not None:
            self._cloud_watch = CloudWatch(
                settings.cloud, on_reclaim=self._on_reclaim, on_hint=self._hints.take, on_withdrawn=self._on_withdrawn
            )

    @property
    def source(self) -> str:
        """Return the name of the cloud that announces reclaims, else of the agent."""
        return self._settings.cloud.name if self._settings.cloud else "the agent"

    def left_s(self, otherwise_s: float) -> float:
        """Return the seconds until this rank has to end."""
        return otherwise_s if self.by_s is None else max(0.0, self.by_s - time.monotonic())

    def report(self, how: str, exit_code: int) -> None:
        """Report how this rank leaves; the first report stands."""
        with self._lock:
            if self.exit_code is None:
                self.exit_code = exit_code
                self._reporter.left(how, self._timer.step)

    def report_notice(self, *, durable: bool) -> None:
        """Report that it leaves on a notice; with 0 under torchrun, which takes any other code for a failure."""
        done = 0 if self._settings.torchelastic else EXIT_CHECKPOINTED
        self.report(*(("checkpointed", done) if durable else ("aborted", StopError.exit_code)))

    def block_if_ending(self) -> None:
        """Stop the loop's thread once another thread ends the process: before its next step, and before its end."""
        if self._ending.is_set():
            threading.Event().wait()

    def close(self) -> None:
        """Stop listening for notices."""
        if self._cloud_watch is not None:
            self._cloud_watch.close()
        self.notices.close()

    # -- notices, on other threads -------------------------------------------------------------------------

    def notice(self, what: str, left_s: float, *, machine_stays: bool = True) -> None:
        """Take a notice: this rank is killed in `left_s` seconds. A later one counts only if it leaves less time."""
        margin_s = min(MARGIN_S_MAX, left_s / 10)
        first = self.by_s is None
        with self._lock:
            self._machine_stays = self._machine_stays and machine_stays
        if self.within(left_s - margin_s):
            log.info("rank %d: %s, %s to leave", self._rank, what, format_duration(left_s))
        if first:
            self.request()
            self._log_plan()

    def follow(self, left_s: float) -> None:
        """Take the notice of another rank: all ranks have `left_s` seconds."""
        if self.within(left_s):
            self._log_plan()

    def _log_plan(self) -> None:
        if self.saving is not None and self.agreement is not None:
            log.info("rank %d: %s", self._rank, deadline.plan(self._situation(self.saving)).text)

    def request(self) -> None:
        """Ask all ranks to leave at one boundary."""
        if self.agreement is not None:
            beside(partial(self.agreement.request, leave_in_s=self.left_s(self._settings.grace_s)))

    def within(self, left_s: float) -> bool:
        """Set the deadline; return False if the one before is as early."""
        by_s = time.monotonic() + left_s
        with self._lock:
            if self.by_s is not None and by_s >= self.by_s - 0.1:
                return False
            first, self.by_s = self.by_s is None, by_s
        self.notices.at("deadline", by_s, self.abort)
        self.notices.at("turn", time.monotonic(), self._turn)
        if first and self._settings.spool is not None:
            self.notices.at("agent", time.monotonic() + LOOK_S, self._look)
        return True

    def _on_signal(self, number: int) -> None:
        if number == signal.SIGINT and self._is_impatient():
            self._interrupt()
        notice = read_notice(self._settings.spool)
        left_s = self._settings.grace_s if notice is None else notice.left_s()
        stays = notice is None or notice.machine_stays
        self.notice(signal.Signals(number).name, left_s, machine_stays=stays)
        if number == signal.SIGINT and self._rank == 0 and not self._settings.torchelastic:
            log.info("saving, then leaving; Ctrl-C again ends it at once")

    def _is_impatient(self) -> bool:
        """Return whether a person has pressed Ctrl-C again; launchers pass the first one on once more."""
        since_s = time.monotonic() - self.notices.first_s[signal.SIGINT]
        return since_s > REPEATED_S and not self._settings.torchelastic

    def _interrupt(self) -> None:
        """End the process at once, in the middle of a step or a save. Does not return."""
        log.error("rank %d: ends at once, %s", self._rank, goes_on_from(self.saving))
        _kill_workers()
        os._exit(128 + signal.SIGINT)

    def _look(self) -> None:
        """Read the agent's notice again, since the deadline may have moved closer."""
        if (notice := read_notice(self._settings.spool)) is not None:
            self.notice("the agent", notice.left_s(), machine_stays=notice.machine_stays)
        self.notices.at("agent", time.monotonic() + LOOK_S, self._look)

    def _on_reclaim(self, reclaim: Reclaim) -> None:
        self.notice(f"{self.source}: {reclaim.why}", reclaim.left_s(), machine_stays=False)

    def _on_withdrawn(self, reclaim: Reclaim) -> None:
        log.warning("rank %d: %s withdraws its notice (%s); the ranks leave", self._rank, self.source, reclaim.why)

    # -- what is still made durable ------------------------------------------------------------------------

    def _situation(self, saving: Saver, *, at_boundary: bool = False) -> Situation:
        left_s = self.left_s(self._settings.grace_s)
        return saving.situation(self._timer, left_s=left_s, at_boundary=at_boundary, machine_stays=self._machine_stays)

    def decide(self, saving: Saver, agreement: Agreement) -> tuple[Choice, int]:
        """Agree, at the boundary to leave at, on the choice of all ranks and its number of levels."""
        now = self._situation(saving, at_boundary=True)
        plan = deadline.plan(now)
        n_levels = len(now.levels)
        saves = {reach: f"save {reach}" for reach in range(n_levels, 0, -1)}
        tries = {reach: f"try {reach}" for reach in range(1, n_levels + 1)}
        useful = deadline.reaches(now)
        mine = {saves[reach] for reach in useful if deadline.fits(now, reach)}
        if saving.is_coming(now.step, n_levels):
            mine.add(saves[n_levels])  # durable or under way: ranks do not learn of it at the same time
        if now.kept_step == now.step:
            mine.add("kept")
        if deadline.finish_s(now) is not None:
            mine.add("finish")
        else:
            mine |= {tries[reach] for reach in useful}
        options = [*saves.values(), "kept", "finish", *tries.values()]
        chosen = agreement.choose(options, mine, self.left_s(self._settings.grace_s)) or "finish"
        word, _, reach = chosen.partition(" ")
        choice = {"kept": Choice.DURABLE}.get(word) or Choice(word)
        self._decided = choice is not Choice.FINISH
        if self._rank == 0 and chosen != saves[n_levels]:
            log.info(
                "all ranks: %s", plan.text if choice is plan.choice else f"{chosen} (rank 0 alone would: {plan.text})"
            )
        return choice, int(reach or n_levels)

    def _turn(self) -> None:
        """Stop waiting for the boundary when the captures in memory need the remaining time."""
        if self.saving is None or self.by_s is None or self._decided:
            return
        plan = deadline.plan(self._situation(self.saving))
        if plan.turn_s <= 0.0:
            return
        now_s = time.monotonic()
        if self.by_s - now_s > plan.turn_s:
            self.notices.at("turn", self.by_s - plan.turn_s, self._turn)
        elif plan.choice is Choice.SAVE and not self._timer.is_overdue():
            self.notices.at("turn", now_s + TURN_S, self._turn)  # A near level may still get this very step.
        else:
            log.warning("rank %d: not at a boundary in time; uploading the capture in memory", self._rank)
            self.abort()

    def abort(self) -> None:
        """End the process now; the uploader goes on with its save and the captures in memory. Does not return.

        An error on the way, of a full disk or a device, is logged and ignored: nothing else would end the process.
        """
        self._ending.set()
        try:
            self._wind_up()
        except Exception:
            log.exception("rank %d leaves in spite of an error", self._rank)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # Its reader may be gone, or its disk full.
                    stream.flush()
            os._exit(StopError.exit_code if self.exit_code is None else self.exit_code)

    def _wind_up(self) -> None:
        """Report how the rank leaves, and without an agent wait for the uploader.

        An agent lets the uploader finish. Without one, the container or Slurm's step may end with this process.
        """
        with self._lock:
            reported = self.exit_code
        if reported is None:
            self._report_abort()
            if self.agreement is not None:
                beside(self.agreement.abort).join(timeout=0.5)
        _kill_workers()
        if self.saving is not None and self._settings.spool is None:
            most_s = time.monotonic() + RESCUE_S_MAX
            self.saving.leave(lambda: self.left_s(max(0.0, most_s - time.monotonic())))

    def _report_abort(self) -> None:
        timer = self._timer
        if self.agreement is None and self.saving is not None:  # It still reads a checkpoint.
            timer.step = self.saving.kept_step(machine_stays=True)
        kept = self.saving.kept_step(machine_stays=self._machine_stays) if self.saving else 0
        nothing_done = self.agreement is None or (not timer.inside and kept == timer.step)
        durable = self.saving is not None and nothing_done
        if durable:
            log.info("rank %d: leaves before step %d: no work is lost", self._rank, timer.step)
        else:
            where = f"in step {timer.step}" if timer.inside else f"before step {timer.step}"
            log.error("rank %d: leaves %s; durable: %s", self._rank, where, durable_name(self.saving))
        self.report_notice(durable=durable)


class _Hints:
    """Hints that the machine may go, from the cloud, or from the agent, which asks the cloud for its ranks.

    A hint from the agent waits until there is something to save.
    """

    def __init__(self, rank_exit: RankExit, on_hint: Callable[[], None], spool: Path | None) -> None:
        self._exit, self._on_hint, self._spool = rank_exit, on_hint, spool
        self._newest_us = 0
        if spool is not None:
            rank_exit.notices.at("hint", time.monotonic(), self._look)

    def take(self, hint: Hint) -> None:
        log.warning("%s: %s; saving now, and going on", self._exit.source, hint.why)
        self._on_hint()

    def _look(self) -> None:
        if self._exit.agreement is not None and self._spool is not None:
            at_us, why = read_hint(self._spool) or (0, "")
            if at_us > self._newest_us:
                self._newest_us = at_us
                self.take(Hint(why=why))
        self._exit.notices.at("hint", time.monotonic() + HINT_LOOK_S, self._look)


def _kill_workers() -> None:
    """Kill the workers of data loaders: one that hangs would outlive this process."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def goes_on_from(saving: Saver | None) -> str:
    """Return what is durable and how to go on, for a message to the person who started the script."""
    return f"durable: {durable_name(saving)}; start it again to go on"


def durable_name(saving: Saver | None) -> str:
    """Return the name of the newest durable checkpoint, for a message."""
    newest = saving.checkpointer.newest() if saving else None
    return f"step {newest.step}" if newest else "nothing"


def beside(call: Callable[[], object]) -> threading.Thread:
    """Run a call on a new thread, since a store that hangs must not delay the deadline."""

    def run() -> None:
        try:
            call()
        except (RuntimeError, StopError) as error:
            log.warning("the ranks' store does not answer: %s", error)

    thread = threading.Thread(target=run, name="cordee-request", daemon=True)
    thread.start()
    return thread
