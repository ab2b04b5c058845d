"""Watching a rank from beside its loop: does it go on, and does it keep the others waiting?

The loop is asked for nothing: one thread looks at its step count, and at torch's own count of collectives begun and
ended. Another thread passes a sign of life to the ranks' store now and then; rank 0 reads them all and says who holds
the others up (`stragglers.py`), with that rank's stack (`stacks.py`). No collective, and nothing in a step.
"""

import faulthandler
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from cordee.events import Behind
from cordee.train.report import Reporter
from cordee.train.settings import Settings
from cordee.train.step_timer import StepTimer
from cordee.train.torch_version import clone_of
from cordee.train.watch import stacks
from cordee.train.watch.collectives import CollectiveCounter
from cordee.train.watch.stragglers import ENDED, Sign, SlowRank, SlowRankDetector, who_stands
from cordee.units import format_duration

log = logging.getLogger("cordee")

LOOK_S = 0.05  # between two looks at the collectives, where they have to be looked at
BEAT_S_MAX = 6.0  # between two signs of life
BEATS_PER_S_MAX = 2000  # that all ranks together send to the store
MISSED_BEATS = 3  # then a rank is silent
USUAL_STEPS = 10  # so many of them are no hang
FIRST_STEP = 10  # times the limit: the first one may compile


