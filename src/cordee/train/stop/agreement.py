"""Agreeing on one future step without a collective: the pledge protocol.

Each rank counts the steps it has begun. When a round is opened, a watcher thread of every rank publishes that count
as its pledge; the largest pledge is the step at which all ranks meet, to save or to leave. Nobody has begun that step,
and everybody runs every step below it, so each collective and each send in those steps finds its peer. The loop itself
never talks to the store. What happens at the agreed step is for `job.py`, which numbers the boundaries between steps in
its own way: a "step" here is such a number.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import Any

from cordee.errors import StopError
from cordee.train.torch_version import clone_of

log = logging.getLogger("cordee")

_FOREVER = timedelta(days=1)  # a wait is repeated when it runs out, so this only bounds how often


class BoundaryAction(StrEnum):
    """What a rank does at a step boundary."""

    BEGIN = "begin"  # the step
    SAVE = "save"  # all ranks are at this boundary: save, conclude() and ask again
    LEAVE = "leave"  # all ranks are at this boundary: save and leave


@dataclass(frozen=True, slots=True)
class _Agreed:
    step: int
    verdict: BoundaryAction


class Agreement:
    """The step at which the ranks of a gang meet next, one round after the other.

    A round is opened by `request` on any rank and any thread. The keys of round k, under `<prefix>/<k>/`: `open`
    (the request that did), `wake/<rank>`, `pledge/<rank>`, `pledged` (a count) and `step`, the decision, set once by
    compare-and-set. `<prefix>/leave` says that the gang has to leave, and in how many seconds.

    Args:
        first_step: the number of the first boundary, or less.
        store: a torch.distributed store. It is cloned twice, for the watcher and for all other threads, since a
            waiting client blocks whoever else uses it; at the start, since connecting can be slow (a name server).
        on_leave: called by the watcher with the seconds that are left, when another rank was given notice.
        on_abort: called by the watcher when the ranks did not agree in time; it does not return.
        undecided_s: after this time a round that was opened to save is called off.
    """

    def __init__(
        self,
        *,
        first_step: int,
        rank: int = 0,
        world_size: int = 1,
        store: Any = None,
        prefix: str = "stop/0",
        on_leave: Callable[[float], None] = lambda left_s: None,
        on_abort: Callable[[], None] = lambda: None,
        undecided_s: float = 60.0,
    ) -> None:
        assert world_size == 1 or store is not None, "several ranks agree through a store"
        self._rank, self._world, self._prefix = rank, world_size, prefix
        self._on_leave, self._on_abort, self._undecided_s = on_leave, on_abort, undecided_s
        self._changed = threading.Condition()
        self._begun = first_step
        self._pledge: int | None = None
        self._agreed: _Agreed | None = None
        self._round = 0
        self._leaving = False
        self._closed = False
        self.held_s_max = 0.0
        self._requests = itertools.count()
        if world_size > 1:
            # Here and not in the watcher: a rank that began its steps before it could pledge would hold all others.
            waiting, self._calls = clone_of(store), clone_of(store)
            self._watcher = threading.Thread(target=self._watch, args=(waiting,), name="cordee-stop", daemon=True)
            self._watcher.start()

    # -- the loop's side -----------------------------------------------------------------------------------

    def at(self, number: int) -> BoundaryAction:
        """What to do at this boundary; waits only between this rank's pledge and the decision.

        All ranks pass the same ones in the same order. Their numbers grow and may leave gaps: the ranks meet at the
        first boundary that is not below what they agreed on.
        """
        with self._changed:
            if self._agreed is None and self._pledge is not None and number >= self._pledge:
                self._hold(number)
            agreed = self._agreed
            if agreed is not None and number >= agreed.step:
                return agreed.verdict
            self._begun = max(self._begun, number + 1)
            return BoundaryAction.BEGIN

    def _hold(self, number: int) -> None:
        started = time.monotonic()
        while self._agreed is None and self._pledge is not None and number >= self._pledge:
            self._changed.wait()
        self.held_s_max = max(self.held_s_max, time.monotonic() - started)

    def conclude(self) -> None:
        """This rank has saved at the agreed step: the next round may begin."""
        with self._changed:
            self._pledge = None
            alone = self._world == 1 and self._leaving  # a notice that came during the save
            self._agreed = _Agreed(self._begun, BoundaryAction.LEAVE) if alone else None
            self._round += 1
            self._changed.notify_all()

    def choose(self, options: Sequence[str], mine: Collection[str], timeout_s: float) -> str | None:
        """At the boundary to leave at: the first option that every rank accepts.

        None: there is no such option, or some rank has not come in time.
        """
        if self._world == 1:
            return next((option for option in options if option in mine), None)
        for option in options:
            if option not in mine:
                self._calls.add(f"{self._prefix}/veto/{option}", 1)
        if not self._meet("choose", timeout_s):
            return None
        return next((each for each in options if not self._calls.check([f"{self._prefix}/veto/{each}"])), None)

    def is_leaving(self) -> bool:
        """Whether any rank was asked to leave, also if this one has not been told yet."""
        if self._world == 1 or self._leaving:
            return self._leaving
        try:
            return bool(self._calls.check([f"{self._prefix}/leave"]))
        except RuntimeError:
            return False  # the store is gone with its host, and nobody knows

    @property
    def begun(self) -> int:
        """The number of steps begun, those before this attempt included."""
        return self._begun

    # -- any thread ----------------------------------------------------------------------------------------

    def request(self, *, leave_in_s: float | None = None) -> None:
        """Open a round: to leave within some seconds, or without them to save and go on."""
        leave = leave_in_s is not None
        if self._world == 1:
            self._request_alone(leave)
            return
        with self._changed:
            if self._closed or self._leaving or (not leave and self._pledge is not None):
                return  # a round is under way and will do what is asked for
            self._leaving = leave
            number = self._round
        store = self._calls
        if leave:
            store.compare_set(f"{self._prefix}/leave", "", f"{leave_in_s:.3f}")
        # A round that another rank has opened may have been decided, to save, just before `leave` was set. Then the
        # one after it is opened too. If this one does end with leaving, the next is never looked at.
        while not self._open(store, number) and leave:
            number += 1

    def _request_alone(self, leave: bool) -> None:
        with self._changed:
            self._leaving = self._leaving or leave
            verdict = BoundaryAction.LEAVE if self._leaving else BoundaryAction.SAVE
            step = self._agreed.step if self._agreed else self._begun
            self._agreed = _Agreed(step, verdict)

    def _open(self, store: Any, number: int) -> bool:
        """Whether it was this request that opened the round; only then it wakes the ranks."""
        me = f"{self._rank}.{next(self._requests)}"
        if store.compare_set(f"{self._prefix}/{number}/open", "", me) != me.encode():
            return False
        keys = [f"{self._prefix}/{number}/wake/{rank}" for rank in range(self._world)]
        if store.has_extended_api():
            store.multi_set(keys, ["1"] * len(keys))
        else:
            for key in keys:
                store.set(key, "1")
        return True

    def abort(self) -> None:
        """The deadline has passed: no step of this round may be agreed on any more."""
        if self._world > 1:
            self._calls.compare_set(f"{self._prefix}/{self._round}/step", "", "abort")

    def count_out(self, timeout_s: float | None = None) -> None:
        """Leave with all ranks: nobody misses a pledge, and the store's host, rank 0, goes last.

        Raises:
            StopError: others had not come when the time ran out.
        """
        if self._world == 1:
            self.close()
            return
        complete = self._meet("out", timeout_s)
        self.close()
        if self._meet("last", timeout_s, waits=self._rank == 0) and complete:
            return
        raise StopError(f"rank {self._rank} waited {timeout_s:.0f} s for the other ranks to leave")

    def _meet(self, name: str, timeout_s: float | None, *, waits: bool = True) -> bool:
        store, key = self._calls, f"{self._prefix}/{name}"
        if store.add(key, 1) == self._world:
            store.set(f"{key}/all", "1")
        until = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = 0.001
        while waits and not store.check([f"{key}/all"]):
            if until is not None and time.monotonic() > until:
                return False
            time.sleep(pause_s)  # not a wait in the store: a notice may have to be passed on meanwhile
            pause_s = min(0.05, 2 * pause_s)
        return True

    def close(self) -> None:
        """End the watcher. A rank that closes inside a round calls it off, so that no peer waits for it."""
        with self._changed:
            self._closed = True
            inside = self._pledge is not None and self._agreed is None
            number = self._round
            self._changed.notify_all()
        if self._world == 1:
            return
        try:
            store = self._calls
            store.set(f"{self._prefix}/{number}/wake/{self._rank}", "1")
            if inside:
                store.compare_set(f"{self._prefix}/{number}/step", "", "abort" if self._leaving else "off")
        except RuntimeError as error:
            log.debug("the store was gone before the watcher ended: %s", error)
        self._watcher.join(timeout=5.0)

    # -- the watcher ---------------------------------------------------------------------------------------

    def _watch(self, store: Any) -> None:
        try:
            while self._watch_round(store, self._round):
                pass
        except Exception as error:
            if not self._closed:
                log.warning("rank %d lost the ranks' store, no notice can be agreed on: %s", self._rank, error)
            with self._changed:
                if self._agreed is None:
                    self._call_off()

    def _watch_round(self, store: Any, number: int) -> bool:
        key = f"{self._prefix}/{number}"
        _wait(store, f"{key}/wake/{self._rank}", None)
        self._learn_of_leaving(store)
        with self._changed:
            if self._closed:
                return False
            pledge = self._pledge = self._begun
        store.set(f"{key}/pledge/{self._rank}", str(pledge))
        if store.add(f"{key}/pledged", 1) == self._world:
            self._decide(store, key)
        # A round to leave is ended by its deadline, which every rank keeps for itself.
        if not _wait(store, f"{key}/step", None if self._leaving else self._undecided_s):
            store.compare_set(f"{key}/step", "", "off")
        return self._take(store, store.get(f"{key}/step").decode())

    def _learn_of_leaving(self, store: Any) -> None:
        key = f"{self._prefix}/leave"
        if not self._closed and store.check([key]):
            self._leaving = True
            self._on_leave(float(store.get(key)))

    def _decide(self, store: Any, key: str) -> None:
        pledges = [int(store.get(f"{key}/pledge/{rank}")) for rank in range(self._world)]
        verdict = BoundaryAction.LEAVE if store.check([f"{self._prefix}/leave"]) else BoundaryAction.SAVE
        store.compare_set(f"{key}/step", "", f"{max(pledges)} {verdict}")

    def _take(self, store: Any, decision: str) -> bool:
        """Tell the loop; True if another round may follow."""
        if decision == "abort":
            if not self._closed:
                self._on_abort()
            return False
        if decision == "off":
            log.warning("the ranks did not agree on a step to save at within %.0f s; going on", self._undecided_s)
            with self._changed:
                self._call_off()
                self._round += 1
                return not self._closed
        step, verdict = decision.split()
        if verdict == BoundaryAction.LEAVE and not self._leaving:
            self._learn_of_leaving(store)
        with self._changed:
            self._agreed = _Agreed(int(step), BoundaryAction(verdict))
            self._changed.notify_all()
            while self._agreed is not None and not self._closed:
                self._changed.wait()
            return not self._closed

    def _call_off(self) -> None:
        self._agreed = self._pledge = None
        self._changed.notify_all()


def _wait(store: Any, key: str, timeout_s: float | None) -> bool:
    """Wait for the key, without end if no time is given; False when the time is up."""
    from torch.distributed import DistStoreError

    until = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        left = _FOREVER if until is None else timedelta(seconds=max(0.001, until - time.monotonic()))
        try:
            store.wait([key], left)
            return True
        except DistStoreError:
            if until is not None and time.monotonic() >= until:
                return False
