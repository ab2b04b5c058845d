"""Seconds of one optimizer step: kernels, collectives, pipeline bubble, optimizer, host.

Every size in a layout may be a NumPy array: then the times are arrays too, one for each candidate.
"""

from dataclasses import dataclass

import numpy as np

from cordee.hardware.arrays import Real
from cordee.hardware.catalog import Gpu
from cordee.plan.buffers import cuda_bytes_of, shards_on_host, stays_whole
from cordee.plan.comms import (
    context_layer_s,
    data_messages,
    expert_layer_s,
    gradient_s,
    shard_group,
    stage_send_s,
    tensor_layer_s,
)
from cordee.plan.host import layer_host_s
from cordee.plan.kernels import stream_s
from cordee.plan.layer import Passes, head_passes, layer_passes
from cordee.plan.layout import Layout
from cordee.plan.measured import update_seconds
from cordee.plan.memory import peak_bytes
from cordee.plan.offload import paged_bytes
from cordee.plan.pipeline.price import bubble_s
from cordee.plan.pipeline.schedules import find_schedule
from cordee.plan.shards import expert_stretch
from cordee.plan.states import flop_per_token, frozen_bytes, holding, layer_kinds, trained_parameters
from cordee.plan.training import Training
from cordee.units import GB
from cordee.workload.model import ModelShape

# Half of a normal distribution's 90 % interval, in standard deviations.
INTERVAL_SIGMAS = 1.645
# FSDP2 copies what it gathers from one buffer to each parameter, and 16-bit gradients into one fp32 buffer to reduce:
# `split_with_sizes_copy` and `chunk_cat` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
COPY_IN_BYTES = 6
# The host runs ahead of the device, but not in each part of a layer, nor from the first kernel on: where both take
# about as long neither hides the other, and a layer takes 1.26 times that. With order 3 vTrain's 900 steps of small
# models are off by 8.7 %, with 2.5 and 4 by 7.9 and 9.9, and by 12.0 where the longer of both counts alone.
HOST_ORDER = 3
# A host link in each direction, PCIe 4 x16 as most measure it: for offloaded states and activations.
HOST_BYTES_PER_S = 25 * GB


def host_bytes_per_s(gpu: Gpu) -> float:
    """Return the rate of the link to the host in one direction: as calibrated, else as most measure it."""
    return HOST_BYTES_PER_S if gpu.measured is None else gpu.measured.numbers.get("host_bytes_per_s", HOST_BYTES_PER_S)


@dataclass(frozen=True, slots=True)
class StepTime:
    """The time of one step, part by part. Traffic counts as far as nothing hides it."""

    compute_s: Real
    recompute_s: Real
    tensor_s: Real
    context_s: Real
    expert_s: Real
    pipeline_s: Real
    bubble_s: Real
    data_s: Real
    optimizer_s: Real
    offload_s: Real
    host_s: Real
    reference_s: Real = 0.0

    @property
    def total_s(self) -> Real:
        """The whole step."""
        busy = self.compute_s + self.recompute_s + self.tensor_s + self.context_s + self.expert_s
        moved = self.pipeline_s + self.bubble_s + self.data_s + self.offload_s
        return busy + moved + self.optimizer_s + self.host_s + self.reference_s


def step_interval_s(total_s: Real, gpu: Gpu, doubt: Real = 0.0) -> tuple[Real, Real]:
    """Return the interval in which nine of ten measured steps are expected, by the spread of the GPU's table.

    >>> from cordee.hardware.load import load_catalogue
    >>> low, high = step_interval_s(1.0, load_catalogue().find_gpu("A100"))
    >>> bool(low < 1.0 < high)
    True
    """
    factor = np.exp(INTERVAL_SIGMAS * np.hypot(gpu.efficiency.spread, doubt))
    return total_s / factor, total_s * factor


