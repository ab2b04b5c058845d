"""Continuous batching as a sequence of events: a trace of requests in, the times of each answer out.

The rules are vLLM's: a step gives every running answer a token and fills the rest of its tokens with chunks of prompts,
in the order of arrival; when the KV cache is full the youngest answer gives back its blocks and is computed again.
Steps in which nothing begins or ends are taken in one jump, as if their time grew evenly with the context.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import ceil, inf, sqrt
from typing import Protocol

from cordee.plan.serving.queueing.pool import Pool
from cordee.plan.serving.queueing.served import Outcome, Served
from cordee.plan.serving.speed.speculation import Speculation
from cordee.workload.requests import Request


class Steps(Protocol):
    """Step times; see `Speed`."""

    def step_s(
        self, prefill: Sequence[tuple[int, int]], sequences: int = 0, context_tokens: float = 0.0, *, each: int = 1
    ) -> float:
        """Return the seconds of one step."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one replica.

    Attributes:
        max_sequences: concurrent sequences.
        max_batched_tokens: tokens of one step.
        kv_tokens: tokens of the KV cache.
        block_tokens: tokens of one of its blocks.
        max_context_tokens: longest prompt with its answer.
        chunked_prefill: prompts are cut and share steps with answers; otherwise a step has whole prompts or answers.
        prefix_caching: blocks of prompts stay for the next one.
        reserves_output: a request starts only when its whole answer has room, so none is preempted.
    """

    max_sequences: int
    max_batched_tokens: int
    kv_tokens: float
    block_tokens: int = 16
    max_context_tokens: float = inf
    chunked_prefill: bool = True
    prefix_caching: bool = False
    reserves_output: bool = False

    def holds(self, input_tokens: int, output_tokens: int) -> bool:
        """Return whether a request of this length has room in an empty replica."""
        if not self.chunked_prefill and input_tokens > self.max_batched_tokens:
            return False
        if input_tokens + output_tokens > self.max_context_tokens:
            return False
        return input_tokens + output_tokens + (self.block_tokens - 1) / 2 <= self.kv_tokens


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request on its way. `prompt` is what has to be in the cache before the next token."""

    index: int
    request: Request
    prompt: int
    generated: float = 0.0
    computed: int = 0
    cached: int = 0
    shared: tuple[int, ...] = ()
    private: float = 0.0
    first_step: int = 0
    last_step: int = 0
    start_s: float = -1.0
    first_token_s: float = -1.0
    order: int = 0
    runs: bool = False


@dataclass
class _Tally:
    refused: int = 0
    preemptions: int = 0
    busy_s: float = 0.0
    recomputed_tokens: int = 0
    outcomes: dict[int, Outcome] = field(default_factory=dict)


def serve(
    requests: Sequence[Request],
    speed: Steps,
    limits: Limits,
    *,
    speculation: Speculation | None = None,
    prefilled: bool = False,
    jumps: bool = True,
) -> Served:
    """Return what one replica does with a trace of requests.

    Args:
        requests: in the order of arrival.
        speed: step times of the replica.
        limits: of its engine and memory.
        speculation: how tokens are guessed, if they are.
        prefilled: prompts arrive computed, with their first token (the decode side of a disaggregated service).
        jumps: take steps in which nothing begins or ends at once; without it each is taken alone.
    """
    replica = Replica(speed, limits, speculation=speculation, prefilled=prefilled, jumps=jumps)
    for each in requests:
        replica.offer(each)
    replica.run()
    return replica.served


