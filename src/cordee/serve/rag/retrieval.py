"""Retrieval as a pipeline of its own: one thread loads partitions while another one searches, for all that wait.

The threads do what `policy/retrieval.py` decides; results are merged exactly, whatever the order of the partitions.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace

import numpy as np

from cordee.serve.policy.retrieval import (
    RetrievalRules,
    WaitingQuery,
    batch_of,
    next_load,
    next_search,
    to_pin,
)
from cordee.serve.rag.index import Problem, RagIndex, probed
from cordee.serve.rag.memory import Memory, Throttle
from cordee.serve.rag.merge import BestChunks
from cordee.serve.rag.partition import Vectors
from cordee.storage.sealed import Damaged

LOOK_S = 0.5
"""Between two looks at the catalogue for changes."""
HALF_LIFE_S = 60.0
"""Time in which a partition's popularity halves."""
SLOW = 0.5
"""Fraction of the profiled rate below which the disk is called slow."""

Say = Callable[[str, int | None, int | None, str], None]
"""Report a change: what, before, after, and why."""


@dataclass(frozen=True, slots=True)
class RetrievalSettings:
    """The settings of retrieval.

    Attributes:
        memory_bytes: of the partitions in memory.
        probes: partitions of each query; None: all.
        load_bytes_per_s: limit of reading; None: none.
        expected_bytes_per_s: as profiled; None: not known.
        rules: the parts in use.
    """

    memory_bytes: int
    probes: int | None = None
    load_bytes_per_s: float | None = None
    expected_bytes_per_s: float | None = None
    rules: RetrievalRules = field(default_factory=RetrievalRules)


@dataclass(frozen=True, slots=True)
class Ranked:
    """The best chunks of a query, what was not searched, and when the work for it began and ended (monotonic)."""

    chunks: tuple[tuple[int, float], ...]
    not_searched: tuple[Problem, ...]
    began_s: float
    ended_s: float


@dataclass(slots=True)
class _Query:
    vector: Vectors
    k: int
    best: BestChunks
    done: "Future[Ranked]"
    began_s: float
    not_searched: list[Problem] = field(default_factory=list)


class Popularity:
    """The counts of how often each partition was wanted lately, and those that stay in memory for it."""

    def __init__(self) -> None:
        self.pinned: frozenset[int] = frozenset()
        self._counts: defaultdict[int, float] = defaultdict(float)
        self._faded_s = time.monotonic()

    def count(self, wants: frozenset[int]) -> None:
        """Count a query; earlier ones fade."""
        now = time.monotonic()
        fade = 0.5 ** ((now - self._faded_s) / HALF_LIFE_S)
        self._faded_s = now
        for id_ in self._counts:
            self._counts[id_] *= fade
        for id_ in wants:
            self._counts[id_] += 1.0

    def pin(self, memory: Memory) -> frozenset[int]:
        """Decide what stays in memory."""
        self.pinned = to_pin(memory.sizes, self._counts, memory.limit_bytes, self.pinned)
        return self.pinned


