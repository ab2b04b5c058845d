"""Signs of life: each rank writes its own to the store at intervals, and rank 0 reads them all.

From the signs, `stragglers.py` concludes which rank holds the others up. If rank 0 is silent, rank 1 takes over once it
stands still itself.
"""

import json
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING

from cordee.events import Behind
from cordee.train.torch_version import clone_of
from cordee.train.watch import stacks
from cordee.train.watch.findings import Findings
from cordee.train.watch.stragglers import ENDED, Sign, SlowRank, SlowRankDetector, find_stuck

if TYPE_CHECKING:
    from torch.distributed import Store

MISSED_BEATS = 3  # then a rank is silent


class SignExchange:
    """One rank's side of the exchange.

    Args:
        store: the ranks' store, of which it makes a clone of its own.
        sign: returns this rank's sign of life, for a beat.
        limit_s: returns how long a rank may be silent while none is stuck.

    Attributes:
        answered_s: when the store last answered, on time.monotonic().
    """

    def __init__(
        self,
        store: "Store",
        prefix: str,
        *,
        rank: int,
        world_size: int,
        beat_s: float,
        window_s: float,
        findings: Findings,
        sign: Callable[[int], Sign],
        limit_s: Callable[[], float],
    ) -> None:
        self.answered_s = time.monotonic()
        self._store, self._prefix = store, prefix
        self._rank, self._world_size, self._silent_s = rank, world_size, MISSED_BEATS * beat_s
        self._findings, self._sign, self._limit_s = findings, sign, limit_s
        self._beat = self._stuck_beats = 0
        self._beats: dict[int, tuple[int, float]] = {}  # by rank: its newest beat, and when it was first seen
        self._reported: set[int] = set()
        self._slow_ranks = SlowRankDetector(window_s)

    def connect(self) -> None:
        """Clone the store's client, on the thread that is to use it."""
        self._store = clone_of(self._store)

    def beat(self) -> None:
        """Write a sign of life; rank 0 also reads those of all ranks."""
        self._beat += 1
        sign = self._sign(self._beat)
        if sign.stuck:
            self._store.set(self._key("stack", self._rank), json.dumps(stacks.main_stack()))
        self._store.set(self._key("sign", self._rank), json.dumps(asdict(sign)))
        if self._rank == 0 or (self._rank == 1 and sign.stuck):
            self._conclude(self._read(), time.monotonic())
        self.answered_s = time.monotonic()

    def leave(self) -> None:
        """Write that this rank has ended, so that no rank reports it as silent."""
        self._store.set(self._key("sign", self._rank), json.dumps(asdict(self._sign(ENDED))))

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"

    def _read(self) -> dict[int, Sign]:
        store, keys = self._store, {rank: self._key("sign", rank) for rank in range(self._world_size)}
        if not store.check(list(keys.values())):  # some rank has not begun: a get would wait for it
            keys = {rank: key for rank, key in keys.items() if store.check([key])}
        values = store.multi_get(list(keys.values())) if store.has_extended_api() else map(store.get, keys.values())
        return {rank: Sign(**json.loads(value)) for rank, value in zip(keys, values, strict=True)}

    def _conclude(self, signs: dict[int, Sign], now_s: float) -> None:
        for rank, sign in signs.items():
            if rank not in self._beats or self._beats[rank][0] != sign.beat:
                self._beats[rank] = (sign.beat, now_s)
        ages = {rank: now_s - at_s for rank, (beat, at_s) in self._beats.items() if beat != ENDED}
        silent = {rank: age_s for rank, age_s in ages.items() if age_s > self._silent_s}
        if self._rank == 1 and 0 not in silent:
            return
        self._stuck_beats = self._stuck_beats + 1 if any(sign.stuck for sign in signs.values()) else 0
        long_silent = {rank: age_s for rank, age_s in silent.items() if age_s > self._limit_s()}
        if self._stuck_beats > MISSED_BEATS and not self._reported:
            self._report_stuck(signs, find_stuck(signs, silent), silent)
        elif not self._stuck_beats and long_silent and not self._reported:
            self._report_stuck(signs, find_stuck(signs, long_silent), long_silent)
        elif not self._stuck_beats and not silent:
            for rank in self._reported:
                self._findings.recovered(rank, signs[rank].step)
            self._reported = set()
            self._report_slow(self._slow_ranks.look(signs), signs)

    def _report_stuck(self, signs: dict[int, Sign], found: list[tuple[int, Behind]], silent: dict[int, float]) -> None:
        rank, how = found[0]
        self._reported = {rank}
        sign, where, stack = signs[rank], "", []
        if how is Behind.SILENT:
            here = sign.host == socket.gethostname()
            where = stacks.state_of(sign.pid) if here else f"process {sign.pid} on {sign.host}"
        elif self._store.check([self._key("stack", rank)]):
            where, stack = json.loads(self._store.get(self._key("stack", rank)))
        if len(found) > 1:
            where += f", as have {len(found) - 1} other ranks"
        still_s = max(sign.still_s + silent.get(rank, 0.0), 0.0)
        self._findings.stuck(rank, how, sign.step, still_s, where=where, stack=tuple(stack))

    def _report_slow(self, slow: SlowRank | None, signs: dict[int, Sign]) -> None:
        if slow is None:
            return
        step = signs[slow.rank].step
        if slow.waited:
            self._findings.slow(slow.rank, step, slow.waited)
        else:
            self._findings.recovered(slow.rank, step)
