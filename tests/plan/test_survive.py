"""When to checkpoint and what a preemption costs: known vectors, and the maximum found by brute force."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.plan.cost import hold_usd, usd_per_billion_tokens
from cordee.plan.survive import (
    Interruptions,
    Saving,
    best_period_of_s,
    best_period_s,
    checkpoint_bytes,
    goodput,
    lost_fraction,
    lost_usd,
    survival,
)
from cordee.plan.training import OPTIMIZERS, Training
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


def test_the_first_order_estimate_agrees_with_it_when_checkpoints_are_cheap() -> None:
    best = best_period_s(1e6, 0, 1)
    assert math.sqrt(2 * 1 * 1e6) == pytest.approx(best, rel=0.01)


def test_the_known_story() -> None:
    # 64 H100s for 47 hours at $2.99: 3,008 GPU-hours, $8,994, and all of it lost without a checkpoint.
    assert hold_usd(64, 47 * 3600, 2.99) == pytest.approx(8993.92)
    assert lost_usd(64, 47 * 3600, 0, 2.99) == pytest.approx(8993.92)
    assert usd_per_billion_tokens(1, 1e9 / 3600, 2.0) == pytest.approx(2.0)


def test_a_checkpoint_of_70b_weighs_12_bytes_a_parameter() -> None:
    assert checkpoint_bytes(L70, Training(8192, 512)) == 70_553_706_496 * 12
    assert checkpoint_bytes(L70, Training(8192, 512, OPTIMIZERS["adamw-8bit"])) == 70_553_706_496 * (4 + 8 / 256)


def test_what_a_job_has_to_expect() -> None:
    expected = survival(L70, Training(8192, 512), 64, Saving(16e9, 120), mtbi_s=86_400, usd_per_gpu_hour=2.25)
    write_s = 70_553_706_496 * 12 / 16e9
    assert expected.checkpoint_s == expected.notice_needed_s == pytest.approx(write_s)
    assert expected.restart_s == pytest.approx(120 + write_s)
    assert expected.period_s == pytest.approx(best_period_s(86_400, expected.restart_s, write_s))
    assert expected.usd_per_hour == 144.0
    restart_usd = 144 * expected.restart_s / 3600
    assert expected.lost_usd_with_notice == pytest.approx(restart_usd)
    assert expected.lost_usd_expected == pytest.approx(restart_usd + 144 * expected.period_s / 2 / 3600)
    assert expected.lost_usd_worst == pytest.approx(restart_usd + 144 * expected.period_s / 3600)


def test_without_a_price_there_are_no_dollars_and_without_a_rate_llama_3s() -> None:
    expected = survival(L70, Training(8192, 512), 16_384, Saving(1e12, 60))
    assert expected.lost_usd_worst is None and expected.usd_per_hour is None
    assert expected.mtbi_s == pytest.approx(54 * 86_400 / 419)
    given_period = survival(L70, Training(8192, 512), 64, Saving(1e12, 60), period_s=3600)
    assert given_period.period_s == 3600


def test_other_forms_of_the_known_vector() -> None:
    # Without the checkpoint's own square the form is sqrt(2(M + R)C), 24 steps of 15 s; Young has no restart either.
    assert pytest.approx(363.3, abs=0.05) == (2 * (6000 + 600) * 10) ** 0.5
    assert math.sqrt(2 * 6000 * 10) == pytest.approx(346.4, abs=0.05)


ASYNC = {"stall_s": 2.0, "upload_s": 60.0, "restart_s": 300.0, "leave_s": 70.0}


@given(
    st.floats(600, 1e6), st.floats(600, 1e6), st.floats(0, 300), st.floats(0.01, 100), st.floats(0, 500),
    st.floats(0, 2000),
)  # fmt: skip
def test_no_other_period_keeps_more_with_failures_reclaims_and_an_upload(
    failures_s: float, reclaims_s: float, grace_s: float, stall_s: float, upload_s: float, restart_s: float
) -> None:
    stops = Interruptions(failures_s, reclaims_s, grace_s)
    losses = {"restart_s": restart_s, "stall_s": stall_s, "upload_s": upload_s, "leave_s": stall_s + upload_s}

    def kept(period_s: float) -> float:
        return (1 - stall_s / period_s) / (1 + lost_fraction(period_s, stops, **losses))

    best = best_period_of_s(stops, **losses)
    assert best >= upload_s and best > stall_s
    for factor in (0.3, 0.7, 0.95, 1.05, 1.5, 4.0):
        if best * factor > max(upload_s, stall_s):
            assert kept(best * factor) <= kept(best) + 1e-12


@given(st.floats(100, 1e6), st.floats(0, 5000), st.floats(0.1, 500), st.floats(0, 500))
def test_with_failures_alone_it_is_the_closed_form(
    mtbi_s: float, restart_s: float, stall_s: float, upload_s: float
) -> None:
    stops = Interruptions(mtbi_s)
    found = best_period_of_s(stops, restart_s=restart_s, stall_s=stall_s, upload_s=upload_s, leave_s=0.0)
    assert found == pytest.approx(best_period_s(mtbi_s, restart_s, stall_s, upload_s), rel=1e-9)
    share = lost_fraction(found, stops, restart_s=restart_s, stall_s=stall_s, upload_s=upload_s, leave_s=0.0)
    assert (1 - stall_s / found) / (1 + share) == pytest.approx(goodput(found, mtbi_s, restart_s, stall_s, upload_s))


def test_the_interval_is_never_shorter_than_the_upload() -> None:
    assert best_period_s(600, 60, 0.01, upload_s=400) == 400
    assert best_period_s(1e6, 60, 10, upload_s=400) > 400


def test_enough_notice_makes_reclaims_cost_a_save_and_a_restart_only() -> None:
    short, long = Interruptions(None, 3600, 30), Interruptions(None, 3600, 120)
    assert lost_fraction(600, short, **ASYNC) == pytest.approx((300 + 60 + 300) / 3600)
    assert lost_fraction(600, long, **ASYNC) == pytest.approx((2 + 60 + 300) / 3600)
    # Nothing is ever undone: only failures ask for an interval, and there are none.
    assert best_period_of_s(long, **ASYNC) == float("inf")


def test_an_asynchronous_save_loses_half_the_interval_and_the_upload() -> None:
    arguments = {"mtbi_s": 86_400, "usd_per_gpu_hour": 2.25}
    waits = survival(L70, Training(8192, 512), 64, Saving(16e9), **arguments)
    goes_on = survival(L70, Training(8192, 512), 64, Saving(16e9, stall_s=2.0), **arguments)
    write_s = 70_553_706_496 * 12 / 16e9
    assert (waits.stall_s, waits.upload_s) == (pytest.approx(write_s), 0)
    assert (goes_on.stall_s, goes_on.upload_s) == (2.0, pytest.approx(write_s))
    assert goes_on.period_s < waits.period_s and goes_on.goodput > waits.goodput
    assert goes_on.lost_s_expected == pytest.approx(goes_on.period_s / 2 + write_s)
    assert goes_on.lost_usd_expected == pytest.approx(144 * (goes_on.lost_s_expected + goes_on.restart_s) / 3600)
    assert goes_on.period_s >= goes_on.upload_s


def test_spot_capacity_is_stopped_by_failures_and_reclaims_together() -> None:
    arguments = {"mtbi_s": 86_400.0, "reclaim_mtbi_s": 43_200.0}
    saving = Saving(16e9)
    spot = survival(L70, Training(8192, 512), 64, saving, **arguments, grace_s=30)
    assert spot.mtbi_s == pytest.approx(28_800)
    assert not spot.grace_is_enough
    warned = survival(L70, Training(8192, 512), 64, saving, **arguments, grace_s=120, step_s=60)
    assert warned.grace_is_enough and warned.goodput > spot.goodput
    assert not survival(L70, Training(8192, 512), 64, saving, **arguments, grace_s=120, step_s=70).grace_is_enough
