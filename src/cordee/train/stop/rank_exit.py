"""How a rank leaves: the notice, the deadline that follows from it, what is still saved, the record and the exit code.

Notices come from signals, the agent, the cloud and other ranks, on other threads than the loop's. Which boundary the
ranks leave at is agreed on in `agreement.py`; the save there is the loop's. What is here works if the loop never comes
back.
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
from typing import Any

from cordee.errors import EXIT_CHECKPOINTED, StopError
from cordee.storage.rescue import RESCUE_S_MAX
from cordee.telemetry.cloud import CloudWatch, Hint, Reclaim
from cordee.telemetry.notices import read_hint, read_notice
from cordee.train.checkpoint.saving import Saving
from cordee.train.report import Reporter
from cordee.train.settings import Settings
from cordee.train.step_timer import StepTimer
from cordee.train.stop import deadline
from cordee.train.stop.agreement import Agreement
from cordee.train.stop.deadline import Choice, Situation
from cordee.train.stop.notice import Notices
from cordee.units import format_duration

log = logging.getLogger("cordee")

MARGIN_S_MAX = 2.0  # a rank is gone so long before it would be killed, or a tenth of its time if that is less
TURN_S = 0.05  # between two looks whether the step that runs has become overdue
HINT_LOOK_S = 5.0  # as often as the clouds are asked themselves
LOOK_S = 0.5  # between two looks at what the agent tells, once there was a notice


class RankExit:
    """One rank's end.

    Args:
        on_hint: the machine may go soon; nobody has to leave.

    Attributes:
        by_s: until when this rank has to be gone, on time.monotonic(); None without a notice.
        exit_code: once this rank has said how it leaves.
        saving, agreement: set when they are there; a notice may come before.
    """

    def __init__(
        self, told: Settings, rank: int, reporter: Reporter, pace: StepTimer, on_hint: Callable[[], None] = lambda: None
    ) -> None:
        self._told, self._rank, self._reporter, self._pace, self._hinted = told, rank, reporter, pace, on_hint
        self._lock = threading.Lock()
        self._machine_stays = True
        self._decided = False
        self.by_s: float | None = None
        self.exit_code: int | None = None
        self.saving: Saving | None = None
        self.agreement: Agreement | None = None
        self._ending = threading.Event()
        self.notices = Notices(told.signals, self._on_signal)
        self._hinted_us = 0
        if told.spool is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            self.notices.at("hint", time.monotonic(), self._look_for_hint)
        self._watch = None
        if told.cloud is not None:
            self._watch = CloudWatch(
                told.cloud, on_reclaim=self._on_reclaim, on_hint=self._on_hint, on_withdrawn=self._on_withdrawn
            )

    def left_s(self, otherwise_s: float) -> float:
        """Seconds until this rank has to be gone."""
        return otherwise_s if self.by_s is None else max(0.0, self.by_s - time.monotonic())

    def say(self, how: str, exit_code: int) -> None:
        """The record of how this rank leaves; the first stands."""
        with self._lock:
            if self.exit_code is None:
                self.exit_code = exit_code
                self._reporter.left(how, self._pace.step)

    def say_notice(self, *, durable: bool) -> None:
        """It leaves on a notice. torchrun takes any code but 0 for a failure, and exits with 1 itself."""
        done = 0 if self._told.torchelastic else EXIT_CHECKPOINTED
        self.say(*(("checkpointed", done) if durable else ("aborted", StopError.exit_code)))

    def stay(self) -> None:
        """Once another thread ends the process, the loop's goes no further: neither to its next step nor to its end."""
        if self._ending.is_set():
            threading.Event().wait()

    def close(self) -> None:
        """Take no notice any more."""
        if self._watch is not None:
            self._watch.close()
        self.notices.close()

    # -- notices, on other threads -------------------------------------------------------------------------

    def notice(self, what: str, left_s: float, *, machine_stays: bool = True) -> None:
        """This rank is killed after so many seconds. A later notice counts only if it leaves less time."""
        margin_s = min(MARGIN_S_MAX, left_s / 10)
        first = self.by_s is None
        with self._lock:
            self._machine_stays = self._machine_stays and machine_stays
        if self.within(left_s - margin_s):
            log.info("rank %d: %s, %s to leave", self._rank, what, format_duration(left_s))
        if first:
            self.request()
            self._say_plan()

    def follow(self, left_s: float) -> None:
        """Another rank was given notice, and all have so long to be gone."""
        if self.within(left_s):
            self._say_plan()

    def _say_plan(self) -> None:
        if self.saving is not None and self.agreement is not None:
            log.info("rank %d: %s", self._rank, deadline.plan(self._situation(self.saving)).says)

    def request(self) -> None:
        """Ask all ranks to leave at one boundary."""
        if self.agreement is not None:
            beside(partial(self.agreement.request, leave_in_s=self.left_s(self._told.grace_s)))

    def within(self, left_s: float) -> bool:
        """This rank has to be gone after so many seconds; False if it had no more before."""
        by_s = time.monotonic() + left_s
        with self._lock:
            if self.by_s is not None and by_s >= self.by_s - 0.1:
                return False
            first, self.by_s = self.by_s is None, by_s
        self.notices.at("deadline", by_s, self.abort)
        self.notices.at("turn", time.monotonic(), self._turn)
        if first and self._told.spool is not None:
            self.notices.at("agent", time.monotonic() + LOOK_S, self._look)
        return True

    def _on_signal(self, number: int) -> None:
        told = read_notice(self._told.spool)
        left_s = self._told.grace_s if told is None else told.left_s()
        stays = told is None or told.machine_stays
        self.notice(signal.Signals(number).name, left_s, machine_stays=stays)

    def _look(self) -> None:
        """The agent may have been told that there is less time."""
        if (told := read_notice(self._told.spool)) is not None:
            self.notice("the agent", told.left_s(), machine_stays=told.machine_stays)
        self.notices.at("agent", time.monotonic() + LOOK_S, self._look)

    def _on_reclaim(self, reclaim: Reclaim) -> None:
        self.notice(f"{self._cloud()}: {reclaim.why}", reclaim.left_s(), machine_stays=False)

    def _on_hint(self, hint: Hint) -> None:
        log.warning("rank %d: %s: %s; saving now, and going on", self._rank, self._cloud(), hint.why)
        self._hinted()

    def _look_for_hint(self) -> None:
        """The agent asks the cloud for its ranks. A hint that comes before there is anything to save waits."""
        if self.agreement is not None and self._told.spool is not None:
            at_us, why = read_hint(self._told.spool) or (0, "")
            if at_us > self._hinted_us:
                self._hinted_us = at_us
                self._on_hint(Hint(why=why))
        self.notices.at("hint", time.monotonic() + HINT_LOOK_S, self._look_for_hint)

    def _on_withdrawn(self, reclaim: Reclaim) -> None:
        log.warning("rank %d: %s takes back its notice (%s); the ranks leave", self._rank, self._cloud(), reclaim.why)

    def _cloud(self) -> str:
        return self._told.cloud.name if self._told.cloud else "the agent"

    # -- what is still made durable ------------------------------------------------------------------------

    def _situation(self, saving: Saving, *, at_boundary: bool = False) -> Situation:
        left_s = self.left_s(self._told.grace_s)
        return saving.situation(self._pace, left_s=left_s, at_boundary=at_boundary, machine_stays=self._machine_stays)

    def decide(self, saving: Saving, agreement: Agreement) -> tuple[Choice, int]:
        """At the boundary to leave at: what all ranks do now, and to how many stores."""
        now = self._situation(saving, at_boundary=True)
        plan = deadline.plan(now)
        n_stores = len(now.stores)
        saves = {reach: f"save {reach}" for reach in range(n_stores, 0, -1)}
        tries = {reach: f"try {reach}" for reach in range(1, n_stores + 1)}
        useful = deadline.reaches(now)
        mine = {saves[reach] for reach in useful if deadline.fits(now, reach)}
        if saving.is_coming(now.step, n_stores):
            mine.add(saves[n_stores])  # on its way, or there: a rank may know what another one does not yet
        if now.kept_step == now.step:
            mine.add("kept")
        if deadline.finish_s(now) is not None:
            mine.add("finish")
        else:
            mine |= {tries[reach] for reach in useful}
        options = [*saves.values(), "kept", "finish", *tries.values()]
        chosen = agreement.choose(options, mine, self.left_s(self._told.grace_s)) or "finish"
        word, _, reach = chosen.partition(" ")
        choice = {"kept": Choice.DURABLE}.get(word) or Choice(word)
        self._decided = choice is not Choice.FINISH
        if self._rank == 0 and chosen != saves[n_stores]:
            log.info("all ranks: %s", plan.says if choice is plan.choice else f"{chosen} (rank 0 would: {plan.says})")
        return choice, int(reach or n_stores)

    def _turn(self) -> None:
        """What is only held in memory needs the time that is left: wait for the boundary no longer."""
        if self.saving is None or self.by_s is None or self._decided:
            return
        plan = deadline.plan(self._situation(self.saving))
        if plan.turn_s <= 0.0:
            return
        now_s = time.monotonic()
        if self.by_s - now_s > plan.turn_s:
            self.notices.at("turn", self.by_s - plan.turn_s, self._turn)
        elif plan.choice is Choice.SAVE and not self._pace.is_overdue():
            self.notices.at("turn", now_s + TURN_S, self._turn)  # A near store may still have this very step.
        else:
            log.warning("rank %d: not at the boundary; what is held in memory goes to the stores now", self._rank)
            self.abort()

    def abort(self) -> None:
        """Leave on what there is. Does not return; the drain goes on with what it has, and with what is held.

        Whatever raises on the way, a full disk or a device's error: the loop waits already, and this is its only end.
        """
        self._ending.set()
        try:
            self._wind_up()
        except Exception:
            log.exception("rank %d leaves all the same", self._rank)
        finally:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):  # Its reader may be gone, or its disk full.
                    stream.flush()
            os._exit(StopError.exit_code if self.exit_code is None else self.exit_code)

    def _wind_up(self) -> None:
        """What is left to say, and to wait for.

        An agent lets the drain live. Without one, the container or Slurm's step may end with this process: it waits.
        """
        with self._lock:
            said = self.exit_code
        if said is None:
            if self.agreement is None and self.saving is not None:  # It reads a checkpoint still.
                self._pace.step = self.saving.kept_step(machine_stays=True)
            kept = self.saving.kept_step(machine_stays=self._machine_stays) if self.saving else 0
            nothing_done = self.agreement is None or (not self._pace.inside and kept == self._pace.step)
            durable = self.saving is not None and nothing_done
            if durable:
                log.info("rank %d: leaves before step %d, with nothing to lose", self._rank, self._pace.step)
            else:
                where = f"in step {self._pace.step}" if self._pace.inside else f"before step {self._pace.step}"
                log.error("rank %d: leaves %s; durable: %s", self._rank, where, name(self.saving))
            self.say_notice(durable=durable)
            if self.agreement is not None:
                beside(self.agreement.abort).join(timeout=0.5)
        for child in multiprocessing.active_children():
            if child.daemon:  # A data loader's worker: with what hangs in it, it would outlive this process.
                child.kill()
        if self.saving is not None and self._told.spool is None:
            most_s = time.monotonic() + RESCUE_S_MAX
            self.saving.leave(lambda: self.left_s(max(0.0, most_s - time.monotonic())))


def name(saving: Saving | None) -> str:
    """What is durable, in words."""
    newest = saving.checkpointer.newest() if saving else None
    return f"step {newest.step}" if newest else "nothing"


def beside(call: Callable[[], Any]) -> threading.Thread:
    """On a thread of its own: a store that hangs must not hold the deadline up."""

    def run() -> None:
        try:
            call()
        except (RuntimeError, StopError) as error:
            log.warning("the ranks' store does not answer: %s", error)

    thread = threading.Thread(target=run, name="cordee-request", daemon=True)
    thread.start()
    return thread
