"""The timeline of a rank by hand: schedules, experts, contexts, frameworks, offload; and arrays against one layout."""

from dataclasses import replace

import numpy as np
import pytest

from cordee.plan.activations import context_moment_bytes, in_flight, kept_bytes, layer_activation_bytes
from cordee.plan.buffers import context_bytes, standing_bytes
from cordee.plan.layout import Layout
from cordee.plan.loss import loss_bytes
from cordee.plan.memory import peak_bytes, rank_memory, state_bytes, timeline
from cordee.plan.offload import host_optimizer_bytes
from cordee.plan.states import holding, padded_vocab, peak_ranks, rank_parameters
from cordee.plan.training import OPTIMIZERS, Training
from cordee.units import MiB
from cordee.workload.load import load_shape

L70, MIXTRAL, V3 = load_shape("llama-3-70b"), load_shape("mixtral-8x7b"), load_shape("deepseek-v3")
TRAINING = Training(4096, 64)
MEGATRON = Training(4096, 64, OPTIMIZERS["adamw-fp32-grads"], framework="megatron", loss="fused")
FUSED = replace(TRAINING, fused=True)


@pytest.mark.parametrize(
    ("schedule", "vpp", "expected"),
    [
        # Micro-batches of a rank's layers in flight on ranks 0 and 3 of 4, counted on the papers' diagrams.
        ("1f1b", 1, (4, 1)),
        ("gpipe", 1, (64, 64)),
        ("interleaved", 2, (11 / 2, 5 / 2)),  # 2*3 + 4 + 1 and 4 + 1 chunks of 2
        ("zb-h1", 1, (4, 4)),
        ("zb-h2", 1, (7, 7)),
        ("zb-v", 1, (4, 4)),
        ("dualpipe", 1, (5 / 2, 5 / 2)),  # p + 1 of two stages
        ("dualpipev", 1, (9 / 2, 9 / 2)),  # 2p + 1 of two chunks
    ],
)
def test_micro_batches_in_flight(schedule: str, vpp: int, expected: tuple[float, float]) -> None:
    layout = Layout(pp=4, schedule=schedule, vpp=vpp)
    assert (in_flight(layout, TRAINING, 0), in_flight(layout, TRAINING, 3)) == expected
    few = replace(TRAINING, global_batch=2)
    assert in_flight(layout, few, 0) <= 2


def test_who_holds_which_layers_and_ends() -> None:
    def told(layout: Layout, rank: int) -> tuple[int, int, int]:
        held = holding(L70, layout, rank)
        return held.layers, held.embeddings, held.heads

    assert told(Layout(pp=4), 0) == (20, 1, 0)
    assert told(Layout(pp=4), 3) == (20, 0, 1)
    assert told(Layout(pp=4, schedule="interleaved", vpp=5), 3) == (20, 0, 1)
    # The fold brings both ends to the first rank; DualPipe holds every stage twice.
    assert told(Layout(pp=4, schedule="zb-v"), 0) == (20, 1, 1)
    assert told(Layout(pp=4, schedule="zb-v"), 3) == (20, 0, 0)
    assert told(Layout(pp=4, schedule="dualpipe"), 0) == (40, 1, 1)
    assert told(Layout(pp=4, schedule="dualpipe"), 1) == (40, 0, 0)
    assert told(Layout(pp=4, split=(18, 22, 22, 18)), 1) == (22, 0, 0)


def test_dualpipe_holds_the_parameters_twice() -> None:
    once = sum(rank_parameters(L70, Layout(pp=4), TRAINING, rank).total for rank in range(4))
    twice = sum(rank_parameters(L70, Layout(pp=4, schedule="dualpipe"), TRAINING, rank).total for rank in range(4))
    assert (once, twice) == (L70.parameters, 2 * L70.parameters)


