"""The levers on a plan: what is measured stays apart from what is assumed, and ranks keep to their own links."""

from dataclasses import replace
from operator import mul

import pytest

from cordee.errors import SpecError
from cordee.hardware.catalog import Price, Source
from cordee.hardware.kernels import Kernels
from cordee.hardware.load import load_catalogue, load_speedups
from cordee.plan.serving.answer import ServingAnswer
from cordee.plan.serving.ask import ServingRequest, ask
from cordee.plan.serving.case import ServingLayout
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.formats import KV, WEIGHTS
from cordee.plan.serving.layouts import parse_serving_layout
from cordee.plan.serving.levers.draft import draft_cost
from cordee.plan.serving.levers.lever import Lever
from cordee.plan.serving.levers.levers import ASSUMED, is_measured, sequence_gpus
from cordee.plan.serving.memory.kv import kv_bytes
from cordee.plan.serving.memory.weights import weights_bytes
from cordee.plan.serving.offered import smaller_kv, smaller_weights
from cordee.plan.serving.performance import speed_of
from cordee.plan.serving.price.price import TokenPrices
from cordee.plan.serving.request import Draft, LeverAssumptions, Pricing, Traffic
from cordee.plan.serving.speed.speed import host_s
from cordee.units import parse_bytes_per_s
from cordee.workload.load import load_shape
from cordee.workload.requests import Request

CATALOGUE = load_catalogue()


def plan(model: str = "llama-3-8b", gpus: str = "1xH100", *, layout: str = "tp=1", **more: object) -> ServingAnswer:
    count, _, name = gpus.partition("x")
    pricing = Pricing(prices=CATALOGUE.prices)
    given = {
        "pricing": pricing,
        "assumed": LeverAssumptions(speedups=load_speedups()),
        "layout": parse_serving_layout(layout),
        **more,
    }
    asked = ServingRequest(
        shape=load_shape(model), gpu=CATALOGUE.find_gpu(name), gpus=int(count), engine=find_engine("vllm"), **given  # type: ignore[arg-type]
    )  # fmt: skip
    return ask(asked)


def named(answer: ServingAnswer, name: str) -> list[Lever]:
    return [each for each in answer.levers if each.name == name]


def test_a_slice_is_compared_on_the_grids_of_its_gpu() -> None:
    answer = plan()
    bare = ask(replace(answer.request, gpu=replace(answer.request.gpu, name="H100 bare", kernels=Kernels())))
    assert bare.nearest.performance is not None and answer.nearest.performance is not None
    (mig,) = named(answer, "MIG")
    assert mig.factor is not None and mig.factor > 0.8  # without the grids 0.75: most of it was their absence
    assert bare.nearest.performance.requests_per_s < 0.9 * answer.nearest.performance.requests_per_s


def test_a_replica_never_spans_slices() -> None:
    """Ranks in different slices have no link: NCCL does not support it."""
    answer = plan("deepseek-v3", "16xH200", layout="pp=2,dp=8", weights=(WEIGHTS["fp8-block"],))
    assert named(answer, "MIG") == []


def test_gpus_without_measured_kernels_are_marked_and_come_after_the_measured() -> None:
    pricing = Pricing(prices=CATALOGUE.prices, other_gpus=tuple(g for g in CATALOGUE.gpus if g.name != "H100"))
    answer = plan(pricing=pricing)
    found = named(answer, "GPU")
    marked = [each.crossover.startswith(ASSUMED) for each in found]
    assert marked == sorted(marked) and any(marked) and not all(marked)
    assert [is_measured(CATALOGUE.find_gpu(each.change.split(",")[0])) for each in found] == [not m for m in marked]
    (phase,) = named(answer, "GPU of a phase")
    assert "MI300X" not in phase.change and "A10," not in phase.change


def test_the_gpus_of_both_phases_cost_less_than_any_one_that_is_listed() -> None:
    """A phase alone was cheap by a price of both phases apart, beside prices of steps that compute both."""
    others = tuple(CATALOGUE.find_gpu(name) for name in ("GB200", "RTX-4090"))
    answer = plan("llama-2-7b", "1xA10", pricing=Pricing(prices=CATALOGUE.prices, other_gpus=others))
    (phase,) = named(answer, "GPU of a phase")
    single = min(each.usd_per_mtok for each in named(answer, "GPU") if each.usd_per_mtok is not None)
    assert phase.usd_per_mtok is not None
    assert (
        phase.usd_per_mtok < 0.999 * single if "then" in phase.change else phase.usd_per_mtok == pytest.approx(single)
    )


def test_a_sequence_is_restored_over_the_links_of_its_own_rank() -> None:
    assert sequence_gpus(ServingLayout(tp=2, pp=2, dp=4)) == 4
    answer = plan("deepseek-v3", "8xH200", layout="dp=8,ep", weights=(WEIGHTS["fp8"],))
    case, prompt = answer.nearest.case, answer.request.traffic.input_tokens
    (offload,) = named(answer, "KV offload")
    needed = parse_bytes_per_s(offload.change.removesuffix(" to break even"))
    assert needed == pytest.approx(kv_bytes(case, prompt) / speed_of(case).prefill_s(prompt), rel=0.01)


