"""Continuous batching against closed forms, against itself token by token, and its conservation laws."""

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.plan.serving.queueing.batching import Limits, Replica, serve
from cordee.plan.serving.queueing.served import Served
from cordee.plan.serving.speed.speculation import Speculation
from cordee.workload.requests import Request, poisson


class Affine:
    """A step that costs a constant, each token and each token of context."""

    def __init__(self, step_s: float = 0.01, token_s: float = 1e-5, context_s: float = 1e-8) -> None:
        self.constant_s, self.token_s, self.context_s = step_s, token_s, context_s

    def step_s(
        self, prefill: Sequence[tuple[int, int]], sequences: int = 0, context_tokens: float = 0.0, *, each: int = 1
    ) -> float:
        tokens = sum(new for new, _ in prefill) + sequences * each
        return self.constant_s + self.token_s * tokens + self.context_s * context_tokens


def close(one: Served, other: Served) -> bool:
    """Return whether two runs answered every request at the same times."""
    assert len(one.outcomes) == len(other.outcomes)
    return all(
        a.ttft_s == pytest.approx(b.ttft_s, rel=1e-6, abs=1e-9) and a.e2e_s == pytest.approx(b.e2e_s, rel=1e-6)
        for a, b in zip(one.outcomes, other.outcomes, strict=True)
    )


def test_one_request_alone_takes_one_prefill_and_a_step_for_each_further_token() -> None:
    served = serve([Request(5.0, 100, 11)], Affine(0.01, 1e-5, 0.0), Limits(8, 1000, 10_000))
    (outcome,) = served.outcomes
    assert outcome.ttft_s == pytest.approx(0.01 + 100e-5)
    assert outcome.e2e_s == pytest.approx(0.01 + 100e-5 + 10 * (0.01 + 1e-5))
    assert outcome.tpot_s == pytest.approx(0.01 + 1e-5)


def test_prompt_longer_than_a_step_is_cut() -> None:
    served = serve([Request(0.0, 2500, 1)], Affine(0.01, 0.0, 0.0), Limits(8, 1000, 10_000))
    assert served.outcomes[0].ttft_s == pytest.approx(0.03)


def test_batch_of_one_waits_as_an_m_d_1_queue() -> None:
    """Mean wait of M/D/1 is rho / (2 (1 - rho)) services (Pollaczek and Khinchine)."""
    steps = 50
    service = steps * 0.01
    for load in (0.3, 0.7):
        requests = poisson(40_000, load / service, [(10, steps)], seed=7)
        served = serve(requests, Affine(0.01, 0.0, 0.0), Limits(1, 1000, 10_000))
        expected = load / (2 * (1 - load)) * service
        assert served.ttft.mean - 0.01 == pytest.approx(expected, rel=0.06)


@settings(max_examples=40, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from([900.0, 2_000.0, 50_000.0]),
    st.sampled_from([2, 8, 64]),
    st.booleans(),
    st.booleans(),
)
def test_jumps_equal_steps_taken_one_by_one(
    seed: int, kv_tokens: float, places: int, chunked: bool, caching: bool
) -> None:
    rng = np.random.default_rng(seed)
    plain = poisson(60, 8.0, [(100, 60), (400, 20), (30, 200), (64, 1)], seed=seed)
    requests = [
        Request(each.arrival_s, each.input_tokens, each.output_tokens, tuple(map(int, rng.permutation(9)[:6])), 64)
        for each in plain
    ]
    limits = Limits(places, 512, kv_tokens, 16, chunked_prefill=chunked, prefix_caching=caching)
    jumped = serve(requests, Affine(), limits)
    stepped = serve(requests, Affine(), limits, jumps=False)
    assert close(jumped, stepped)
    assert jumped.preemptions == stepped.preemptions
    assert len(jumped.outcomes) + jumped.refused == len(requests)


def test_requests_that_are_known_only_when_they_arrive_are_served_alike() -> None:
    requests = poisson(300, 8.0, [(100, 60), (400, 20), (30, 200), (64, 1)], seed=3)
    limits = Limits(64, 512, 50_000.0, 16)
    replica = Replica(Affine(), limits)
    for each in requests:
        replica.run(each.arrival_s)
        replica.offer(each)
        assert replica.open > 0
    replica.run()
    assert replica.open == 0 and close(replica.served, serve(requests, Affine(), limits))


def test_full_cache_preempts_and_every_answer_still_ends() -> None:
    requests = [Request(0.0, 100, 200) for _ in range(10)]
    tight = serve(requests, Affine(), Limits(10, 4096, 1500))
    wide = serve(requests, Affine(), Limits(10, 4096, 10_000))
    assert tight.preemptions > 0 and tight.recomputed_tokens > 0
    assert wide.preemptions == 0
    assert len(tight.outcomes) == 10
    assert tight.end_s > wide.end_s


def test_reserved_output_preempts_nothing() -> None:
    requests = [Request(0.0, 100, 200) for _ in range(10)]
    served = serve(requests, Affine(), Limits(10, 4096, 1500, reserves_output=True))
    assert served.preemptions == 0 and len(served.outcomes) == 10


def test_request_longer_than_the_cache_is_refused() -> None:
    served = serve([Request(0.0, 1000, 1000), Request(0.0, 10, 10)], Affine(), Limits(4, 4096, 1500))
    assert served.refused == 1 and len(served.outcomes) == 1


def test_prefix_cache_saves_what_prompts_have_in_common() -> None:
    first = Request(0.0, 1025, 2, (1, 2), 512)
    second = Request(10.0, 1537, 2, (1, 2, 3), 512)
    other = Request(20.0, 1537, 2, (9, 2, 3), 512)
    served = serve([first, second, other], Affine(), Limits(4, 4096, 100_000, prefix_caching=True))
    assert [each.cached_tokens for each in served.outcomes] == [0, 1024, 0]


def test_small_pool_forgets_the_least_recently_used_blocks() -> None:
    requests = [Request(10.0 * i, 1025, 2, ids, 512) for i, ids in enumerate([(1, 2), (3, 4), (5, 6), (1, 2)])]
    small = serve(requests, Affine(), Limits(4, 4096, 2500, prefix_caching=True))
    large = serve(requests, Affine(), Limits(4, 4096, 30_000, prefix_caching=True))
    assert small.outcomes[3].cached_tokens == 0
    assert large.outcomes[3].cached_tokens == 1024


def test_speculation_divides_the_steps_by_its_gain() -> None:
    sure = Speculation(3, 1.0)
    served = serve([Request(0.0, 10, 41)], Affine(0.01, 0.0, 0.0), Limits(4, 4096, 10_000), speculation=sure)
    assert served.outcomes[0].e2e_s == pytest.approx(0.01 + 10 * 0.01)


def test_prefilled_requests_cost_no_prompt() -> None:
    served = serve([Request(0.0, 10_000, 11)], Affine(0.01, 1.0, 0.0), Limits(4, 64, 20_000), prefilled=True)
    assert served.outcomes[0].e2e_s == pytest.approx(10 * 1.01)
