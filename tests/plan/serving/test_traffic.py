"""Replicas under their traffic: overload, refusals, cached prefixes, slots, floors and routing."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.errors import SpecError
from cordee.hardware.kernels import Grid, Kernels
from cordee.hardware.load import load_catalogue
from cordee.plan.serving import judge
from cordee.plan.serving.ask import ServingAnswer, ask
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.formats import WEIGHTS
from cordee.plan.serving.judge import steady
from cordee.plan.serving.layouts import parse_serving_layout
from cordee.plan.serving.performance import Performance, speed_of
from cordee.plan.serving.queueing.routing import route
from cordee.plan.serving.request import EngineLimits, Pricing, ServingRequest, Slo, Traffic
from cordee.workload.load import load_shape
from cordee.workload.requests import Request

CATALOGUE = load_catalogue()


def request(model: str = "llama-3-8b", gpus: str = "1xH100", layout: str = "tp=1", **more: object) -> ServingRequest:
    count, _, name = gpus.partition("x")
    return ServingRequest(
        shape=load_shape(model),
        gpu=CATALOGUE.find_gpu(name),
        gpus=int(count),
        engine=find_engine("vllm"),
        layout=parse_serving_layout(layout),
        **{"pricing": Pricing(prices=CATALOGUE.prices), **more},  # type: ignore[arg-type]
    )


def trace(requests: int, per_s: float, input_tokens: int = 1000, output_tokens: int = 200, **more: object) -> Traffic:
    rows = tuple(Request(index / per_s, input_tokens, output_tokens) for index in range(requests))
    return Traffic(input_tokens=input_tokens, output_tokens=output_tokens, requests=rows, **more)  # type: ignore[arg-type]


def performance(answer: ServingAnswer) -> Performance:
    assert answer.nearest.performance is not None
    return answer.nearest.performance


def test_an_overloading_trace_is_not_sold_as_capacity() -> None:
    full = ask(request())
    overload = ask(request(traffic=trace(2000, 100)))
    assert overload.best is None and overload.nearest.performance is None
    assert overload.nearest.capacity_per_s == pytest.approx(performance(full).requests_per_s, rel=0.1)
    assert "cannot keep up: at most 2" in overload.summary


def test_a_trace_takes_the_replicas_that_answer_it_and_never_costs_less_than_full_ones() -> None:
    full = ask(request())
    answer = ask(request(gpus="8xH100", traffic=trace(2000, 100), slo=Slo(ttft_s=2.0)))
    found = performance(answer)
    assert answer.best is not None and answer.nearest.replicas >= 4
    assert found.sequences <= answer.nearest.sequences
    assert found.requests_per_s <= performance(full).requests_per_s * answer.nearest.replicas
    assert answer.nearest.usd_per_mtok is not None and full.nearest.usd_per_mtok is not None
    assert answer.nearest.usd_per_mtok >= full.nearest.usd_per_mtok


def test_requests_that_wait_are_not_counted_as_running() -> None:
    burst = replace(trace(600, 1e6), requests=tuple(Request(0.0, 1000, 200) for _ in range(600)))
    answer = ask(request(gpus="1xH100", traffic=burst))
    assert answer.nearest.performance is None  # all wait at the last arrival
    slow = ask(request(traffic=trace(300, 20)))
    assert 0 < performance(slow).sequences <= slow.nearest.sequences


def test_requests_longer_than_the_context_are_refused_and_counted() -> None:
    rows = tuple(Request(0.5 * index, 20_000 if index % 50 == 0 else 800, 100) for index in range(300))
    answer = ask(request(traffic=Traffic(input_tokens=1184, output_tokens=100, requests=rows), slo=Slo(ttft_s=1.0)))
    found = performance(answer)
    assert (found.refused, found.requests) == (6, 300)
    assert answer.best is None and not answer.remedies
    assert "6 of 300 requests refused: the context is 8,192 tokens" in answer.summary
    assert "20,100" in answer.error().message


def test_a_longer_context_is_the_remedy_of_refusals_by_a_shorter_one() -> None:
    rows = tuple(Request(0.5 * index, 5000 if index % 9 == 0 else 800, 100) for index in range(50))
    traffic = Traffic(input_tokens=1300, output_tokens=100, requests=rows)
    answer = ask(request(traffic=traffic, limits=EngineLimits(context_tokens=4096)))
    assert performance(answer).refused == 6
    assert "--context 5100" in [each.change for each in answer.remedies]
    with pytest.raises(SpecError, match="the shortest request of the trace has 900 tokens"):
        request(traffic=traffic, limits=EngineLimits(context_tokens=512))


@pytest.mark.parametrize("load", [{}, {"rate_per_s": 5.0}, {"concurrency": 40}])
def test_a_cached_prefix_is_read_by_every_answer(load: dict[str, float]) -> None:
    """40 x 8,050 tokens x 131 kB are 42 GB: 12.6 ms of an H100's bandwidth, after 4.8 ms of weights."""
    limits = EngineLimits(max_sequences=40)
    long = Traffic(input_tokens=8000, output_tokens=100, cached_fraction=0.95, **load)  # type: ignore[arg-type]
    short = Traffic(input_tokens=400, output_tokens=100, **load)  # type: ignore[arg-type]
    cached, other = (ask(request(traffic=each, limits=limits)) for each in (long, short))
    assert performance(cached).tpot.mean > 1.05 * performance(other).tpot.mean
    if "rate_per_s" not in load:
        assert performance(cached).sequences == 40
        assert performance(cached).tpot.mean >= 0.017
    assert performance(cached).mix.cached_tokens == 7600
    assert cached.nearest.sequences == min(40, cached.nearest.memory.sequences(8100))


