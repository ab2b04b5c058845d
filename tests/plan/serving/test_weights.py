"""Bytes of the weights on one GPU, by hand and against checkpoints."""

import pytest
from cases import served
from hypothesis import given
from hypothesis import strategies as st

from cordee.plan.serving.memory.weights import rotary_bytes, stage_layers, weights_bytes
from cordee.units import GiB
from cordee.workload.load import load_shape


@pytest.mark.parametrize(
    ("model", "tp", "weights", "loaded_gib"),
    [
        ("llama-3.1-8b", 1, "bf16", 14.99),
        ("llama-3-8b", 1, "bf16", 14.96),
        ("qwen3-0.6b", 1, "bf16", 1.12),
        ("qwen3-32b", 1, "bf16", 61.03),
        ("qwen3-32b", 2, "bf16", 30.59),
        ("llama-3.1-70b", 1, "fp8", 67.72),
        ("llama-3.1-70b", 2, "fp8", 33.88),
        ("mistral-small-24b", 1, "bf16", 44.76),
        ("gpt-oss-20b", 1, "mxfp4", 13.47),
        ("gpt-oss-120b", 1, "mxfp4", 64.38),
    ],
)
def test_an_engine_loads_as_much(model: str, tp: int, weights: str, loaded_gib: float) -> None:
    """vLLM 0.11.0 on H100, "Model loading took": llm-d-planner, docs/empirical-vllm-memory-results.md."""
    assert weights_bytes(served(model, tp=tp, weights=weights)) / GiB == pytest.approx(loaded_gib, rel=0.006)


def test_a_gguf_mix_has_the_size_of_its_file() -> None:
    """Meta-Llama-3-8B-Instruct: Q4_K_M has 4,920,739,232 bytes, Q8_0 8,540,770,720, with some 8 MB of vocabulary."""
    for name, file_bytes in (("gguf-q4_k_m", 4_920_739_232), ("gguf-q8_0", 8_540_770_720)):
        case = served("llama-3-8b", weights=name)
        assert weights_bytes(case) - rotary_bytes(case.shape) == pytest.approx(file_bytes, rel=0.003)


def test_one_gpu_holds_every_parameter_once() -> None:
    shape = load_shape("llama-3-8b")
    assert weights_bytes(served("llama-3-8b")) == 2 * shape.parameters + rotary_bytes(shape)


@given(layers=st.integers(1, 130), pp=st.integers(1, 16))
def test_stages_hold_each_layer_once(layers: int, pp: int) -> None:
    stages = [stage_layers(layers, min(pp, layers), stage) for stage in range(min(pp, layers))]
    assert [index for stage in stages for index in stage] == list(range(layers))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


@given(
    model=st.sampled_from(["llama-3-8b", "qwen3-30b-a3b", "deepseek-v3", "qwen3.5-27b", "gemma-3-4b", "gpt-oss-20b"]),
    weights=st.sampled_from(["bf16", "fp8", "int4", "nvfp4", "gguf-q4_k_m"]), tp=st.sampled_from([1, 2, 4]),
)  # fmt: skip
def test_doubling_tp_never_halves_by_more_and_never_grows(model: str, weights: str, tp: int) -> None:
    one, two = (weights_bytes(served(model, tp=size, weights=weights)) for size in (tp, 2 * tp))
    assert one / 2 <= two + 1024
    assert two < one


def test_experts_are_spread_or_cut() -> None:
    whole = weights_bytes(served("deepseek-v3", weights="fp8"))
    cut, spread = (weights_bytes(served("deepseek-v3", dp=8, weights="fp8", ep=ep)) for ep in (False, True))
    assert cut == spread  # 256 experts on 8 GPUs either way
    experts = load_shape("deepseek-v3").parameter_count.experts
    assert whole - cut == experts * 7 // 8
