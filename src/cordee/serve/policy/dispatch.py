"""The decisions about one request, put together: limits, fair queue, admission, route. One dispatcher for each service.

The gateway and the simulator call it in the same order: `submit`, then `dispatch` whenever something has changed, and
for each ticket that it returns `first_token`, and one of `finish`, `retry` or `cancel`. Nothing is called for a token.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

from cordee.serve.policy.admit import BLOCK_TOKENS, Admission, AnswerLengths, Capacity, Reservation
from cordee.serve.policy.fair import FairQueue, Waiting
from cordee.serve.policy.limits import PICO_PER_MICRO, Budget, Prices, RateLimit
from cordee.serve.policy.refusal import Refusal
from cordee.serve.policy.route import Choice, ReplicaLoad, Router, RouteRequest

ROUTE_BLOCK_TOKENS = 512
"""Tokens of one block of the router's model; of text about 2 KiB."""
CACHE_BLOCKS = 8192
"""Blocks that a replica of unknown KV cache is thought to hold."""
WAITING_MAX = 10_000
"""Requests that wait for one service."""
TENANT_WAITING_MAX = 2_000
"""Of one tenant in one priority."""
ACTIVE_US = 60_000_000
"""A tenant that sent nothing for so long has no part that others leave to it."""
LIGHT_WAITING_MAX = 4
"""Waiting requests of a tenant that still counts as light."""
PARTS_MAX = 32
"""Tenants whose weights make up the parts."""
STARTS_MIN = 16
"""Requests that started since the queue was empty, from which the wait of another one is estimated."""


@dataclass(frozen=True, slots=True)
class Tenant:
    """The rules of one tenant.

    Attributes:
        weight: its part of the service against the other tenants' weights, while all of them wait.
        priority: requests of a higher one go first, whatever the weights.
        rate_per_s: requests a second; None: any.
        budget_micro_usd: that it may spend; None: any.
        spent_micro_usd: that the server knows of.
    """

    name: str
    weight: float = 1.0
    priority: int = 0
    rate_per_s: float | None = None
    budget_micro_usd: int | None = None
    spent_micro_usd: int = 0


class Tenants:
    """Rates and budgets of all tenants; the services of one gateway share it."""

    def __init__(self, tenants: Sequence[Tenant] = ()) -> None:
        """Begin with these tenants; others have the default rules."""
        self.rules: dict[str, Tenant] = {}
        self._rates: dict[str, RateLimit] = {}
        self._budgets: dict[str, Budget] = {}
        self.set_tenants(tenants)

    def set_tenants(self, tenants: Sequence[Tenant], unreported_pico_usd: Mapping[str, int] | None = None) -> None:
        """Take over the server's rules; a rate that did not change keeps its level.

        Args:
            tenants: the rules of all.
            unreported_pico_usd: by tenant what it spent here and the server does not know yet.
        """
        self.rules = {each.name: each for each in tenants}
        unreported = unreported_pico_usd or {}
        for each in tenants:
            rate = self._rates.get(each.name)
            if each.rate_per_s is None:
                self._rates.pop(each.name, None)
            elif rate is None or rate.per_s != each.rate_per_s:
                self._rates[each.name] = RateLimit(each.rate_per_s)
            if each.budget_micro_usd is None:
                self._budgets.pop(each.name, None)
                continue
            budget = self._budgets.setdefault(each.name, Budget(each.budget_micro_usd))
            budget.budget_micro_usd = each.budget_micro_usd
            budget.set_spent(each.spent_micro_usd * PICO_PER_MICRO + unreported.get(each.name, 0))

    def get(self, name: str) -> Tenant:
        """Return the rules of a tenant."""
        return self.rules.get(name) or Tenant(name)

    def enter(self, name: str, pico_usd: int, now_us: int) -> Refusal | None:
        """Count a request that can cost so much at most, or refuse it."""
        rate, budget = self._rates.get(name), self._budgets.get(name)
        refusal = rate.take(name, now_us) if rate else None
        return refusal or (budget.hold(name, pico_usd) if budget else None)

    def leave(self, name: str, held_pico_usd: int, spent_pico_usd: int) -> None:
        """Count the end of a request."""
        budget = self._budgets.get(name)
        if budget:
            budget.settle(held_pico_usd, spent_pico_usd)


