"""Times of the answered requests of a trace, and their percentiles."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Outcome:
    """One answered request: seconds from its arrival."""

    arrival_s: float
    ttft_s: float
    e2e_s: float
    output_tokens: int
    cached_tokens: int = 0
    waited_s: float = 0.0

    @property
    def running_s(self) -> float:
        """Seconds in which it had a slot of the replica."""
        return self.e2e_s - self.waited_s

    @property
    def tpot_s(self) -> float:
        """Seconds between two tokens; 0 for an answer of one token."""
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Mean, median, 90th and 99th percentile in seconds."""

    mean: float
    p50: float
    p90: float
    p99: float


def percentiles(values: Iterable[float]) -> Percentiles:
    """Return mean and percentiles; zeros of no values.

    >>> percentiles([1.0, 2.0, 3.0]).p50
    2.0
    """
    array = np.fromiter(values, dtype=np.float64)
    if not array.size:
        return Percentiles(0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = np.percentile(array, (50, 90, 99))
    return Percentiles(float(array.mean()), float(p50), float(p90), float(p99))


@dataclass(frozen=True, slots=True)
class Served:
    """A trace of requests, answered by one replica.

    Attributes:
        outcomes: one for each answered request, in order of arrival.
        refused: requests that are longer than the KV cache.
        preemptions: running answers that gave back their blocks and were computed again.
        busy_s: seconds in which the replica computed.
        end_s: when the last answer ended.
        recomputed_tokens: tokens of prompts and answers that were computed again after preemptions.
    """

    outcomes: Sequence[Outcome]
    refused: int
    preemptions: int
    busy_s: float
    end_s: float
    recomputed_tokens: int = 0

    @property
    def ttft(self) -> Percentiles:
        """Time to first token."""
        return percentiles(each.ttft_s for each in self.outcomes)

    @property
    def tpot(self) -> Percentiles:
        """Time per output token, of answers with more than one."""
        return percentiles(each.tpot_s for each in self.outcomes if each.output_tokens > 1)

    @property
    def e2e(self) -> Percentiles:
        """Time from arrival to the last token."""
        return percentiles(each.e2e_s for each in self.outcomes)

    @property
    def span_s(self) -> float:
        """Seconds from the first arrival to the last answer's end."""
        return self.end_s - self.outcomes[0].arrival_s if self.outcomes else 0.0

    @property
    def requests_per_s(self) -> float:
        """Answered requests a second over the span."""
        return len(self.outcomes) / self.span_s if self.span_s > 0 else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Tokens of answers a second over the span."""
        return sum(each.output_tokens for each in self.outcomes) / self.span_s if self.span_s > 0 else 0.0

    @property
    def running(self) -> float:
        """Requests with a slot, on average over the span."""
        return sum(each.running_s for each in self.outcomes) / self.span_s if self.span_s > 0 else 0.0

    def keeps_up(self, fraction: float) -> bool:
        """Return whether the queue at the last arrival is short: requests came at `fraction` of the capacity at most.

        The last answer may end after the last arrival by the longest time in a slot and that of one prompt.
        """
        first_s, last_s = self.outcomes[0].arrival_s, self.outcomes[-1].arrival_s
        allowed_s = max(each.running_s for each in self.outcomes)
        allowed_s += max(each.ttft_s - each.waited_s for each in self.outcomes)
        return self.end_s - last_s - allowed_s <= (1 / fraction - 1) * (last_s - first_s)

    @property
    def cached_tokens(self) -> int:
        """Tokens of prompts that were found in the prefix cache."""
        return sum(each.cached_tokens for each in self.outcomes)


def merged(parts: Sequence[Served]) -> Served:
    """Return the outcomes of several replicas as those of one service."""
    return Served(
        sorted((each for part in parts for each in part.outcomes), key=lambda each: each.arrival_s),
        refused=sum(part.refused for part in parts),
        preemptions=sum(part.preemptions for part in parts),
        busy_s=sum(part.busy_s for part in parts),
        end_s=max(part.end_s for part in parts),
        recomputed_tokens=sum(part.recomputed_tokens for part in parts),
    )
