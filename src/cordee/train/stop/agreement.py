"""Agree on one future step without a collective: the pledge protocol.

Each rank counts the steps it has begun. When a round is opened, a watcher thread of every rank publishes that count
as its pledge; the largest pledge is the step at which all ranks meet, to save or to leave. No rank has begun that step,
and every rank runs every step below it, so each collective and each send in those steps finds its peer. The loop itself
never uses the store. `job.py` saves or leaves at the agreed step. It numbers the boundaries between steps in its own
way: a "step" here is such a number.
"""

import itertools
import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING

from cordee.errors import StopError
from cordee.train.torch_version import clone_of

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger("cordee")

_FOREVER = timedelta(days=1)  # repeated when it runs out


class BoundaryAction(StrEnum):
    """The action of a rank at a step boundary."""

    BEGIN = "begin"  # the step
    SAVE = "save"  # all ranks are at this boundary: save, conclude() and ask again
    LEAVE = "leave"  # all ranks are at this boundary: save and leave


@dataclass(frozen=True, slots=True)
class _Agreed:
    step: int
    action: BoundaryAction


class Agreement:
    """The step at which the ranks of a gang meet next, round by round.

    `request` opens a round, on any rank and any thread.

    Args:
        first_step: the number of the first boundary, or a lower one.
        store: a torch.distributed store; None with one rank.
        on_leave: called by the watcher with the seconds left, when another rank has had a notice.
        on_abort: called by the watcher when the ranks did not agree in time; it does not return.
        undecided_s: time after which a round to save is called off.
    """

    def __init__(
        self,
        *,
        first_step: int,
        rank: int = 0,
        world_size: int = 1,
        store: "Store | None" = None,
        prefix: str = "stop/0",
        on_leave: Callable[[float], None] = lambda left_s: None,
        on_abort: Callable[[], None] = lambda: None,
        undecided_s: float = 60.0,
    ) -> None:
        assert world_size == 1 or store is not None, "several ranks agree through a store"
        self._on_leave, self._on_abort, self._undecided_s = on_leave, on_abort, undecided_s
        self._changed = threading.Condition()
        self._begun = first_step
        self._pledge: int | None = None
        self._agreed: _Agreed | None = None
        self._round = 0
        self._leaving = False
        self._closed = False
        self.held_s_max = 0.0
        self._gang: _GangStore | None = None
        if world_size > 1:
            # Not in the watcher: a rank that begins its steps before it can pledge would hold up all others.
            self._gang = _GangStore(store, prefix, rank, world_size)
            self._watcher = threading.Thread(target=self._watch, args=(self._gang,), name="cordee-stop", daemon=True)
            self._watcher.start()

    # -- the loop's side -----------------------------------------------------------------------------------

    def at(self, number: int) -> BoundaryAction:
        """Return what to do at this boundary; wait only between this rank's pledge and the decision.

        All ranks pass the same boundaries in the same order. Their numbers grow, with gaps: the ranks meet at the first
        boundary that is not below the agreed number.
        """
        with self._changed:
            if self._agreed is None and self._pledge is not None and number >= self._pledge:
                self._await_decision(number)
            agreed = self._agreed
            if agreed is not None and number >= agreed.step:
                return agreed.action
            self._begun = max(self._begun, number + 1)
            return BoundaryAction.BEGIN

    def await_request(self, timeout_s: float) -> bool:
        """Wait until the ranks are asked to save or to leave; return False if the time runs out."""
        with self._changed:
            return self._changed.wait_for(lambda: self._pledge is not None or self._agreed is not None, timeout_s)

    def _await_decision(self, number: int) -> None:
        started = time.monotonic()
        while self._agreed is None and self._pledge is not None and number >= self._pledge:
            self._changed.wait()
        self.held_s_max = max(self.held_s_max, time.monotonic() - started)

    def conclude(self) -> None:
        """Allow the next round: this rank has saved at the agreed step."""
        with self._changed:
            self._pledge = None
            alone = self._gang is None and self._leaving  # a notice that came during the save
            self._agreed = _Agreed(self._begun, BoundaryAction.LEAVE) if alone else None
            self._round += 1
            self._changed.notify_all()

    def choose(self, options: Sequence[str], mine: Collection[str], timeout_s: float) -> str | None:
        """Return, at the boundary to leave at, the first option that every rank accepts.

        Return None if there is no such option, or a rank did not come in time.
        """
        gang = self._gang
        if gang is None:
            return next((option for option in options if option in mine), None)
        for option in options:
            if option not in mine:
                gang.add(f"veto/{option}")
        if not gang.meet("choose", timeout_s):
            return None
        return next((each for each in options if not gang.has(f"veto/{each}")), None)

    def is_leaving(self) -> bool:
        """Return whether any rank was asked to leave, even if this one does not know it yet."""
        if self._gang is None or self._leaving:
            return self._leaving
        try:
            return self._gang.has("leave")
        except RuntimeError:
            return False  # the store is gone with its host

    @property
    def begun(self) -> int:
        """Return the number of steps begun, those before this attempt included."""
        return self._begun

    # -- any thread ----------------------------------------------------------------------------------------

    def request(self, *, leave_in_s: float | None = None) -> None:
        """Open a round: to leave within `leave_in_s` seconds, or, if that is None, to save and go on."""
        leave = leave_in_s is not None
        if self._gang is None:
            self._request_alone(leave)
            return
        with self._changed:
            if self._closed or self._leaving or (not leave and self._pledge is not None):
                return  # a round is under way and will do what is asked for
            self._leaving = leave
            number = self._round
        if leave:
            self._gang.set_once("leave", f"{leave_in_s:.3f}")
        # Another rank's round may have been decided, to save, just before `leave` was set: open the next one too.
        # If this round ends with leaving after all, nobody reads the next one.
        while not self._gang.open_round(number) and leave:
            number += 1

    def _request_alone(self, leave: bool) -> None:
        with self._changed:
            self._leaving = self._leaving or leave
            action = BoundaryAction.LEAVE if self._leaving else BoundaryAction.SAVE
            step = self._agreed.step if self._agreed else self._begun
            self._agreed = _Agreed(step, action)
            self._changed.notify_all()

    def abort(self) -> None:
        """End this round without a step: the deadline has passed."""
        if self._gang is not None:
            self._gang.set_once(f"{self._round}/step", "abort")

    def count_out(self, timeout_s: float | None = None) -> None:
        """Leave with all ranks: no pledge is missing, and the store's host, rank 0, goes last.

        Raises:
            StopError: the time ran out before all others came.
        """
        gang = self._gang
        if gang is None:
            self.close()
            return
        complete = gang.meet("out", timeout_s)
        self.close()
        if gang.meet("last", timeout_s, waits=gang.rank == 0) and complete:
            return
        raise StopError(f"rank {gang.rank} waited {timeout_s:.0f} s for the other ranks to leave")

    def close(self) -> None:
        """End the watcher. A rank that closes inside a round calls it off, so that no peer waits for it."""
        with self._changed:
            self._closed = True
            inside = self._pledge is not None and self._agreed is None
            number = self._round
            self._changed.notify_all()
        if self._gang is None:
            return
        try:
            self._gang.wake(number)
            if inside:
                self._gang.set_once(f"{number}/step", "abort" if self._leaving else "off")
        except RuntimeError as error:
            log.debug("the store was gone before the watcher ended: %s", error)
        self._watcher.join(timeout=5.0)

    # -- the watcher ---------------------------------------------------------------------------------------

    def _watch(self, gang: "_GangStore") -> None:
        try:
            while self._watch_round(gang, self._round):
                pass
        except Exception as error:
            if not self._closed:
                log.warning(
                    "rank %d lost the ranks' store, so the ranks cannot agree on a notice: %s", gang.rank, error
                )
            with self._changed:
                if self._agreed is None:
                    self._call_off()

    def _watch_round(self, gang: "_GangStore", number: int) -> bool:
        waiting = gang.waiting
        waiting.wait(f"{number}/wake/{gang.rank}", None)
        self._learn_of_leaving(waiting)
        with self._changed:
            if self._closed:
                return False
            pledge = self._pledge = self._begun
            self._changed.notify_all()
        waiting.set(f"{number}/pledge/{gang.rank}", str(pledge))
        if waiting.add(f"{number}/pledged") == gang.world_size:
            self._decide(waiting, number, gang.world_size)
        # The deadline, which every rank keeps for itself, ends a round to leave.
        if not waiting.wait(f"{number}/step", None if self._leaving else self._undecided_s):
            waiting.set_once(f"{number}/step", "off")
        return self._take(waiting, waiting.get(f"{number}/step"))

    def _learn_of_leaving(self, store: "_Keys") -> None:
        if not self._closed and store.has("leave"):
            self._leaving = True
            self._on_leave(float(store.get("leave")))

    def _decide(self, store: "_Keys", number: int, world_size: int) -> None:
        pledges = [int(store.get(f"{number}/pledge/{rank}")) for rank in range(world_size)]
        action = BoundaryAction.LEAVE if store.has("leave") else BoundaryAction.SAVE
        store.set_once(f"{number}/step", f"{max(pledges)} {action}")

    def _take(self, store: "_Keys", decision: str) -> bool:
        """Pass the decision to the loop; return whether another round may follow."""
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
        step, action = decision.split()
        if action == BoundaryAction.LEAVE and not self._leaving:
            self._learn_of_leaving(store)
        with self._changed:
            self._agreed = _Agreed(int(step), BoundaryAction(action))
            self._changed.notify_all()
            while self._agreed is not None and not self._closed:
                self._changed.wait()
            return not self._closed

    def _call_off(self) -> None:
        self._agreed = self._pledge = None
        self._changed.notify_all()