def test_kernels_of_another_engine_are_marked_in_the_plan() -> None:
    answer = plan(gpus="1xH200", weights=(WEIGHTS["int4"],))
    assert answer.borrowed is not None and "not in vllm" in answer.borrowed
    (int4,) = (each for each in plan(gpus="1xH200").levers if each.change == "int4")
    assert "not in vllm" in int4.crossover
    assert plan().borrowed is None


NIGHT = (0.25,) * 12 + (1.0,) * 12


def test_given_hours_price_each_hour() -> None:
    answer = plan(
        gpus="8xH100", pricing=Pricing(prices=CATALOGUE.prices, busy_fractions=NIGHT), traffic=Traffic(rate_per_s=100)
    )
    quiet, busy = answer.hours[0], answer.hours[12]
    assert busy.replicas == answer.nearest.replicas > quiet.replicas
    assert quiet.usd_per_mtok is not None and busy.usd_per_mtok is not None
    assert quiet.usd_per_mtok == pytest.approx(4 * busy.usd_per_mtok)
    assert quiet.rented_usd_per_mtok == pytest.approx(quiet.usd_per_mtok * quiet.replicas / busy.replicas)
    # The price of the day is the dollars of all hours over the tokens of all hours.
    assert answer.nearest.usd_per_mtok == pytest.approx(busy.usd_per_mtok / 0.625)
    assert plan().hours == ()


def test_a_trace_of_a_day_brings_its_hours() -> None:
    def day(hours: int) -> Traffic:
        each = [60.0 if hour < 12 else 15.0 for hour in range(24)][:hours]
        arrivals = [hour * 3600 + at * gap for hour, gap in enumerate(each) for at in range(int(3600 / gap))]
        return Traffic(requests=tuple(Request(at, 1000, 20) for at in arrivals), input_tokens=1000, output_tokens=20)

    answer = plan(traffic=day(24))
    assert [each.load for each in answer.hours] == pytest.approx([0.25] * 12 + [1.0] * 12, rel=0.02)
    (lever,) = named(answer, "hours")
    assert "no reserved price" in lever.crossover
    usd = [each.usd_per_mtok or 0.0 for each in answer.hours]
    # The whole trace was judged: its price is the mean of all hours already.
    loads = [each.load for each in answer.hours]
    weighted = sum(map(mul, loads, usd)) / sum(loads)
    assert answer.nearest.usd_per_mtok == pytest.approx(weighted, rel=0.05)
    assert plan(traffic=day(3)).hours == ()


def test_reserved_capacity_has_a_price_where_the_file_has_one() -> None:
    ours = Price("H100", "reserved", 1.5, Source("our contract", "2026-11"))
    load = Traffic(rate_per_s=60)
    pricing = Pricing(capacity="reserved", busy_fractions=NIGHT, api=TokenPrices(1, 1, 1))
    lists = ((*CATALOGUE.prices, ours), CATALOGUE.prices)
    reserved, shipped = (plan(gpus="8xH100", traffic=load, pricing=replace(pricing, prices=each)) for each in lists)
    assert reserved.nearest.usd_per_hour == 1.5 * reserved.nearest.gpus
    assert shipped.nearest.usd_per_hour is None and shipped.against_api is None
    (lever,) = named(reserved, "hours")
    assert "reserved" in lever.crossover and not lever.crossover.startswith(
        "0 on-demand and 0 spot replica-hours a day, 0"
    )
    assert reserved.against_api is not None


def test_phases_apart_keep_prompts_out_of_the_steps_of_answers() -> None:
    traffic = Traffic(input_tokens=4000, output_tokens=200)
    (apart,) = named(plan(gpus="4xH100", traffic=traffic, layout="tp=1,pp=1"), "phases apart")
    assert apart.change in ("2 for prompts, 2 for answers", "3 for prompts, 1 for answers")
    assert apart.factor is not None and 0.3 < apart.factor < 1.2
    mine, its = apart.crossover.split("TPOT ")[1].split(", not ")
    assert float(mine.split()[0]) < float(its.split()[0])
    assert not named(plan(), "phases apart")


def test_blocks_are_compared_with_runs_of_tokens_beside_the_cache() -> None:
    (drawn,) = (each for each in plan().levers if each.change == "blocks of 16, not runs")
    used = [int(part.split("%")[0].split()[-1]) for part in drawn.crossover.split(",")[0:2] for part in part.split(";")]
    assert used[0] > 93 > used[1] > used[2]
    same = Traffic(requests=tuple(Request(index, 1000, 24) for index in range(50)), input_tokens=1000, output_tokens=24)
    (traced,) = (each for each in plan(traffic=same).levers if each.change == "blocks of 16, not runs")
    assert traced.crossover.endswith("by the trace's lengths")


