"""Memory by hand, against measurements, and by what must always hold."""

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.hardware.load import load_catalogue
from cordee.plan.activations import layer_activation_bytes
from cordee.plan.buffers import context_bytes
from cordee.plan.layout import Layout
from cordee.plan.memory import rank_memory, state_bytes
from cordee.plan.search import fewest_gpus_to_hold
from cordee.plan.states import stage_parameters
from cordee.plan.training import OPTIMIZERS, Training, Tuning
from cordee.units import GB, GiB
from cordee.workload.load import load_shape, model_names
from cordee.workload.model import ModelShape

L70, L405 = load_shape("llama-3-70b"), load_shape("llama-3-405b")
H100 = load_catalogue().find_gpu("H100")
SHAPES = st.sampled_from([load_shape(name) for name in model_names()])
LAYOUTS = st.builds(
    Layout,
    dp=st.sampled_from([1, 2, 8]),
    tp=st.sampled_from([1, 2, 4]),
    pp=st.sampled_from([1, 2, 4]),
    zero=st.integers(0, 3),
    sp=st.booleans(),
    micro_batch=st.integers(1, 2),
    recompute=st.sampled_from(["none", "selective", "full"]),
)


def test_the_state_of_llama_3_70b() -> None:
    assert state_bytes(L70, Training(8192, 512)) == 70_553_706_496 * 16
    assert round(state_bytes(L70, Training(8192, 512)) / 1e12, 3) == 1.129


def test_the_state_of_llama_3_405b_with_8_bit_adam() -> None:
    n_bytes = state_bytes(L405, Training(8192, 512, OPTIMIZERS["adamw-8bit"]))
    assert round(n_bytes / 1e12, 3) == 2.448
    assert fewest_gpus_to_hold(n_bytes, H100) == 29


def test_states_by_hand_for_every_zero_stage() -> None:
    # Megatron-LM's and DeepSpeed's 2 + 2 + 12. torch has fp32 weights and gradients, FSDP2 shards these themselves, and
    # DDP's gradients are there twice once several micro-batches add up.
    n, training = L70.parameters, Training(8192, 512, framework="internevo")
    torch = Training(8192, 512)
    for used, stages in (
        (training, [(2, 2, 12), (2, 2, 12 / 64), (2, 2 / 64, 12 / 64), (2 / 64, 2 / 64, 12 / 64)]),
        (torch, [(4, 8, 8), (4, 8, 8 / 64), (4 / 64, 4 / 64, 8 / 64), (4 / 64, 4 / 64, 8 / 64)]),
    ):
        for zero, (weights, gradients, kept) in enumerate(stages):
            stage = rank_memory(L70, Layout(dp=64, zero=zero), used).worst
            assert stage.weights_bytes == pytest.approx(n * weights, rel=1e-6)
            assert stage.gradients_bytes == pytest.approx(n * gradients, rel=1e-6)
            assert stage.optimizer_bytes == pytest.approx(n * kept, rel=1e-6)


@pytest.mark.parametrize(
    ("zero", "ranks", "recompute", "micro_batches", "traced"),
    [
        (0, 1, "none", 2, 160_429_597_696),
        (0, 8, "none", 2, 192_550_642_688),
        (0, 8, "full", 1, 147_278_881_792),
        (1, 8, "none", 1, 104_215_405_568),
        (1, 8, "none", 2, 136_336_450_560),
        (1, 8, "full", 2, 123_185_734_656),
        (2, 8, "none", 1, 42_340_883_456),
        (2, 8, "full", 2, 35_878_118_400),
    ],
)
def test_replicas_hold_what_a_trace_of_torch_has(
    zero: int, ranks: int, recompute: Literal["none", "full"], micro_batches: int, traced: int
) -> None:
    # Llama 3.1 8B as torchtitan writes it, sequences of 2,048, under DDP, ZeroRedundancyOptimizer, FSDP2.
    training = Training(2048, ranks * micro_batches)
    layout = Layout(dp=ranks, zero=zero, recompute=recompute)
    planned = rank_memory(load_shape("llama-3.1-8b"), layout, training).worst.allocated_bytes
    assert -0.001 < planned / traced - 1 < 0.007


