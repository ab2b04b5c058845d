"""What torch's own trainers hold beside others: whole stages under FSDP, tensors to receive into, a plain loss."""

import pytest

from cordee.plan.activations import WORKSPACE_BYTES
from cordee.plan.layout import Layout
from cordee.plan.memory import Moment, rank_memory, timeline
from cordee.plan.settings import Settings
from cordee.plan.states import rank_parameters
from cordee.plan.training import Training
from cordee.workload.load import load_shape

L8, L70 = (load_shape(f"llama-3-{size}") for size in ("8b", "70b"))


def test_fsdp_in_a_torch_pipeline_is_whole_while_micro_batches_pass() -> None:
    layout = Layout(dp=8, tp=8, pp=4, sp=True, zero=3)
    training = Training(8192, 128)
    own = rank_parameters(L70, layout, training, 1).total
    states, forward, *_, step = timeline(L70, layout, training, 1)
    for still in (states, step):
        assert still.weights_bytes == still.gradients_bytes == 4 * own / 8
    # Gathered weights in 16 bits; gradients add up in fp32 until the last micro-batch.
    assert forward.weights_bytes == 4 * own / 8 + 2 * own
    assert forward.gradients_bytes == 4 * own / 8 + 4 * own
    for other in (Training(8192, 128, framework="megatron"), Training(8192, 128, framework="deepspeed")):
        sharded = timeline(L70, layout, other, 1)[1].weights_bytes
        assert sharded == 2 * rank_parameters(L70, layout, other, 1).total / 8


def test_a_torch_pipeline_receives_into_a_tensor_for_each_micro_batch() -> None:
    few, many = (Layout(dp=dp, tp=8, pp=4, sp=True) for dp in (8, 4))
    boundary = 2 * 8192 * 8192 / 8
    for rank, passes in ((0, 1), (1, 2), (3, 1)):
        less, more = (timeline(L70, layout, Training(8192, 128), rank)[0].buffers_bytes for layout in (few, many))
        # 16 and 32 micro-batches: activations from before, gradients from behind.
        assert more - less == passes * 16 * boundary
    less, more = (timeline(L70, each, Training(8192, 128, framework="megatron"), 1)[0] for each in (few, many))
    assert more.buffers_bytes == less.buffers_bytes


def test_a_loss_over_divided_logits_keeps_four_tensors_in_fp32() -> None:
    training = Training(8192, 8)
    for tp, each in ((1, 12), (8, 16)):
        *_, loss = (m for m in timeline(L8, Layout(tp=tp, sp=tp > 1), training, 0) if m.event == "loss")
        assert loss.loss_bytes == each * 8192 * 128_256 / tp


def test_a_compiled_loss_keeps_the_logits_and_their_gradient_in_16_bits() -> None:
    training = Training(8192, 8, loss="compiled")
    for tp in (1, 8):
        *_, loss = (m for m in timeline(L8, Layout(tp=tp, sp=tp > 1), training, 0) if m.event == "loss")
        assert loss.loss_bytes == 4 * 8192 * 128_256 / tp


def _moments(layout: Layout, **given: object) -> dict[str, Moment]:
    training = Settings(**given).training(L8, layout.gpus)  # type: ignore[arg-type]
    return {each.event: each for each in rank_memory(L8, layout, training).worst_timeline}


ROWS = 2 * 128_256 * 4096
SHORT = {"train": "qlora", "seq_tokens": 256, "global_batch": 8}


def test_fsdp_gathers_the_embedding_as_it_comes_and_copied_out() -> None:
    moments = _moments(Layout(dp=8, zero=3, recompute="full"), **SHORT)
    states, forward, backward = (moments[name] for name in ("states", "forward", "backward"))
    hidden = 2 * 256 * 4096
    assert forward.allocated_bytes - states.allocated_bytes == pytest.approx(2 * ROWS + hidden)
    # It comes again with the first layer's backward pass, beside that layer; nothing of it without FSDP.
    assert backward.buffers_bytes > ROWS + WORKSPACE_BYTES
    whole = _moments(Layout(recompute="full"), **SHORT)
    for name in ("forward", "backward"):
        assert whole[name].buffers_bytes < ROWS


def test_a_third_layer_is_there_where_one_gives_way_to_the_next() -> None:
    layout = Layout(dp=8, zero=3, recompute="full")
    training = Settings(train="lora", seq_tokens=1024, global_batch=8, rank=1).training(L70, 8)
    moments = [each for each in rank_memory(L70, layout, training).worst_timeline if each.event == "forward"]
    layer = 2 * (2 * 8192 * 8192 + 2 * 1024 * 8192 + 3 * 8192 * 28672)
    assert moments[0].buffers_bytes - WORKSPACE_BYTES == pytest.approx(3 * layer, rel=0.001)


def test_a_loss_within_the_forward_pass_has_the_gathered_head_beside_it() -> None:
    layout = Layout(dp=8, zero=3, recompute="full")
    few, many = (_moments(layout, train="qlora", seq_tokens=tokens, global_batch=8)["loss"] for tokens in (2048, 8192))
    outside = _moments(layout, train="qlora", seq_tokens=2048, global_batch=8, model_code="torchtitan")["loss"]
    # 16-bit logits, two tensors in fp32, the head's buffer and input, or three tensors in fp32: whichever is more.
    hidden = 2 * 2048 * 4096
    assert few.loss_bytes == 10 * 2048 * 128_256 + hidden and many.loss_bytes == 12 * 8192 * 128_256
    assert few.allocated_bytes - outside.allocated_bytes == pytest.approx(ROWS - 2 * 2048 * 128_256 + hidden)


def test_casts_of_recomputed_layers_are_gone_when_the_loss_goes_backward() -> None:
    for recompute, tokens, each in (("full", 2048, 10), ("full", 65_536, 12), ("none", 2048, 12)):
        layout = Layout(dp=8, zero=1, recompute=recompute)  # type: ignore[arg-type]
        loss = _moments(layout, seq_tokens=tokens, global_batch=8)["loss"]
        assert loss.loss_bytes == each * tokens * 128_256


def test_the_last_gradient_of_one_gpu_lies_beside_nothing_and_that_of_ddp_beside_its_bucket() -> None:
    hidden = 2 * 2048 * 4096
    for layout, batch, more in ((Layout(), 1, 0), (Layout(), 2, 2 * ROWS), (Layout(dp=8), 8, 2 * ROWS)):
        moments = _moments(layout, seq_tokens=2048, global_batch=batch)
        found = moments["embedding"].allocated_bytes - moments["step"].allocated_bytes
        assert found == pytest.approx(hidden + more)


def test_blocks_of_gradients_stay_beside_those_of_a_peak_without_them() -> None:
    mixtral = load_shape("mixtral-8x7b")
    gradients = 4 * mixtral.parameters / 8
    for recompute, of_gradients in (("none", 1), ("full", 0)):  # at the loss there are none, at the last layer all
        layout = Layout(dp=8, zero=3, recompute=recompute)  # type: ignore[arg-type]
        worst = rank_memory(mixtral, layout, Settings(seq_tokens=4096, global_batch=8).training(mixtral, 8)).worst
        assert worst.cached_bytes == pytest.approx(of_gradients * gradients, abs=0.1 * gradients)


def test_a_compiled_checkpoint_keeps_no_result_that_nothing_reads() -> None:
    layout = Layout(dp=8, zero=3, recompute="selective")
    kept = {
        compiled: _moments(layout, seq_tokens=8192, global_batch=8, compiled=compiled)["loss"].activations_bytes
        for compiled in (False, True)
    }
    assert kept[False] - kept[True] == 32 * 2 * 8192 * 4096
