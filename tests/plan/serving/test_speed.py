"""Step times against rooflines by hand, and what must hold for every table."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cordee.hardware.kernels import Grid, Kernels
from cordee.hardware.load import load_catalogue
from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.engine import find_engine
from cordee.plan.serving.formats import KV, WEIGHTS
from cordee.plan.serving.queueing.batching import Limits, serve
from cordee.plan.serving.speed.attention import (
    decode_attention,
    decode_roofline_s,
    prefill_attention,
    prefill_roofline_s,
    seen_pairs,
)
from cordee.plan.serving.speed.grouped import Grouped, expected_imbalance, grouped_roofline_s, grouped_s
from cordee.plan.serving.speed.mixers import projections, scan_flop_per_token, scan_s
from cordee.plan.serving.speed.products import product_s, roofline_s
from cordee.plan.serving.speed.speculation import Speculation
from cordee.plan.serving.speed.speed import Speed
from cordee.plan.serving.speed.throughput import saturated
from cordee.plan.serving.speed.traffic import sum_s
from cordee.workload.load import load_shape, model_names
from cordee.workload.requests import Request

CATALOGUE = load_catalogue()
H100 = CATALOGUE.find_gpu("H100")
BARE = replace(H100, kernels=Kernels())


def case(model: str = "llama-3-8b", gpu: str = "H100", weights: str = "bf16", **layout: int) -> ServingCase:
    return ServingCase(
        shape=load_shape(model),
        gpu=CATALOGUE.find_gpu(gpu),
        layout=ServingLayout(**layout),
        weights=WEIGHTS[weights],
        kv=KV["bf16"],
        engine=find_engine("vllm"),
        max_sequences=256,
        max_batched_tokens=8192,
        max_context_tokens=8192,
        memory_fraction=0.9,
    )


def test_product_at_one_token_reads_the_weights_and_at_many_computes() -> None:
    """8192 x 8192 in bf16: 134 MB over 3.35 TB/s, and 2 x 8192^3 FLOPs over 989.4 TFLOP/s."""
    assert roofline_s(H100, WEIGHTS["bf16"], 1, 8192, 8192) == pytest.approx(40.07e-6, rel=1e-3)
    assert roofline_s(H100, WEIGHTS["bf16"], 8192, 8192, 8192) == pytest.approx(1.1113e-3, rel=1e-3)


def test_grid_scales_the_roofline() -> None:
    half = replace(H100, kernels=Kernels("by hand", {("product", "bf16"): Grid(((1,), (1,), (1,)), (50.0,))}))
    ideal = roofline_s(half, WEIGHTS["bf16"], 7, 4096, 4096)
    assert product_s(half, WEIGHTS["bf16"], 7, 4096, 4096) == pytest.approx(2 * ideal)


def test_measured_product_of_an_h100_is_what_the_table_says() -> None:
    """vLLM 0.24.0 and others on H100: 8192 x 8192 x 8192 in bf16 reaches 60 to 85 % of 989.4 TFLOP/s."""
    fraction = roofline_s(H100, WEIGHTS["bf16"], 8192, 8192, 8192) / product_s(H100, WEIGHTS["bf16"], 8192, 8192, 8192)
    assert 0.6 < fraction < 0.9


def test_gpus_without_own_tables_use_those_of_their_chip() -> None:
    assert CATALOGUE.find_gpu("H800").kernels == H100.kernels
    assert not CATALOGUE.find_gpu("MI300X").kernels.grids
    assert product_s(CATALOGUE.find_gpu("MI300X"), WEIGHTS["bf16"], 64, 4096, 4096) > 0


def test_weight_only_wins_at_small_batches_and_not_at_large_ones() -> None:
    h200 = CATALOGUE.find_gpu("H200")

    def speedup(m: int) -> float:
        return product_s(h200, WEIGHTS["bf16"], m, 8192, 8192) / product_s(h200, WEIGHTS["int4"], m, 8192, 8192)

    assert speedup(1) > 1.8
    assert speedup(512) < 1.1


def test_attention_by_hand() -> None:
    """Llama 3 8B, 32 heads of 128: 4 x 32 x 128 FLOPs a pair; decode reads 4 KiB of KV a token."""
    attention = prefill_attention(load_shape("llama-3-8b"), 1)
    assert attention.pair_flop == 4 * 32 * 128
    computed = 4 * 32 * 128 * 4096 * 4097 / 2 / 989.4e12
    assert prefill_roofline_s(H100, attention, KV["bf16"], 4096, 0) == pytest.approx(computed)
    read = (64 * 1000 * 2 * 8 * 128 * 2 + 64 * 4 * 32 * 128) / 3.35e12
    answers = decode_attention(load_shape("llama-3-8b"), 1)
    assert decode_roofline_s(H100, answers, KV["bf16"], 64, 64_000) == pytest.approx(read)


def test_reads_by_each_query_head_take_the_time_of_as_many_kv_heads() -> None:
    """TensorRT-LLM 0.5: 8 query heads of a Llama 70B read one KV head 8 times; a model with MHA reads as before."""
    grouped, many = load_shape("llama-2-70b"), load_shape("llama-2-7b")
    together, alone = (decode_attention(grouped, 4, grouped_reads=each) for each in (True, False))
    assert alone.kv_elements == 8 * together.kv_elements and alone.pair_flop == together.pair_flop
    assert decode_attention(many, 1, grouped_reads=False) == decode_attention(many, 1)
    plan = case("llama-2-70b", weights="fp8", tp=4)
    old, new = (Speed(replace(plan, engine=find_engine("tensorrt-llm", version))) for version in ("0.5", "0.10"))
    assert old.decode_s(64, 64 * 3072) > 1.5 * new.decode_s(64, 64 * 3072)


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 200))
def test_windowed_pairs_equal_a_count(new: int, past: int, window: int) -> None:
    counted = sum(min(past + index + 1, window) for index in range(new))
    assert seen_pairs(new, past, window) == counted


def test_experts_touched_are_read_once() -> None:
    """DeepSeek-V3's layer at one token: 8 of 256 experts of 44 MB in fp8, over 3.35 TB/s."""
    group = Grouped(256, 256, 8, 7168, 2048)
    expected = (8 * 3 * 7168 * 2048 + 4 * 8 * (7168 + 2048)) / 3.35e12
    assert grouped_roofline_s(H100, WEIGHTS["fp8"], group, 1) == pytest.approx(expected, rel=1e-3)
    even, uneven = (grouped_s(H100, WEIGHTS["fp8"], group, 4096, imbalance=each) for each in (1.0, 1.5))
    assert uneven > even


