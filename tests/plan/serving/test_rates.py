"""Latency by arrival rate, and pools of their own for prompts and answers."""

from collections.abc import Sequence

import pytest

from cordee.plan.serving.queueing.batching import Limits
from cordee.plan.serving.queueing.disaggregated import Replicas, serve_apart
from cordee.plan.serving.queueing.rates import Load, Promise, knee, largest_rate, rate_curve
from cordee.workload.requests import Request


class Constant:
    """Every step takes 10 ms, and each token of a prompt 10 us more."""

    def step_s(
        self, prefill: Sequence[tuple[int, int]], sequences: int = 0, context_tokens: float = 0.0, *, each: int = 1
    ) -> float:
        return 0.01 + 1e-5 * sum(new for new, _ in prefill)


ONE = Limits(1, 4096, 100_000)
LOAD = Load([(100, 50)], requests=400, seed=5)


def test_latency_grows_with_the_rate_and_the_knee_lies_before_saturation() -> None:
    points = rate_curve(Constant(), ONE, LOAD, (4.0, 0.1, 1.0, 1.6))
    means = [point.served.e2e.mean for point in points]
    assert means == sorted(means)
    found = knee(points)
    assert found is not None and found.requests_per_s < 1.96  # 1 / 0.51 s would be saturation


def test_largest_rate_keeps_the_promise_and_a_little_more_breaks_it() -> None:
    promise = Promise(ttft_s=1.0, quantile="p90")
    rate = largest_rate(Constant(), ONE, LOAD, promise)
    assert promise.is_kept(LOAD.served(Constant(), ONE, rate))
    assert not promise.is_kept(LOAD.served(Constant(), ONE, 1.05 * rate))
    assert largest_rate(Constant(), ONE, LOAD, Promise(tpot_s=0.001)) == 0.0
    assert largest_rate(Constant(), ONE, LOAD, Promise(), highest=8.0) == 8.0


def test_pools_add_transfer_to_the_answer_and_not_to_its_first_token() -> None:
    pool = Replicas(1, Constant(), Limits(4, 4096, 100_000))
    served = serve_apart([Request(0.0, 1000, 11), Request(5.0, 1000, 1)], pool, pool, lambda tokens: tokens * 1e-4)
    answered, single = served.outcomes
    assert answered.ttft_s == pytest.approx(0.02)
    assert answered.e2e_s == pytest.approx(0.02 + 0.1 + 10 * 0.01)
    assert single.e2e_s == pytest.approx(0.02)


def test_pools_refuse_what_either_cannot_hold() -> None:
    prefill = Replicas(2, Constant(), Limits(4, 4096, 100_000))
    decode = Replicas(1, Constant(), Limits(4, 4096, 2_000))
    served = serve_apart([Request(0.0, 100, 10), Request(0.1, 3000, 10)], prefill, decode, lambda _: 0.0)
    assert served.refused == 1 and len(served.outcomes) == 1