class Replica:
    """One replica in time: requests are offered in the order of arrival, and `run` serves them.

    With requests that are known only later, run it until each of them arrives.
    """

    def __init__(
        self,
        speed: Steps,
        limits: Limits,
        *,
        speculation: Speculation | None = None,
        prefilled: bool = False,
        jumps: bool = True,
    ) -> None:
        self.arrivals: deque[_Sequence] = deque()
        self.offered = 0
        self.speed, self.limits, self.speculation = speed, limits, speculation
        self.prefilled, self.jumps = prefilled, jumps
        self.pool = Pool(limits.kv_tokens, block_tokens=limits.block_tokens, caching=limits.prefix_caching)
        self.waiting: deque[_Sequence] = deque()
        self.filling: list[_Sequence] = []
        self.batch = _Batch(speculation.tokens_per_step if speculation else 1.0, grows=not limits.reserves_output)
        self.tally = _Tally()
        self.now_s = 0.0
        self.until_s = inf
        self.admitted = 0

    @property
    def open(self) -> int:
        """Requests that have arrived and are not answered."""
        return self.offered - len(self.tally.outcomes) - self.tally.refused

    @property
    def served(self) -> Served:
        """The requests that it has answered, so far."""
        done = self.tally
        outcomes = [done.outcomes[index] for index in sorted(done.outcomes)]
        return Served(outcomes, done.refused, done.preemptions, done.busy_s, self.now_s, done.recomputed_tokens)

    def offer(self, request: Request) -> None:
        """Add a request that arrives after all others."""
        self.arrivals.append(_Sequence(self.offered, request, request.input_tokens))
        self.offered += 1

    def run(self, until_s: float = inf) -> None:
        """Serve until no request is left, or until a step ends at `until_s` or after it."""
        self.until_s = until_s
        while self.now_s < until_s and (self.arrivals or self.waiting or self.filling or self.batch.size):
            if not (self.waiting or self.filling or self.batch.size):
                self.now_s = max(self.now_s, self.arrivals[0].request.arrival_s)
            self._receive()
            self._make_room()
            chunks = self._chunks()
            if chunks:
                self._mixed_step(chunks)
            elif self.batch.size:
                self._decode_steps()
            else:
                assert not self.waiting, "an empty replica has room for every request that it accepted"

    def _receive(self) -> None:
        while self.arrivals and self.arrivals[0].request.arrival_s <= self.now_s:
            each = self.arrivals.popleft()
            if self.limits.holds(each.request.input_tokens, each.request.output_tokens):
                self.waiting.append(each)
            else:
                self.tally.refused += 1

    def _make_room(self) -> None:
        """Preempt the youngest answers until the others have room for their next tokens."""
        while not self.limits.reserves_output and self.batch.size and self.pool.free < self.batch.growth:
            youngest = self.batch.pop_youngest()
            self.tally.preemptions += 1
            self._release(youngest)
            youngest.prompt = ceil(youngest.request.input_tokens + youngest.generated)
            youngest.computed = youngest.cached = 0
            self.waiting.appendleft(youngest)

    def _chunks(self) -> list[tuple[_Sequence, int]]:
        """Return the chunks of prompts in the next step, after letting in who has room."""
        answers = self.batch.size * (self.speculation.draft_tokens + 1 if self.speculation else 1)
        mixed = self.limits.chunked_prefill
        budget = self.limits.max_batched_tokens - (answers if mixed else 0)
        chunks: list[tuple[_Sequence, int]] = []
        for each in self.filling:
            new = min(each.prompt - each.computed, budget)
            if new > 0:
                chunks.append((each, new))
                budget -= new
        while self.waiting and len(self.filling) + self.batch.size < self.limits.max_sequences:
            if budget <= 0 or not self._admit(self.waiting[0], budget):
                break
            each = self.waiting.popleft()
            if self.prefilled:
                self._start_answer(each)
                continue
            self.filling.append(each)
            new = min(each.prompt - each.computed, budget if mixed else each.prompt)
            chunks.append((each, new))
            budget -= new
        return chunks

    def _admit(self, each: _Sequence, budget: int) -> bool:
        """Reserve room for a prompt; return whether there was any."""
        request = each.request
        whole = request.blocks[: (each.request.input_tokens - 1) // request.block_tokens]
        hits = whole[: self.pool.matched(whole)] if self.pool.caching else ()
        shared = len(hits) * request.block_tokens
        cached = max(shared, request.cached_tokens)
        alone = budget == self.limits.max_batched_tokens  # a preempted answer may have outgrown a step
        if not (self.limits.chunked_prefill or self.prefilled or alone) and each.prompt - cached > budget:
            return False
        kept = each.request.input_tokens + each.request.output_tokens if self.limits.reserves_output else each.prompt
        # Room for the next step of all, or this prompt would be preempted before it has given a token.
        spare = 0.0 if self.limits.reserves_output or not self.batch.size else self.batch.growth + self.batch.gain
        self.pool.pin(hits)
        if self.pool.free < kept - shared + self.pool.waste + spare:
            self.pool.unpin(hits)
            return False
        self.pool.take(kept - shared + self.pool.waste)
        each.shared, each.private = hits, kept - shared + self.pool.waste
        each.start_s = self.now_s if each.start_s < 0 else each.start_s
        each.computed = each.cached = cached
        each.order, self.admitted = self.admitted, self.admitted + 1
        return True

    def _mixed_step(self, chunks: list[tuple[_Sequence, int]]) -> None:
        answers = self.batch.size if self.limits.chunked_prefill else 0
        prefill = [(new, each.computed) for each, new in chunks]
        self._pass(self._step_s(prefill, answers, self.batch.context if answers else 0.0))
        if answers:
            self._advance(1)
        for each, new in chunks:
            each.computed += new
            if each.generated:
                self.tally.recomputed_tokens += new
            if each.computed >= each.prompt:
                self.filling.remove(each)
                self._start_answer(each)

    def _start_answer(self, each: _Sequence) -> None:
        """Move a sequence whose prompt is in the cache to the answers."""
        if self.pool.caching and not self.prefilled:
            request = each.request
            own = request.blocks[len(each.shared) : request.input_tokens // request.block_tokens]
            self.pool.publish(own, request.block_tokens)
            each.private -= len(own) * request.block_tokens
            each.shared += tuple(own)
        if not each.generated:
            each.first_token_s = self.now_s
            each.generated = 1.0
        if each.generated >= each.request.output_tokens:
            self._finish(each)
        else:
            self.batch.add(each)

    def _decode_steps(self) -> None:
        """Take all steps until an answer ends, a request arrives that could start, or the cache is full."""
        batch = self.batch
        steps = batch.steps_to_end
        if not self.limits.reserves_output:
            steps = max(1, min(steps, int(self.pool.free // batch.growth)))
        now = self._step_s([], batch.size, batch.context)
        if not self.jumps or steps == 1:
            self._pass(now)
            self._advance(1)
            return
        last = self._step_s([], batch.size, batch.context + batch.growth * (steps - 1))
        slope = (last - now) / (steps - 1)
        arrival = self.arrivals[0].request.arrival_s if self.arrivals else self.until_s
        full = self.waiting or batch.size >= self.limits.max_sequences
        if not full:
            steps = int(min(steps, _steps_until(arrival - self.now_s, now, slope)))
        self._pass(steps * now + slope * steps * (steps - 1) / 2)
        self._advance(steps)

    def _step_s(self, prefill: list[tuple[int, int]], sequences: int, context: float) -> float:
        if self.speculation is None:
            return self.speed.step_s(prefill, sequences, context)
        draft = self.speculation.draft_s * self.speculation.draft_tokens if sequences else 0.0
        return draft + self.speed.step_s(prefill, sequences, context, each=self.speculation.draft_tokens + 1)

    def _pass(self, seconds: float) -> None:
        self.now_s += seconds
        self.tally.busy_s += seconds

    def _advance(self, steps: int) -> None:
        if not self.limits.reserves_output:
            self.pool.take(self.batch.growth * steps)
        for each in self.batch.advance(steps):
            self._finish(each)

    def _release(self, each: _Sequence) -> None:
        self.pool.give(each.private)
        self.pool.unpin(each.shared)
        each.shared, each.private = (), 0.0

    def _finish(self, each: _Sequence) -> None:
        self._release(each)
        request = each.request
        waited, first, end = (at - request.arrival_s for at in (each.start_s, each.first_token_s, self.now_s))
        self.tally.outcomes[each.index] = Outcome(
            request.arrival_s, first, end, request.output_tokens, each.cached, waited
        )


class _Batch:
    """The running answers. They advance together, so each is known by the step in which it ends."""

    def __init__(self, gain: float, *, grows: bool) -> None:
        self.gain = gain
        self.grows = grows
        self.size = 0
        self.context = 0.0
        self.step = 0
        self._ends: list[tuple[int, int, _Sequence]] = []
        self._youngest: list[tuple[int, int, _Sequence]] = []

    @property
    def growth(self) -> float:
        """Tokens by which the context grows in a step."""
        return self.size * self.gain

    @property
    def steps_to_end(self) -> int:
        """Steps until the next answer ends."""
        while not _is_current(self._ends[0]):
            heappop(self._ends)
        return self._ends[0][0] - self.step

    def add(self, each: _Sequence) -> None:
        """Let an answer take part from the next step on."""
        each.runs = True
        each.first_step = self.step
        each.last_step = self.step + max(1, ceil((each.request.output_tokens - each.generated) / self.gain - 1e-9))
        self.size += 1
        self.context += each.request.input_tokens + each.generated
        heappush(self._ends, (each.last_step, each.order, each))
        heappush(self._youngest, (-each.order, each.last_step, each))

    def advance(self, steps: int) -> list[_Sequence]:
        """Take steps and return the answers that end with the last of them."""
        self.step += steps
        self.context += self.growth * steps
        ended = []
        while self._ends and self._ends[0][0] <= self.step:
            entry = heappop(self._ends)
            if _is_current(entry):
                self._remove(entry[2])
                ended.append(entry[2])
        return ended

    def pop_youngest(self) -> _Sequence:
        """Remove the answer that was admitted last."""
        while True:
            order, last_step, each = heappop(self._youngest)
            if _is_current((last_step, order, each)):
                self._remove(each)
                return each

    def _remove(self, each: _Sequence) -> None:
        grown = (self.step - each.first_step) * self.gain
        self.size -= 1
        self.context -= each.request.input_tokens + each.generated + grown
        each.runs = False
        each.generated += grown
        each.private += grown * self.grows


def _is_current(entry: tuple[int, int, _Sequence]) -> bool:
    """Return whether an entry of a heap still stands for a running answer."""
    return entry[2].runs and entry[2].last_step == entry[0]


def _steps_until(seconds: float, first_s: float, slope_s: float) -> float:
    """Return how many steps last until so many seconds have passed: the first takes `first_s`, each other more.

    >>> _steps_until(1.0, 0.3, 0.0), _steps_until(1.0, 0.1, 0.1)
    (4, 4)
    """
    if seconds == inf:
        return inf
    if slope_s <= 1e-9 * first_s:
        return max(1, ceil(seconds / first_s - 1e-9))
    # steps x first + slope x steps x (steps - 1) / 2 = seconds
    half = first_s - slope_s / 2
    return max(1, ceil((sqrt(half * half + 2 * slope_s * max(seconds, 0.0)) - half) / slope_s - 1e-9))
