"""The queue of one service in this gateway: policy decides, this room waits."""

from collections.abc import Callable
from typing import Protocol

from cordee.serve.gateway.calls import BYTES_PER_TOKEN
from cordee.serve.gateway.directory import RESERVE, SERVING, Service
from cordee.serve.gateway.replies import ApiError
from cordee.serve.policy.admit import Capacity
from cordee.serve.policy.dispatch import Ask, Dispatcher, Tenants, Ticket
from cordee.serve.policy.limits import Prices
from cordee.serve.policy.refusal import Refusal

CONTEXT_TOKENS = 1 << 20
"""Of a service that does not say."""


class Placed(Protocol):
    """A request that waits for a replica, or goes on while it waits for another one."""

    def placed(self) -> None:
        """Take the choice that its ticket has now."""

    def refuse(self, error: ApiError) -> None:
        """End the wait for a replica."""


class Desk:
    """Waiting and running requests of a service."""

    def __init__(
        self, service: Service, tenants: Tenants, clock: Callable[[], float], unserved: Callable[[], None]
    ) -> None:
        """Begin without requests; `unserved` is called when one waits and no replica could ever take it."""
        self.service = service
        self._clock, self._unserved = clock, unserved
        self._dispatcher = Dispatcher({}, tenants)
        self._running = False
        self.bytes_per_token = BYTES_PER_TOKEN
        """Of prompts, a moving average."""

    @property
    def context_tokens(self) -> int:
        """Return the longest prompt and answer."""
        return self.service.context or CONTEXT_TOKENS

    @property
    def queued(self) -> int:
        """Return the number of requests without a replica."""
        return self._dispatcher.queue.size

    @property
    def running(self) -> int:
        """Return the number of requests that replicas work on."""
        return sum(len(each.open) for each in self.service.endpoints.values())

    def oldest_wait_us(self) -> int:
        """Return the longest time that a request has waited."""
        now_us = self._now_us()
        return max((now_us - each.arrival_us for each in self._dispatcher.queue), default=0)

    def kv_used(self) -> dict[str, int]:
        """Return the KV tokens that are reserved on each replica of known capacity."""
        loads = self._dispatcher.loads
        return {
            name: each.kv_tokens - loads[name].kv_free
            for name, each in self.service.endpoints.items()
            if each.kv_tokens is not None and name in loads
        }

    def refresh(self, prices: Prices) -> None:
        """Take over the replicas of the service as they are now."""
        self._dispatcher.prices = prices
        self._dispatcher.context_tokens = self.context_tokens
        endpoints = self.service.endpoints
        self._dispatcher.set_replicas({name: Capacity(each.kv_tokens, each.slots) for name, each in endpoints.items()})
        states = SERVING if any(each.in_rotation(SERVING) for each in endpoints.values()) else RESERVE
        for name, endpoint in endpoints.items():
            self._dispatcher.mark(name, draining=not endpoint.in_rotation(states))
        self.run()

    def run(self) -> None:
        """Start all requests that can start now."""
        if self._running or not self._dispatcher.queue.size:
            return
        self._running = True
        try:
            for ticket in self._dispatcher.dispatch(self._now_us()):
                item: Placed = ticket.ask.item  # type: ignore[assignment]
                item.placed()
        finally:
            self._running = False

    def submit(self, ask: Ask) -> Ticket:
        """Take a request in; its item is called when it is placed, perhaps before this returns.

        Raises:
            ApiError: it is refused.
        """
        ticket = self._dispatcher.submit(ask, self._now_us())
        if isinstance(ticket, Refusal):
            raise refused(ticket)
        self.run()
        if ticket.choice is None and not any(each.usable for each in self.service.endpoints.values()):
            self._unserved()
        return ticket

    def first_token(self, ticket: Ticket) -> None:
        """Note that a request's prompt is computed."""
        self._dispatcher.first_token(ticket)
        self.run()

    def again(self, ticket: Ticket, generated: int, avoid: frozenset[str] = frozenset()) -> None:
        """Let a request wait for another replica than its own and these."""
        self._dispatcher.retry(ticket, generated, self._now_us(), avoid)
        self.run()

    def finish(self, ticket: Ticket, input_tokens: int, cached_tokens: int, output_tokens: int) -> int:
        """Close a request that has its answer; return its cost in 10^-12 dollars."""
        cost = self._dispatcher.finish(
            ticket, input_tokens=input_tokens, cached_tokens=cached_tokens, output_tokens=output_tokens
        )
        self.run()
        return cost

    def cancel(self, ticket: Ticket, input_tokens: int = 0, cached_tokens: int = 0, output_tokens: int = 0) -> int:
        """Close a request without a whole answer; return its cost in 10^-12 dollars."""
        cost = self._dispatcher.cancel(
            ticket, input_tokens=input_tokens, cached_tokens=cached_tokens, output_tokens=output_tokens
        )
        self.run()
        return cost

    def priority(self, tenant: str, asked: int) -> int:
        """Return the priority of a request: a client may put it below its tenant's other ones, and not above."""
        return self._dispatcher.tenants.get(tenant).priority + min(0, asked)

    def learn(self, prompt_bytes: int, input_tokens: int) -> None:
        """Note how many tokens a prompt had."""
        self.bytes_per_token += 0.05 * (prompt_bytes / input_tokens - self.bytes_per_token)

    def refuse_waiting(self, error: ApiError) -> None:
        """End the wait of all requests: their service has ended."""
        for waiting in list(self._dispatcher.queue):
            ticket: Ticket = waiting.item  # type: ignore[assignment]
            item: Placed = ticket.ask.item  # type: ignore[assignment]
            item.refuse(error)

    def expire(self) -> list[tuple[Ticket, ApiError]]:
        """Close and return the waiting requests whose deadline is over."""
        if not self._dispatcher.queue.size:
            return []
        return [(ticket, refused(refusal)) for ticket, refusal in self._dispatcher.expired(self._now_us())]

    def _now_us(self) -> int:
        return round(self._clock() * 1e6)


def refused(refusal: Refusal) -> ApiError:
    """Return a refusal as an answer of the API."""
    text = f"{refusal.message}; hint: {refusal.hint}"
    kind = "insufficient_quota" if refusal.code == "insufficient_quota" else ""
    return ApiError(refusal.status, text, code=refusal.code, kind=kind, retry_s=refusal.retry_after_s)
