"""Rates and budgets of tenants: exact, with the numbers in the message."""

from hypothesis import given
from hypothesis import strategies as st

from cordee.serve.policy.limits import PICO_PER_MICRO, Budget, Prices, RateLimit


def test_a_rate_allows_its_burst_and_then_one_request_in_its_time() -> None:
    rate = RateLimit(4.0)
    assert [rate.take("t", 0) is None for _ in range(5)] == [True] * 4 + [False]
    refusal = rate.take("t", 0)
    assert refusal is not None and refusal.retry_after_s == 0.25 and refusal.status == 429
    assert refusal.message == "tenant t may send 4 requests per second, 4 at once; the next one may come in 0.250 s"
    assert rate.take("t", 249_999) is not None
    assert rate.take("t", 250_000) is None
    assert rate.take("t", 250_000) is not None


@given(st.floats(0.1, 1000), st.lists(st.integers(0, 200_000), max_size=200))
def test_no_more_pass_than_the_burst_and_the_time_allow(per_s: float, gaps_us: list[int]) -> None:
    rate, now_us, passed = RateLimit(per_s), 0, 0
    for gap_us in gaps_us:
        now_us += gap_us
        passed += rate.take("t", now_us) is None
        assert passed <= rate.burst + per_s * now_us / 1e6 * (1 + 1e-5) + 1e-6


def test_the_time_that_a_refusal_names_is_right_to_the_microsecond() -> None:
    rate = RateLimit(3.0, burst=1)
    assert rate.take("t", 0) is None
    refusal = rate.take("t", 100_000)
    assert refusal is not None and refusal.retry_after_s is not None
    again_us = 100_000 + round(refusal.retry_after_s * 1e6)
    assert rate.take("t", again_us - 1) is not None
    assert rate.take("t", again_us) is None


def test_a_rate_of_nothing_never_allows_a_second_request() -> None:
    rate = RateLimit(0.0)
    assert rate.take("t", 0) is None
    refusal = rate.take("t", 10**12)
    assert refusal is not None and refusal.retry_after_s is None


def test_a_budget_refuses_what_it_cannot_pay_for() -> None:
    budget = Budget(1_000_000, spent_micro_usd=999_000)
    assert budget.hold("t", 600 * PICO_PER_MICRO) is None
    refusal = budget.hold("t", 600 * PICO_PER_MICRO)
    assert refusal is not None and refusal.code == "insufficient_quota" and refusal.retry_after_s is None
    assert refusal.message == (
        "tenant t has spent $0.999000 of $1.000000, its open requests hold $0.000600, and this one may cost $0.000600"
    )
    budget.settle(600 * PICO_PER_MICRO, 100 * PICO_PER_MICRO)
    assert budget.left_pico_usd == 900 * PICO_PER_MICRO
    assert budget.hold("t", 900 * PICO_PER_MICRO) is None


@given(st.lists(st.tuples(st.integers(1, 50), st.floats(0, 1)), max_size=50))
def test_a_budget_is_never_exceeded(requests: list[tuple[int, float]]) -> None:
    budget, spent = Budget(100), 0
    for most_micro, part in requests:
        most = most_micro * PICO_PER_MICRO
        if budget.hold("t", most) is None:
            used = int(most * part)
            budget.settle(most, used)
            spent += used
    assert spent <= 100 * PICO_PER_MICRO
    assert budget.left_pico_usd == 100 * PICO_PER_MICRO - spent


def test_cached_tokens_cost_their_own_price() -> None:
    prices = Prices(3_000_000, 300_000, 15_000_000)  # $3, $0.30 and $15 per million
    assert prices.cost_pico_usd(1_000_000, 0, 0) == 3 * 10**12
    assert prices.cost_pico_usd(1_000_000, 1_000_000, 0) == 3 * 10**11
    assert prices.cost_pico_usd(0, 0, 2) == 3 * 10**7