@dataclass(frozen=True, slots=True)
class Ask:
    """One request.

    Attributes:
        tenant: that sends it.
        prompt_tokens: counted or estimated.
        answer_tokens: the client's limit; None: that of the context.
        blocks: of the prompt, see `prefix_blocks`.
        session: requests of one go to one replica.
        deadline_us: latest time of its start.
        priority: None: the tenant's.
        item: what the caller wants back.
    """

    tenant: str
    prompt_tokens: int
    answer_tokens: int | None = None
    blocks: Sequence[int] = ()
    session: str = ""
    deadline_us: int | None = None
    priority: int | None = None
    item: object = None


@dataclass(slots=True, eq=False)
class Ticket:
    """A request on its way; `Dispatcher` alone changes it.

    Attributes:
        choice: of its replica; None while it waits.
        charged_pico_usd: to its tenant's counter in the queue.
        generated: tokens of the answer on replicas that failed.
        avoid: those replicas.
    """

    ask: Ask
    waiting: Waiting
    limit_tokens: int
    held_pico_usd: int
    choice: Choice | None = None
    reservation: Reservation | None = None
    charged_pico_usd: int = 0
    generated: int = 0
    avoid: frozenset[str] = frozenset()
    open: bool = True


class Chooser(Protocol):
    """`Router`, or a policy to compare it with."""

    def set_replicas(self, replicas: Mapping[str, int]) -> None:
        """Take over the replicas and the blocks of their prefix caches."""

    def choose(self, request: RouteRequest, load: Mapping[str, ReplicaLoad], *, wait: bool = True) -> Choice | None:
        """Return the replica of a request; None to wait."""


