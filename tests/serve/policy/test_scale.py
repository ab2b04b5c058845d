"""The number of replicas: a table of decisions, no flapping, scale to zero and back."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.serve.policy.scale import SECOND_US, ScaleInput, ScaleRules, ScaleState, decide

RULES = ScaleRules(0, 8, ttft_us=500_000, tpot_us=50_000)
LATER_US = 1_000 * SECOND_US


@pytest.mark.parametrize(
    ("seen", "wanted", "becomes", "why"),
    [
        (ScaleInput(), 0, 0, ""),
        (ScaleInput(queued=1), 0, 1, "1 requests are open"),
        (ScaleInput(ready=2, running=12, slots=8), 2, 2, ""),
        (ScaleInput(ready=2, running=13, queued=20, slots=8), 2, 6, "33 requests for 8 slots each"),
        (ScaleInput(ready=2, running=4, kv_fraction=0.95, slots=8), 2, 3, "95% of the KV cache is used"),
        (
            ScaleInput(ready=4, running=4, ttft_p99_us=900_000),
            4,
            6,
            "p99 of the time to first token is 900 ms for 500 ms",
        ),
        (ScaleInput(ready=4, running=4, tpot_p99_us=54_000), 4, 4, ""),
        (ScaleInput(ready=4, running=4, tpot_p99_us=56_000), 4, 6, "p99 of the time per token is 56 ms for 50 ms"),
        (ScaleInput(ready=3, starting=1, running=4, ttft_p99_us=900_000), 4, 4, ""),
        (ScaleInput(ready=8, running=90, slots=8), 8, 8, ""),
        (ScaleInput(ready=4, queued=200, running=32, slots=8), 4, 8, "232 requests for 8 slots each"),
        (ScaleInput(ready=4, running=8, slots=8), 4, 2, "at most 2 were wanted in the last 300 s"),
    ],
)
def test_decisions(seen: ScaleInput, wanted: int, becomes: int, why: str) -> None:
    decision = decide(LATER_US, ScaleState(wanted, ((LATER_US, 0),), LATER_US), seen, RULES)
    assert (decision.replicas, decision.why) == (becomes, why)


def test_fewer_only_after_a_window_in_which_nothing_wanted_more() -> None:
    state = decide(0, ScaleState(4), ScaleInput(ready=4, running=25, slots=8), RULES).state
    for second in range(2, 600, 2):
        decision = decide(second * SECOND_US, state, ScaleInput(ready=4, running=6, slots=8), RULES)
        state = decision.state
        assert decision.replicas == (4 if second < 300 else 1), second


def test_without_a_memory_the_replicas_of_now_stay_for_a_window() -> None:
    assert decide(LATER_US, ScaleState(4), ScaleInput(ready=4, running=6, slots=8), RULES).replicas == 4


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(14, 36), min_size=200, max_size=400))
def test_a_noisy_load_does_not_flap(running: list[int]) -> None:
    state, changes = ScaleState(5), 0
    rules = replace(RULES, ttft_us=None)
    for step, each in enumerate(running):
        decision = decide(step * 2 * SECOND_US, state, ScaleInput(ready=state.wanted, running=each, slots=8), rules)
        changes += decision.replicas != state.wanted
        state = decision.state
    # Raises to the highest number, and one fall for each whole window.
    assert changes <= 6 + 2 * (2 * len(running) // 300)


def test_a_slow_answer_to_a_raise_raises_no_more_at_once() -> None:
    late = ScaleInput(ready=2, running=4, ttft_p99_us=2_000_000)
    state, wanted = ScaleState(2, busy_at_us=0), []
    for second in range(0, 130, 10):
        state = decide(second * SECOND_US, state, replace(late, ready=state.wanted), RULES).state
        wanted.append(state.wanted)
    assert wanted == [3] * 6 + [4] * 6 + [6]


def test_a_service_scales_to_zero_and_a_held_request_brings_it_back() -> None:
    state = ScaleState(1, busy_at_us=0)
    state = decide(0, state, ScaleInput(ready=1, running=1), RULES).state
    for second in range(2, 400, 2):
        decision = decide(second * SECOND_US, state, ScaleInput(ready=state.wanted), RULES)
        state = decision.state
        assert decision.replicas == (1 if second < 300 else 0), second
    decision = decide(500 * SECOND_US, state, ScaleInput(queued=1), RULES)
    assert (decision.replicas, decision.why) == (1, "1 requests are open")
    # It stays while the replica loads, although the client has left.
    assert decide(502 * SECOND_US, decision.state, ScaleInput(starting=1), RULES).replicas == 1


def test_a_price_bounds_the_replicas() -> None:
    rules = replace(RULES, micro_usd_per_hour=4_000_000, max_micro_usd_per_hour=13_000_000)
    busy = ScaleInput(ready=2, queued=500, running=16, slots=8)
    decision = decide(0, ScaleState(2), busy, rules)
    assert (decision.replicas, decision.why) == (3, "516 requests for 8 slots each")
    assert decision.limit == "8 replicas would cost $32.00 an hour, and $13.00 is the most"
    # It says so as long as it holds, and no longer.
    decision = decide(SECOND_US, decision.state, busy, rules)
    assert (decision.replicas, decision.why) == (3, "") and decision.limit.startswith("8 replicas would cost")
    assert decide(2 * SECOND_US, decision.state, ScaleInput(ready=3, running=19, slots=8), rules).limit == ""
    # A replica in reserve is paid as well, and the fewest are there at any price.
    assert decide(0, ScaleState(2), busy, replace(rules, standby=1)).replicas == 2
    assert decide(0, ScaleState(4), busy, replace(rules, min_replicas=4)).replicas == 4
    assert decide(0, ScaleState(2), busy, replace(rules, micro_usd_per_hour=0)).replicas == 8, "no price is known"


@given(
    st.builds(
        ScaleInput,
        ready=st.integers(0, 20),
        starting=st.integers(0, 3),
        queued=st.integers(0, 5000),
        running=st.integers(0, 5000),
        kv_fraction=st.floats(0, 1.2),
        slots=st.none() | st.integers(1, 64),
        ttft_p99_us=st.none() | st.integers(0, 10**8),
        tpot_p99_us=st.none() | st.integers(0, 10**8),
    ),
    st.integers(0, 12),
    st.integers(0, 3),
    st.integers(3, 9),
)
def test_the_bounds_hold(seen: ScaleInput, wanted: int, least: int, most: int) -> None:
    rules = ScaleRules(least, most, ttft_us=500_000, tpot_us=50_000)
    decision = decide(LATER_US, ScaleState(wanted), seen, rules)
    assert least <= decision.replicas <= most
    assert decision.replicas or not (seen.queued or seen.running)
    assert bool(decision.why) == (decision.replicas != wanted)
