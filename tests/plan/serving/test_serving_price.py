"""Prices of tokens: identities that are public, the hour profile, spot replicas, and the break-even against an API."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.errors import SpecError
from cordee.hardware.load import load_catalogue
from cordee.hardware.power import POWER, Electricity
from cordee.plan.serving.price.energy import energy_usd_per_mtok, gpu_watts
from cordee.plan.serving.price.hours import (
    Renting,
    ReplicaHours,
    SpotReplicas,
    cheapest_hours,
    hour_profile,
    replicas_by_hour,
)
from cordee.plan.serving.price.own_or_api import BreakEven, OwnReplicas, break_even
from cordee.plan.serving.price.price import (
    DAY_S,
    PhaseRates,
    TokenMix,
    TokenPrices,
    replica_s,
    token_prices,
)

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
GPUS = {gpu.name: gpu for gpu in load_catalogue().gpus}

# published_serving.csv, deepseek-ai/open-infra-index day 6, DeepSeek-V3/R1 on nodes of 8 H800.
DEEPSEEK_NODE = PhaseRates(prefill_tokens_per_s=73_700, decode_tokens_per_s=14_800)  # the former with cache hits
DEEPSEEK_DAY = TokenMix(input_tokens=608e9, output_tokens=168e9)
R1_PRICES = TokenPrices(input_usd=0.55, cached_usd=0.14, output_usd=2.19)

# published_serving.csv, NVIDIA/TensorRT-LLM perf-overview, TensorRT-LLM 1.0, Llama-3.1-405B FP8, 8 x H100, TP8:
# (input, output, total_output_throughput in tokens/s).
LLAMA_405B = (
    (128, 128, 3627),
    (128, 2048, 4340),
    (128, 4096, 3116),
    (500, 2000, 3994),
    (1000, 1000, 2919),
    (1000, 2000, 2895),
    (2048, 128, 453),
    (2048, 2048, 2296),
    (5000, 500, 610),
    (20000, 2000, 345),
)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark's prices of measured replicas: beside the package, importable only from here."""
    monkeypatch.setattr(sys, "path", [*sys.path, str(BENCHMARKS)])
    return importlib.import_module("serving.loaded")


class TestDeepSeeksDay:
    def test_nodes(self) -> None:
        prefill = 608e9 / 73_700 / DAY_S
        decode = 168e9 / 14_800 / DAY_S
        nodes = replica_s(DEEPSEEK_NODE, DEEPSEEK_DAY) / DAY_S
        assert (round(prefill, 1), round(decode, 1), round(nodes, 1)) == (95.5, 131.4, 226.9)
        assert nodes == pytest.approx(226.75, rel=0.001)  # reported

    def test_cost(self) -> None:
        fleet = cheapest_hours((1,) * 24, 8, Renting(on_demand_usd_per_gpu_hour=2.0))
        assert 226.75 * fleet.usd_per_day == pytest.approx(87_072)  # reported

    def test_revenue_and_margin(self, loaded: ModuleType) -> None:
        revenue = R1_PRICES.usd(TokenMix(608e9, 168e9, cached_tokens=342e9))
        assert revenue == pytest.approx(562_100)
        assert revenue == pytest.approx(562_027, rel=0.0002)  # reported
        assert loaded.margin(562_027, 87_072) == pytest.approx(5.45, abs=0.01)  # 545 % reported
        assert loaded.margin(revenue, 87_072) == pytest.approx(5.455, abs=0.01)

    def test_cost_of_a_million_tokens(self) -> None:
        own = token_prices(DEEPSEEK_NODE, usd_per_replica_hour=16.0)
        assert own.usd(DEEPSEEK_DAY) == pytest.approx(226.9 * 384, rel=0.001)
        assert (round(own.input_usd, 4), round(own.output_usd, 3)) == (0.0603, 0.3)