def model_flop_fraction(shape: ModelShape, gpu: Gpu, training: Training, gpus: int, step_s: Real) -> Real:
    """Return the MFU: the model's own FLOPs (causal attention half, no recomputation) over the dense peak."""
    flop = flop_per_token(shape, training) * training.tokens_per_step
    return flop / (step_s * gpus * gpu.peak_flop_per_s(training.precision))


def step_time(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training) -> StepTime:
    """Compute the seconds of one step on this GPU; the busiest stage sets the pace, the others fill the bubble."""
    count = training.global_batch / (layout.dp * layout.micro_batch)
    layers, fraction = stage_extent(shape, layout)
    layer = _mean_layer(shape, gpu, layout, training)
    again, repeated = _recompute(layer, layout, training, layers)
    if training.tuning.frozen is not None:
        again = again * (1 - layer_kinds(shape, training).skipped / shape.layers)
    head = head_passes(shape, gpu, layout, training)
    tensor, context, expert = _layer_traffic(shape, gpu, layout, training, core_s=layer.core_s, repeated=repeated)
    issued = layer.forward_s + layer.backward_s + again + tensor + context + expert
    host = layer_host_s(shape, gpu, layout, training, repeated)
    body = issued + host if gpu.is_synchronous else beside_s(issued, host)
    stretch = body / issued
    loss = head.forward_s + head.backward_s
    # The last stage has the head; where it has a layer less it may still not be the busiest.
    ends_busy = layers[1] * body + loss > layers[0] * body
    busy = np.where(ends_busy, layers[1], layers[0])
    # A rank waits while a first micro-batch passes the other stages: on average their work, not that of the busiest.
    others = Passes(layer.forward_s + again + (tensor + context + expert) / 3, layer.inner_s, layer.weight_s, 0.0)
    # The head in layers, by what both do once: so that more recomputation never shortens the bubble.
    mean = others.times((shape.layers * stretch + loss / (layer.forward_s + layer.backward_s)) / layout.pp)
    rest = (tensor + context + expert) * 2 / 3 * stretch * shape.layers / layout.pp
    idle = bubble_s(
        layout.schedule, layout.pp, layout.chunks, count,
        forward_s=mean.forward_s, inner_s=mean.inner_s + rest, weight_s=mean.weight_s,
    )  # fmt: skip
    send = 2 * layout.chunks * stage_send_s(shape, gpu, layout, training)
    send = send * np.where(layout.vpp > 1, gpu.efficiency.exposed_fraction if training.overlap else 1.0, 1.0)
    parameters = _stage_parameters(shape, layout, training, fraction)
    return StepTime(
        compute_s=count * (busy * (layer.forward_s + layer.backward_s) + np.where(ends_busy, loss, 0.0)),
        recompute_s=count * busy * again,
        tensor_s=count * busy * tensor,
        context_s=count * busy * context,
        expert_s=count * busy * expert,
        pipeline_s=(count + layout.pp - 1) * send,
        bubble_s=idle,
        data_s=_data_s(gpu, layout, training, parameters, layers=layers[0], third_s=body * layers[1] / 3, count=count),
        optimizer_s=_optimizer_s(gpu, layout, training, parameters),
        offload_s=_offload_s(gpu, shape, layout, training, parameters, layers=layers[0], count=count)
        + _paging_s(shape, gpu, layout, training),
        host_s=count * busy * (body - issued),
        reference_s=_reference_s(
            gpu, layout, training, parameters, layers=layers[0], count=count,
            pass_s=busy * (layer.forward_s + (tensor + context + expert) / 3) * stretch
            + np.where(ends_busy, head.forward_s, 0.0),
        ),
    )  # fmt: skip


def stage_extent(shape: ModelShape, layout: Layout) -> tuple[tuple[Real, Real], Real]:
    """Return the layers of the fullest and the last stage, and the fullest stage's fraction of all layers."""
    if layout.split is not None:
        held = [holding(shape, layout, rank) for rank in range(layout.pp)]
        copies = find_schedule(layout.schedule).placement(layout.pp, layout.vpp).copies
        most = max(rank.layers for rank in held) / copies
        last = max(rank.layers for rank in held if rank.heads) / copies
    else:
        most, last = np.ceil(shape.layers / layout.pp), np.floor(shape.layers / layout.pp)
    return (most, last), most / shape.layers