def test_a_llama_layer_keeps_what_the_closed_form_says() -> None:
    # 2*T*(6h + 2kd + 3f) bytes, flash attention, no dropout; and 4 bytes a head and token of log-sums.
    tokens = 8192
    closed = 2 * tokens * (6 * 8192 + 2 * 8 * 128 + 3 * 28672) + 4 * 64 * tokens
    training = Training(tokens, 1, fused=True)
    one = layer_activation_bytes(L70, Layout(zero=3), training)
    assert one == closed
    # Eager PyTorch keeps silu(gate) as well.
    assert layer_activation_bytes(L70, Layout(zero=3), Training(tokens, 1)) == closed + 2 * tokens * 28672
    divided = layer_activation_bytes(L70, Layout(tp=8, sp=True), replace(training, framework="megatron"))
    assert divided == closed / 8
    # Autocast keeps hidden states in fp32, and 16-bit inputs of q, k, v, gate and up each.
    autocast = layer_activation_bytes(L70, Layout(), training)
    assert autocast == closed + 2 * tokens * (2 + 3) * 8192
    # DTensor keeps the results of the two norms whole, as it gathered them.
    assert (
        layer_activation_bytes(L70, Layout(tp=8, sp=True, zero=3), training) == divided + 2 * tokens * 2 * 8192 * 7 / 8
    )
    again = replace(training, tuning=Tuning(regathers=True))
    assert layer_activation_bytes(L70, Layout(tp=8, sp=True, zero=3), again) == divided
    assert layer_activation_bytes(L70, Layout(cp=4, zero=3), training) == closed / 4
    whole_norms = layer_activation_bytes(L70, Layout(tp=8, zero=3), training)
    assert whole_norms - divided == 2 * tokens * 4 * 8192 * 7 / 8


def test_scores_are_what_flash_attention_saves() -> None:
    # Korthikanti et al. 2022, section 4.1: 5*a*s^2*b bytes.
    shape, training, layout = load_shape("gpt2"), Training(1024, 8, dropout=True), Layout(micro_batch=2, zero=3)
    kept = layer_activation_bytes(shape, layout, training, scores=True)
    spared = layer_activation_bytes(shape, layout, training)
    assert kept - spared == 5 * 12 * 1024 * 1024 * 2
    # And the whole layer is his 34*s*b*h + 5*a*s^2*b, but for the log-sums that only flash attention keeps.
    assert spared - 4 * 12 * 1024 * 2 == 34 * 1024 * 2 * 768


def test_pipeline_stages_hold_what_is_in_flight() -> None:
    # 1F1B: stage i of p keeps p - i micro-batches; the last one has the logits as well.
    training = Training(8192, 64, framework="megatron")
    layout = Layout(tp=8, pp=4, sp=True)
    memory = rank_memory(L70, layout, training)
    first, second, third, last = memory.stages
    layer = layer_activation_bytes(L70, layout, training)
    boundary = 2 * 8192 * 8192 / 8
    # Those behind the first also hold on to the gradient that they sent back.
    assert second.activations_bytes - third.activations_bytes == pytest.approx(20 * layer, rel=1e-6)
    assert first.activations_bytes - second.activations_bytes == pytest.approx(20 * layer - boundary, rel=1e-6)
    assert [stage.loss_bytes > 0 for stage in memory.stages] == [False, False, False, True]
    assert last.loss_bytes == 8 * 8192 * 129_024 / 8  # 128,256 padded to a multiple of 8*128
    assert first.weights_bytes > second.weights_bytes
    assert memory.worst_stage == 0


def test_fewer_micro_batches_than_stages_are_never_all_in_flight() -> None:
    few = rank_memory(L70, Layout(pp=8), Training(8192, 2)).stages[0]
    many = rank_memory(L70, Layout(pp=8), Training(8192, 64)).stages[0]
    assert few.activations_bytes * 4 == pytest.approx(many.activations_bytes, rel=1e-6)


def test_full_recomputation_keeps_one_tensor_for_each_layer() -> None:
    training = Training(8192, 64, framework="megatron")
    stage = rank_memory(L70, Layout(recompute="full"), training).worst
    assert stage.activations_bytes == 2 * 8192 * 8192 * 80
    half = rank_memory(L70, Layout(recompute="full", recompute_layers=40), training).worst
    layer = layer_activation_bytes(L70, Layout(), training)
    assert half.activations_bytes == pytest.approx(40 * 2 * 8192 * 8192 + 40 * layer, rel=1e-9)