class Retrieval:
    """The pipeline over one index."""

    def __init__(self, index: RagIndex, settings: RetrievalSettings, say: Say = lambda *change: None) -> None:
        self.settings = settings
        self.memory = Memory(index, settings.memory_bytes, Throttle(settings.load_bytes_per_s))
        self.popularity = Popularity()
        self._index, self._say = index, say
        self._turn = threading.Condition()
        self._queries: dict[int, _Query] = {}
        self._waiting: dict[int, WaitingQuery] = {}
        self._later: dict[int, WaitingQuery] = {}
        self._next, self._looked_s = 0, time.monotonic()
        self._stopped = self._slow = False
        self._threads = [threading.Thread(target=each, daemon=True) for each in (self._load_on, self._search_on)]
        self._version = index.catalog.version()
        for each in self._threads:
            each.start()

    @property
    def backlog(self) -> int:
        """Return the number of queries that wait."""
        return len(self._queries)

    def submit(self, vector: Vectors, k: int) -> "Future[Ranked]":
        """Search for one unit vector; other threads do it."""
        future: Future[Ranked] = Future()
        with self._turn:
            self._look()
            now = time.monotonic()
            number, self._next = self._next, self._next + 1
            self._queries[number] = query = _Query(vector, k, BestChunks(k), future, now)
            wants = self._wants(query) if k > 0 else frozenset()
            each = WaitingQuery(round(now * 1e6), wants)
            if self.settings.rules.join or not self._waiting:
                self._waiting[number] = each
            else:
                self._later[number] = each
            self._note(wants)
            if not wants:
                self._finish(number)
            self._turn.notify_all()
        return future

    def stop(self) -> None:
        """End the threads; queries that wait fail."""
        with self._turn:
            self._stopped = True
            self._turn.notify_all()
        for each in self._threads:
            each.join()
        for query in self._queries.values():
            if query.done.set_running_or_notify_cancel():
                query.done.set_exception(RuntimeError("retrieval has ended"))
        self.memory.close()

    # The catalogue, and what is popular.

    def _look(self) -> None:
        """Follow a change of the index: queries that wait begin again over its new partitions."""
        now = time.monotonic()
        if now - self._looked_s < LOOK_S:
            return
        self._looked_s = now
        self.memory.forgive()
        version = self._index.catalog.version()
        if version == self._version:
            return
        self._version, before = version, len(self.memory.partitions)
        self.memory.follow()
        self._say("partitions", before, len(self.memory.partitions), f"the index has changed: version {version}")
        for waiting in (self._waiting, self._later):
            for number, each in waiting.items():
                query = self._queries[number]
                query.best, query.not_searched = BestChunks(query.k), []
                waiting[number] = replace(each, wants=self._wants(query))
        for number in [number for number, each in self._waiting.items() if not each.wants]:
            self._finish(number)

    def _wants(self, query: _Query) -> frozenset[int]:
        """Return the partitions of a query; it notes those that are damaged, and goes without them."""
        partitions = list(self.memory.partitions.values())
        wants = probed(partitions, query.vector[None, :], self.settings.probes)[0]
        query.not_searched += [
            Problem(f"partition {id_}", why) for id_, (why, _) in self.memory.damaged.items() if id_ in wants
        ]
        return frozenset(wants - self.memory.damaged.keys())

    def _note(self, wants: frozenset[int]) -> None:
        """Count what a query wants, and pin what is popular."""
        self.popularity.count(wants)
        if not self.settings.rules.pin:
            return
        before = self.popularity.pinned
        chosen = self.popularity.pin(self.memory)
        if chosen != before:
            new = ", ".join(str(id_) for id_ in sorted(chosen - before)) or "none"
            why = f"queries want some partitions more than others; new: {new}"
            if chosen == self.memory.partitions.keys():
                why = "all partitions fit into memory"
            self._say("pinned", len(before), len(chosen), why)

    # The two threads.

    def _load_on(self) -> None:
        while True:
            with self._turn:
                while (id_ := self._to_load()) is None:
                    if self._stopped:
                        return
                    self._turn.wait()
                partition = self.memory.partitions[id_]
                self.memory.loading = id_
            try:
                mapped = self.memory.load(partition)
            except Damaged as damage:
                with self._turn:
                    self._give_up(id_, str(damage))
                    self._turn.notify_all()
                continue
            with self._turn:
                self.memory.arrived(mapped)
                self._watch_disk()
                self._turn.notify_all()

    def _to_load(self) -> int | None:
        """Return the partition to load now; room is made for it."""
        memory, rules = self.memory, self.settings.rules
        if self._stopped or memory.loading is not None or (not rules.prefetch and memory.in_use is not None):
            return None
        waiting, held = self._waiting.values(), memory.mapped.keys() | memory.damaged.keys()
        if not rules.prefetch and next_search(waiting, memory.mapped, self.popularity.pinned) is not None:
            return None
        found = next_load(time.monotonic_ns() // 1000, waiting, held, rules)
        return found if found is not None and memory.make_room(found, waiting, self.popularity.pinned) else None

    def _search_on(self) -> None:
        while True:
            with self._turn:
                while (id_ := self._to_search()) is None:
                    if self._stopped:
                        return
                    self._turn.wait()
                batch = batch_of(self._waiting, id_, None if self.settings.rules.together else 1)
                self.memory.in_use = id_
                mapped, queries = self.memory.mapped[id_], [self._queries[number] for number in batch]
            vectors = np.stack([each.vector for each in queries])
            try:
                found = mapped.search(vectors, max(each.k for each in queries))
            except Exception as error:  # Of the library: no query may wait for ever.
                with self._turn:
                    self.memory.in_use = None
                    self.memory.close([id_])
                    self._give_up(id_, f"it cannot be searched: {error!r}")
                    self._turn.notify_all()
                continue
            with self._turn:
                self.memory.in_use = None
                self.memory.used_us[id_] = time.monotonic_ns() // 1000
                for row, number in enumerate(batch):
                    if self._queries.get(number) is queries[row] and id_ in self._waiting[number].wants:
                        queries[row].best.add(found.scores[row], found.ids[row])
                        self._searched(number, id_)
                if id_ not in self.memory.partitions:
                    self.memory.close([id_])
                self._turn.notify_all()

    def _to_search(self) -> int | None:
        return (
            None if self._stopped else next_search(self._waiting.values(), self.memory.mapped, self.popularity.pinned)
        )

    def _searched(self, number: int, partition: int) -> None:
        each = self._waiting[number]
        left = each.wants - {partition}
        self._waiting[number] = replace(each, wants=left)
        if not left:
            self._finish(number)

    def _give_up(self, partition: int, why: str) -> None:
        """Let the queries that want a damaged partition go on without it."""
        self.memory.failed(partition, why)
        if partition not in self.memory.partitions:
            return  # The index has changed meanwhile, and the partition is gone.
        self._say("damaged", partition, None, f"partition {partition}: {why}; answers say that it was not searched")
        for waiting in (self._waiting, self._later):
            for number, each in list(waiting.items()):
                if partition in each.wants:
                    self._queries[number].not_searched.append(Problem(f"partition {partition}", why))
                    waiting[number] = replace(each, wants=each.wants - {partition})
                    if not waiting[number].wants:
                        self._finish(number)

    def _finish(self, number: int) -> None:
        query = self._queries.pop(number)
        self._waiting.pop(number, None)
        self._later.pop(number, None)
        ranked = Ranked(tuple(query.best.ranked()), tuple(query.not_searched), query.began_s, time.monotonic())
        if query.done.set_running_or_notify_cancel():
            query.done.set_result(ranked)
        if not self._waiting and self._later:
            self._waiting, self._later = self._later, {}
            for each in self._waiting:
                self._queries[each].began_s = time.monotonic()

    def _watch_disk(self) -> None:
        expected, seen = self.settings.expected_bytes_per_s, self.memory.bytes_per_s
        if expected is None or seen is None:
            return
        if not self._slow and seen < SLOW * expected:
            self._slow = True
            why = (
                f"the disk is slow: partitions come at {seen / 1e6:,.0f} MB/s, and {expected / 1e6:,.0f} were profiled"
            )
            self._say("disk", round(expected), round(seen), why)
        elif self._slow and seen > 0.8 * expected:
            self._slow = False
            self._say("disk", None, round(seen), f"the disk is as fast as profiled again: {seen / 1e6:,.0f} MB/s")
