"""The latency of a workload, from the profile of both stages: the pipelines' own decisions, played over its arrivals.

And with it the search for what lies in memory: slots of the engine with their KV cache, or partitions.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, gcd, log
from statistics import mean

from cordee.serve.policy.retrieval import (
    BUFFERS,
    RetrievalRules,
    WaitingQuery,
    batch_of,
    next_load,
    next_search,
    to_pin,
    to_release,
)

SLOTS = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class RagProfile:
    """Both stages as they were measured on this machine.

    Attributes:
        load_bytes_per_s: of a partition, with its checksum, out of no cache.
        search_s: of a partition for one query, and of each further one in the same batch.
        generation_s: of one answer, by the number at once.
        embed_s: of a question.
        cores: of the processor that both stages have, for all of their work.
        load_cores: that a load uses while it goes on: it reads, copies and checks.
        engine_cores: that the engine and its client use while it answers; 0: it is somebody's, elsewhere.
        engine_bytes: of the engine without KV cache.
        slot_bytes: of one slot's KV cache.
        process_bytes: of our own process without partitions.
    """

    load_bytes_per_s: float
    search_s: tuple[float, float]
    generation_s: Mapping[int, float]
    embed_s: float = 0.0
    cores: float = 1.0
    load_cores: float = 0.0
    engine_cores: float = 0.0
    engine_bytes: int = 0
    slot_bytes: int = 0
    process_bytes: int = 0

    def loading_s(self, size_bytes: int) -> float:
        """Return the seconds in which a partition of this size is loaded."""
        return size_bytes / self.load_bytes_per_s

    def searching_s(self, queries: int) -> float:
        """Return the seconds in which a partition is searched for so many queries."""
        return self.search_s[0] + max(0, queries - 1) * self.search_s[1]


@dataclass(frozen=True, slots=True)
class RagSetup:
    """The setting of the pipelines: `memory_bytes` are those of partitions, pinned and passing ones."""

    sizes: Mapping[int, int]
    memory_bytes: int
    at_once: int
    rules: RetrievalRules = field(default_factory=RetrievalRules)


@dataclass(frozen=True, slots=True)
class AnswerLatency:
    """The seconds of one request: without anything done for it, in retrieval, in generation."""

    wait_s: float
    retrieval_s: float
    generation_s: float

    @property
    def total_s(self) -> float:
        """Return their sum."""
        return self.wait_s + self.retrieval_s + self.generation_s


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The division of a budget, and the mean latency that is expected of it.

    Attributes:
        slots: of the engine.
        engine_bytes, partition_bytes, process_bytes: their parts of the budget.
        latency_s: expected, on average.
        tried: slots that fit, each with its expected latency.
    """

    slots: int
    engine_bytes: int
    partition_bytes: int
    process_bytes: int
    latency_s: float
    tried: tuple[tuple[int, float], ...]


def plan_memory(
    profile: RagProfile,
    sizes: Mapping[int, int],
    budget_bytes: int,
    arrivals_s: Sequence[float],
    wanted: Sequence[frozenset[int]] | None = None,
    slots: Sequence[int] = SLOTS,
) -> MemoryPlan | None:
    """Return the best division of a budget for these arrivals; None: not even the engine and one partition fit.

    Args:
        profile: of both stages.
        sizes: bytes of each partition.
        budget_bytes: of the engine, our process and the partitions.
        arrivals_s: of the requests to plan for.
        wanted: partitions of each request; None: all of them.
        slots: of the engine, those that are tried, ascending.
    """
    found: list[MemoryPlan] = []
    largest = max(sizes.values(), default=0)
    for number in slots:
        engine = profile.engine_bytes + number * profile.slot_bytes
        left = budget_bytes - engine - profile.process_bytes
        buffers = min(BUFFERS, len(sizes))
        if left < min(buffers * largest, sum(sizes.values())) and (found or left < largest):
            break
        setup = RagSetup(sizes, min(left, sum(sizes.values())), number)
        latency = mean(each.total_s for each in forecast(profile, setup, arrivals_s, wanted))
        found.append(MemoryPlan(number, engine, setup.memory_bytes, profile.process_bytes, latency, ()))
    if not found:
        return None
    best = min(found, key=lambda each: (each.latency_s, each.slots))
    return replace(best, tried=tuple((each.slots, each.latency_s) for each in found))


