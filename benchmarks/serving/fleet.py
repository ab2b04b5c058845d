"""Replicas in simulated time behind the gateway's own policy code: what the router, the fair queue and admission do.

A replica works in steps, as vLLM does: each running answer gets a token, and the rest of the step's tokens are chunks
of prompts in their order. A step takes a fixed time, and a time for each prompt token, running answer and token of
context. Its prefix cache is a least-recently-used one of blocks, which the router does not see.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from cordee.serve.policy.admit import Capacity
from cordee.serve.policy.dispatch import Ask, Dispatcher, Tenants, Ticket
from cordee.serve.policy.limits import Prices
from cordee.serve.policy.refusal import Refusal
from cordee.serve.policy.route import Choice, ReplicaLoad, RouteRequest
from cordee.workload.requests import Request

CHUNK_TOKENS = 8192


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Microseconds of a step; the defaults are those of an 8B model in bf16 on one H100, rounded."""

    fixed_us: float = 6_000.0
    prompt_token_us: float = 55.0
    answer_us: float = 20.0
    context_token_us: float = 0.05


@dataclass(slots=True, eq=False)
class Played:
    """One request and what became of it; times in microseconds."""

    request: Request
    tenant: str = "all"
    session: str = ""
    ticket: Ticket | None = None
    arrival_us: int = 0
    start_us: int = -1
    first_us: int = -1
    end_us: int = -1
    cached_blocks: int = 0
    replica: str = ""
    left_tokens: int = 0
    retries: int = 0


class Replica:
    """One engine."""

    def __init__(self, name: str, blocks: int, times: StepTimes) -> None:
        self.name, self.blocks, self.times = name, blocks, times
        self.held: OrderedDict[int, None] = OrderedDict()
        self.prompts: deque[Played] = deque()
        self.ends: list[tuple[int, int, Played]] = []
        self.number = self.step = 0
        self.context = 0.0
        self.miss_tokens = self.requests = 0
        self.busy = self.dead = False

    def begin(self, played: Played) -> None:
        """Take a request; look its prompt up."""
        blocks = played.request.blocks
        matched = 0
        while matched < len(blocks) and blocks[matched] in self.held:
            matched += 1
        for block in reversed(blocks):
            self.held[block] = None
            self.held.move_to_end(block)
        while len(self.held) > self.blocks:
            self.held.popitem(last=False)
        played.cached_blocks = matched
        cached = min(matched * played.request.block_tokens, played.request.input_tokens - 1)
        played.left_tokens = played.request.input_tokens - cached
        self.miss_tokens += played.left_tokens
        self.requests += 1
        self.prompts.append(played)

    def work(self) -> tuple[int, list[Played], list[Played]]:
        """Take one step: its microseconds, the requests whose first token it gives, and those whose last."""
        answers = len(self.ends)
        budget = left = max(1, CHUNK_TOKENS - answers)
        first: list[Played] = []
        while self.prompts and left:
            played = self.prompts[0]
            new = min(left, played.left_tokens)
            played.left_tokens -= new
            left -= new
            if played.left_tokens == 0:
                first.append(self.prompts.popleft())
        times = self.times
        took = times.fixed_us + times.prompt_token_us * (budget - left) + times.answer_us * answers
        took += times.context_token_us * self.context
        self.step += 1
        self.context += answers
        last: list[Played] = []
        while self.ends and self.ends[0][0] <= self.step:
            played = heappop(self.ends)[2]
            self.context -= played.request.tokens
            last.append(played)
        for played in first:
            if played.request.output_tokens <= 1:
                last.append(played)
                continue
            self.number += 1
            heappush(self.ends, (self.step + played.request.output_tokens - 1, self.number, played))
            self.context += played.request.input_tokens + 1
        return int(took), first, last

    @property
    def idle(self) -> bool:
        """Whether it has nothing to do."""
        return not self.prompts and not self.ends