def test_experts_in_a_format_that_was_not_measured_reach_the_fraction_of_those_in_16_bits() -> None:
    """An assumed fraction beside a measured one made int8 2.5 times as fast as bf16 on A100, whose units do twice."""
    a100, group = load_catalogue().find_gpu("A100-80"), Grouped(8, 8, 2, 4096, 14336)
    for tokens in (16, 256, 4096):
        gain = grouped_s(a100, WEIGHTS["bf16"], group, tokens) / grouped_s(a100, WEIGHTS["int8"], group, tokens)
        assert 1.5 < gain <= 2.01


def test_imbalance_is_what_routing_dumps_showed() -> None:
    """Fullest of 8, 16 and 32 GPUs with 64 experts: mean balance of four tasks .69, .545 and .39."""
    for ranks, balance in ((8, 0.69), (16, 0.545), (32, 0.39)):
        assert expected_imbalance(64, ranks) == pytest.approx(1 / balance, rel=0.15)


def test_measured_all_reduce_moves_its_bytes_no_faster_than_the_switch() -> None:
    """In-switch reduction sends each byte once: 256 MB over 450 GB/s."""
    n_bytes = 2.0**28
    assert sum_s(H100, n_bytes, 8) > n_bytes / 450e9
    assert sum_s(H100, n_bytes, 8) < 3 * n_bytes / 450e9
    assert sum_s(H100, n_bytes, 1) == 0


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["llama-3-8b", "qwen3-30b-a3b", "deepseek-v3", "gpt-oss-20b", "gemma-3-12b"]),
    st.sampled_from(["H100", "B200", "L40S", "MI300X"]),
    st.integers(1, 400),
    st.integers(100, 20_000),
)
def test_step_grows_with_context_and_never_beats_the_weights(
    model: str, gpu: str, sequences: int, context: int
) -> None:
    speed = Speed(case(model, gpu))
    now = speed.decode_s(sequences, sequences * context)
    assert speed.decode_s(sequences, 4 * sequences * context) >= 0.99 * now
    assert speed.step_s([(512, 0)], sequences, sequences * context) > now
    assert speed.prefill_s(4096) > speed.prefill_s(1024)
    dense_bytes = speed.case.shape.matmul_parameters * 2 if speed.case.shape.experts is None else 0
    assert now > 0.99 * dense_bytes / speed.case.gpu.memory_bytes_per_s


@pytest.mark.parametrize("model", model_names())
def test_no_model_is_faster_than_the_nameplate(model: str) -> None:
    """One answer reads the active weights; a prompt of 4,096 computes its products and its causal attention."""
    shape = load_shape(model)
    head, bf16 = shape.vocab * shape.hidden, 2.0
    body = shape.matmul_parameters - head
    for gpu in map(CATALOGUE.find_gpu, ("H200", "L40S", "MI300X")):
        for tp in (1, *(tp for tp in (8,) if shape.heads % tp == 0)):
            speed = Speed(case(model, gpu.name, tp=tp))
            assert speed.decode_s(1, 1) >= bf16 * (body + head) / tp / gpu.memory_bytes_per_s
            flop = 4096 * (2 * body + shape.layers * shape.attention_flop_per_token(4096)) / tp
            assert speed.prefill_s(4096) >= flop / gpu.flop_per_s["bf16"]


