"""The places of a static batch that are in use, against draws."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.plan.serving.levers.static import static_use


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=50), st.integers(1, 64))
def test_it_falls_with_the_batch_and_is_never_above_one(lengths: list[int], batch: int) -> None:
    assert static_use(batch + 1, lengths) <= static_use(batch, lengths) * (1 + 1e-9)
    assert static_use(batch, lengths) <= 1 + 1e-9
    assert static_use(1, lengths) == pytest.approx(1)


def test_it_agrees_with_draws() -> None:
    rng = random.Random(7)
    # Measured with transformers, answers lognormal with mean 46, at most 171 tokens: 0.54, 0.46, 0.40 and 0.34 in use.
    lengths = [max(1, min(171, round(rng.lognormvariate(3.6, 0.65)))) for _ in range(400)]
    for batch, measured in ((4, 0.54), (8, 0.46), (16, 0.40), (32, 0.34)):
        drawn = [rng.choices(lengths, k=batch) for _ in range(2000)]
        expected = sum(map(sum, drawn)) / sum(batch * max(each) for each in drawn)
        assert static_use(batch, lengths) == pytest.approx(expected, rel=0.05)
        assert static_use(batch, lengths) == pytest.approx(measured, rel=0.2)
    assert static_use(8) == pytest.approx(0.368, abs=0.001)