class TestLlama405B:
    @pytest.fixture
    def prices(self, loaded: ModuleType) -> dict[tuple[int, int], tuple[float, float]]:
        rows = {(i, o): loaded.loaded_price(rate, TokenMix(i, o), 16.0) for i, o, rate in LLAMA_405B}
        return {shape: (round(each.output_usd, 2), round(each.blended_usd, 2)) for shape, each in rows.items()}

    def test_published_rows(self, prices: dict[tuple[int, int], tuple[float, float]]) -> None:
        assert prices[1000, 1000] == (1.52, 0.76)
        assert prices[5000, 500] == (7.29, 0.66)
        assert prices[128, 2048] == (1.02, 0.96)

    def test_two_eighty_a_million_pays_blended_everywhere_and_on_output_alone_only_for_long_answers(
        self, prices: dict[tuple[int, int], tuple[float, float]]
    ) -> None:
        assert all(blended < 2.8 for _, blended in prices.values())
        loses_on_output_alone = {shape for shape, (output, _) in prices.items() if output > 2.8}
        assert loses_on_output_alone == {(2048, 128), (5000, 500), (20000, 2000)}

    @pytest.mark.parametrize(
        ("shape", "list_prices", "busy"),
        [
            ((1000, 1000, 2919), TokenPrices(2.8, 2.8, 2.8), 0.272),
            ((1000, 1000, 2919), TokenPrices(0.0, 0.0, 2.8), 0.544),
            ((5000, 500, 610), TokenPrices(2.8, 2.8, 2.8), 0.237),
            ((5000, 500, 610), TokenPrices(0.0, 0.0, 2.8), 2.602),  # never
        ],
    )
    def test_busy_fraction_from_which_it_pays(
        self, loaded: ModuleType, shape: tuple[int, int, int], list_prices: TokenPrices, busy: float
    ) -> None:
        price = loaded.loaded_price(shape[2], TokenMix(shape[0], shape[1]), 16.0)
        assert price.busy_fraction_needed(list_prices) == pytest.approx(busy, abs=0.001)


def test_a_half_busy_replica_costs_twice_as_much() -> None:
    full, half = (token_prices(PhaseRates(1e4, 1e3, 1e5), 8.0, busy) for busy in (1.0, 0.5))
    assert half.input_usd == pytest.approx(2 * full.input_usd)
    assert half.cached_usd == pytest.approx(2 * full.cached_usd)
    assert half.output_usd == pytest.approx(2 * full.output_usd)
    assert full.cached_usd == pytest.approx(full.input_usd / 10)


@given(
    st.floats(1, 1e6), st.floats(0, 1), st.floats(1, 1e5), st.floats(10, 1e6), st.floats(10, 1e5), st.floats(0.1, 100)
)
def test_the_prices_of_a_mix_add_up_to_its_replica_time(
    inputs: float, hit: float, outputs: float, prefill: float, decode: float, usd: float
) -> None:
    mix, rates = TokenMix(inputs, outputs, hit * inputs), PhaseRates(prefill, decode, 1e6)
    assert token_prices(rates, usd).usd(mix) == pytest.approx(replica_s(rates, mix) * usd / 3600)


class TestHourProfile:
    def test_hours_of_several_days_fold(self) -> None:
        rows = [(day * 86_400 + hour * 3600 + 1800, 1.0 + hour % 2) for day in range(3) for hour in range(24)]
        profile = hour_profile([*rows, (0.0, 0.0), (3 * 86_400 - 1e-6, 0.0)])
        assert profile == pytest.approx([2 / 3, 4 / 3] * 12)

    def test_an_hour_that_is_covered_in_part_counts_by_that_part(self) -> None:
        rows = [(t, 1.0) for t in range(0, 3600 + 1800, 10)]
        assert hour_profile(rows)[:2] == pytest.approx((1.0, 1.0), rel=0.01)

    def test_a_profile_of_minutes_is_flat(self) -> None:
        assert hour_profile([(10.0, 5.0), (20.0, 1.0)]) == (1.0,) * 24

    @pytest.mark.parametrize("rows", [[], [(1.0, 0.0)]])
    def test_no_work_is_refused(self, rows: list[tuple[float, float]]) -> None:
        with pytest.raises(SpecError, match="requests with work"):
            hour_profile(rows)

    def test_replicas_of_each_hour(self) -> None:
        assert replicas_by_hour((1.0,) * 24, 86_400 * 4, 1.0) == (4,) * 24
        assert replicas_by_hour((0.0, 2.0), 86_400 * 4, 0.8, at_least=2) == (2, 10)
        with pytest.raises(SpecError, match="cannot be busy"):
            replicas_by_hour((1.0,), 1.0, 1.2)
        with pytest.raises(SpecError, match="not negative"):
            replicas_by_hour((1.0, -1.0), 1.0, 0.8)

    def test_busy_fraction(self) -> None:
        day = cheapest_hours(replicas_by_hour((0.5, 1.5) * 12, 86_400 * 4, 1.0), 1, Renting(1.0))
        assert day.replicas[:2] == (2, 6)
        assert day.busy_fraction(86_400 * 4) == pytest.approx(1.0)
        assert day.usd == pytest.approx(sum(day.replicas))


