"""Money: storage, a whole run, rent or buy, and the figures that are quoted in the field."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.errors import SpecError
from cordee.hardware.collectives import Link, all_gather_s
from cordee.plan.cost import egress_usd, hold_usd, storage_usd_per_month, training_run
from cordee.plan.memory import state_bytes
from cordee.plan.published import figures
from cordee.plan.rent_or_buy import Ownership, break_even_month, compare, ownership_from
from cordee.plan.training import OPTIMIZERS, Training
from cordee.units import GB, TB, MiB
from cordee.workload.load import load_shape

L70, L405 = load_shape("llama-3-70b"), load_shape("llama-3-405b")
OWNED = Ownership(
    gpus=64, busy_fraction=0.7, rent_usd_per_gpu_hour=2.99, purchase_usd_per_gpu=40_000, life_years=4,
    power_kw_per_gpu=1.4, usd_per_kwh=0.11, housing_usd_per_year=120_000, staff_usd_per_year=150_000,
    resale_fraction=0.1,
)  # fmt: skip


def test_405b_in_8_bit_adam_is_three_times_810_gb() -> None:
    assert 810 * GB == 2 * 405e9
    assert round(2 * L405.parameters / GB, 1) == 811.7
    n_bytes = state_bytes(L405, Training(8192, 512, OPTIMIZERS["adamw-8bit"]))
    constants = L405.parameters * 2 * 4 // 256  # of the blocks of both moments
    assert n_bytes == 3 * 2 * L405.parameters + constants and round(n_bytes / TB, 3) == 2.448


def test_two_fp32_moments_of_405b_are_3_24_tb_and_of_70b_560_gb_not_280() -> None:
    assert 3.24 * TB == 8 * 405e9
    assert OPTIMIZERS["adamw"].moment_bytes * 70e9 == 560 * GB
    assert 280 * GB == 4 * 70e9


def test_thirty_checkpoints_of_420_gb_cost_252_dollars_a_month() -> None:
    total = 30 * 420 * GB
    assert total == 12.6 * TB
    assert storage_usd_per_month(total, 0.02) == pytest.approx(252)
    assert egress_usd(total, 0.09) == pytest.approx(1134)


def test_47_hours_on_64_gpus_are_3008_gpu_hours_and_8994_dollars() -> None:
    assert 64 * 47 == 3008
    assert round(hold_usd(64, 47 * 3600, 2.99)) == 8994


@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 1000])
def test_a_ring_all_reduce_moves_2_n_minus_1_over_n(ranks: int) -> None:
    # A reduce-scatter and an all-gather, without latency and at a byte a second.
    moved = 2 * float(all_gather_s(1e6, ranks, Link(0.0, 1.0)))
    assert moved == pytest.approx(2 * (ranks - 1) / ranks * 1e6)


def test_224_mb_is_the_traffic_of_one_layer_at_tp_8() -> None:
    one = 2 * 8192 * L405.hidden
    assert one == 256 * MiB
    assert one * 7 / 8 == 224 * MiB


def test_a_hundred_runs_a_year_never_pay_for_64_owned_gpus_and_a_hundred_a_month_do_in_six() -> None:
    yearly = 100 * 48 * 98
    assert yearly == 470_400
    assert 312_500 + 200_000 + 50_000 == 562_500 > yearly
    purchase, running = 8 * 312_500, 250_000 / 12
    assert break_even_month(purchase, running, yearly / 12, 96) is None
    assert break_even_month(purchase, running, yearly, 96) == 6


def test_what_is_published_holds_or_says_how_it_does_not() -> None:
    found = {figure.statement: figure for figure in figures(L70, L405)}
    held = [says for says, figure in found.items() if figure.holds]
    assert len(found) == 9 and len(held) == 6
    assert all(figure.because and figure.computed for figure in found.values())
    assert "560 GB" in found["70B: optimizer states of 280 GB"].computed
    sequence = found["sequence parallelism: 224 MB instead of 2.4 TB"]
    assert not sequence.holds and "224 MiB" in sequence.computed and "2.435 TB" in sequence.computed
    owned = next(figure for says, figure in found.items() if says.startswith("100 runs a year"))
    assert not owned.holds and "never" in owned.computed and "8 H100s, not 64" in owned.because


def test_a_run_counts_its_interruptions() -> None:
    run = training_run(1e12, tokens_per_step=4_000_000, step_s=10.0, gpus=64, goodput=0.8, usd_per_gpu_hour=2.0)
    assert run.steps == 250_000
    assert run.run_s == pytest.approx(250_000 * 10 / 0.8)
    assert run.usd == pytest.approx(64 * run.run_s / 3600 * 2)
    assert run.usd_lost == pytest.approx(0.2 * (run.usd or 0))
    assert training_run(1e12, tokens_per_step=4_000_000, step_s=10.0, gpus=64, goodput=0.8).usd is None
    assert training_run(1, tokens_per_step=4_000_000, step_s=10.0, gpus=1, goodput=1.0).steps == 1


@given(
    st.floats(1e3, 1e8), st.floats(0, 1e6), st.floats(0, 1e6), st.floats(1, 240)
)  # fmt: skip
def test_the_break_even_month_is_the_first_in_which_owning_was_cheaper(
    purchase: float, running: float, rent: float, life: float
) -> None:
    month = break_even_month(purchase, running, rent, life)
    if month is None:
        last = int(life)
        assert last < 1 or purchase + running * last > rent * last * (1 - 1e-9)
        return
    assert purchase + running * month <= rent * month * (1 + 1e-9)
    assert month == 1 or purchase + running * (month - 1) > rent * (month - 1) * (1 - 1e-9)


def test_rent_or_buy_by_hand() -> None:
    found = compare(OWNED)
    rent = 64 * 0.7 * 730 * 2.99
    running = (64 * 1.4 * 0.7 * 8760 * 0.11 + 270_000) / 12
    assert OWNED.rent_usd_per_month == pytest.approx(rent)
    assert OWNED.running_usd_per_month == pytest.approx(running)
    assert found.rent_usd == pytest.approx(48 * rent)
    assert found.own_usd == pytest.approx(64 * 40_000 * 0.9 + 48 * running)
    assert found.own_usd_per_gpu_hour == pytest.approx(found.own_usd / (64 * 0.7 * 8760 * 4))
    assert found.break_even_month == break_even_month(64 * 40_000, running, rent, 48) == 37
    assert "month 37 of 48" in found.verdict
    assert found.break_even_busy_fraction is not None
    even = compare(replace(OWNED, busy_fraction=found.break_even_busy_fraction))
    assert even.rent_usd == pytest.approx(even.own_usd)


def test_what_moves_the_month_most_stands_first_and_idle_gpus_are_rented() -> None:
    swings = compare(OWNED).swings
    spans = [abs((s.low_month or 49) - (s.high_month or 49)) for s in swings]
    assert spans == sorted(spans, reverse=True)
    price = next(s for s in swings if s.name == "purchase_usd_per_gpu")
    assert price.low_month is not None and price.high_month is not None and price.low_month < 37 < price.high_month
    idle = compare(replace(OWNED, busy_fraction=0.1))
    assert idle.break_even_month is None and idle.verdict.startswith("Rent: ")
    assert compare(replace(OWNED, rent_usd_per_gpu_hour=0.05)).break_even_busy_fraction is None


@pytest.mark.parametrize(
    ("change", "says", "hint"),
    [
        ({"busy": 0.5}, "unknown name 'busy'", "busy_fraction"),
        ({"busy_fraction": None}, "busy_fraction is missing", "busy_fraction = 0.7"),
        ({"busy_fraction": 7}, "busy_fraction is 7", "between 0 and 1"),
        ({"busy_fraction": 0}, "busy_fraction is 0", "more than 0"),
        ({"life_years": "four"}, "life_years is 'four'", "not negative"),
        ({"purchase_usd_per_gpu": -1}, "purchase_usd_per_gpu is -1", "not negative"),
        ({"staff_usd_per_year": True}, "staff_usd_per_year is True", "not negative"),
    ],
)
def test_assumptions_that_cannot_be_are_refused(change: dict[str, object], says: str, hint: str) -> None:
    table = {"busy_fraction": 0.5, "purchase_usd_per_gpu": 40_000, "life_years": 4} | change
    with pytest.raises(SpecError) as caught:
        ownership_from(table, gpus=64, rent_usd_per_gpu_hour=2.99)
    assert says in caught.value.message and hint in (caught.value.hint or "")


def test_gpus_and_rent_come_from_the_plan_unless_the_file_has_them() -> None:
    table = {"busy_fraction": 0.5, "purchase_usd_per_gpu": 40_000, "life_years": 4}
    assert ownership_from(table, gpus=64, rent_usd_per_gpu_hour=2.99).rent_usd_per_gpu_hour == 2.99
    assert ownership_from(table | {"rent_usd_per_gpu_hour": 2}, gpus=64, rent_usd_per_gpu_hour=None).gpus == 64
    with pytest.raises(SpecError, match="rent_usd_per_gpu_hour is missing"):
        ownership_from(table, gpus=64, rent_usd_per_gpu_hour=None)
