"""Throughput against latency by concurrency, and the knee beyond which one more brings less than half."""

from dataclasses import dataclass
from itertools import pairwise

from cordee.plan.curve import WORTH
from cordee.plan.serving.judge import ServingCandidate, sizes, steady


@dataclass(frozen=True)
class ServingPoint:
    """All replicas at this concurrency of each; `added_fraction` as in the scaling curve of training."""

    candidate: ServingCandidate
    sequences: int
    output_tokens_per_s: float
    ttft_s: float
    tpot_s: float
    added_fraction: float


@dataclass(frozen=True)
class ServingCurve:
    """All points, and the last one whose requests are worth their latency; None: there is no knee."""

    points: tuple[ServingPoint, ...]
    knee: ServingPoint | None


def serving_curve(candidate: ServingCandidate) -> ServingCurve:
    """Return the curve of one layout, from one request to as many as its memory and its engine allow."""
    points: list[ServingPoint] = []
    most = 0.0
    for sequences in sizes(max(1, candidate.sequences)):
        found = steady(candidate, sequences)
        speed = found.performance
        assert speed is not None, "the layout fits"
        rate = speed.output_tokens_per_s
        before = points[-1] if points else None
        added = (rate - before.output_tokens_per_s) / (sequences - before.sequences) if before else rate
        most = max(most, rate / sequences)
        points.append(ServingPoint(found, sequences, rate, speed.ttft.mean, speed.tpot.mean, added / most))
    return ServingCurve(tuple(points), _knee(points))


def _knee(points: list[ServingPoint]) -> ServingPoint | None:
    """Return the last point before added requests bring less than half of what one brought at its best."""
    return next((before for before, after in pairwise(points) if after.added_fraction < WORTH), None)
