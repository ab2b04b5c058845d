"""The latency of a workload, from the profile of both stages: the pipelines' own decisions, played over its arrivals.

And with it the search for what lies in memory: slots of the engine with their KV cache, or partitions.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, gcd, log
from statistics import mean

from cordee.serve.policy.generation import knee, seconds_at
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
        load_s: of a partition of no size.
        search_s: of a partition for one query, and of each further one in the same batch.
        generation_s: of one answer, by the number at once.
        embed_s: of a question.
        engine_bytes: of the engine without KV cache.
        slot_bytes: of one slot's KV cache.
        process_bytes: of our own process without partitions.
    """

    load_bytes_per_s: float
    load_s: float
    search_s: tuple[float, float]
    generation_s: Mapping[int, float]
    embed_s: float = 0.0
    engine_bytes: int = 0
    slot_bytes: int = 0
    process_bytes: int = 0

    def loading_s(self, size_bytes: int) -> float:
        """Return the seconds in which a partition of this size is loaded."""
        return self.load_s + size_bytes / self.load_bytes_per_s

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
        pinned: partitions that stay in memory.
        latency_s: expected, on average.
        tried: slots that fit, each with its expected latency.
    """

    slots: int
    engine_bytes: int
    partition_bytes: int
    process_bytes: int
    pinned: int
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
        setup = RagSetup(sizes, min(left, sum(sizes.values())), knee(profile.generation_s, number))
        latency = mean(each.total_s for each in forecast(profile, setup, arrivals_s, wanted))
        pinned = len(to_pin(sizes, {}, left))
        found.append(MemoryPlan(number, engine, setup.memory_bytes, profile.process_bytes, pinned, latency, ()))
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
    if not arrivals_s:
        return []
    every = frozenset(setup.sizes)
    played = _Retrieval(profile, setup)
    times = played.play([(at + profile.embed_s, (wanted[n] if wanted else every)) for n, at in enumerate(arrivals_s)])
    begun = _generation(profile.generation_s, setup.at_once, [end for _, end in times])
    return [
        AnswerLatency(start - at - profile.embed_s + first - end, profile.embed_s + end - start, last - first)
        for at, (start, end), (first, last) in zip(arrivals_s, times, begun, strict=True)
    ]


class _Retrieval:
    """One loader and one searcher, and the queries that wait for them."""

    def __init__(self, profile: RagProfile, setup: RagSetup) -> None:
        self._profile, self._setup, rules = profile, setup, setup.rules
        self._pinned = to_pin(setup.sizes, {}, setup.memory_bytes) if rules.pin else frozenset[int]()
        self._resident: dict[int, int] = dict.fromkeys(sorted(self._pinned), 0)  # by last search
        self._waiting: dict[int, WaitingQuery] = {}
        self._later: dict[int, WaitingQuery] = {}  # those that do not join a scan that goes on
        self._times: dict[int, tuple[float, float]] = {}
        self._events: list[tuple[float, int, str, int]] = []
        self._loading: int | None = None
        self._searching: int | None = None
        self._batch: list[int] = []

    def play(self, queries: Sequence[tuple[float, frozenset[int]]]) -> list[tuple[float, float]]:
        """Return when the retrieval of each query began and ended."""
        for number, (at, _) in enumerate(queries):
            heapq.heappush(self._events, (at, number, "comes", number))
        while self._events:
            now, _, kind, number = heapq.heappop(self._events)
            if kind == "comes":
                self._come(now, number, queries[number][1])
            elif kind == "loaded":
                self._resident[number], self._loading = round(now * 1e6), None
            else:
                self._searched(now)
            self._go_on(now)
        return [self._times[number] for number in range(len(queries))]

    def _come(self, now: float, number: int, wants: frozenset[int]) -> None:
        each = WaitingQuery(round(now * 1e6), wants)
        self._times[number] = (now, now)
        if self._setup.rules.join or not self._waiting:
            self._waiting[number] = each
        else:
            self._later[number] = each

    def _searched(self, now: float) -> None:
        assert self._searching is not None, "it was searched"
        self._resident[self._searching] = round(now * 1e6)
        for number in self._batch:
            left = self._waiting[number].wants - {self._searching}
            if left:
                self._waiting[number] = replace(self._waiting[number], wants=left)
            else:
                del self._waiting[number]
                self._times[number] = (self._times[number][0], now)
        self._searching = None
        if not self._waiting and self._later:
            self._waiting, self._later = self._later, {}
            self._times |= dict.fromkeys(self._waiting, (now, now))

    def _go_on(self, now: float) -> None:
        rules, waiting = self._setup.rules, self._waiting
        if self._searching is None:
            partition = next_search(waiting.values(), self._resident, self._pinned)
            if partition is not None and not (not rules.prefetch and self._loading is not None):
                self._searching = partition
                self._batch = batch_of(waiting, partition, None if rules.together else 1)
                took = self._profile.searching_s(len(self._batch))
                heapq.heappush(self._events, (now + took, 1 << 40, "searched", partition))
        if self._loading is None and (rules.prefetch or self._searching is None):
            self._load(now)

    def _load(self, now: float) -> None:
        sizes, resident = self._setup.sizes, self._resident
        partition = next_load(round(now * 1e6), self._waiting.values(), resident, self._setup.rules)
        if partition is None:
            return
        while sum(sizes[each] for each in resident) + sizes[partition] > self._setup.memory_bytes:
            idle = {each: at for each, at in resident.items() if each != self._searching}
            leaves = to_release(self._waiting.values(), idle, self._pinned)
            if leaves is None:
                return  # A search has to end first.
            del resident[leaves]
        self._loading = partition
        heapq.heappush(self._events, (now + self._profile.loading_s(sizes[partition]), 1 << 41, "loaded", partition))


def _generation(seconds: Mapping[int, float], most: int, ready_s: Sequence[float]) -> list[tuple[float, float]]:
    """Return when each answer began and ended: `most` at once, all of them as fast as the table says for so many."""
    order = sorted(range(len(ready_s)), key=lambda number: (ready_s[number], number))
    times: dict[int, tuple[float, float]] = {}
    running: dict[int, float] = {}  # work left, in parts of a request
    now, waiting = 0.0, list(reversed(order))
    while waiting or running:
        while waiting and len(running) < most and ready_s[waiting[-1]] <= now:
            number = waiting.pop()
            running[number] = 1.0
            times[number] = (now, now)
        ahead = ready_s[waiting[-1]] if waiting and len(running) < most else None
        if not running:
            assert ahead is not None, "one is still to come"
            now = max(now, ahead)
            continue
        each_s = seconds_at(seconds, len(running))
        end = now + min(running.values()) * each_s
        until = end if ahead is None else min(end, max(now, ahead))
        for number in list(running):
            running[number] -= (until - now) / each_s
            if running[number] <= 1e-9:
                del running[number]
                times[number] = (times[number][0], until)
        now = until
    return [times[number] for number in range(len(ready_s))]


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