class RankWatch:
    """Of one rank, from its first step on.

    Args:
        store: the ranks' store, of which it makes a clone of its own; None with one rank.
        on_hung: ends the process, so that the gang starts again; called with the seconds that it stood still.
    """

    def __init__(
        self,
        told: Settings,
        *,
        rank: int,
        world_size: int,
        store: Any,
        prefix: str,
        pace: StepTimer,
        reporter: Reporter,
        on_hung: Callable[[float], None],
    ) -> None:
        self.rank, self.world_size, self.prefix = rank, world_size, prefix
        self._store, self._pace, self.reporter, self._on_hung = store, pace, reporter, on_hung
        self._flight, self._restart_s = told.spool, told.hang_restart_s
        self.report_s = told.hang_report_s if self._restart_s is None else min(told.hang_report_s, self._restart_s / 2)
        self.beat_s = max(min(BEAT_S_MAX, self.report_s / 10), world_size / BEATS_PER_S_MAX)
        self._collectives = CollectiveCounter() if world_size > 1 else None
        self._on = self._lives = False
        self._closed = threading.Event()
        self._longest_pause_s = 0.0  # that ended: an evaluation, a compilation
        self._at = pace.step
        self._went_on_s = self._answered_s = time.monotonic()
        self._stuck = False
        self._alone = self.world_size == 1  # nobody else can be asked, or told that the store does not answer
        self._renew_at_s = 0.0
        self._threads = [threading.Thread(target=self._watch, name="cordee-watch", daemon=True)]
        if world_size > 1:
            self._threads.append(threading.Thread(target=self._exchange, name="cordee-beat", daemon=True))
        for thread in self._threads:
            thread.start()

    def on(self) -> None:
        """The loop begins."""
        self._at, self._went_on_s, self._on = self._pace.step, time.monotonic(), True
        self._renew(self._went_on_s)

    def alive(self) -> None:
        """The loop goes on within a step: what is done there takes long, and hangs nowhere."""
        self._lives = True

    def off(self) -> None:
        """The loop is over: what follows may take as long as it likes."""
        self._on = False

    def close(self) -> None:
        """End the threads. A store that does not answer is not waited for."""
        self._on = False
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        for thread in self._threads:
            thread.join(timeout=2.0)

    # -- this rank ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        sees = self._collectives is not None and self._collectives.sees
        look_s = min(LOOK_S, self.report_s / 600) if sees else min(1.0, self.beat_s)
        while not self._closed.wait(look_s):
            now_s = time.monotonic()
            if self._collectives is not None:
                self._collectives.look(now_s)
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        if now_s >= self._renew_at_s:
            self._renew(now_s)
        step = self._pace.step
        if step != self._at or not self._on or self._lives:
            self._lives = False
            self._goes_on(step, now_s)
            return
        still_s = now_s - self._went_on_s
        if not self._stuck and still_s >= self.limit_s():
            self._stuck = True
            self.reporter.stalled(still_s)
            stacks.keep_flight_record(self._flight, self.rank)
            if self.world_size == 1:
                where, stack = stacks.main_stack()
                self.tell(self.rank, Behind.STUCK, step, still_s, where=where, stack=stack)
        if self._stuck and not self._alone and now_s - self._answered_s > self.limit_s():
            self._alone = True
            log.warning("rank %d stands still in step %d, and the ranks' store does not answer", self.rank, step)
            if self.rank == 1:
                self.reporter.behind(0, Behind.SILENT, step, still_s, where="nor does the store, which it may host")
        if self._restart_s is not None and still_s >= self._restart_s:
            self._on_hung(still_s)

    def _renew(self, now_s: float) -> None:
        # Prints all stacks if the watching thread is not let in, since another one keeps the interpreter to itself.
        stacks.dump_unless_renewed(self.report_s)
        self._renew_at_s = now_s + self.report_s / 4

    def _goes_on(self, step: int, now_s: float) -> None:
        if self._stuck:
            self._stuck, self._alone = False, self.world_size == 1
            pause_s = now_s - self._went_on_s
            self._longest_pause_s = max(self._longest_pause_s, pause_s)
            if self.world_size == 1:
                self.over(self.rank, step)
        self._at, self._went_on_s = step, now_s

    def limit_s(self) -> float:
        """How long this rank may stand still: several of its usual steps, and twice any pause that did end."""
        usual_s = self._pace.step_s()
        if usual_s is None:
            return FIRST_STEP * self.report_s
        return max(self.report_s, USUAL_STEPS * usual_s, 2 * self._longest_pause_s)

    # -- all ranks ---------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        gang = _SignExchange(self)
        try:
            store = clone_of(self._store)
            while not self._closed.wait(self.beat_s):
                gang.beat(store)
                self._answered_s = time.monotonic()
            gang.leave(store)
        except RuntimeError as error:  # of torch's stores: the host is gone
            if not self._closed.is_set():
                log.debug("rank %d lost the ranks' store, nobody watches the others: %s", self.rank, error)

    def sign(self, beat: int) -> Sign:
        """This rank's, now."""
        seen = self._collectives
        assert seen is not None, "one rank alone gives no signs"
        return Sign(
            beat=beat,
            step=self._at,
            still_s=time.monotonic() - self._went_on_s,
            stuck=self._stuck,
            waits=seen.waits,
            begun=seen.begun,
            waited_s=seen.waited_s,
            watched_s=seen.watched_s if self._on else 0.0,
            host=socket.gethostname(),
            pid=os.getpid(),
        )

    def tell(self, rank: int, how: Behind, step: int, still_s: float, *, where: str, stack: tuple[str, ...]) -> None:
        does = "has not answered" if how is Behind.SILENT else "has stood still"
        lines = "".join(f"\n    {line}" for line in stack)
        for line in stacks.other_threads() if rank == self.rank else ():
            lines += f"\n    thread {line}"
        since = format_duration(still_s)
        place = f", {where}" if where else ""
        last = "last seen" if how is Behind.SILENT else "and is"
        log.warning("rank %d %s for %s, %s in step %d%s%s", rank, does, since, last, step, place, lines)
        self.reporter.behind(rank, how, step, still_s, where=where, stack=stack)

    def over(self, rank: int, step: int) -> None:
        log.warning("rank %d goes on, in step %d", rank, step)
        self.reporter.behind(rank, Behind.OVER, step, 0.0)