def forecast(
    profile: RagProfile, setup: RagSetup, arrivals_s: Sequence[float], wanted: Sequence[frozenset[int]] | None = None
) -> list[AnswerLatency]:
    """Return the latency of each request of a workload.

    Args:
        profile: of both stages.
        setup: what lies in memory.
        arrivals_s: of the requests, ascending.
        wanted: partitions of each request; None: all of them.
    """
    every = frozenset(setup.sizes)
    retrieval, generation = _Retrieval(profile, setup), _Generation(profile, setup.at_once)
    coming = deque((at + profile.embed_s, number) for number, at in enumerate(arrivals_s))
    now = 0.0
    while True:
        works = [each for each in (retrieval.loading, retrieval.searching, generation.work()) if each is not None]
        speeds = fair_speeds(profile.cores, [each.cores for each in works])
        ends = [now + each.left_s / speed for each, speed in zip(works, speeds, strict=True)]
        if coming:
            ends.append(coming[0][0])
        if not ends:
            break
        before, now = now, max(now, min(ends))
        for each, speed in zip(works, speeds, strict=True):
            each.left_s -= (now - before) * speed
        while coming and coming[0][0] <= now:
            _, number = coming.popleft()
            retrieval.come(now, number, wanted[number] if wanted else every)
        for number in retrieval.go_on(now):
            generation.come(number)
        generation.go_on(now)
    return [
        AnswerLatency(began - at - profile.embed_s + first - end, profile.embed_s + end - began, last - first)
        for at, (began, end), (first, last) in zip(
            arrivals_s, _in_order(retrieval.times), _in_order(generation.times), strict=True
        )
    ]


def fair_speeds(cores: float, wanted: Sequence[float]) -> list[float]:
    """Return the speed of works that run at once, each of which would use so many cores alone: 1 is that of one alone.

    The processor gives each what it wants, and divides evenly what is left between those that want more.

    >>> fair_speeds(1.0, [1.0, 1.0]), fair_speeds(1.0, [0.2, 1.0]), fair_speeds(2.0, [1.0, 1.0])
    ([0.5, 0.5], [1.0, 0.8], [1.0, 1.0])
    """
    left, speeds = cores, [1.0] * len(wanted)
    order = sorted(range(len(wanted)), key=lambda each: wanted[each])
    for number, each in enumerate(order):
        got = min(wanted[each], left / (len(order) - number))
        speeds[each] = got / wanted[each] if wanted[each] else 1.0
        left -= got
    return speeds


def _in_order(times: Mapping[int, tuple[float, float]]) -> list[tuple[float, float]]:
    return [times[number] for number in sorted(times)]


_ENDED_S = 1e-9


@dataclass(slots=True)
class _Work:
    """Work that goes on: its seconds that are left if it were alone, and the cores that it uses then."""

    left_s: float
    cores: float
    partition: int = 0
    queries: tuple[int, ...] = ()