def test_data_parallel_ranks_have_their_own_slots() -> None:
    asked = request("deepseek-v3", "8xH200", "dp=8,ep", weights=(WEIGHTS["fp8-block"],))
    limits = EngineLimits(max_sequences=64)
    few, all_ = (ask(replace(asked, traffic=Traffic(concurrency=each), limits=limits)) for each in (64, 512))
    assert all_.nearest.sequences == 512 and performance(all_).sequences == 512
    assert performance(all_).requests_per_s > 2 * performance(few).requests_per_s


def test_a_concurrency_beyond_the_slots_waits() -> None:
    limits = EngineLimits(max_sequences=32)
    held, queued = (ask(request(traffic=Traffic(concurrency=each), limits=limits)) for each in (32, 320))
    assert queued.best is not None and performance(queued).sequences == 32
    assert performance(queued).requests_per_s == pytest.approx(performance(held).requests_per_s)
    # Little's law
    assert 320 / performance(queued).requests_per_s == pytest.approx(performance(queued).e2e.mean)
    assert performance(queued).ttft.mean > 10 * performance(held).ttft.mean


def test_why_not_so_many_counts_what_each_rank_holds() -> None:
    asked = request("deepseek-v3", "8xH200", "dp=8,ep", weights=(WEIGHTS["fp8-block"],), why="8000")
    found = ask(asked).why
    assert found is not None and found.ground == "does not fit"
    assert " 84.3 GB of KV cache on each GPU" in found.message


@pytest.mark.parametrize("text", ["0", "00"])
def test_why_not_zero_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="asks about no request"):
        _ = ask(request(why=text)).why


def test_latencies_below_the_floor_are_answered_with_it_and_play_no_larger_fleet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    played: list[int] = []

    def counted(traffic: Traffic, held: object, speed: object, replicas: int) -> Performance | None:
        played.append(replicas)
        return None

    monkeypatch.setattr(judge, "play", counted)
    slo = Slo(ttft_s=0.001, tpot_s=0.001)
    asked = request("llama-3-70b", "4xH100", "tp=4", traffic=Traffic(rate_per_s=5), slo=slo)
    answer = ask(asked)
    assert not answer.remedies and len(played) == 1
    assert answer.floor.startswith("the floor here is TTFT ") and "with tp4" in answer.floor


@given(st.integers(1, 4000), st.integers(1, 400), st.integers(1, 64))
def test_no_load_has_latencies_below_the_floor(prompt: int, output: int, sequences: int) -> None:
    candidate = ask(request(traffic=Traffic(input_tokens=prompt, output_tokens=output, concurrency=1))).nearest
    state = steady(candidate, sequences).performance
    assert state is not None
    assert state.ttft.mean >= candidate.floor.ttft_s and state.tpot.mean >= candidate.floor.tpot_s


def test_equal_cases_with_other_kernels_have_their_own_step_times() -> None:
    slow = Kernels("by hand", {("product", "bf16"): Grid(((1,), (1,), (1,)), (10.0,))})
    asked = request()
    case = asked.case(ask(asked).nearest.case.layout, asked.weights[0], asked.kv[0])
    other = replace(case, gpu=replace(case.gpu, kernels=slow))
    assert case == other
    assert speed_of(other).decode_s(1, 1000) > 2 * speed_of(case).decode_s(1, 1000)
    assert speed_of(case) is speed_of(case)


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4000)), max_size=200))
def test_routing_loses_no_request_and_keeps_their_order(replicas: int, drawn: list[tuple[int, int]]) -> None:
    rows = [Request(float(at), tokens, 10, (block, block + 1, at)) for at, (block, tokens) in enumerate(drawn)]
    parts = route(rows, replicas)
    assert sorted((each for part in parts for each in part), key=lambda each: each.arrival_s) == rows
    for part in parts:
        assert [each.arrival_s for each in part] == sorted(each.arrival_s for each in part)


def test_prompts_that_begin_alike_meet_on_a_replica_within_its_load() -> None:
    rows = [Request(float(at), 1500, 50, (at % 40, 100 + at % 40, 1000 + at)) for at in range(800)]
    homes = [{each.blocks[0] for each in part} for part in route(rows, 4)]
    assert sum(map(len, homes)) < 1.5 * 40  # in turn it would be 160
    common = [replace(each, blocks=(1, 2, each.blocks[2])) for each in rows]
    loads = [sum(each.tokens for each in part) for part in route(common, 4)]
    assert max(loads) <= 1.3 * sum(loads) / 4
    plain = [replace(each, blocks=()) for each in rows]
    assert {len(part) for part in route(plain, 4)} == {200}


def test_a_trace_with_prefixes_says_how_it_was_routed_and_finds_more_than_in_turn() -> None:
    rows = tuple(Request(0.05 * at, 2048, 50, (at % 30, 100 + at % 30, 1000 + at % 30, 5000 + at)) for at in range(400))
    traffic = Traffic(input_tokens=2048, output_tokens=50, requests=rows)
    slo = Slo(ttft_s=0.12, tpot_s=0.02)
    answer = ask(request(gpus="4xH100", traffic=traffic, slo=slo))
    assert answer.nearest.replicas > 1
    assert "by the hash of their first two prefix blocks" in answer.method
    assert performance(answer).mix.cached_tokens > 0.6 * 2048
    plain = replace(traffic, requests=tuple(replace(each, blocks=()) for each in rows))
    assert "fewest tokens" in ask(request(gpus="4xH100", traffic=plain, slo=slo)).method