def _mean_layer(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training) -> Passes:
    """Return a layer as the model has them on average: dense ones and those with experts."""
    dense = layer_passes(shape, gpu, layout, training)
    if training.tuning.frozen is not None:
        # Frozen matrices have no gradient of their own; layers before all that is trained have the forward pass only.
        kinds = layer_kinds(shape, training)
        inner, weight = (kinds.trained + kinds.passed) / shape.layers, kinds.trained / shape.layers
        return Passes(dense.forward_s, dense.inner_s * inner, dense.weight_s * weight, dense.core_s)
    if shape.experts is None:
        return dense
    fraction = shape.expert_layers / shape.layers
    return dense.times(1 - fraction) + layer_passes(shape, gpu, layout, training, expert=True).times(fraction)


def _recompute(layer: Passes, layout: Layout, training: Training, layers: tuple[Real, Real]) -> tuple[Real, Real]:
    """Return a layer's seconds of recomputation on average, and the fraction of layers recomputed whole."""
    if layout.recompute == "full":
        fraction = 1.0 if layout.recompute_layers is None else np.minimum(1.0, layout.recompute_layers / layers[0])
        return layer.forward_s * fraction, fraction
    if layout.recompute == "selective" and not training.flash:
        return layer.core_s, 0.0
    if layout.recompute == "selective" and training.framework == "torch":
        # torchtitan's selective checkpoint makes every second product again and all small kernels, never the attention.
        return (layer.forward_s - layer.core_s + layer.moved_s) / 2, 0.0
    return 0.0, 0.0


def _layer_traffic(
    shape: ModelShape, gpu: Gpu, layout: Layout, training: Training, *, core_s: Real, repeated: Real
) -> tuple[Real, Real, Real]:
    """Return a layer's tensor, context and expert parallel traffic in one micro-batch that nothing hides."""
    shown = gpu.efficiency.exposed_fraction if training.overlap else 1.0
    # torch's DTensor waits for each of its collectives where the next product needs it (asynchronous tensor parallelism
    # is an option of its own); Megatron-LM sends while it multiplies.
    awaited = 1.0 if training.framework == "torch" else shown
    # The weights' gradient does not need the input gradient's all-reduce, so even without more one backward half hides.
    forward, backward = 2 + 2 * repeated, 2 * (0.5 + 0.5 * awaited)
    tensor = (forward * (0.5 + 0.5 * awaited) + backward) * tensor_layer_s(shape, gpu, layout, training)
    moved = context_layer_s(shape, gpu, layout, training)
    if layout.cp_kind == "ring":
        # Rounds of a ring hide behind the attention on what came before.
        context = hidden_s((3 + repeated) * moved, (3.5 + repeated) * core_s, shown)
    else:
        context = (3 + repeated) * moved
    experts = 0.0 if shape.experts is None else shape.expert_layers / shape.layers
    expert = experts * (4 + 2 * repeated) * expert_layer_s(shape, gpu, layout, training)
    return tensor, context, expert


def beside_s(device_s: Real, host_s: Real) -> Real:
    """Return the seconds of a layer that the host issues in `host_s` and the device computes in `device_s`.

    >>> [round(float(beside_s(1.0, host)), 3) for host in (0.0, 0.5, 1.0, 2.0)]
    [1.0, 1.04, 1.26, 2.08]
    """
    longer = np.maximum(device_s, host_s)
    return longer * (1 + (np.minimum(device_s, host_s) / longer) ** HOST_ORDER) ** (1 / HOST_ORDER)


def hidden_s(traffic_s: Real, work_s: Real, shown: Real) -> Real:
    """Return the part of traffic beside work that costs time: what exceeds the work, and at least a fraction of all."""
    return np.maximum(traffic_s - work_s, shown * traffic_s)