class TestRenting:
    def brute_force(self, replicas: tuple[int, ...], on_demand: float, reserved: float) -> float:
        return min(
            count * len(replicas) * reserved + sum(max(0, need - count) for need in replicas) * on_demand
            for count in range(max(replicas) + 1)
        )

    @given(st.lists(st.integers(0, 6), min_size=1, max_size=24), st.floats(0.5, 5), st.floats(0.3, 5))
    def test_no_other_number_of_reserved_replicas_is_cheaper(
        self, replicas: list[int], on_demand: float, reserved: float
    ) -> None:
        found = cheapest_hours(replicas, 1, Renting(on_demand, reserved))
        assert found.usd == pytest.approx(self.brute_force(tuple(replicas), on_demand, reserved))

    def test_spot_pays_for_its_reclaims(self) -> None:
        # A reclaim an hour, with notice: 180 s of start for 3,600 s; without notice also half a request of 20 s.
        assert SpotReplicas(1.0, 3600.0, grace_s=30).useful_fraction == pytest.approx(1 / (1 + 180 / 3600))
        assert SpotReplicas(1.0, 3600.0, grace_s=0).useful_fraction == pytest.approx(1 / (1 + 190 / 3600))

    def test_spot_is_left_where_its_reclaims_make_it_dearer(self) -> None:
        seldom, often = (Renting(3.0, None, SpotReplicas(2.0, mtbi_s)) for mtbi_s in (36_000, 300))
        needed: tuple[ReplicaHours, ...] = tuple(cheapest_hours((4,) * 24, 8, rent) for rent in (seldom, often))
        assert needed[0].spot_hours == pytest.approx(48 * (1 + 180 / 36_000))
        assert needed[0].usd == pytest.approx(8 * 48 * (3.0 + 2.0 * 1.005))
        assert needed[1].spot_hours == 0
        assert needed[1].usd == pytest.approx(8 * 96 * 3.0)


class TestBreakEven:
    MIX = TokenMix(1000, 1000)
    OWN = OwnReplicas(PhaseRates(1e9, 2919.0), 8, Renting(2.0))

    def test_one_replica_pays_once_its_day_costs_less_than_the_requests(self) -> None:
        found = break_even(self.OWN, TokenPrices(2.8, 2.8, 2.8), self.MIX)
        assert found.first_per_day == pytest.approx(8 * 24 * 2.0 / 0.0056)
        assert found.always_per_day == found.first_per_day
        assert "cheaper from 68,571 requests a day" in str(found)

    def test_it_never_pays_against_a_price_below_the_cost_at_scale(self) -> None:
        # $1.52/M at full load is $1.90/M at 80 %.
        found = break_even(self.OWN, TokenPrices(0.0, 0.0, 1.85), self.MIX)
        assert found.first_per_day is None
        assert found.always_per_day is None
        assert "the API is cheaper at any load" in str(found)

    @pytest.mark.parametrize("output_usd", [2.0, 2.3, 2.8, 6.0])
    def test_the_answer_is_where_a_scan_finds_it(self, output_usd: float) -> None:
        own = OwnReplicas(PhaseRates(2e4, 2919.0), 8, Renting(2.0, 1.3), (0.5,) * 12 + (1.5,) * 12)
        api = TokenPrices(0.2, 0.02, output_usd)
        found = break_even(own, api, self.MIX)
        if found.always_per_day is None:
            assert found.own_usd_per_request >= found.api_usd_per_request or output_usd == 2.0
            return
        assert found.first_per_day is not None
        for factor in (0.1, 0.5, 0.9, 0.99):
            load = found.first_per_day * factor
            assert own.usd_per_day(self.MIX, load) > load * api.usd(self.MIX)
        for factor in (1.001, 1.1, 1.5, 2.0, 3.3, 10.0):
            load = found.always_per_day * factor
            assert own.usd_per_day(self.MIX, load) <= load * api.usd(self.MIX)


class TestEnergy:
    def test_an_h100_with_its_part_of_a_dgx(self) -> None:
        assert gpu_watts(GPUS["H100"], Electricity()) == pytest.approx((700 + 575) * 1.56)

    def test_a_million_tokens(self) -> None:
        at = Electricity(usd_per_kwh=0.10)
        full = energy_usd_per_mtok(GPUS["H100"], 8, 2919.0, at)
        assert full == pytest.approx(0.1514, abs=0.001)  # of the $1.52 of Llama-405B's output
        half = energy_usd_per_mtok(GPUS["H100"], 8, 2919.0, at, busy_fraction=0.5)
        assert half is not None
        assert full < half < 2 * full

    def test_a_card_in_a_plain_server_has_no_dgx_around_it(self) -> None:
        for name in ("A10", "RTX-4090", "L40S"):
            watts = gpu_watts(GPUS[name], Electricity(building_factor=1.0))
            assert watts is not None and watts < POWER[name].watts + 200
        assert gpu_watts(GPUS["A100-80"], Electricity(building_factor=1.0)) == pytest.approx(6500 / 8)

    def test_every_gpu_of_the_catalogue_has_watts(self) -> None:
        assert all(gpu_watts(gpu, Electricity()) is not None for gpu in GPUS.values())


def test_dollars_of_a_request_have_no_exponent() -> None:
    text = str(BreakEven(1000, 1000, own_usd_per_request=8.99e-05, api_usd_per_request=8e-4))
    assert "$0.0000899 of one's own against $0.000800 by the API" in text