class Dispatcher:
    """Waiting and running requests of one service."""

    def __init__(
        self,
        replicas: Mapping[str, Capacity],
        tenants: Tenants | None = None,
        *,
        context_tokens: int = 1 << 20,
        prices: Prices | None = None,
        cache_blocks: Mapping[str, int] | None = None,
    ) -> None:
        """Begin with these replicas.

        Args:
            replicas: that are ready.
            tenants: their rates and budgets, which other services share.
            context_tokens: longest prompt with its answer.
            prices: of tokens.
            cache_blocks: of each replica's prefix cache, where it is larger than its KV cache.
        """
        self.tenants = tenants or Tenants()
        self.context_tokens = context_tokens
        self.prices = prices or Prices()
        self.queue = FairQueue()
        self.answers = AnswerLengths()
        self._pace = _Pace(0)
        self._parts = _Parts()
        self.admission = Admission(replicas)
        self.router: Chooser = Router(cache_blocks or _cache_blocks(replicas))

    @property
    def loads(self) -> Mapping[str, ReplicaLoad]:
        """The open work of each replica."""
        return self.admission.loads

    def set_replicas(self, replicas: Mapping[str, Capacity]) -> None:
        """Take over the replicas that are ready now; tickets of those that are gone stay open until they are ended."""
        self.admission.set_replicas(replicas)
        self.router.set_replicas(_cache_blocks(replicas))

    def mark(self, replica: str, *, failing: bool = False, draining: bool = False) -> None:
        """Note that a replica fails or drains, or does so no longer."""
        load = self.admission.loads.get(replica)
        if load is not None:
            load.failing, load.draining = failing, draining

    def submit(self, ask: Ask, now_us: int) -> Ticket | Refusal:
        """Take a request into the queue, or refuse it."""
        limit = self.context_tokens - ask.prompt_tokens
        if limit <= 0 or (ask.answer_tokens is not None and ask.answer_tokens > limit):
            return Refusal(
                400,
                "context_length_exceeded",
                f"the context is {self.context_tokens} tokens, and the request has {ask.prompt_tokens} in its prompt "
                f"and up to {ask.answer_tokens or 1} in its answer",
                "shorten the prompt, or lower max_tokens",
            )
        limit = limit if ask.answer_tokens is None else ask.answer_tokens
        rules = self.tenants.get(ask.tenant)
        priority = rules.priority if ask.priority is None else ask.priority
        refusal = self._crowded(ask, priority, now_us)
        if refusal is not None:
            return refusal
        most = self.prices.cost_pico_usd(ask.prompt_tokens, 0, limit)
        refusal = self.tenants.enter(ask.tenant, most, now_us)
        if refusal is not None:
            return refusal
        self.queue.set_weight(ask.tenant, rules.weight)
        expected = self.prices.cost_pico_usd(ask.prompt_tokens, 0, self.answers.expected(limit))
        if not self.queue.size:
            self._pace = _Pace(now_us)
        waiting = Waiting(ask.tenant, expected, None, priority, ask.deadline_us, now_us)
        ticket = Ticket(ask, waiting, limit, most)
        waiting.item = ticket
        self.queue.put(waiting)
        self._parts.seen(ask.tenant, now_us)
        return ticket

    def dispatch(self, now_us: int) -> Iterator[Ticket]:
        """Yield each ticket that starts now, with its choice."""
        while self.queue.size:
            waiting = self.queue.take(self._place)
            if waiting is None:
                return
            assert isinstance(waiting.item, Ticket)
            waiting.item.charged_pico_usd += waiting.cost
            self._pace.starts += 1
            self._pace.cost += waiting.cost
            yield waiting.item

    def first_token(self, ticket: Ticket) -> None:
        """Note that a ticket's prompt is computed."""
        if ticket.reservation is not None:
            self.admission.first_token(ticket.reservation)

    def finish(self, ticket: Ticket, *, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Close a ticket with what it used, and return its cost in 10^-12 dollars."""
        self.answers.add(output_tokens)
        spent = self.prices.cost_pico_usd(input_tokens, cached_tokens, output_tokens)
        self._close(ticket, spent)
        return spent

    def retry(self, ticket: Ticket, generated: int, now_us: int, avoid: frozenset[str] = frozenset()) -> None:
        """Put a ticket whose replica failed, after `generated` tokens in all, before its tenant's other requests.

        It avoids that replica, these ones, and those that failed before it without a further token.
        """
        assert ticket.choice is not None and ticket.reservation is not None, "it has not started"
        self.admission.release(ticket.reservation)
        self._parts.change(ticket.ask.tenant, -1)
        before = ticket.avoid if generated == ticket.generated else frozenset[str]()
        ticket.avoid = before | avoid | {ticket.choice.replica}
        ticket.generated = generated
        ticket.choice = ticket.reservation = None
        old = ticket.waiting
        ticket.waiting = Waiting(old.tenant, 0, ticket, old.priority, old.arrival_us, old.arrival_us)
        self.queue.put(ticket.waiting)

    def cancel(self, ticket: Ticket, *, input_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> int:
        """Close a ticket whose client is gone, with what it used so far; return its cost in 10^-12 dollars."""
        spent = self.prices.cost_pico_usd(input_tokens, cached_tokens, output_tokens)
        self._close(ticket, spent)
        return spent

    def expired(self, now_us: int) -> list[tuple[Ticket, Refusal]]:
        """Close and return the waiting tickets whose deadline is over."""
        over = []
        for waiting in list(self.queue):
            ticket = waiting.item
            assert isinstance(ticket, Ticket)
            deadline_us = ticket.ask.deadline_us
            if deadline_us is not None and deadline_us < now_us and not ticket.generated:
                waited_s = (now_us - waiting.arrival_us) / 1e6
                self._close(ticket, 0)
                message = f"the request waited {waited_s:.3f} s, and its deadline is over"
                over.append((ticket, Refusal(503, "deadline_exceeded", message, "retry later", 1.0)))
        return over

    def _crowded(self, ask: Ask, priority: int, now_us: int) -> Refusal | None:
        """Refuse a request that the queue has no place for, or that would start after its deadline."""
        wait_s = self._pace.wait_s(self.queue.backlog(ask.tenant, priority), now_us)
        own = self.queue.waiting(ask.tenant, priority)
        if self.queue.size >= WAITING_MAX or own >= TENANT_WAITING_MAX:
            most = f"{WAITING_MAX}, {TENANT_WAITING_MAX} of one tenant"
            return Refusal(
                503,
                "overloaded",
                f"{self.queue.size} requests wait, {own} of them of tenant {ask.tenant}; the queue holds {most}",
                "retry later, or ask for more replicas",
                wait_s or 1.0,
            )
        if ask.deadline_us is None or now_us + wait_s * 1e6 <= ask.deadline_us:
            return None
        left_s = max(0.0, (ask.deadline_us - now_us) / 1e6)
        return Refusal(
            503,
            "deadline_exceeded",
            f"{own} requests of tenant {ask.tenant} wait before this one; it would start in {wait_s:.1f} s, and its "
            f"deadline is in {left_s:.1f} s",
            "retry later, give a later deadline, or ask for more replicas",
            wait_s,
        )

    def _place(self, waiting: Waiting, wait: bool) -> bool:
        ticket = waiting.item
        assert isinstance(ticket, Ticket)
        prompt = ticket.ask.prompt_tokens + ticket.generated
        room = prompt + self.answers.expected(max(1, ticket.limit_tokens - ticket.generated)) + BLOCK_TOKENS
        room = min(room, self.admission.largest())
        is_light = self._parts.is_light(
            waiting.tenant, self.queue.waiting(waiting.tenant, waiting.priority), self.tenants
        )
        several = len(self._parts.seen_us) > 1
        is_moving = bool(ticket.avoid)  # Its client waits in the middle of an answer: no prompt holds it back.
        request = RouteRequest(
            ticket.ask.blocks,
            prompt,
            room,
            ticket.ask.session,
            ticket.avoid,
            is_moving or (several and is_light),
            several and not is_light and not is_moving,
        )
        choice = self.router.choose(request, self.admission.loads, wait=wait)
        if choice is None:
            return False
        ticket.choice = choice
        ticket.reservation = self.admission.reserve(choice.replica, room, choice.miss_tokens)
        self._parts.change(waiting.tenant, 1)
        return True

    def _close(self, ticket: Ticket, spent_pico_usd: int) -> None:
        if not ticket.open:
            return
        ticket.open = False
        if ticket.choice is None:
            self.queue.remove(ticket.waiting)
        if ticket.reservation is not None:
            self.admission.release(ticket.reservation)
            self._parts.change(ticket.ask.tenant, -1)
        if ticket.charged_pico_usd:
            self.queue.charge(ticket.ask.tenant, spent_pico_usd - ticket.charged_pico_usd)
        self.tenants.leave(ticket.ask.tenant, ticket.held_pico_usd, spent_pico_usd)


@dataclass(slots=True)
class _Pace:
    """Requests and their cost that started since the queue was empty."""

    since_us: int
    starts: int = 0
    cost: float = 0.0

    def wait_s(self, backlog: float, now_us: int) -> float:
        """Return the seconds in which so much cost will have started; 0 while that is unknown."""
        if self.starts < STARTS_MIN or now_us <= self.since_us:
            return 0.0
        return backlog / self.cost * (now_us - self.since_us) / 1e6


@dataclass(slots=True)
class _Parts:
    """Running requests of the tenants that sent one lately."""

    running: dict[str, int] = field(default_factory=dict)
    seen_us: dict[str, int] = field(default_factory=dict)
    total: int = 0

    def seen(self, tenant: str, now_us: int) -> None:
        """Note a request of a tenant; forget those that sent none for a while."""
        self.seen_us.pop(tenant, None)
        self.seen_us[tenant] = now_us
        while self.seen_us and (first := next(iter(self.seen_us))) and self.seen_us[first] < now_us - ACTIVE_US:
            del self.seen_us[first]

    def change(self, tenant: str, running: int) -> None:
        """Count a request that starts or ends."""
        left = self.running.get(tenant, 0) + running
        self.total += running
        if left:
            self.running[tenant] = left
        else:
            self.running.pop(tenant, None)

    def is_light(self, tenant: str, waiting: int, tenants: Tenants) -> bool:
        """Return whether a tenant has few waiting requests, and runs less than its part of all.

        Of tenants that keep waiting none is light: the counters alone decide between them.
        """
        if waiting > LIGHT_WAITING_MAX:
            return False
        # Of a thousand tenants each one's part is nearly nothing: their weights are not summed for each request.
        weights = sum(tenants.get(each).weight for each in islice(self.seen_us, PARTS_MAX))
        return self.running.get(tenant, 0) * weights <= tenants.get(tenant).weight * self.total


def _cache_blocks(replicas: Mapping[str, Capacity]) -> dict[str, int]:
    return {
        name: CACHE_BLOCKS if each.kv_tokens is None else max(1, each.kv_tokens // ROUTE_BLOCK_TOKENS)
        for name, each in replicas.items()
    }
