"""The serving answer: ranked layouts, what they hold and cost, and the reasons against the others."""

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.errors import DoesNotFitError, LayoutError, SpecError
from cordee.hardware.load import load_catalogue
from cordee.plan.serving.answer import ServingAnswer
from cordee.plan.serving.ask import ServingRequest, ask
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.formats import KV, WEIGHTS
from cordee.plan.serving.judge import steady
from cordee.plan.serving.layouts import parse_serving_layout
from cordee.plan.serving.price.price import TokenPrices
from cordee.plan.serving.request import EngineLimits, Pricing, Slo, Traffic
from cordee.workload.load import load_shape
from cordee.workload.requests import Request

CATALOGUE = load_catalogue()
NINE_TENTHS = {"limits": EngineLimits(memory_fraction=0.9)}


def request(
    model: str = "llama-3-8b", gpus: str = "8xH100", *, layout: str | None = None, **more: object
) -> ServingRequest:
    count, _, name = gpus.partition("x")
    made = ServingRequest(
        shape=load_shape(model),
        gpu=CATALOGUE.find_gpu(name),
        gpus=int(count),
        engine=find_engine("vllm"),
        **{"pricing": Pricing(prices=CATALOGUE.prices), **more},  # type: ignore[arg-type]
    )
    return made if layout is None else replace(made, layout=parse_serving_layout(layout))


def check(answer: ServingAnswer) -> None:
    """Hold what is true of every answer."""
    assert len(answer.candidates) == len(answer.serving) + len(answer.late) + len(answer.rejected)
    assert answer.candidates == (*answer.serving, *answer.late, *answer.rejected)
    assert (answer.best is None) == (not answer.serving)
    for each in answer.candidates:
        assert each.replicas >= 1 and each.gpus <= answer.request.gpus
        assert each.fits == (each.shortfall_bytes == 0)
        assert not each.fits or sum(each.parts.values()) <= each.case.gpu.memory_bytes * 1.1
        if each.performance is not None:
            # Nothing is sold that the replicas cannot do, so no token costs less than where requests always wait.
            found = each.performance
            assert 0 < found.sequences <= max(1, each.sequences) <= each.case.slots
            assert found.requests_per_s <= 1.1 * each.capacity_per_s
            if each.usd_per_mtok is not None and each.usd_per_hour is not None:
                full_mtok_per_hour = 3600 * each.capacity_per_s * found.mix.tokens / 1e6
                assert each.usd_per_mtok >= each.usd_per_hour / full_mtok_per_hour / 1.1
            assert each.floor.ttft_s <= found.ttft.p50 and each.floor.tpot_s <= found.tpot.p50
    prices = [each.usd_per_mtok for each in answer.serving if each.usd_per_mtok is not None]
    assert prices == pytest.approx(sorted(prices))


def test_without_a_load_it_serves_as_much_as_the_latencies_allow() -> None:
    answer = ask(request(slo=Slo(ttft_s=0.5, tpot_s=0.05)))
    check(answer)
    best = answer.best
    assert best is not None and best.performance is not None and not best.performance.played
    sequences = round(best.performance.sequences)
    assert best.excess <= 1 < steady(best, sequences + 1).excess


def test_a_rate_takes_the_fewest_replicas_that_keep_the_latencies() -> None:
    slo = Slo(ttft_s=0.5, tpot_s=0.05)
    few, many = (ask(request(traffic=Traffic(rate_per_s=rate), slo=slo, layout="tp=1")) for rate in (5, 100))
    check(few)
    check(many)
    assert few.best is not None and many.best is not None
    assert few.best.replicas == 1 < many.best.replicas
    assert many.best.performance is not None and many.best.performance.requests_per_s == pytest.approx(100)
    assert many.best.performance.played