class _SignExchange:
    """What one rank passes on, and, where it is rank 0, what it makes of all the others' signs.

    If rank 0 is silent, rank 1 takes its place, once it stands still itself.
    """

    def __init__(self, watch: RankWatch) -> None:
        self._watch, self._rank, self._world = watch, watch.rank, watch.world_size
        self._beat = self._stuck_beats = 0
        self._beats: dict[int, tuple[int, float]] = {}  # of each rank: its newest beat, and when it was new
        self._told: set[int] = set()
        self._slowness = SlowRankDetector(watch.report_s / 6)

    def _key(self, name: str, rank: int) -> str:
        return f"{self._watch.prefix}/{name}/{rank}"

    def beat(self, store: Any) -> None:
        self._beat += 1
        sign = self._watch.sign(self._beat)
        if sign.stuck:
            store.set(self._key("stack", self._rank), json.dumps(stacks.main_stack()))
        store.set(self._key("sign", self._rank), json.dumps(asdict(sign)))
        if self._rank == 0 or (self._rank == 1 and sign.stuck):
            self._conclude(store, self._read(store), time.monotonic())

    def leave(self, store: Any) -> None:
        store.set(self._key("sign", self._rank), json.dumps(asdict(self._watch.sign(ENDED))))

    def _read(self, store: Any) -> dict[int, Sign]:
        keys = {rank: self._key("sign", rank) for rank in range(self._world)}
        if not store.check(list(keys.values())):  # some rank has not begun: a get would wait for it
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        values = store.multi_get(list(keys.values())) if store.has_extended_api() else map(store.get, keys.values())
        return {rank: Sign(**json.loads(value)) for rank, value in zip(keys, values, strict=True)}

    def _conclude(self, store: Any, signs: dict[int, Sign], now_s: float) -> None:
        for rank, sign in signs.items():
            if rank not in self._beats or self._beats[rank][0] != sign.beat:
                self._beats[rank] = (sign.beat, now_s)
        patience_s = MISSED_BEATS * self._watch.beat_s
        ages = {rank: now_s - at_s for rank, (beat, at_s) in self._beats.items() if beat != ENDED}
        silent = {rank: age_s for rank, age_s in ages.items() if age_s > patience_s}
        if self._rank == 1 and 0 not in silent:
            return
        self._stuck_beats = self._stuck_beats + 1 if any(sign.stuck for sign in signs.values()) else 0
        long_silent = {rank: age_s for rank, age_s in silent.items() if age_s > self._watch.limit_s()}
        if self._stuck_beats > MISSED_BEATS and not self._told:
            self._tell(store, signs, who_stands(signs, silent), silent)
        elif not self._stuck_beats and long_silent and not self._told:
            self._tell(store, signs, who_stands(signs, long_silent), long_silent)
        elif not self._stuck_beats and not silent:
            for rank in self._told:
                self._watch.over(rank, signs[rank].step)
            self._told = set()
            self._tell_slow(self._slowness.look(signs), signs)

    def _tell(
        self, store: Any, signs: dict[int, Sign], found: list[tuple[int, Behind]], silent: dict[int, float]
    ) -> None:
        rank, how = found[0]
        self._told = {rank}
        sign, where, stack = signs[rank], "", []
        if how is Behind.SILENT:
            here = sign.host == socket.gethostname()
            where = stacks.state_of(sign.pid) if here else f"process {sign.pid} on {sign.host}"
        elif store.check([self._key("stack", rank)]):
            where, stack = json.loads(store.get(self._key("stack", rank)))
        if len(found) > 1:
            where += f", as have {len(found) - 1} other ranks"
        still_s = max(sign.still_s + silent.get(rank, 0.0), 0.0)
        self._watch.tell(rank, how, sign.step, still_s, where=where, stack=tuple(stack))

    def _tell_slow(self, slow: SlowRank | None, signs: dict[int, Sign]) -> None:
        if slow is None:
            return
        step = signs[slow.rank].step
        if not slow.waited:
            self._watch.over(slow.rank, step)
            return
        log.warning("rank %d is slow: the others wait for it %.0f %% of the time", slow.rank, 100 * slow.waited)
        self._watch.reporter.behind(slow.rank, Behind.SLOW, step, 0.0, waited=slow.waited)