@dataclass
class Fleet:
    """Replicas, the dispatcher before them, and the clock."""

    replicas: Mapping[str, Replica]
    dispatcher: Dispatcher
    now_us: int = 0
    done: list[Played] = field(default_factory=list)
    refused: list[tuple[Played, Refusal]] = field(default_factory=list)
    on_end: Callable[[Played], None] | None = None
    _events: list[tuple[int, int, Callable[[], None]]] = field(default_factory=list)
    _number: int = 0

    def at(self, at_us: int, act: Callable[[], None]) -> None:
        """Do something at a time."""
        self._number += 1
        heappush(self._events, (at_us, self._number, act))

    def send(self, played: Played) -> None:
        """Bring a request to the gateway now."""
        request = played.request
        played.arrival_us = self.now_us
        ask = Ask(
            played.tenant, request.input_tokens, request.output_tokens, request.blocks, played.session, item=played
        )
        ticket = self.dispatcher.submit(ask, self.now_us)
        if isinstance(ticket, Refusal):
            self.refused.append((played, ticket))
            return
        played.ticket = ticket
        self._dispatch()

    def run(self, until_us: int | None = None) -> None:
        """Let time pass until nothing is left to do."""
        while self._events and (until_us is None or self._events[0][0] <= until_us):
            self.now_us, _, act = heappop(self._events)
            act()

    def _dispatch(self) -> None:
        for ticket in self.dispatcher.dispatch(self.now_us):
            played = ticket.ask.item
            assert isinstance(played, Played) and ticket.choice is not None
            played.start_us, played.replica = self.now_us, ticket.choice.replica
            replica = self.replicas[ticket.choice.replica]
            replica.begin(played)
            if not replica.busy:
                replica.busy = True
                self._step(replica)

    def _step(self, replica: Replica) -> None:
        if replica.dead:
            return
        if replica.idle:
            replica.busy = False
            return
        took, first, last = replica.work()
        self.at(self.now_us + took, lambda: self._stepped(replica, first, last))

    def _stepped(self, replica: Replica, first: list[Played], last: list[Played]) -> None:
        if replica.dead:
            return
        for played in first:
            played.first_us = self.now_us
            assert played.ticket is not None
            self.dispatcher.first_token(played.ticket)
        for played in last:
            played.end_us = self.now_us
            assert played.ticket is not None
            request = played.request
            cached = min(played.cached_blocks * request.block_tokens, request.input_tokens)
            self.dispatcher.finish(
                played.ticket,
                input_tokens=request.input_tokens,
                cached_tokens=cached,
                output_tokens=request.output_tokens,
            )
            self.done.append(played)
            if self.on_end is not None:
                self.on_end(played)
        if first or last:
            self._dispatch()
        self._step(replica)


def fleet(
    replicas: int,
    *,
    blocks: int,
    capacity: Capacity,
    tenants: Tenants | None = None,
    times: StepTimes | None = None,
    prices: Prices | None = None,
) -> Fleet:
    """Return so many equal replicas with prefix caches of `blocks`."""
    names = [f"r{index}" for index in range(replicas)]
    dispatcher = Dispatcher(
        dict.fromkeys(names, capacity), tenants, prices=prices, cache_blocks=dict.fromkeys(names, blocks)
    )
    return Fleet({name: Replica(name, blocks, times or StepTimes()) for name in names}, dispatcher)


class Baseline:
    """A policy to compare with: it has the router's methods, and takes any replica with room."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.turn = 0
        self.waits = False
        self.caches: dict[str, OrderedDict[int, None]] = {}

    def set_replicas(self, replicas: Mapping[str, int]) -> None:
        """Nothing is kept of a replica."""

    def choose(self, request: RouteRequest, load: Mapping[str, ReplicaLoad], *, wait: bool = True) -> Choice | None:
        """Return the replica that the policy picks among those with room."""
        usable = [name for name, each in load.items() if each.kv_free >= request.kv_tokens and each.slots_free > 0]
        usable = [name for name in usable if load[name].prefill_free > 0]
        if not usable:
            return None
        name = self.pick(request.blocks, list(load), load)
        if name not in usable:
            if wait and self.waits:
                return None
            name = min(usable, key=lambda each: load[each].running)
        self.chosen(name, request.blocks)
        return Choice(name, 0, request.tokens, "baseline")

    def pick(self, blocks: Sequence[int], names: list[str], load: Mapping[str, ReplicaLoad]) -> str:
        """Return the policy's replica, with room or not: round robin."""
        self.turn += 1
        return names[self.turn % len(names)]

    def chosen(self, name: str, blocks: Sequence[int]) -> None:
        """Note where a prompt went."""


class TwoBlockHash(Baseline):
    """The hash of the first two blocks."""

    def pick(self, blocks: Sequence[int], names: list[str], load: Mapping[str, ReplicaLoad]) -> str:
        return names[hash(tuple(blocks[:2])) % len(names)]


class LongestMatch(Baseline):
    """The longest match, of equal ones the least loaded."""

    def pick(self, blocks: Sequence[int], names: list[str], load: Mapping[str, ReplicaLoad]) -> str:
        def matched(name: str) -> int:
            held = self.caches.setdefault(name, OrderedDict())
            count = 0
            while count < len(blocks) and blocks[count] in held:
                count += 1
            return count

        return min(names, key=lambda name: (-matched(name), load[name].running))

    def chosen(self, name: str, blocks: Sequence[int]) -> None:
        held = self.caches.setdefault(name, OrderedDict())
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self.blocks:
            held.popitem(last=False)
