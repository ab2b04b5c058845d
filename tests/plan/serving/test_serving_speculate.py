"""Speculation by batch: the gain from acceptance and cost of checking, the best draft, and where the gain ends."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.plan.serving.levers.speculate import (
    acceptance_needed,
    best_draft,
    speculation_curve,
    speculation_gain,
)
from cordee.plan.serving.speed.speculation import Speculation

# Measured on 2 CPU cores, 128 M parameters: a step with k + 1 tokens over a step with one, by batch.
CPU_CHECK = {1: {3: 1.08, 5: 1.76, 9: 2.36}, 4: {3: 1.38, 5: 1.75, 9: 1.95}, 16: {3: 1.38, 5: 1.55, 9: 2.18}}


def roofline(batch: int, each: int) -> float:
    """A step that reads weights for 1.0 s or computes 0.01 s for each token, whichever takes longer."""
    return max(1.0, 0.01 * batch * each)


def measured(batch: int, each: int) -> float:
    return 1.0 if each == 1 else CPU_CHECK[batch][each]


class TestGain:
    def test_it_is_accepted_tokens_over_the_cost_of_checking(self) -> None:
        # (1 - 0.8^5) / (1 - 0.8) = 3.3616 tokens for 1.76 steps.
        assert speculation_gain(measured, 1, Speculation(4, 0.8)) == pytest.approx(3.3616 / 1.76)

    def test_a_draft_that_is_always_wrong_costs_its_check(self) -> None:
        assert speculation_gain(measured, 1, Speculation(4, 0.0)) == pytest.approx(1 / 1.76)

    def test_a_draft_model_costs_its_own_steps(self) -> None:
        free, paid = (speculation_gain(measured, 4, Speculation(4, 0.8, draft_s)) for draft_s in (0.0, 0.1))
        assert paid == pytest.approx(free * 1.75 / (1.75 + 0.4))

    @given(st.integers(1, 200), st.floats(0, 0.95), st.integers(1, 8))
    def test_it_grows_with_acceptance_and_falls_with_the_batch(self, batch: int, acceptance: float, k: int) -> None:
        gain = speculation_gain(roofline, batch, Speculation(k, acceptance))
        assert speculation_gain(roofline, batch, Speculation(k, acceptance + 0.05)) >= gain
        assert speculation_gain(roofline, batch + 1, Speculation(k, acceptance)) <= gain * (1 + 1e-9)


class TestBestDraft:
    def test_long_drafts_for_one_user_and_short_ones_for_many(self) -> None:
        assert best_draft(roofline, 1, 0.7).draft_tokens == 8
        assert best_draft(roofline, 40, 0.7).draft_tokens in (1, 2)
        assert best_draft(roofline, 100, 0.7).draft_tokens == 0

    @given(st.integers(1, 300), st.floats(0, 1))
    def test_no_other_length_gains_more(self, batch: int, acceptance: float) -> None:
        found = best_draft(roofline, batch, acceptance)
        others = [speculation_gain(roofline, batch, Speculation(k, acceptance)) for k in range(1, 9)]
        assert found.gain == pytest.approx(max(1.0, *others))


class TestCrossover:
    def test_the_batch_at_which_it_ends(self) -> None:
        # One drafted token at acceptance a gives 1 + a tokens for 0.02 B s of checking: faster while B < 50 (1 + a).
        curve = speculation_curve(roofline, 0.7)
        assert curve.pays_up_to == 84
        assert not curve.always
        assert str(curve) == "3.20x as fast at batch 1 with a draft of 8, faster up to batch 84"

    def test_ends_at_no_batch_where_memory_decides_always(self) -> None:
        curve = speculation_curve(lambda batch, each: 1.0, 0.5)
        assert curve.always
        assert "at all batches up to 1,024" in str(curve)

    def test_pays_at_no_batch_where_checking_costs_all(self) -> None:
        curve = speculation_curve(lambda batch, each: float(each), 0.5)
        assert curve.pays_up_to is None
        assert str(curve) == "speculation is faster at no batch"

    def test_the_acceptance_that_it_needs(self) -> None:
        needed = acceptance_needed(measured, 4, 2)
        assert needed is not None
        assert 1 + needed + needed**2 == pytest.approx(1.38, abs=1e-3)
        assert acceptance_needed(lambda batch, each: 1.0 if each == 1 else 9.0, 1, 2) is None
