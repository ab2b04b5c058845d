"""Watch a rank from outside its loop: whether it makes progress, and whether the others wait for it.

One thread reads the loop's step count (`loop_progress.py`) and torch's count of collectives (`collectives.py`). Another
thread exchanges signs of life with the other ranks through their store (`exchange.py`); rank 0 concludes which rank
holds the others up (`stragglers.py`), and logs and reports it with that rank's stack (`findings.py`, `stacks.py`). The
watch runs no collective and adds nothing to a step.
"""

import faulthandler
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from cordee.events import Behind
from cordee.train.report import Reporter
from cordee.train.settings import Settings
from cordee.train.step_timer import StepTimer
from cordee.train.watch import stacks
from cordee.train.watch.collectives import CollectiveCounter
from cordee.train.watch.exchange import SignExchange
from cordee.train.watch.findings import Findings
from cordee.train.watch.loop_progress import LoopProgress, Progress
from cordee.train.watch.stragglers import Sign

if TYPE_CHECKING:
    from torch.distributed import Store

log = logging.getLogger("cordee")

LOOK_S = 0.05  # between two looks at the collectives, where they are sampled
BEAT_S_MAX = 6.0  # between two signs of life
BEATS_PER_S_MAX = 2000  # of all ranks together


class RankWatch:
    """The watch of one rank, from its first step on.

    Args:
        store: the ranks' store; None with one rank.
        on_hung: called with the seconds without progress; it ends the process, so that the gang starts again.
    """

    def __init__(
        self,
        settings: Settings,
        *,
        rank: int,
        world_size: int,
        store: "Store | None",
        prefix: str,
        timer: StepTimer,
        reporter: Reporter,
        on_hung: Callable[[float], None],
    ) -> None:
        self._rank, self._on_hung, self._flight_folder = rank, on_hung, settings.spool
        hang = settings.hang
        self._restart_s = hang.restart_s
        self._report_s = hang.report_s if hang.restart_s is None else min(hang.report_s, hang.restart_s / 2)
        self._beat_s = max(min(BEAT_S_MAX, self._report_s / 10), world_size / BEATS_PER_S_MAX)
        self._loop = LoopProgress(timer, self._report_s, time.monotonic())
        self._findings = Findings(rank, reporter)
        self._collectives = CollectiveCounter() if world_size > 1 else None
        self._closed = threading.Event()
        self._renew_at_s = 0.0  # when the dump of all stacks is renewed
        self._store_is_lost = False
        self._exchange: SignExchange | None = None
        self._threads = [threading.Thread(target=self._watch, name="cordee-watch", daemon=True)]
        if world_size > 1:
            self._exchange = SignExchange(
                store,
                prefix,
                rank=rank,
                world_size=world_size,
                beat_s=self._beat_s,
                window_s=self._report_s / 6,
                findings=self._findings,
                sign=self._sign,
                limit_s=self._loop.limit_s,
            )
            thread = threading.Thread(target=self._beat, args=(self._exchange,), name="cordee-beat", daemon=True)
            self._threads.append(thread)
        for thread in self._threads:
            thread.start()

    def begin(self) -> None:
        """Start watching: the loop begins."""
        now_s = time.monotonic()
        self._loop.begin(now_s)
        self._renew(now_s)

    def keep_alive(self) -> None:
        """Count this moment as progress within a step, for long work that does not hang."""
        self._loop.keep_alive()

    def end(self) -> None:
        """Stop watching: the loop is over, and the rest has no limit."""
        self._loop.end()

    def close(self) -> None:
        """End the threads. Do not wait for a store that does not answer."""
        self._loop.end()
        self._closed.set()
        faulthandler.cancel_dump_traceback_later()
        for thread in self._threads:
            thread.join(timeout=2.0)

    # -- this rank -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        sees = self._collectives is not None and self._collectives.sees
        look_s = min(LOOK_S, self._report_s / 600) if sees else min(1.0, self._beat_s)
        while not self._closed.wait(look_s):
            now_s = time.monotonic()
            if self._collectives is not None:
                self._collectives.look(now_s)
            self._look(now_s)

    def _look(self, now_s: float) -> None:
        if now_s >= self._renew_at_s:
            self._renew(now_s)
        loop, found = self._loop, self._loop.look(now_s)
        still_s = loop.still_s(now_s)
        if found is Progress.RECOVERED:
            self._store_is_lost = False
            if self._exchange is None:
                self._findings.recovered(self._rank, loop.step)
        if found in (Progress.RECOVERED, Progress.GOES_ON):
            return
        if found is Progress.BECAME_STUCK:
            self._findings.stalled(still_s)
            stacks.keep_flight_record(self._flight_folder, self._rank)
            if self._exchange is None:
                where, stack = stacks.main_stack()
                self._findings.stuck(self._rank, Behind.STUCK, loop.step, still_s, where=where, stack=stack)
        if loop.stuck and self._exchange is not None and not self._store_is_lost:
            self._store_is_lost = now_s - self._exchange.answered_s > loop.limit_s()
            if self._store_is_lost:
                self._findings.lost_store(loop.step, still_s)
        if self._restart_s is not None and still_s >= self._restart_s:
            self._on_hung(still_s)

    def _renew(self, now_s: float) -> None:
        # Prints all stacks if another thread keeps the interpreter from the watching thread.
        stacks.dump_unless_renewed(self._report_s)
        self._renew_at_s = now_s + self._report_s / 4

    # -- all ranks -----------------------------------------------------------------------------------------

    def _beat(self, exchange: SignExchange) -> None:
        try:
            exchange.connect()
            while not self._closed.wait(self._beat_s):
                exchange.beat()
            exchange.leave()
        except RuntimeError as error:  # of torch's stores: the host is gone
            if not self._closed.is_set():
                log.debug("rank %d lost the ranks' store and watches no other rank: %s", self._rank, error)

    def _sign(self, beat: int) -> Sign:
        seen = self._collectives
        assert seen is not None, "one rank alone gives no signs"
        return Sign(
            beat=beat,
            step=self._loop.step,
            still_s=self._loop.still_s(time.monotonic()),
            stuck=self._loop.stuck,
            waits=seen.waits,
            begun=seen.begun,
            waited_s=seen.waited_s,
            watched_s=seen.watched_s if self._loop.running else 0.0,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
