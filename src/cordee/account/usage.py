"""Tokens by service, tenant, key and model, and the dollars of the replicas that served them, day by day.

All dollars of a service's replicas on a day, also those of idle, loading and draining ones, are divided over the tokens
that it served on that day, by the time that a token of each kind takes. So the lines of a day sum to the dollars held.
A report counts on the day on which it reaches the log: a day that is over does not change.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import takewhile
from operator import add, attrgetter
from typing import Literal, NamedTuple

from cordee.account.split import apportioned
from cordee.events import TokensServed, TokenWeights
from cordee.units import US_PER_DAY, month_start_us

UsageBy = Literal["service", "tenant", "key", "model"]
DAY_US = US_PER_DAY

UNPLANNED = TokenWeights(input=10, cached=1, output=40)
"""Weights of a service without a plan: about those of the price lists of APIs."""

_counts = attrgetter("requests", "failed", "input", "cached", "output", "retrieval_us", "generation_us")
_amounts = attrgetter("computed", "cached", "output", "unused")

_DAYS_KEPT = 62  # at the start of a month, older days are merged into their months


class UsageKey(NamedTuple):
    """The tokens of one line: the service that served them, and for whom. A key is its id."""

    service: str
    tenant: str
    key: str
    model: str


@dataclass(frozen=True, slots=True)
class Tokens:
    """Requests, and tokens by kind; `input` has the cached ones as well, `failed` are of the requests.

    `retrieval_us` and `generation_us` are the times of requests to knowledge bases.
    """

    requests: int = 0
    failed: int = 0
    input: int = 0
    cached: int = 0
    output: int = 0
    retrieval_us: int = 0
    generation_us: int = 0

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(*map(add, _counts(self), _counts(other)))

    @property
    def computed(self) -> int:
        """Return the input tokens that were in no cache."""
        return max(0, self.input - self.cached)

    @property
    def total(self) -> int:
        """Return input and output tokens."""
        return self.input + self.output


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Micro-dollars by kind of token: computed input, cached input, output; `unused` served no token."""

    computed: int = 0
    cached: int = 0
    output: int = 0
    unused: int = 0

    def __add__(self, other: "TokenCost") -> "TokenCost":
        return TokenCost(*map(add, _amounts(self), _amounts(other)))

    @property
    def total(self) -> int:
        """Return all micro-dollars."""
        return self.computed + self.cached + self.output + self.unused


@dataclass(frozen=True, slots=True)
class CostLine:
    """Tokens and micro-dollars of one key in one day or month of UTC."""

    from_us: int
    to_us: int
    key: UsageKey
    tokens: Tokens
    micro_usd: TokenCost


class UsageRow(NamedTuple):
    """The sum of the lines of one service, tenant, key or model."""

    key: str
    tokens: Tokens
    micro_usd: TokenCost

    @property
    def micro_usd_per_million(self) -> dict[str, int | None]:
        """Return micro-dollars per million tokens of each kind, and of input and output together; None: no tokens."""
        counts = {"computed": self.tokens.computed, "cached": self.tokens.cached, "output": self.tokens.output}
        prices = {kind: _per_million(getattr(self.micro_usd, kind), count) for kind, count in counts.items()}
        return prices | {"blended": _per_million(self.micro_usd.total, self.tokens.total)}