@dataclass(frozen=True, slots=True)
class _Weights:
    """Trained parameters on one rank of the fullest stage before ZeRO: those of every rank of the group, its experts'.

    `frozen_bytes` are those of the weights under adapters, which only ZeRO-3 gathers.
    """

    shared: Real
    experts: Real
    frozen_bytes: Real = 0.0


def _stage_parameters(shape: ModelShape, layout: Layout, training: Training, fraction: Real) -> _Weights:
    # FSDP2 moves and updates as many rows of experts for every rank as the fullest has.
    if training.adapters is not None or training.tuning.frozen is not None:
        plain = Layout()
        trained = trained_parameters(shape, plain, training, 0).total
        return _Weights(trained, 0.0, frozen_bytes(shape, plain, training, 0))
    attention = shape.attention_parameters / layout.tp
    ends = shape.vocab * shape.hidden / layout.tp / np.where(layout.pp > 1, 1, 0.5 + 0.5 * np.where(shape.tied, 1, 0))
    dense, shared_mlp = shape.layers, 0.0
    routed: Real = 0.0
    if shape.experts is not None:
        dense = shape.layers - shape.expert_layers
        whole = shape.expert_layers * shape.experts.routed * shape.mlp_parameters(shape.experts.ffn)
        routed = whole * expert_stretch(shape, layout, training)
        shared_mlp = shape.expert_layers * shape.mlp_parameters(shape.experts.shared_ffn)
    mlp = (dense * shape.mlp_parameters(shape.ffn) + shared_mlp) / layout.tp
    body = shape.layers * attention + mlp
    return _Weights(body * fraction + ends, routed * fraction / (layout.ep * layout.expert_tp))


def _data_s(
    gpu: Gpu, layout: Layout, training: Training, weights: _Weights, *, layers: Real, third_s: Real, count: Real
) -> Real:
    """Return what data parallelism adds once the passes of a micro-batch have hidden their part.

    `third_s` is about the forward pass of one micro-batch; the backward pass takes twice as long.
    """
    optimizer = training.optimizer
    shown = gpu.efficiency.exposed_fraction
    # Experts have their own, smaller group of ranks with the same weights; its traffic is counted as if in this one.
    few = np.where(layout.expert_data_ranks > 1, weights.experts, 0.0)
    weight, gradient = optimizer.weight_bytes, optimizer.gradient_bytes
    moved = weights.shared + few
    gathered = moved * weight + np.where(layout.zero == 3, weights.frozen_bytes, 0.0)
    parts = data_messages(layout, training, moved * gradient, element_bytes=gradient, layers=layers)
    reduce = gradient_s(gpu, layout, moved * gradient, parts)
    parts = data_messages(layout, training, gathered, element_bytes=weight, layers=layers)
    gather = shard_group(gpu, layout).gather_s(gathered, parts)
    together = np.where(layout.data_ranks > 1, 1.0, 0.0)
    once: Real
    if not training.overlap:
        once = reduce + np.where(layout.zero > 0, gather, 0.0)
        every = np.where(stays_whole(layout, training), once, count * (2 * gather + reduce))
        return together * np.where(layout.zero == 3, every, once)
    # The first bucket cannot start before the pass, and the last one ends after it.
    least = np.maximum(shown, 1 / layers)
    once = hidden_s(reduce, 2 * third_s, least)
    # Megatron-LM and FSDP gather weights while the next forward pass runs; DeepSpeed, InternEvo and torch's stage 1
    # (ZeroRedundancyOptimizer) before it starts.
    late = training.framework in ("deepspeed", "internevo") or ((training.framework == "torch") & (layout.zero == 1))
    once = once + np.where(layout.zero > 0, np.where(late, gather, hidden_s(gather, third_s, least)), 0.0)
    sharded = hidden_s(gather, third_s, least) + hidden_s(gather + reduce, 2 * third_s, least)
    if training.framework == "torch":
        sharded = sharded + stream_s(gpu, 2 * (2 * gathered) + COPY_IN_BYTES * moved)
    twice = hidden_s(reduce, 2 * third_s, least) * count + gather * least
    # With a pipeline the gradients of all micro-batches are kept, so they are reduced once there.
    often = np.where((layout.zero == 2) & (layout.pp == 1), twice, once)
    passing = np.where(stays_whole(layout, training), once, count * sharded)
    return together * np.where(layout.zero == 3, passing, often)


