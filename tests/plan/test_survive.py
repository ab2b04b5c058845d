"""When to checkpoint and what a preemption costs: known vectors, and the maximum found by brute force."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.plan.cost import hold_usd, usd_per_billion_tokens
from cordee.plan.layout import OPTIMIZERS, Training
from cordee.plan.survive import best_period_s, checkpoint_bytes, daly_s, goodput, lost_usd, survival, young_s
from cordee.workload.load import load_shape

L70 = load_shape("llama-3-70b")


def test_the_known_vector() -> None:
    assert best_period_s(mtbi_s=6000, restart_s=600, checkpoint_s=10) == pytest.approx(373.5, abs=0.05)


@given(st.floats(100, 1e6), st.floats(0, 5000), st.floats(0.1, 500))
def test_no_other_period_has_more_goodput(mtbi_s: float, restart_s: float, checkpoint_s: float) -> None:
    best = best_period_s(mtbi_s, restart_s, checkpoint_s)
    reached = goodput(best, mtbi_s, restart_s, checkpoint_s)
    assert best > checkpoint_s
    assert 0 < reached < 1
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert goodput(best * factor, mtbi_s, restart_s, checkpoint_s) <= reached + 1e-12


def test_young_and_daly_agree_with_it_when_checkpoints_are_cheap() -> None:
    best = best_period_s(1e6, 0, 1)
    assert young_s(1e6, 1) == pytest.approx(best, rel=0.01)
    assert daly_s(1e6, 1) == pytest.approx(best, rel=0.01)
    assert daly_s(10, 30) == 10


def test_the_known_story() -> None:
    # 64 H100s for 47 hours at $2.99: 3,008 GPU-hours, $8,994, and all of it lost without a checkpoint.
    assert hold_usd(64, 47 * 3600, 2.99) == pytest.approx(8993.92)
    assert lost_usd(64, 47 * 3600, 0, 2.99) == pytest.approx(8993.92)
    assert usd_per_billion_tokens(1, 1e9 / 3600, 2.0) == pytest.approx(2.0)


def test_a_checkpoint_of_70b_weighs_12_bytes_a_parameter() -> None:
    assert checkpoint_bytes(L70, Training(8192, 512)) == 70_553_706_496 * 12
    assert checkpoint_bytes(L70, Training(8192, 512, OPTIMIZERS["adamw-8bit"])) == 70_553_706_496 * 4


def test_what_a_job_has_to_expect() -> None:
    expected = survival(
        L70, Training(8192, 512), 64, storage_bytes_per_s=16e9, start_s=120, mtbi_s=86_400, usd_per_gpu_hour=2.25
    )
    write_s = 70_553_706_496 * 12 / 16e9
    assert expected.checkpoint_s == expected.notice_needed_s == pytest.approx(write_s)
    assert expected.restart_s == pytest.approx(120 + write_s)
    assert expected.period_s == best_period_s(86_400, expected.restart_s, write_s)
    assert expected.usd_per_hour == 144.0
    restart_usd = 144 * expected.restart_s / 3600
    assert expected.lost_usd_with_notice == pytest.approx(restart_usd)
    assert expected.lost_usd_expected == pytest.approx(restart_usd + 144 * expected.period_s / 2 / 3600)
    assert expected.lost_usd_worst == pytest.approx(restart_usd + 144 * expected.period_s / 3600)


def test_without_a_price_there_are_no_dollars_and_without_a_rate_llama_3s() -> None:
    expected = survival(L70, Training(8192, 512), 16_384, storage_bytes_per_s=1e12, start_s=60)
    assert expected.lost_usd_worst is None and expected.usd_per_hour is None
    assert expected.mtbi_s == pytest.approx(54 * 86_400 / 419)
    given_period = survival(L70, Training(8192, 512), 64, storage_bytes_per_s=1e12, start_s=60, period_s=3600)
    assert given_period.period_s == 3600