def test_recurrent_layers_cost_their_own_products_and_their_scan() -> None:
    """Nemotron-H-56B, 118 layers: 54 of Mamba-2 and 10 of attention; their products have the layers' parameters."""
    shape = load_shape("nemotron-h-56b")
    assert shape.mixed is not None and shape.mixed.recurrent is not None
    layer = shape.mixed.recurrent
    cut = [sum(n * k for n, k in projections(shape, tp, "recurrent")) for tp in (1, 2)]
    assert cut[0] == 2 * cut[1] == pytest.approx(layer.parameters(shape.hidden), rel=1e-3)
    assert scan_s(H100, layer, 1, 4096) > 4096 * scan_flop_per_token(layer) / H100.flop_per_s["bf16"]
    assert scan_s(H100, layer, 1, 0) == 0


@pytest.mark.parametrize("model", [each for each in model_names() if load_shape(each).latent is None])
def test_products_of_attention_have_its_parameters(model: str) -> None:
    shape = load_shape(model)
    for kind in {shape.kind(index) for index in range(shape.layers)} & {"full", "window"}:
        multiplied = sum(n * k for n, k in projections(shape, 1, kind))
        assert multiplied == pytest.approx(shape.mixer_parameters(kind), rel=2e-3), kind  # biases are apart


def test_tensor_parallel_answers_sooner_and_data_parallel_waits_for_the_longest_prompt() -> None:
    assert Speed(case("llama-3-70b", tp=4)).decode_s(8, 8000) < Speed(case("llama-3-70b", tp=2)).decode_s(8, 8000)
    spread = Speed(case("qwen3-30b-a3b", dp=4))
    assert spread.step_s([(4096, 0)]) > spread.step_s([(1024, 0)] * 4)


def test_pipeline_stages_share_a_round() -> None:
    """A round of all micro-batches costs a pass of one with its part of the sequences, and the waits for the head."""
    staged, alone = Speed(case("llama-3-70b", pp=4)), Speed(case("llama-3-70b"))
    assert alone.decode_s(16, 16_000) < staged.decode_s(64, 64_000) < 1.15 * alone.decode_s(16, 16_000)


@settings(max_examples=20, deadline=None)
@given(st.integers(1, 256), st.integers(16, 4000), st.integers(16, 2000))
def test_throughput_stays_below_the_roofline(sequences: int, prompt: int, answer: int) -> None:
    speed = Speed(case())
    found = saturated(speed, prompt, answer, sequences=sequences)
    shape = speed.case.shape
    flop = 2 * shape.matmul_parameters * (prompt + answer) / answer
    assert 0 < found.output_tokens_per_s < H100.peak_flop_per_s("bf16") / flop
    per_step = sequences * H100.memory_bytes_per_s / (2 * shape.matmul_parameters)
    assert found.output_tokens_per_s < per_step
    assert found.ttft_s > 0 and found.tpot_s > 0


def test_speculation_pays_alone_and_less_in_a_crowd() -> None:
    speed, draft = Speed(case("llama-3-70b", tp=4)), Speculation(4, 0.7)

    def gain(sequences: int) -> float:
        plain = saturated(speed, 500, 500, sequences=sequences)
        guessed = saturated(speed, 500, 500, sequences=sequences, speculation=draft)
        return guessed.output_tokens_per_s / plain.output_tokens_per_s

    assert gain(1) > 1.8
    assert gain(1) > gain(256)


@pytest.mark.parametrize(
    ("prompt", "answer", "places", "cached"),
    [(1000, 1000, 100, 0), (2000, 100, 64, 0), (8000, 100, 40, 7600), (1000, 200, 10, 500)],
)
def test_steady_state_is_what_a_long_queue_comes_to(prompt: int, answer: int, places: int, cached: int) -> None:
    speed = Speed(case())
    steady = saturated(speed, prompt, answer, sequences=places, cached_tokens=cached)
    queue = [Request(0.0, prompt, answer, cached_tokens=cached)] * (10 * places)
    served = serve(queue, speed, Limits(places, 8192, 1e9))
    assert served.output_tokens_per_s == pytest.approx(steady.output_tokens_per_s, rel=0.08)
    assert served.tpot.mean == pytest.approx(steady.tpot_s, rel=0.08)


def test_prompts_pass_in_whole_chunks_also_where_memory_is_the_bound() -> None:
    """A few tokens of prompts in each step would cost nothing beside the weights; a whole prompt in some steps does."""
    speed = Speed(case("llama-2-7b", gpu="A10"))
    whole, half = (saturated(speed, 1000, 200, sequences=10, cached_tokens=cached) for cached in (0, 500))
    assert half.output_tokens_per_s > 1.05 * whole.output_tokens_per_s