def test_a_rate_that_no_number_of_replicas_keeps_up_with_is_said_with_what_they_do() -> None:
    answer = ask(request(gpus="1xH100", traffic=Traffic(rate_per_s=500)))
    check(answer)
    assert answer.best is None and answer.fits
    assert "cannot keep up: at most" in answer.summary
    assert 0 < answer.nearest.capacity_per_s < 500


def test_a_concurrency_is_spread_over_the_replicas() -> None:
    answer = ask(request("llama-3-70b", traffic=Traffic(concurrency=64), slo=Slo(tpot_s=0.03)))
    check(answer)
    best = answer.best
    assert best is not None and best.performance is not None
    assert best.performance.sequences * best.replicas >= 64


def test_a_trace_brings_its_own_arrivals() -> None:
    """It is what replicas answer that counts: one replica takes 2 requests a second, 60 take more."""
    answers = []
    for per_s in (2, 60):
        traced = tuple(Request(index / per_s, 800, 100) for index in range(30 * per_s))
        traffic = Traffic(input_tokens=800, output_tokens=100, requests=traced)
        answers.append(ask(request(gpus="8xH100", traffic=traffic, layout="tp=1")))
    light, heavy = answers
    check(light)
    assert light.best is not None and light.best.performance is not None and light.best.performance.played
    assert light.best.replicas == 1 and light.best.performance.requests_per_s == pytest.approx(2, rel=0.1)
    assert heavy.best is not None and heavy.best.performance is not None
    assert heavy.best.replicas > 1 and heavy.best.performance.requests_per_s == pytest.approx(60, rel=0.3)


def test_formats_that_are_left_open_are_searched_and_named() -> None:
    formats = (WEIGHTS["bf16"], WEIGHTS["fp8"])
    answer = ask(request(weights=formats, kv=(KV["bf16"], KV["fp8"]), gpus="1xH100"))
    check(answer)
    assert {each.name for each in answer.candidates} == {
        f"tp1 {weights} kv-{kv}" for weights in ("bf16", "fp8") for kv in ("bf16", "fp8")
    }
    assert answer.nearest.case.weights.name == "fp8"


def test_seven_billion_on_24_gb_die_of_the_cache_and_not_of_the_weights() -> None:
    """The weights take little more than half of the card; an 8-bit cache doubles the requests at once."""
    plain = ask(request("llama-2-7b", "1xA10")).nearest
    assert plain.fits and plain.parts["weights"] < 0.6 * plain.case.gpu.memory_bytes
    assert plain.sequences <= 12
    eight = ask(request("llama-2-7b", "1xA10", kv=(KV["fp8"],))).nearest
    assert eight.sequences in (2 * plain.sequences, 2 * plain.sequences + 1)


def test_a_model_that_does_not_fit_is_answered_with_what_would() -> None:
    answer = ask(request("llama-3-70b", "2xL40S"))
    check(answer)
    assert not answer.fits and answer.best is None and answer.curve is None and not answer.levers
    changes = [remedy.change for remedy in answer.remedies]
    assert "--weights fp8" in changes and any(each.startswith("--gpus") for each in changes)
    for remedy in answer.remedies:
        assert remedy.candidate.keeps_slo
    error = answer.error()
    assert isinstance(error, DoesNotFitError)
    assert "does not fit 2 x L40S, not even for one request" in error.message
    assert error.hint is not None and "--weights fp8" in error.hint


