"""Pools of their own for prompts and answers."""

from collections.abc import Sequence

import pytest

from cordee.plan.serving.queueing.batching import Limits
from cordee.plan.serving.queueing.disaggregated import Replicas, serve_apart
from cordee.workload.requests import Request


class Constant:
    """Every step takes 10 ms, and each token of a prompt 10 us more."""

    def step_s(
        self, prefill: Sequence[tuple[int, int]], sequences: int = 0, context_tokens: float = 0.0, *, each: int = 1
    ) -> float:
        return 0.01 + 1e-5 * sum(new for new, _ in prefill)


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
