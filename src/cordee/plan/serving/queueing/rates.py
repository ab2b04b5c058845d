"""Latency by arrival rate of one replica, the knee of that curve, and the largest rate that keeps a promise."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from cordee.plan.serving.queueing.batching import Limits, Steps, serve
from cordee.plan.serving.queueing.served import Percentiles, Served
from cordee.workload.requests import poisson

Quantile = Literal["mean", "p50", "p90", "p99"]
SLOWER = 2.0
"""The knee is the largest rate at which a request takes at most so many times as long as at the lowest rate."""


@dataclass(frozen=True, slots=True)
class Promise:
    """Latencies that a service keeps for this quantile of requests; None: any."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2e_s: float | None = None
    quantile: Quantile = "p99"

    def is_kept(self, served: Served) -> bool:
        """Return whether all requests were answered and none of the latencies is larger."""
        if served.refused or not served.outcomes:
            return False
        pairs = ((self.ttft_s, served.ttft), (self.tpot_s, served.tpot), (self.e2e_s, served.e2e))
        return all(limit is None or _at(found, self.quantile) <= limit for limit, found in pairs)


def _at(found: Percentiles, quantile: Quantile) -> float:
    by_name = {"mean": found.mean, "p50": found.p50, "p90": found.p90, "p99": found.p99}
    return by_name[quantile]


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One arrival rate and what came of it."""

    requests_per_s: float
    served: Served


@dataclass(frozen=True)
class Load:
    """Requests to try a replica with: pairs of tokens in and out, their number, and the seed of the arrivals."""

    lengths: Sequence[tuple[int, int]]
    requests: int = 500
    seed: int = 0

    def served(self, speed: Steps, limits: Limits, per_s: float) -> Served:
        """Return what a replica does with these requests at this Poisson rate."""
        return serve(poisson(self.requests, per_s, self.lengths, seed=self.seed), speed, limits)


def rate_curve(speed: Steps, limits: Limits, load: Load, rates: Sequence[float]) -> tuple[RatePoint, ...]:
    """Return a point for each of these rates, in ascending order."""
    return tuple(RatePoint(rate, load.served(speed, limits, rate)) for rate in sorted(rates))


def knee(points: Sequence[RatePoint]) -> RatePoint | None:
    """Return the last point before requests take more than `SLOWER` times as long as at the lowest rate."""
    kept = None
    for point in points:
        if not point.served.outcomes or point.served.e2e.mean > SLOWER * points[0].served.e2e.mean:
            break
        kept = point
    return kept


def largest_rate(
    speed: Steps, limits: Limits, load: Load, promise: Promise, *, lowest: float = 1e-3, highest: float = 1e4
) -> float:
    """Return the largest rate, to 2 %, at which the promise is kept; 0 where it is not even at the lowest."""
    if not promise.is_kept(load.served(speed, limits, lowest)):
        return 0.0
    low, high = lowest, lowest
    while high < highest and promise.is_kept(load.served(speed, limits, min(2 * high, highest))):
        low = high = min(2 * high, highest)
    if high >= highest:
        return highest
    high = 2 * low
    while high / low > 1.02:
        middle = (low * high) ** 0.5
        if promise.is_kept(load.served(speed, limits, middle)):
            low = middle
        else:
            high = middle
    return low