def test_remedies_try_the_cheapest_gpus_as_many_of_another_kind_and_two_changes_together() -> None:
    """A 70B in bf16 on an A10 of 24 GB: no format helps alone, one MI300X holds it; on two, int4 needs little more."""
    kinds = tuple(gpu for gpu in CATALOGUE.gpus if gpu.name != "A10")
    pricing = Pricing(prices=CATALOGUE.prices, other_gpus=kinds)
    found = ask(request("llama-3-70b", "1xA10", pricing=pricing)).remedies
    gpus = [each for each in found if each.change.startswith("--gpus")]
    alone = [each for each in gpus if each.candidate.request.gpus == 1]
    assert alone and all(each.candidate.case.gpu.memory_bytes > 160e9 for each in alone)
    assert len({each.change for each in found}) == len(found)
    hourly = [each.candidate.usd_per_hour for each in gpus if each.candidate.usd_per_hour is not None]
    assert gpus[0].candidate.usd_per_hour == min(hourly)
    both = ask(request("llama-3-70b", "2xA10", pricing=pricing, limits=EngineLimits(max_sequences=256))).remedies
    assert any(each.change.count("--") == 2 and "--weights int4" in each.change for each in both)
    for each in (*found, *both):
        assert each.candidate.keeps_slo


def test_eight_bit_weights_are_int8_where_a_gpu_has_no_fp8() -> None:
    changes = [each.change for each in ask(request("llama-3-70b", "4xA100-40", **NINE_TENTHS)).remedies]
    assert "--weights int8" in changes and "--weights fp8" not in changes


def test_latencies_that_no_layout_keeps_name_the_nearest_and_its_price() -> None:
    answer = ask(request("llama-3-70b", "8xH100", slo=Slo(tpot_s=0.005)))
    check(answer)
    assert answer.best is None and answer.fits
    nearest = answer.nearest
    assert nearest.usd_per_mtok is not None and nearest.excess == min(each.excess for each in answer.late)
    message = answer.error().message
    assert "does not meet p99 of TPOT 5 ms" in message and "times the SLO" in message and "$" in message


def test_the_context_is_what_fits_unless_it_is_asked_for() -> None:
    free = ask(request("qwen2.5-7b", "1xA10")).nearest
    assert 1200 <= free.case.max_context_tokens < free.request.shape.positions
    assert free.memory.sequences(free.case.max_context_tokens) >= 1
    asked = ask(request("qwen2.5-7b", "1xA10", limits=EngineLimits(context_tokens=32768)))
    assert not asked.fits or asked.nearest.case.max_context_tokens == 32768


@pytest.mark.parametrize(
    ("asked", "ground", "message"),
    [
        ("tp=3", "does not divide", "does not divide the 32 attention heads"),
        ("tp=1", "the best", "tp1 is the best"),
        ("tp=8", "costs more", "less than tp1"),
        ("100000", "does not fit", "of KV cache on each GPU"),
        ("300", "misses the SLO", "of 30"),
        ("8", "possible", "there is room for"),
    ],
)
def test_why_names_the_ground_with_its_numbers(asked: str, ground: str, message: str) -> None:
    found = ask(request(slo=Slo(tpot_s=0.03), why=asked)).why
    assert found is not None and found.ground == ground
    assert message in found.message


def test_why_not_a_layout_of_the_same_price_or_one_that_does_not_keep_up() -> None:
    larger = ask(request("llama-3-70b", "4xH100", traffic=Traffic(rate_per_s=2.0), layout="pp=1", why="tp=4")).why
    assert larger is not None and larger.ground == "costs as much" and "at the price of tp2" in larger.message
    late = ask(request("llama-3-8b", "1xH100", traffic=Traffic(rate_per_s=500.0), why="tp=1")).why
    assert late is not None and late.ground == "does not keep up" and "of 500.0 requests/s" in late.message


def test_why_not_so_many_at_once_beyond_the_engines_limit() -> None:
    found = ask(request(limits=EngineLimits(max_sequences=64), why="128")).why
    assert found is not None and found.ground == "the engine's limit"
    assert found.hint == "give --max-sequences 128"


def test_why_not_a_layout_that_lacks_memory_or_time() -> None:
    lacks = ask(request("llama-3-70b", why="tp=1")).why
    assert lacks is not None and lacks.ground == "does not fit"
    assert "lacks" in lacks.message and "GB of weights" in lacks.message
    late = ask(request("llama-3-70b", slo=Slo(tpot_s=0.012), why="tp=4")).why
    assert late is not None and late.ground == "misses the SLO" and "of 12" in late.message


