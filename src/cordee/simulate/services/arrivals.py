"""The requests of a service as columns: of a trace, or a synthetic day from a seed."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cordee.errors import InputError, TraceError
from cordee.workload.request_files import load_requests
from cordee.workload.requests import Request

SYNTHETIC = "synthetic"
HOUR_S = 3600.0
_PEAK_HOUR = 14.0


@dataclass(frozen=True)
class Arrivals:
    """Requests in the order of arrival, a column for each property: a day may have millions.

    Attributes:
        name: of the trace, for messages.
        at_s: seconds since the first request, or since the day began.
        input_tokens: of each prompt.
        output_tokens: of each answer.
        traced: the requests themselves where the trace has prefixes; else empty.
    """

    name: str
    at_s: NDArray[np.float64]
    input_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    traced: tuple[Request, ...] = ()

    @property
    def count(self) -> int:
        """The number of requests."""
        return len(self.at_s)

    @property
    def span_s(self) -> float:
        """Seconds until the last request."""
        return float(self.at_s[-1])

    @cached_property
    def tokens(self) -> int:
        """Tokens of all prompts and answers."""
        return int(self.input_tokens.sum() + self.output_tokens.sum())

    @cached_property
    def mean_input(self) -> int:
        """Tokens of a mean prompt."""
        return max(1, round(float(self.input_tokens.mean())))

    @cached_property
    def mean_output(self) -> int:
        """Tokens of a mean answer."""
        return max(1, round(float(self.output_tokens.mean())))

    def part(self, from_s: float, to_s: float) -> "Arrivals":
        """Return the requests that arrive between these times, on the same clock."""
        low, high = np.searchsorted(self.at_s, (from_s, to_s))
        chosen = slice(int(low), int(high))
        return Arrivals(
            self.name, self.at_s[chosen], self.input_tokens[chosen], self.output_tokens[chosen], self.traced[chosen]
        )

    def shorter_than(self, tokens: float) -> "Arrivals":
        """Return the requests that have at most so many tokens with their answers."""
        kept = self.input_tokens + self.output_tokens <= tokens
        traced = tuple(each for each, keeps in zip(self.traced, kept, strict=True) if keeps) if self.traced else ()
        return Arrivals(self.name, self.at_s[kept], self.input_tokens[kept], self.output_tokens[kept], traced)

    def request(self, index: int, at_s: float) -> Request:
        """Return a request of the trace as if it arrived at this time."""
        if self.traced:
            known = self.traced[index]
            return Request(at_s, known.input_tokens, known.output_tokens, known.blocks, known.block_tokens)
        return Request(at_s, int(self.input_tokens[index]), int(self.output_tokens[index]))


def read_arrivals(path: Path, limit: int | None = None) -> Arrivals:
    """Return the requests of a published trace (Azure, BurstGPT, Mooncake).

    Raises:
        TraceError: it cannot be read, or has fewer than two requests with an answer.
    """
    found = load_requests(path, limit=limit)
    if len(found) < 2 or found[-1].arrival_s <= 0:
        requests = "1 request" if len(found) == 1 else f"{len(found)} requests at one moment"
        raise TraceError(f"{path} has {requests} with an answer", hint="give a trace of several, in time")
    return of_requests(path.name, found)


def of_requests(name: str, requests: Sequence[Request]) -> Arrivals:
    """Return requests in the order of arrival as columns."""
    return Arrivals(
        name,
        np.array([each.arrival_s for each in requests]),
        np.array([each.input_tokens for each in requests], dtype=np.int64),
        np.array([each.output_tokens for each in requests], dtype=np.int64),
        tuple(requests) if any(each.blocks for each in requests) else (),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticDay:
    """Made-up requests: a day's swing, bursts, and lengths spread like those of a chat service.

    The lengths have the medians of Azure's conversations of 2023, 1,020 and 129 tokens (arXiv:2311.18677), and
    log-normal tails. The swing and the bursts are assumptions.

    Attributes:
        per_s: requests a second, on average.
        hours: length.
        swing: of the rate over a day, 0 to 1: the busiest hour has 1 + swing times the mean.
        burstiness: coefficient of variation of the times between requests, which are gamma-distributed; 1: Poisson.
        input_median, output_median: tokens.
        input_sigma, output_sigma: of their logarithms.
        longest: tokens at which both tails are cut.
    """

    per_s: float
    hours: float = 24.0
    swing: float = 0.6
    burstiness: float = 2.0
    input_median: float = 1020.0
    input_sigma: float = 0.8
    output_median: float = 129.0
    output_sigma: float = 1.0
    longest: int = 8_000

    def __post_init__(self) -> None:
        if self.per_s <= 0 or self.per_s * self.hours * HOUR_S > 50_000_000:
            total = f"{self.per_s:g} requests a second for {self.hours:g} hours"
            raise InputError(f"{total} cannot be drawn", hint="give a rate above 0 and at most 50 million requests")
        if not 0 <= self.swing <= 1 or self.burstiness <= 0:
            raise InputError(
                f"a swing of {self.swing:g} and a burstiness of {self.burstiness:g} describe no arrivals",
                hint="give a swing from 0 to 1 and a burstiness above 0",
            )

    def draw(self, seed: int) -> Arrivals:
        """Return the requests of this seed."""
        rng = np.random.default_rng(seed)
        span_s = self.hours * HOUR_S
        # Gaps of mean 1 in a time in which the rate is constant, then warped so that the rate swings.
        expected = self.per_s * span_s
        draws = int(expected + 6 * self.burstiness * expected**0.5 + 10)
        shape = 1 / self.burstiness**2
        passed = np.cumsum(rng.gamma(shape, 1 / shape, draws))
        hours = np.linspace(0, self.hours, 24 * 60 + 1)
        rate = 1 + self.swing * np.cos(2 * np.pi * (hours - _PEAK_HOUR) / 24)
        work = np.concatenate(([0.0], np.cumsum((rate[1:] + rate[:-1]) / 2)))
        at_s = np.interp(passed / expected, work / work[-1], hours * HOUR_S, right=np.inf)
        at_s = at_s[at_s < span_s]
        prompts = rng.lognormal(np.log(self.input_median), self.input_sigma, len(at_s))
        answers = rng.lognormal(np.log(self.output_median), self.output_sigma, len(at_s))
        return Arrivals(SYNTHETIC, at_s, self._lengths(prompts), self._lengths(answers))

    def _lengths(self, drawn: NDArray[np.float64]) -> NDArray[np.int64]:
        return np.clip(np.rint(drawn), 1, self.longest).astype(np.int64)