def test_a_pipeline_of_any_schedule_holds_every_parameter_once() -> None:
    for layout in (Layout(pp=5), Layout(pp=4, schedule="interleaved", vpp=4), Layout(pp=4, schedule="zb-v")):
        ranks = range(layout.pp)
        assert sum(rank_parameters(V3, layout, TRAINING, rank).total for rank in ranks) == V3.parameters


def test_only_ranks_that_may_be_fullest_are_judged() -> None:
    assert peak_ranks(L70, Layout(pp=8)) == (0, 1, 7)
    assert set(peak_ranks(V3, Layout(pp=4))) == {0, 1, 2, 3}
    for layout in (Layout(pp=8, dp=2), Layout(pp=7, schedule="zb-h2"), Layout(pp=4, schedule="interleaved", vpp=4)):
        for shape in (L70, V3):
            assert peak_bytes(shape, layout, TRAINING) == pytest.approx(
                rank_memory(shape, layout, TRAINING).total_bytes, rel=1e-9
            )


def test_events_come_in_their_order_and_the_peak_is_the_highest() -> None:
    memory = rank_memory(L70, Layout(tp=8, pp=2, dp=4, zero=1, sp=True), MEGATRON)
    first, last = memory.timelines
    assert [moment.event for moment in first] == ["states", "forward", "backward", "embedding", "step"]
    assert [moment.event for moment in last] == ["states", "forward", "loss", "backward", "step"]
    for stage, moments in zip(memory.stages, memory.timelines, strict=True):
        assert stage.allocated_bytes == pytest.approx(max(moment.allocated_bytes for moment in moments), abs=8)
    assert memory.peak_event in {"loss", "backward"}
    # At the step no activation is left, and the forward pass has nothing of the backward one.
    assert first[-1].activations_bytes == 0
    assert first[1].allocated_bytes < first[2].allocated_bytes


def test_the_loss_by_hand() -> None:
    layout = Layout(tp=4, sp=True)
    tokens, vocab = 4096, 128_512  # 128,256 padded to a multiple of 4*128
    assert padded_vocab(L70, layout, MEGATRON) == vocab
    assert loss_bytes(L70, layout, MEGATRON) == 2 * tokens * vocab / 4
    assert loss_bytes(L70, layout, replace(MEGATRON, loss="parallel")) == 8 * tokens * vocab / 4
    assert loss_bytes(L70, Layout(), replace(TRAINING, loss="eager")) == 12 * tokens * 128_256


def test_the_dummy_gradients_of_one_llama_layer() -> None:
    h, f, kv = 8192, 28672, 1024
    layout = Layout(tp=2, pp=2)
    layer = 2 * (h * (h + 2 * kv) + h * h + 2 * f * h + f * h) / 2
    assert standing_bytes(L70, layout, MEGATRON, holding(L70, layout, 0)) == layer
    assert standing_bytes(L70, layout, MEGATRON, holding(L70, layout, 1)) == layer + 2 * 128_256 * h / 2
    assert standing_bytes(L70, layout, TRAINING, holding(L70, layout, 0)) == 0
    assert standing_bytes(L70, Layout(dp=2), TRAINING, holding(L70, Layout(), 0)) == 2 * 25 * MiB


def test_experts_are_divided_over_ep_and_sharded_over_the_ranks_that_hold_them() -> None:
    layout = Layout(dp=8, tp=2, ep=4, etp=1, zero=1, sp=True)
    held = rank_parameters(MIXTRAL, layout, TRAINING, 0)
    routed = MIXTRAL.parameter_count.experts
    assert held.experts == routed / 4
    assert (layout.expert_data_ranks, layout.expert_shard_ranks) == (4, 4)
    moments = timeline(MIXTRAL, layout, TRAINING, 0)
    assert moments[0].optimizer_bytes == pytest.approx(8 * (held.dense / 8 + held.experts / 4))
    assert moments[0].weights_bytes == 4 * held.total