class _Keys:
    """One client of the ranks' store, with all keys below one prefix."""

    def __init__(self, store: "Store", prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def has(self, key: str) -> bool:
        return bool(self._store.check([f"{self._prefix}/{key}"]))

    def get(self, key: str) -> str:
        value: str = self._store.get(f"{self._prefix}/{key}").decode()
        return value

    def set(self, key: str, value: str) -> None:
        self._store.set(f"{self._prefix}/{key}", value)

    def set_all(self, keys: Sequence[str], value: str) -> None:
        if self._store.has_extended_api():
            self._store.multi_set([f"{self._prefix}/{key}" for key in keys], [value] * len(keys))
        else:
            for key in keys:
                self.set(key, value)

    def set_once(self, key: str, value: str) -> bool:
        """Set a key atomically if it is not set; return whether it has this value."""
        found: bytes = self._store.compare_set(f"{self._prefix}/{key}", "", value)
        return found == value.encode()

    def add(self, key: str) -> int:
        return int(self._store.add(f"{self._prefix}/{key}", 1))

    def wait(self, key: str, timeout_s: float | None) -> bool:
        """Wait for the key, without limit if `timeout_s` is None; return whether it is there."""
        from torch.distributed import DistStoreError

        until = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = _FOREVER if until is None else timedelta(seconds=max(0.001, until - time.monotonic()))
            try:
                self._store.wait([f"{self._prefix}/{key}"], left)
                return True
            except DistStoreError:
                if until is not None and time.monotonic() >= until:
                    return False


class _GangStore(_Keys):
    """The gang's keys, for one rank.

    Keys of round k: `<k>/open` (the request that opened it), `<k>/wake/<rank>`, `<k>/pledge/<rank>`, `<k>/pledged`
    (a count) and `<k>/step`, the decision, set once. `leave` holds the seconds within which the gang has to leave.

    It clones the store twice, for the watcher (`waiting`) and for all other threads, since a waiting client blocks its
    other users. It does so at the start, since connecting can be slow (name servers).
    """

    def __init__(self, store: "Store", prefix: str, rank: int, world_size: int) -> None:
        self.waiting = _Keys(clone_of(store), prefix)
        super().__init__(clone_of(store), prefix)
        self.rank, self.world_size = rank, world_size
        self._requests = itertools.count()

    def open_round(self, number: int) -> bool:
        """Open a round and wake all ranks; return False if it is open already."""
        if not self.set_once(f"{number}/open", f"{self.rank}.{next(self._requests)}"):
            return False
        self.set_all([f"{number}/wake/{rank}" for rank in range(self.world_size)], "1")
        return True

    def wake(self, number: int) -> None:
        """Wake this rank's own watcher."""
        self.set(f"{number}/wake/{self.rank}", "1")

    def meet(self, name: str, timeout_s: float | None, *, waits: bool = True) -> bool:
        """Count this rank in and wait for all others; return False if the time runs out."""
        if self.add(name) == self.world_size:
            self.set(f"{name}/all", "1")
        until = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = 0.001
        while waits and not self.has(f"{name}/all"):
            if until is not None and time.monotonic() > until:
                return False
            time.sleep(pause_s)  # not a wait in the store: a notice may have to be passed on meanwhile
            pause_s = min(0.05, 2 * pause_s)
        return True