def _reference_s(
    gpu: Gpu, layout: Layout, training: Training, weights: _Weights, *, layers: Real, count: Real, pass_s: Real
) -> Real:
    """Return the seconds of passes without gradients: each micro-batch once forward, its weights gathered with ZeRO-3.

    The reference's kernels are the model's own; a pipeline fills and drains once for all micro-batches.
    """
    stage = training.tuning.stage
    if stage is None or not stage.free_passes:
        return 0.0
    moved = (weights.shared + weights.experts) * training.activation_bytes if training.adapters is None else 0.0
    gathered = moved + weights.frozen_bytes
    parts = data_messages(layout, training, gathered, element_bytes=training.activation_bytes, layers=layers)
    sharded = (layout.zero == 3) & (layout.data_ranks > 1)
    gather = np.where(sharded, shard_group(gpu, layout).gather_s(gathered, parts), 0.0)
    least = np.maximum(gpu.efficiency.exposed_fraction, 1 / layers) if training.overlap else 1.0
    shown = hidden_s(gather, pass_s, least)
    return stage.free_passes * ((count + layout.pp - 1) * pass_s + count * shown)


def _optimizer_s(gpu: Gpu, layout: Layout, training: Training, weights: _Weights) -> Real:
    """Return the seconds of the update, which reads and writes every kept byte once, many tensors in one kernel."""
    optimizer = training.optimizer
    shards = np.where(layout.zero > 0, layout.shard_ranks, 1)
    expert_shards = np.where(layout.zero > 0, layout.expert_shard_ranks, 1)
    elements = weights.shared / shards + weights.experts / np.maximum(1, expert_shards)
    states = optimizer.weight_bytes + optimizer.gradient_bytes + optimizer.master_bytes + optimizer.moment_bytes
    found = update_seconds(gpu, training, elements)
    return stream_s(gpu, 2 * elements * states) if found is None else found


def _paging_s(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training) -> Real:
    """Return the seconds in which paged moments that the GPU has no room for come to the step and leave again."""
    if not training.optimizer.paged:
        return 0.0
    paged = paged_bytes(shape, layout, training)
    short = np.clip(peak_bytes(shape, layout, training, cuda_bytes_of(gpu)) + paged - gpu.visible_bytes, 0.0, paged)
    return 2 * short / host_bytes_per_s(gpu)


def _offload_s(
    gpu: Gpu, shape: ModelShape, layout: Layout, training: Training, weights: _Weights, *, layers: Real, count: Real
) -> Real:
    """Return the seconds of host traffic: states there and back once a step, activations with every micro-batch.

    Nothing hides it: an upper bound.
    """
    optimizer = training.optimizer
    seconds: Real = 0.0
    if layout.offload in ("optimizer", "both"):
        shards = np.where(layout.zero > 0, layout.shard_ranks, 1)
        elements = (weights.shared + weights.experts) / shards
        once = optimizer.gradient_bytes + optimizer.weight_bytes
        # Shards on the host are copied for each gathering, in their own type, and gradients for each reduction.
        every = count * (2 * (optimizer.master_bytes or optimizer.weight_bytes) + optimizer.gradient_bytes)
        moved = np.where(shards_on_host(layout, training), every, once)
        seconds = elements * moved / host_bytes_per_s(gpu)
    if layout.offload in ("activations", "both"):
        tokens = training.seq_tokens * layout.micro_batch / layout.cp
        kept = 1 if layout.recompute == "full" else 17
        boundary = training.activation_bytes * tokens * shape.hidden * kept / layout.tp
        seconds = seconds + 2 * count * layers * boundary / host_bytes_per_s(gpu)
    return seconds
