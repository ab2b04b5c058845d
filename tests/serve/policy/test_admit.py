"""Admission: what is reserved returns, and no replica holds more than its KV cache."""

from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.serve.policy.admit import ANSWER_TOKENS, OBSERVED_MIN, Admission, AnswerLengths, Capacity


def test_a_replica_that_was_away_begins_anew() -> None:
    admission = Admission({"a": Capacity(1000, 2)})
    old = admission.reserve("a", 600, 500)
    admission.set_replicas({})
    admission.set_replicas({"a": Capacity(1000, 2)})
    admission.release(old)
    assert (admission.loads["a"].kv_free, admission.loads["a"].slots_free, admission.loads["a"].running) == (1000, 2, 0)


def test_changed_limits_keep_what_is_reserved() -> None:
    admission = Admission({"a": Capacity(1000, 2)})
    held = admission.reserve("a", 600, 500)
    admission.set_replicas({"a": Capacity(2000, 4)})
    assert (admission.loads["a"].kv_free, admission.loads["a"].slots_free) == (1400, 3)
    admission.release(held)
    admission.release(held)
    assert (admission.loads["a"].kv_free, admission.loads["a"].slots_free) == (2000, 4)


def test_the_expected_answer_is_a_quantile_of_those_seen() -> None:
    lengths = AnswerLengths()
    assert (lengths.expected(10_000), lengths.expected(100)) == (ANSWER_TOKENS, 100)
    for tokens in range(1, 101):
        lengths.add(tokens)
    assert 95 <= lengths.expected(10_000) <= 95 * 2**0.25 + 1
    assert lengths.expected(50) == 50
    for _ in range(20_000):
        lengths.add(3000)
    assert 3000 <= lengths.expected(10_000) <= 3000 * 2**0.25
    assert OBSERVED_MIN < 100


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 400), st.sampled_from(("first", "release", "keep")))))
def test_what_is_reserved_returns(moves: list[tuple[str, int, str]]) -> None:
    admission = Admission({"a": Capacity(1000, 3, 500), "b": Capacity(None, None, 500)})
    before = {name: (each.kv_free, each.slots_free, each.prefill_free) for name, each in admission.loads.items()}
    held = []
    for name, tokens, then in moves:
        load = admission.loads[name]
        if load.slots_free > 0 and load.kv_free >= tokens:
            reservation = admission.reserve(name, tokens, tokens // 2)
            held.append(reservation)
            if then != "keep":
                admission.first_token(reservation)
            if then == "release":
                admission.release(reservation)
        assert (
            load.kv_free >= 0
            and load.miss_tokens >= 0
            and load.running == sum(each.open and each.load is load for each in held)
        )
    for each in held:
        admission.release(each)
    after = {name: (each.kv_free, each.slots_free, each.prefill_free) for name, each in admission.loads.items()}
    assert after == before
    assert all(each.miss_tokens == each.running == 0 for each in admission.loads.values())
