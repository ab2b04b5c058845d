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
    def output_tokens_per_s(self) -> float:
        """Tokens of answers a second, from the first arrival to the last answer's end."""
        if not self.outcomes:
            return 0.0
        span = self.end_s - self.outcomes[0].arrival_s
        return sum(each.output_tokens for each in self.outcomes) / span if span > 0 else 0.0

    @property
    def cached_tokens(self) -> int:
        """Tokens of prompts that were found in the prefix cache."""
        return sum(each.cached_tokens for each in self.outcomes)