class _Retrieval:
    """One loader and one searcher, and the queries that wait for them."""

    def __init__(self, profile: RagProfile, setup: RagSetup) -> None:
        self.loading: _Work | None = None
        self.searching: _Work | None = None
        self.times: dict[int, tuple[float, float]] = {}
        self._profile, self._setup, rules = profile, setup, setup.rules
        self._pinned = to_pin(setup.sizes, {}, setup.memory_bytes) if rules.pin else frozenset[int]()
        self._resident: dict[int, int] = dict.fromkeys(sorted(self._pinned), 0)  # by last search
        self._waiting: dict[int, WaitingQuery] = {}
        self._later: dict[int, WaitingQuery] = {}  # those that do not join a scan that goes on

    def come(self, now: float, number: int, wants: frozenset[int]) -> None:
        """Take a query."""
        self.times[number] = (now, now)
        into = self._waiting if self._setup.rules.join or not self._waiting else self._later
        into[number] = WaitingQuery(round(now * 1e6), wants)

    def go_on(self, now: float) -> list[int]:
        """End and begin what is due; return the queries that have all that they want."""
        done = [number for number, each in self._waiting.items() if not each.wants]  # Of an index without partitions.
        for number in done:
            del self._waiting[number]
        if self.loading is not None and self.loading.left_s <= _ENDED_S:
            self._resident[self.loading.partition], self.loading = round(now * 1e6), None
        if self.searching is not None and self.searching.left_s <= _ENDED_S:
            done += self._searched(now, self.searching)
            self.searching = None
        if not self._waiting and self._later:
            self._waiting, self._later = self._later, {}
            self.times |= dict.fromkeys(self._waiting, (now, now))
        rules = self._setup.rules
        if self.searching is None and (rules.prefetch or self.loading is None):
            self._search()
        if self.loading is None and (rules.prefetch or self.searching is None):
            self._load(now)
        return done

    def _searched(self, now: float, search: _Work) -> list[int]:
        self._resident[search.partition] = round(now * 1e6)
        done = []
        for number in search.queries:
            left = self._waiting[number].wants - {search.partition}
            if left:
                self._waiting[number] = replace(self._waiting[number], wants=left)
            else:
                del self._waiting[number]
                self.times[number] = (self.times[number][0], now)
                done.append(number)
        return done

    def _search(self) -> None:
        partition = next_search(self._waiting.values(), self._resident, self._pinned)
        if partition is not None:
            batch = batch_of(self._waiting, partition, None if self._setup.rules.together else 1)
            self.searching = _Work(self._profile.searching_s(len(batch)), 1.0, partition, tuple(batch))

    def _load(self, now: float) -> None:
        sizes, resident = self._setup.sizes, self._resident
        partition = next_load(round(now * 1e6), self._waiting.values(), resident, self._setup.rules)
        if partition is None:
            return
        while sum(sizes[each] for each in resident) + sizes[partition] > self._setup.memory_bytes:
            using = self.searching.partition if self.searching is not None else None
            idle = {each: at for each, at in resident.items() if each != using}
            leaves = to_release(self._waiting.values(), idle, self._pinned)
            if leaves is None:
                return  # A search has to end first.
            del resident[leaves]
        self.loading = _Work(self._profile.loading_s(sizes[partition]), self._profile.load_cores, partition)


class _Generation:
    """An engine with so many answers at once, all of them as fast as the table says for so many."""

    def __init__(self, profile: RagProfile, most: int) -> None:
        self.times: dict[int, tuple[float, float]] = {}
        self._profile, self._most = profile, most
        self._waiting = deque[int]()
        self._running: dict[int, float] = {}  # work left, in parts of an answer
        self._work: _Work | None = None

    def work(self) -> _Work | None:
        """Return the work until the next answer is whole."""
        self._work = None
        if self._running:
            self._work = _Work(min(self._running.values()) * self._each_s(), self._profile.engine_cores)
        return self._work

    def come(self, number: int) -> None:
        """Take a query with its passages."""
        self._waiting.append(number)

    def go_on(self, now: float) -> None:
        """Count what was generated since `work`; end and begin what is due."""
        if self._work is not None:
            each_s = self._each_s()
            done = min(self._running.values()) - self._work.left_s / each_s
            self._running = {number: left - done for number, left in self._running.items()}
            for number in [number for number, left in self._running.items() if left * each_s <= _ENDED_S]:
                del self._running[number]
                self.times[number] = (self.times[number][0], now)
        while self._waiting and len(self._running) < self._most:
            number = self._waiting.popleft()
            self._running[number], self.times[number] = 1.0, (now, now)

    def _each_s(self) -> float:
        return seconds_at(self._profile.generation_s, len(self._running))


def seconds_at(seconds: Mapping[int, float], at_once: float) -> float:
    """Return the seconds of one answer when so many run at once: linear between the numbers that were measured.

    >>> seconds_at({1: 1.0, 4: 2.5}, 2), seconds_at({1: 1.0, 4: 2.5}, 8)
    (1.5, 5.0)
    """
    known = sorted(seconds)
    below = max((each for each in known if each <= at_once), default=known[0])
    above = min((each for each in known if each >= at_once), default=known[-1])
    if below == above:
        # Beyond the last one, answers a second grow no more.
        return seconds[below] * (max(1.0, at_once / below) if at_once > known[-1] else 1.0)
    part = (at_once - below) / (above - below)
    return seconds[below] + part * (seconds[above] - seconds[below])


def even_arrivals(rate_per_s: float, number: int) -> list[float]:
    """Return arrivals of a Poisson process without its chance: each gap is a quantile, in an order that mixes them.

    >>> found = even_arrivals(2.0, 1000)
    >>> round(found[-1] / 1000, 2)
    0.5
    """
    step = next(each for each in range(max(2, ceil(0.382 * number)), number + 2) if gcd(each, number) == 1)
    at, found = 0.0, []
    for each in range(number):
        quantile = ((each * step) % number + 0.5) / number
        at += -log(1 - quantile) / rate_per_s
        found.append(at)
    return found
