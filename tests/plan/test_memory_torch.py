"""What torch's own trainers hold beside others: whole stages under FSDP, tensors to receive into, a plain loss."""

from cordee.plan.layout import Layout
from cordee.plan.memory import timeline
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
        (loss,) = (m for m in timeline(L8, Layout(tp=tp, sp=tp > 1), training, 0) if m.event == "loss")
        assert loss.loss_bytes == each * 8192 * 128_256 / tp


def test_a_compiled_loss_keeps_the_logits_and_their_gradient_in_16_bits() -> None:
    training = Training(8192, 8, loss="compiled")
    for tp in (1, 8):
        (loss,) = (m for m in timeline(L8, Layout(tp=tp, sp=tp > 1), training, 0) if m.event == "loss")
        assert loss.loss_bytes == 4 * 8192 * 128_256 / tp