def test_the_curve_grows_to_its_knee_and_beyond_it_brings_less_than_half() -> None:
    curve = ask(request()).curve
    assert curve is not None and curve.knee is not None
    rates = [point.output_tokens_per_s for point in curve.points]
    # Measured kernels lose up to a few percent from one batch to the next, where tiles no longer fill the chip.
    assert all(after > 0.98 * before for before, after in pairwise(rates))
    after = next(point for point in curve.points if point.sequences > curve.knee.sequences)
    assert after.added_fraction < 0.5 <= curve.knee.added_fraction


def test_each_lever_has_its_effect_and_its_turn() -> None:
    answer = ask(request(slo=Slo(tpot_s=0.05), pricing=Pricing(prices=CATALOGUE.prices, other_gpus=CATALOGUE.gpus[:2])))
    names = [each.name for each in answer.levers]
    assert set(names) == {
        "batch", "dynamic batching", "prefix cache", "weights", "KV cache", "speculation", "parallelism", "GPU",
        "phases apart", "GPU of a phase", "MIG", "KV offload", "idle session",
    }  # fmt: skip
    for each in answer.levers:
        assert each.crossover
        if each.usd_factor is not None and each.factor is not None and each.name != "GPU":
            assert each.factor * each.usd_factor == pytest.approx(1, rel=1e-3)
    by_name = {each.name: each for each in answer.levers}
    batch, speculation = by_name["batch"].usd_per_mtok, by_name["speculation"]
    assert batch is not None and speculation.usd_factor is not None
    assert speculation.usd_per_mtok == pytest.approx(batch * speculation.usd_factor)


def test_a_trace_with_prefixes_sets_the_cache_and_the_levels_of_offload() -> None:
    traced = tuple(
        Request(index, 2048, 100, (index % 7, 100 + index % 7, 1000 + index, 2000 + index)) for index in range(60)
    )
    traffic = Traffic(input_tokens=2048, output_tokens=100, requests=traced)
    levers = {each.change: each for each in ask(request(gpus="1xH100", traffic=traffic)).levers}
    assert "44% of prompts cached" in levers and any(change.endswith("by the trace") for change in levers)
    assert "by the trace" in levers["44% of prompts cached"].crossover
    assert any("by the trace's answers" in each.crossover for each in levers.values())


def test_quiet_hours_need_fewer_replicas() -> None:
    pricing = Pricing(prices=CATALOGUE.prices, busy_fractions=(0.25,) * 12 + (1.0,) * 12)
    levers = ask(request(traffic=Traffic(rate_per_s=100), pricing=pricing, layout="tp=1")).levers
    (hours,) = (each for each in levers if each.name == "hours")
    assert hours.usd_factor is not None and hours.usd_factor < 0.8 and "spot replica-hours" in hours.crossover


def test_an_api_is_cheaper_until_the_replicas_are_full() -> None:
    dear, cheap = (TokenPrices(10.0, 1.0, 30.0), TokenPrices(1e-4, 1e-4, 1e-4))
    prices = [Pricing(prices=CATALOGUE.prices, api=each) for each in (dear, cheap)]
    pays, never = (ask(request(pricing=each, layout="tp=1")).against_api for each in prices)
    assert pays is not None and pays.first_per_day is not None and pays.own_usd_per_request < pays.api_usd_per_request
    assert never is not None and never.first_per_day is None
    assert ask(request()).against_api is None


def test_electricity_is_a_part_of_the_rent() -> None:
    answer = ask(request(layout="tp=1"))
    assert answer.electricity_usd_per_mtok is not None and answer.nearest.usd_per_mtok is not None
    assert 0 < answer.electricity_usd_per_mtok < answer.nearest.usd_per_mtok