def test_the_levers_use_the_given_assumptions() -> None:
    usual, poor = plan(), plan(assumed=LeverAssumptions(acceptance=0.2, prefix_fraction=0.1, kv_bytes_per_s=1e9))
    for name in ("speculation", "prefix cache"):
        (much,), (little,) = named(usual, name), named(poor, name)
        assert much.factor is not None and little.factor is not None and much.factor > little.factor
    assert "host memory" in named(usual, "KV offload")[0].crossover
    assert "host memory" not in named(poor, "KV offload")[0].crossover
    with pytest.raises(SpecError, match="acceptance"):
        LeverAssumptions(acceptance=1.5)


def test_electricity_is_that_of_all_hours() -> None:
    flat, night = (Pricing(prices=CATALOGUE.prices, busy_fractions=hours) for hours in ((1.0,), (0.25, 1.0) * 12))
    load = Traffic(rate_per_s=5)
    full, idle = (plan(pricing=each, traffic=load).electricity_usd_per_mtok for each in (flat, night))
    assert full is not None and idle is not None
    assert idle > 1.2 * full
    assert idle < full / Pricing(busy_fractions=(0.25, 1.0)).mean_load == pytest.approx(full / 0.625)


def test_a_draft_model_costs_its_weights_its_cache_and_its_time() -> None:
    """Against a look-up that costs nothing; a large draft is slower than none, one that does not fit has no figure."""

    def drafted(draft: Draft | None) -> Lever:
        assumed = LeverAssumptions(draft=draft)
        (found,) = named(plan("llama-3-70b", "4xH100", layout="tp=4", assumed=assumed), "speculation")
        return found

    free, small, large = (
        drafted(None),
        drafted(Draft("1b", load_shape("llama-3.2-1b"))),
        drafted(Draft("0.4", fraction=0.4)),
    )
    assert free.factor is not None and small.factor is not None and large.factor is not None
    assert free.factor > small.factor > large.factor and large.factor < 0.95
    assert "by 1b" in small.change and "0.6 GB of weights on each GPU" in small.crossover
    tight = plan("llama-3-70b", "2xH100", layout="tp=2", assumed=LeverAssumptions(draft=Draft("0.4", fraction=0.4)))
    assert [each.crossover[:12] for each in named(tight, "speculation")] in (["does not fit"], [])
    with pytest.raises(SpecError, match=r"1\.2 of the parameters is not between"):
        Draft("1.2", fraction=1.2)


def test_a_draft_counts_by_hand() -> None:
    """2 % of a model: that much of its weights and of a sequence's KV; the host's time is not counted twice."""
    case = plan("llama-3-70b", "4xH100", layout="tp=4").nearest.case
    cost = draft_cost(case, Draft("0.02", fraction=0.02))
    assert cost.weights_bytes == pytest.approx(0.02 * weights_bytes(case, 0))
    assert cost.kv_bytes(1000) == pytest.approx(0.02 * kv_bytes(case, 1000), rel=1e-6)
    assert cost.token_s(8, 1000.0) == pytest.approx(0.02 * (speed_of(case).decode_s(8, 8000.0) - host_s(case, 8)))
    named_model = draft_cost(case, Draft("1b", load_shape("llama-3.2-1b")))
    assert named_model.case is not None and named_model.case.layout.tp == 4
    assert named_model.weights_bytes == pytest.approx(2 * 1.236e9 / 4, rel=0.05)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tensorrt-llm", "llama.cpp"])
@pytest.mark.parametrize("gpu", ["A100-80", "H100", "B200"])
def test_levers_name_only_formats_that_the_engine_serves(engine: str, gpu: str) -> None:
    record, found = find_engine(engine), CATALOGUE.find_gpu(gpu)
    weights = [each.name for each in smaller_weights(record, found, WEIGHTS["bf16"])]
    kv = [each.name for each in smaller_kv(record, KV["bf16"])]
    assert weights and set(weights) <= set(record.weights) and set(kv) <= set(record.kv)
    assert ("nvfp4" in weights) == (gpu == "B200" and engine != "llama.cpp")
    assert not {"fp8", "int8"} <= set(weights)


def test_the_imbalance_of_experts_is_a_part_of_the_traffic() -> None:
    """An even load is faster than the routing of the dumps; an uneven one slower; a dense model has none."""
    times = []
    for imbalance in (1.0, None, 4.0):
        asked = plan("qwen3-30b-a3b", "4xH100", layout="tp=4,ep", traffic=Traffic(imbalance=imbalance))
        times.append(speed_of(asked.nearest.case).decode_s(64, 64_000))
        assert any("experts: the fullest GPU's tokens" in each for each in asked.sources)
    assert times[0] < times[1] < times[2]
    with pytest.raises(SpecError, match=r"an imbalance of 0\.5"):
        Traffic(imbalance=0.5)