def test_routed_tokens_by_hand() -> None:
    # Mixtral: 2 of 8 experts, h = 4096, f = 14336; dense part 4h + q, k, v, out; experts k*(h + 3f).
    tokens, h, f = 4096, 4096, 14336
    dense = 2 * (4 * h + 2 * h + 2 * 1024) + 4 * 32
    assert layer_activation_bytes(MIXTRAL, Layout(zero=3), FUSED, expert=True) == tokens * (dense + 2 * 2 * (h + 3 * f))
    uneven = layer_activation_bytes(MIXTRAL, Layout(zero=3), replace(FUSED, imbalance=1.5), expert=True)
    assert uneven == tokens * (dense + 1.5 * 2 * 2 * (h + 3 * f))
    # Whole tokens for each rank of tp where it divides the experts, a part of the tokens where it does not.
    divided = layer_activation_bytes(MIXTRAL, Layout(tp=4, sp=True, zero=3), TRAINING, expert=True)
    spread = layer_activation_bytes(MIXTRAL, Layout(tp=4, sp=True, etp=1, ep=4, zero=3), TRAINING, expert=True)
    assert divided - spread == tokens * 2 * 2 * h * 3 / 4


def test_latent_attention_keeps_what_it_compressed_and_what_it_expanded() -> None:
    tokens, latent = 4096, V3.latent
    assert latent is not None
    compressed = 2 * 1536 + 2 * 512 + 64
    expanded = 128 * (2 * (128 + 64) + 2 * 128)
    dense = 2 * (4 * 7168 + compressed + expanded + 3 * 18432) + 4 * 128
    assert layer_activation_bytes(V3, Layout(zero=3), FUSED) == tokens * dense


def test_ulysses_keeps_the_attention_s_output_twice() -> None:
    ring = layer_activation_bytes(L70, Layout(cp=4), TRAINING)
    ulysses = layer_activation_bytes(L70, Layout(cp=4, cp_kind="ulysses"), TRAINING)
    assert ulysses - ring == 2 * 1024 * 8192
    one = layer_activation_bytes(L70, Layout(cp_kind="ulysses"), TRAINING)
    assert one == layer_activation_bytes(L70, Layout(), TRAINING)


def test_hsdp_shards_over_its_group_only() -> None:
    whole = timeline(L70, Layout(dp=64, zero=3), TRAINING, 0)[0]
    grouped = timeline(L70, Layout(dp=64, zero=3, shard=8), TRAINING, 0)[0]
    assert grouped.weights_bytes == pytest.approx(8 * whole.weights_bytes)
    assert grouped.optimizer_bytes == pytest.approx(L70.parameters * 8 / 8)


def test_muon_keeps_adam_s_moments_where_there_is_no_matrix() -> None:
    count = L70.parameter_count
    outer = count.embedding + count.head + count.norms
    muon = replace(TRAINING, optimizer=OPTIMIZERS["muon"])
    assert state_bytes(L70, muon) == 12 * L70.parameters + 4 * outer
    states = timeline(L70, Layout(), muon, 0)[0]
    assert states.optimizer_bytes == 4 * L70.parameters + 4 * outer


def test_what_is_offloaded_lies_on_the_host() -> None:
    plain, layout = Layout(dp=8, zero=1), Layout(dp=8, zero=1, offload="both")
    own = replace(TRAINING, framework="internevo")  # torch's DDP has fp32 weights on the GPU, and no master beside them
    assert timeline(L70, layout, own, 0)[0].optimizer_bytes == 0
    on_host = host_optimizer_bytes(L70, layout, own, 0)
    assert on_host == timeline(L70, plain, own, 0)[0].optimizer_bytes == L70.parameters * 12 / 8
    kept = kept_bytes(L70, plain, TRAINING, holding(L70, plain, 0))
    fewer = timeline(L70, layout, TRAINING, 0)[1].activations_bytes
    assert fewer == pytest.approx(kept * 2 / 80)


