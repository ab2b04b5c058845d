"""Seconds of one optimizer step from first principles: products, collectives, pipeline bubble, optimizer.

A first model: one efficiency for products and rings for collectives. It ranks layouts; it is not calibrated.
"""

from dataclasses import dataclass

from cordee.hardware.catalog import Gpu
from cordee.hardware.collectives import all_reduce_s, data_gather_s, link_between, send_s
from cordee.plan.layout import Layout, Training, stage_layers
from cordee.plan.memory import stage_parameters
from cordee.workload.model import ModelShape

# Share of the matmul ceiling that whole layers reach: norms, softmax, copies and launches take the rest.
LAYER_SHARE = 0.80
# Attention is slower than plain products. Half their rate moves the median error over 216 published FSDP runs
# (Mosaic llm-foundry, 512 to 65,536 tokens) from -24 % to -11 %.
ATTENTION_SLOWDOWN = 2.0
# Products as narrow as this lose half: tile and wave quantisation of small tensor-parallel shards.
HALF_WIDTH = 256


@dataclass(frozen=True, slots=True)
class StepTime:
    """Where the time of one step goes. Data-parallel time is what the backward pass does not hide."""

    compute_s: float
    recompute_s: float
    tensor_s: float
    pipeline_s: float
    bubble_s: float
    data_s: float
    optimizer_s: float

    @property
    def total_s(self) -> float:
        """The whole step."""
        return (
            self.compute_s
            + self.recompute_s
            + self.tensor_s
            + self.pipeline_s
            + self.bubble_s
            + self.data_s
            + self.optimizer_s
        )


def step_time(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training) -> StepTime:
    """Seconds of one step on this GPU; the slowest stage sets the pace."""
    micro_batches = layout.micro_batches(training.global_batch)
    per_stage = stage_layers(shape.layers, layout.pp)
    # Only two stages can be the slowest: one with the most layers, and the last, which has the head.
    slow = (per_stage.index(max(per_stage)), layout.pp - 1)
    compute, recompute, tensor = max((_micro_batch_s(shape, gpu, layout, training, stage) for stage in slow), key=sum)
    send = _send_s(shape, gpu, layout, training)
    one = compute + recompute + tensor + send
    backward = (compute + recompute) * 2 / 3
    return StepTime(
        compute_s=micro_batches * compute,
        recompute_s=micro_batches * recompute,
        tensor_s=micro_batches * tensor,
        pipeline_s=micro_batches * send,
        bubble_s=(layout.pp - 1) * one,
        data_s=_data_s(shape, gpu, layout, training, backward),
        optimizer_s=_optimizer_s(shape, gpu, layout, training),
    )


def model_flop_share(shape: ModelShape, gpu: Gpu, training: Training, gpus: int, step_s: float) -> float:
    """MFU: the model's own FLOPs (causal attention counted half, recomputation not at all) over the dense peak."""
    flop = shape.train_flop_per_token(training.seq_tokens) * training.tokens_per_step
    return flop / (step_s * gpus * gpu.peak_flop_per_s(training.precision))


def _micro_batch_s(
    shape: ModelShape, gpu: Gpu, layout: Layout, training: Training, stage: int
) -> tuple[float, float, float]:
    """One micro-batch forward and backward on one stage: products, products done again, tensor-parallel collectives."""
    layers = stage_layers(shape.layers, layout.pp)[stage]
    tokens = training.seq_tokens * layout.micro_batch
    body = shape.matmul_parameters - shape.vocab * shape.hidden
    attention = ATTENTION_SLOWDOWN * shape.attention_flop_per_token(training.seq_tokens)
    forward = tokens * (2 * body * layers / shape.layers + layers * attention) / layout.tp
    head = tokens * 2 * shape.vocab * shape.hidden / layout.tp if stage == layout.pp - 1 else 0.0
    width = min(shape.hidden, _inner_width(shape)) / layout.tp
    rate = gpu.peak_flop_per_s(training.precision) * gpu.matmul_share * LAYER_SHARE * width / (width + HALF_WIDTH)
    again = {"none": 0.0, "selective": 0.0 if training.flash else tokens * layers * attention / layout.tp}
    recompute = again.get(layout.recompute, forward)
    link = link_between(gpu, layout.tp)
    exchange = all_reduce_s(training.activation_bytes * tokens * shape.hidden, layout.tp, link)
    # Two all-reduces forward and two backward in each layer; recomputation repeats the forward ones.
    rounds = layers * (6 if layout.recompute == "full" else 4)
    return 3 * (forward + head) / rate, recompute / rate, rounds * exchange


def _inner_width(shape: ModelShape) -> int:
    return shape.experts.ffn if shape.experts is not None else shape.ffn


def _send_s(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training) -> float:
    """Activations to the next stage and gradients back, for one micro-batch."""
    if layout.pp == 1:
        return 0.0
    tokens = training.seq_tokens * layout.micro_batch
    n_bytes = training.activation_bytes * tokens * shape.hidden / (layout.tp if layout.sp else 1)
    return 2 * send_s(n_bytes, link_between(gpu, layout.gpus))


def _data_s(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training, backward_s: float) -> float:
    """What data parallelism adds to the step once the backward pass (FSDP: all passes) has hidden its part."""
    if layout.dp == 1:
        return 0.0
    count = stage_layers(shape.layers, layout.pp)[0]
    parameters = stage_parameters(shape, layout, 0, range(count))
    optimizer = training.optimizer
    reduce = data_gather_s(parameters * optimizer.gradient_bytes, layout.dp, layout.tp, gpu)
    gather = data_gather_s(parameters * optimizer.weight_bytes, layout.dp, layout.tp, gpu)
    if layout.zero == 3:
        each = 2 * gather + reduce
        exposed = max(each / max(1, count), each - 1.5 * backward_s)
        return layout.micro_batches(training.global_batch) * exposed
    if layout.zero == 2:
        # Sharded gradients are reduced after every micro-batch, since no rank may keep them whole.
        exposed = max(reduce / max(1, count), reduce - backward_s)
        return layout.micro_batches(training.global_batch) * exposed + gather
    # The first bucket cannot start before the backward pass, and the last one ends after it.
    return max((reduce + gather) / max(1, count), reduce + gather - backward_s)


def _optimizer_s(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training) -> float:
    """The update reads and writes every kept byte once."""
    count = stage_layers(shape.layers, layout.pp)[0]
    parameters = stage_parameters(shape, layout, 0, range(count)) / (layout.dp if layout.zero else 1)
    return 2 * parameters * training.optimizer.bytes_per_parameter / gpu.memory_bytes_per_s