class Usage:
    """A fold over the reports of the gateways.

    Attributes:
        day_us: start of the day that is open.
        weights: by service, of its newest plan.
    """

    day_us: int
    weights: dict[str, TokenWeights]
    _open: dict[UsageKey, Tokens]
    _closed: list[CostLine]
    _charged: dict[str, int]  # by service: micro-dollars of closed days

    def __init__(self) -> None:
        self.day_us = 0
        self.weights, self._open, self._closed, self._charged = {}, {}, [], {}

    def copy(self) -> "Usage":
        """Return a copy whose days can be closed without a change of this one."""
        new = Usage()
        new.day_us, new.weights, new._open = self.day_us, self.weights, self._open
        new._closed, new._charged = list(self._closed), dict(self._charged)
        return new

    def count(self, event: TokensServed) -> None:
        """Add a gateway's report to the open day."""
        tokens = (event.input_tokens, event.cached_tokens, event.output_tokens)
        counts = (event.requests, event.failed, *tokens, event.retrieval_us, event.generation_us)
        if any(counts):
            key = UsageKey(event.service, event.tenant, event.key, event.model)
            self._open[key] = self._open.get(key, Tokens()) + Tokens(*counts)

    def close_day(self, held: Mapping[str, int]) -> None:
        """End the open day. `held` are the micro-dollars of each service from the beginning until the day's end."""
        self._closed += self._allocated(held)
        self._charged |= held
        self._open = {}
        self.day_us += DAY_US
        if self.day_us == month_start_us(self.day_us):
            self._closed = list(_by_month(self._closed, self.day_us - _DAYS_KEPT * DAY_US))

    def skip_to(self, at_us: int) -> None:
        """Begin the day of a time; on the days before it nothing was held or served."""
        self.day_us = at_us // DAY_US * DAY_US

    def lines(self, held: Mapping[str, int]) -> list[CostLine]:
        """Return all lines, oldest first; those of the open day until now, and `held` as well."""
        return [*self._closed, *self._allocated(held)]

    def spent(self, held: Mapping[str, int], from_us: int) -> dict[str, int]:
        """Return the micro-dollars of each tenant since a time within the last two months; `held` as for `lines`."""
        spent: dict[str, int] = {}
        recent = takewhile(lambda line: line.from_us >= from_us, reversed(self._closed))
        for line in (*recent, *self._allocated(held)):
            spent[line.key.tenant] = spent.get(line.key.tenant, 0) + line.micro_usd.total
        return spent

    def prices(self, held: Mapping[str, int]) -> dict[str, TokenWeights]:
        """Return micro-dollars of a million tokens of each service, in proportion to its weights.

        The average of the last week; without dollars or tokens yet, its weights as they are.
        """
        time = dict[str, int]()
        cost = dict[str, int]()
        recent = takewhile(lambda line: line.from_us >= self.day_us - 7 * DAY_US, reversed(self._closed))
        for line in (*recent, *self._allocated(held)):
            service = line.key.service
            time[service] = time.get(service, 0) + sum(_times(line.tokens, self._weights(service)))
            cost[service] = cost.get(service, 0) + line.micro_usd.total
        prices = {}
        for service in sorted(cost.keys() | held.keys() | self.weights.keys()):
            weights, usd, whole = self._weights(service), cost.get(service, 0), time.get(service, 0)
            if usd and whole:
                each = (weights.input, weights.cached, weights.output)
                computed, cached, output = (weight * usd * 1_000_000 // whole for weight in each)
                weights = TokenWeights(input=computed, cached=cached, output=output)
            prices[service] = weights
        return prices

    def _allocated(self, held: Mapping[str, int]) -> Iterator[CostLine]:
        """Divide the dollars of the open day over its tokens, service by service."""
        to_us = self.day_us + DAY_US
        by_service: dict[str, list[tuple[UsageKey, Tokens]]] = {service: [] for service in held}
        for key, tokens in self._open.items():
            by_service.setdefault(key.service, []).append((key, tokens))
        for service, served in sorted(by_service.items()):
            amount, weights = held.get(service, 0) - self._charged.get(service, 0), self._weights(service)
            served.sort()
            times = [time for _, tokens in served for time in _times(tokens, weights)]
            if not any(times):
                if amount:
                    key = UsageKey(service, "", "", "")
                    yield CostLine(self.day_us, to_us, key, Tokens(), TokenCost(unused=amount))
                amount, times = 0, [1] * len(times)
            parts = iter(apportioned(amount, times) if times else ())
            for key, tokens in served:
                cost = TokenCost(next(parts), next(parts), next(parts))
                yield CostLine(self.day_us, to_us, key, tokens, cost)

    def _weights(self, service: str) -> TokenWeights:
        return self.weights.get(service, UNPLANNED)


def usage_rows(lines: Iterable[CostLine], by: UsageBy) -> list[UsageRow]:
    """Return the lines summed by service, tenant, key or model, in the order of their names."""
    sums: dict[str, tuple[Tokens, TokenCost]] = {}
    for line in lines:
        name: str = getattr(line.key, by)
        tokens, cost = sums.get(name, (Tokens(), TokenCost()))
        sums[name] = tokens + line.tokens, cost + line.micro_usd
    return [UsageRow(name, *sums[name]) for name in sorted(sums)]


def _per_million(micro_usd: int, tokens: int) -> int | None:
    return micro_usd * 1_000_000 // tokens if tokens else None


def _times(tokens: Tokens, weights: TokenWeights) -> tuple[int, int, int]:
    return tokens.computed * weights.input, tokens.cached * weights.cached, tokens.output * weights.output


def _by_month(lines: Iterable[CostLine], before_us: int) -> Iterator[CostLine]:
    """Yield the lines, those of days before a time merged into their months."""
    months: dict[tuple[int, UsageKey], CostLine] = {}
    recent = []
    for line in lines:
        if line.from_us >= before_us:
            recent.append(line)
            continue
        from_us = month_start_us(line.from_us)
        known = months.get((from_us, line.key))
        tokens, cost = (Tokens(), TokenCost()) if known is None else (known.tokens, known.micro_usd)
        to_us = month_start_us(from_us + 32 * DAY_US)
        months[from_us, line.key] = CostLine(from_us, to_us, line.key, tokens + line.tokens, cost + line.micro_usd)
    yield from months.values()
    yield from recent