def test_fsdp_offloads_weights_and_gradients_with_the_optimizer() -> None:
    torch = replace(TRAINING, framework="torch")
    layout = Layout(dp=8, zero=3, recompute="full", offload="optimizer")
    states, *_, step = timeline(L70, layout, torch, 0)
    assert states.weights_bytes == states.gradients_bytes == states.optimizer_bytes == 0
    assert step.allocated_bytes == states.buffers_bytes
    # fp32 shards and moments, and the gradients.
    assert host_optimizer_bytes(L70, layout, torch, 0) == pytest.approx(L70.parameters * (4 + 8 + 2) / 8)
    deepspeed = timeline(L70, layout, replace(torch, framework="deepspeed"), 0)[0]
    assert deepspeed.weights_bytes == pytest.approx(2 * L70.parameters / 8)


def test_each_communicator_has_its_buffers() -> None:
    one, three = context_bytes(Layout()), context_bytes(Layout(tp=8, pp=2, dp=4))
    assert three - one == 3 * 300_000_000
    assert 1.3e9 <= three <= 1.7e9


def test_deepspeed_makes_fp32_gradients_of_its_part_at_the_step() -> None:
    training = replace(TRAINING, framework="deepspeed")
    states, *_, step = timeline(L70, Layout(dp=8, zero=1), training, 0)
    assert step.buffers_bytes - states.buffers_bytes == pytest.approx(4 * L70.parameters / 8)


@pytest.mark.parametrize("framework", ["megatron", "torch", "deepspeed"])
def test_many_layouts_at_once_are_what_each_is_alone(framework: str) -> None:
    training = replace(MEGATRON, framework=framework, optimizer=OPTIMIZERS["adamw"])
    sizes = [(1, 1, 0, False, 1, 1), (8, 2, 1, True, 2, 4), (4, 8, 3, True, 1, 1), (2, 4, 2, False, 4, 2)]
    dp, tp, zero, sp, micro_batch, ep = (np.array(column) for column in zip(*sizes, strict=True))
    for shape, pp, recompute in ((MIXTRAL, 1, "none"), (MIXTRAL, 4, "full"), (L70, 4, "selective")):
        expert = ep if shape.experts else 1
        many = Layout(dp, tp, pp, zero, sp, micro_batch, recompute, ep=expert, etp=1)  # type: ignore[arg-type]
        found = peak_bytes(shape, many, training)
        for index, (d, t, z, s, m, e) in enumerate(sizes):
            one = Layout(d, t, pp, z, s, m, recompute, ep=e if shape.experts else 1, etp=1)  # type: ignore[arg-type]
            assert found[index] == pytest.approx(rank_memory(shape, one, training).total_bytes, rel=1e-8)


def test_fp8_keeps_products_inputs_in_one_byte_and_weights_twice_more() -> None:
    tokens, h, f = 4096, 8192, 28672
    bf16 = layer_activation_bytes(L70, Layout(), MEGATRON)
    fp8 = layer_activation_bytes(L70, Layout(), replace(MEGATRON, precision="fp8"))
    assert bf16 - fp8 == tokens * (2 * h + f - h)
    assert layer_activation_bytes(L70, Layout(zero=3), replace(FUSED, precision="fp8")) == bf16
    held = holding(L70, Layout(), 0)
    more = standing_bytes(L70, Layout(), replace(MEGATRON, precision="fp8"), held)
    matrices = L70.parameter_count.attention + L70.parameter_count.mlp
    assert more - standing_bytes(L70, Layout(), MEGATRON, held) == 2 * matrices


def test_a_ring_has_two_pairs_of_keys_and_values_on_their_way() -> None:
    own = 2 * 1024 * 2 * 1024
    assert context_moment_bytes(L70, Layout(cp=4), TRAINING) == 2 * 2 * own
    assert context_moment_bytes(L70, Layout(cp=4, cp_kind="all-gather"), TRAINING) == 2 * 4 * own
    assert context_moment_bytes(L70, Layout(cp=4, cp_kind="ulysses"), TRAINING) == 0
    assert context_moment_bytes(L70, Layout(), TRAINING) == 0