def test_a_tied_head_is_copied_where_the_ends_are_apart() -> None:
    shape = load_shape("gpt2")
    assert stage_parameters(shape, Layout(), 0, range(12)) == shape.parameters
    halves = [stage_parameters(shape, Layout(pp=2), stage, range(stage * 6, stage * 6 + 6)) for stage in (0, 1)]
    assert sum(halves) == shape.parameters + shape.vocab * shape.hidden


def test_key_value_heads_are_copied_when_there_are_fewer_than_ranks() -> None:
    at_8 = stage_parameters(L70, Layout(tp=8), 0, range(80)) * 8
    at_16 = stage_parameters(L70, Layout(tp=16), 0, range(80)) * 16
    copied = 80 * 2 * 8192 * 128 * 8
    norms = 161 * 8192
    assert at_16 - at_8 == pytest.approx(copied + 8 * norms, rel=1e-5)


@pytest.mark.parametrize(
    ("shape", "layout", "batch", "measured_gib"),
    [
        # max_memory_allocated of Megatron-LM 0.14 on 8 B200s, models cut to 12 or 4 layers, sequences of 4,096:
        # MooreThreads/SimuMax 4dcaae5, docs/b200/b200_release_v1.2_summary.json.
        (replace(L70, layers=12), Layout(dp=4, tp=2, zero=1, sp=True), 16, 60.68),
        (replace(L70, layers=12), Layout(dp=2, tp=4, zero=1, sp=True), 8, 39.07),
        (replace(L70, layers=12), Layout(dp=4, pp=2, zero=1), 128, 66.55),
        (replace(L405, layers=4), Layout(dp=4, pp=2, zero=1), 16, 87.08),
        (replace(L405, layers=4), Layout(dp=4, tp=2, zero=1, sp=True), 32, 81.59),
        (replace(L405, layers=4), Layout(dp=2, tp=4, zero=1, sp=True), 8, 52.89),
        (replace(L405, layers=4), Layout(tp=8, sp=True), 4, 38.57),
    ],
)
def test_against_measured_peaks(shape: ModelShape, layout: Layout, batch: int, measured_gib: float) -> None:
    training = Training(4096, batch, OPTIMIZERS["adamw-fp32-grads"], framework="megatron", loss="fused")
    shape = replace(shape, kv_heads=16 if shape.hidden == 16384 else 8)
    memory = rank_memory(shape, layout, training)
    assert max(stage.allocated_bytes for stage in memory.stages) / GiB == pytest.approx(measured_gib, rel=0.003)


@given(SHAPES, LAYOUTS)
def test_parts_sum_to_the_total_and_none_is_negative(shape: ModelShape, layout: Layout) -> None:
    memory = rank_memory(shape, layout, Training(512, 64))
    for stage in memory.stages:
        assert stage.total_bytes == sum(stage.parts().values())
        assert min(stage.parts().values()) >= 0
        assert stage.context_bytes == context_bytes(layout)
    assert memory.total_bytes == max(stage.total_bytes for stage in memory.stages)
    assert memory.shortfall_bytes(memory.total_bytes) == 0
    assert memory.shortfall_bytes(memory.total_bytes - GB) == GB


@given(SHAPES, LAYOUTS)
def test_more_sharding_and_more_recomputation_never_need_more_state(shape: ModelShape, layout: Layout) -> None:
    # torch's pipelines keep what FSDP has gathered and reduces only once: another test.
    training = Training(512, 64, framework="megatron")
    one, more = (rank_memory(shape, each, training).stages for each in (layout, replace(layout, zero=3)))
    state = ("weights_bytes", "gradients_bytes", "optimizer_bytes")
    for before, after in zip(one, more, strict=True):
        assert sum(getattr(after, part) for part in state) <= sum(getattr(before, part) for part in state)
    longer = rank_memory(shape, layout, replace(training, seq_tokens=1024))
    assert longer.total_bytes >= rank_memory(shape, layout, training).total_bytes