def test_settings_are_those_of_the_best_layout_for_the_engine_that_was_planned() -> None:
    asked = request(traffic=Traffic(rate_per_s=5), launcher="vllm", layout="tp=2")
    launch = ask(replace(asked, model="my/model")).launch
    assert launch is not None and launch.text.startswith("vllm serve my/model")
    assert "--tensor-parallel-size 2" in launch.text and "--max-model-len 8192" in launch.text
    with pytest.raises(LayoutError, match="the plan is for vllm, not for sglang"):
        _ = ask(request(launcher="sglang")).launch
    with pytest.raises(DoesNotFitError):
        _ = ask(request("llama-3-405b", launcher="vllm")).launch


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            lambda: request(limits=EngineLimits(context_tokens=16384)),
            "but llama-3-8b has 8,192 positions",
        ),
        (lambda: request(traffic=Traffic(input_tokens=8000, output_tokens=500)), "do not go into a context of 8,192"),
        (lambda: Traffic(input_tokens=0), "is empty"),
        (lambda: Traffic(rate_per_s=1, concurrency=2), "two kinds of load"),
        (lambda: Traffic(rate_per_s=0), "asks for nothing"),
        (lambda: Traffic(cached_fraction=1), "not from 0 to below 1"),
        (lambda: ask(request(layout="tp=3")), "tp=3 does not divide the 32 attention heads"),
    ],
)
def test_a_question_that_contradicts_itself_is_refused_with_the_numbers(made: object, message: str) -> None:
    assert callable(made)
    with pytest.raises((LayoutError, SpecError)) as refused:
        made()
    assert message in refused.value.message and refused.value.hint


@settings(deadline=None, max_examples=25)
@given(
    st.sampled_from(["llama-3-8b", "mixtral-8x7b", "qwen2.5-7b"]),
    st.sampled_from(["1xA10", "2xA100-80", "8xH100"]),
    st.integers(1, 3000),
    st.integers(1, 1000),
    st.sampled_from([None, 0.01, 0.05, 1.0]),
)
def test_every_answer_keeps_its_promises(model: str, gpus: str, prompt: int, answer: int, tpot_s: float | None) -> None:
    traffic = Traffic(input_tokens=prompt, output_tokens=answer)
    check(ask(request(model, gpus, traffic=traffic, slo=Slo(tpot_s=tpot_s))))


def test_a_cached_prefix_makes_the_token_cheaper() -> None:
    prices = [
        ask(request(traffic=Traffic(cached_fraction=cached), layout="tp=1")).nearest.usd_per_mtok or 0.0
        for cached in (0.0, 0.3, 0.6)
    ]
    assert prices == sorted(prices, reverse=True)


def test_quiet_hours_are_paid_for() -> None:
    day, flat = (
        ask(request(pricing=Pricing(prices=CATALOGUE.prices, busy_fractions=hours))).nearest
        for hours in ((0.25,) * 12 + (1.0,) * 12, (1.0,))
    )
    assert day.usd_per_mtok is not None and flat.usd_per_mtok is not None
    assert day.usd_per_mtok == pytest.approx(flat.usd_per_mtok / 0.625)


def test_prompts_of_all_data_parallel_ranks_set_the_price_of_input() -> None:
    """A prompt on one rank while three wait made input 0.97 times as dear as output in batches of 1,024."""
    prices = ask(request("mixtral-8x7b", "4xA100-80", layout="dp=4,tp=1,pp=1,ep=0")).nearest.prices
    assert prices is not None and prices.input_usd < 0.75 * prices.output_usd


def test_a_cached_token_is_never_free() -> None:
    """Its KV is read, at the memory's bandwidth at best."""
    asked = request("llama-3-70b", "8xH100", layout="tp=8,pp=1", traffic=Traffic(rate_per_s=1.0))
    found = ask(asked).nearest
    assert found.prices is not None and 0 < found.prices.cached_usd < 0.1 * found.prices.input_usd
