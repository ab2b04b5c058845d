"""Bytes that frameworks hold beside states and activations: buckets, gathered layers, dummy gradients, context."""

from dataclasses import dataclass

import numpy as np

from cordee.hardware.arrays import Real, only_where
from cordee.hardware.catalog import Gpu
from cordee.plan.activations import keeps_fp8
from cordee.plan.layout import Layout
from cordee.plan.shards import adapter_padding, layer_padding, vocabulary_padding
from cordee.plan.states import (
    Holding,
    adapter_parameters,
    layer_linears,
    layer_parameters,
    padded_vocab,
    quantised_saving_bytes,
)
from cordee.plan.training import Training
from cordee.units import GB, MiB
from cordee.workload.model import ModelShape

# CUDA context and kernels as nvidia-smi shows them, without torch's allocator, and the buffers of one NCCL
# communicator: together 1.3-1.6 GB on A100 for three of them (BigScience's notes).
CUDA_BYTES = round(0.7 * GB)
NCCL_BYTES = round(0.3 * GB)
# Ratio of reserved to allocated bytes: 1.028-1.093, mean 1.048, in 43 Megatron-LM runs (SimuMax's measurements);
# BigScience's Megatron-DeepSpeed runs held about 8 % more than is accounted for.
FRAGMENTATION = {"megatron": 0.048, "torch": 0.048, "deepspeed": 0.08, "internevo": 0.048}
# torch DDP and FSDP1 send buckets of this size; DeepSpeed's are in elements (its configuration's default).
BUCKET_BYTES = 25 * MiB
DEEPSPEED_BUCKET = 500_000_000


def context_bytes(layout: Layout, cuda_bytes: float = CUDA_BYTES) -> Real:
    """Return the CUDA context and NCCL's buffers, one communicator an axis: nvidia-smi shows them, torch does not."""
    sizes = (layout.tp, layout.pp, layout.data_ranks, layout.cp, layout.ep)
    return cuda_bytes + sum(NCCL_BYTES * (size > 1) for size in sizes)


def cuda_bytes_of(gpu: Gpu) -> float:
    """Return what libraries take of a GPU: as it was measured of a calibrated one, else CUDA_BYTES."""
    measured = None if gpu.measured is None else gpu.measured.numbers.get("context_bytes")
    return CUDA_BYTES if measured is None else measured


def standing_bytes(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> Real:
    """Return the buffers that live through the whole step.

    Megatron-LM with fused gradient accumulation adds weight gradients to the fp32 ones inside the product, and hands
    autograd an empty tensor of each weight's shape: Transformer Engine keeps one for each distinct shape. With FP8 it
    keeps every weight of a layer in 8 bits as well, and transposed.
    """
    if training.framework == "megatron":
        return _dummy_bytes(shape, layout, training, held) + _fp8_bytes(shape, layout, training, held)
    if training.framework == "deepspeed":
        return (layout.data_ranks > 1) * 2 * training.activation_bytes * DEEPSPEED_BUCKET
    # FSDP2 reduces each layer in a buffer of its size.
    return (layout.data_ranks > 1) * (1 - (layout.zero == 3) * (training.framework == "torch")) * 2 * BUCKET_BYTES


def _dummy_bytes(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> Real:
    if training.optimizer.gradient_bytes <= training.activation_bytes:
        return 0.0
    return training.activation_bytes * sum(size / over for size, over in _weight_shapes(shape, layout, training, held))


def _fp8_bytes(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> Real:
    matrices: Real = 0.0
    for expert, count in ((False, held.dense_layers), (True, held.expert_layers)):
        if count:
            layer = layer_parameters(shape, layout, expert)
            matrices = matrices + count * (layer.total - layer.outer)
    return 2 * keeps_fp8(training) * matrices


def _weight_shapes(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> list[tuple[Real, Real]]:
    """Return the elements of each distinct shape of a weight on this rank, and what divides them."""
    h, tp = shape.hidden, layout.tp
    shapes: dict[tuple[int, int, str], tuple[Real, Real]] = {}

    def add(outputs: int, inputs: int, cut: str, over: Real) -> None:
        shapes[(outputs, inputs, cut)] = (outputs * inputs, over)

    if held.layers:
        latent, heads = shape.latent, shape.heads
        if latent is None:
            kv_heads = shape.kv_heads + (tp > shape.kv_heads) * (tp - shape.kv_heads)
            shapes[(0, h, "out")] = ((heads + 2 * kv_heads) * shape.head_dim * h, tp)
            add(h, heads * shape.head_dim, "in", tp)
        else:
            query = heads * (latent.nope_dim + latent.rope_dim)
            if latent.q_rank is not None:
                add(latent.q_rank, h, "", 1)
            add(query, latent.q_rank or h, "out", tp)
            add(latent.kv_rank + latent.rope_dim, h, "", 1)
            add(heads * (latent.nope_dim + latent.v_dim), latent.kv_rank, "out", tp)
            add(h, heads * latent.v_dim, "in", tp)
    up = 2 if shape.gated else 1
    moe = shape.experts
    widths = [(shape.ffn, tp)] if held.dense_layers else []
    if held.expert_layers and moe is not None:
        widths += [(moe.ffn, layout.expert_tp)] + ([(moe.shared_ffn, tp)] if moe.shared_ffn else [])
    for width, over in widths:
        add(up * width, h, "out", over)
        add(h, width, "in", over)
    if held.heads:
        shapes[(1, h, "head")] = (padded_vocab(shape, layout, training) * h, tp)
    return list(shapes.values())


def gathered_bytes(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> Real:
    """Return the whole weights of this layer and the next one with ZeRO-3; a torch pipeline keeps them whole anyway.

    FSDP2 gathers as many rows of every rank as the fullest has.
    """
    passing = (layout.zero == 3) * (not stays_whole(layout, training))
    whole = training.activation_bytes * _largest_layer(shape, layout, training, held)
    if training.adapters is not None:
        adapters, expert = training.adapters, held.expert_layers > 0
        own = _adapter_bytes(layout, training) * adapter_parameters(shape, adapters, expert=expert)
        whole = whole + own - quantised_saving_bytes(shape, adapters, training.activation_bytes, expert=expert)
    return passing * 2 * whole


@dataclass(frozen=True, slots=True)
class GatheredEnds:
    """Bytes that FSDP2 gathers beside two layers, with ZeRO-3: a group is there twice, as it came and copied out.

    `first` is what is there at the start of the forward pass: the embedding's group alone, or as it came beside the
    first layer; `tied` that of an embedding which is the head's as well and stays, and `head_slope` its gradient as a
    head, which waits for that as an embedding; `ahead` the embedding's as it comes, with the first layer's backward
    pass; `next_layer` a third layer's worth where one layer gives way to the next; `head_buffer` the head's as it came,
    which the model's forward pass keeps to its end; `of_head` a head's gradient, as it comes and as it is reduced,
    `slope` and `reduced` the embedding's.
    """

    first: Real = 0.0
    tied: Real = 0.0
    head_slope: Real = 0.0
    ahead: Real = 0.0
    next_layer: Real = 0.0
    head_buffer: Real = 0.0
    of_head: Real = 0.0
    slope: Real = 0.0
    reduced: Real = 0.0

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout, training: Training, held: Holding) -> "GatheredEnds":
        """Return those of a rank of the pipeline; nothing without FSDP2, or where it keeps a stage whole."""
        if training.framework != "torch" or stays_whole(layout, training) or training.tuning.flat:
            return cls()
        rows, layers = gathered_head_bytes(shape, layout, training), gathered_bytes(shape, layout, training, held)
        both = shape.tied and held.embeddings and held.heads
        slope = (layout.zero == 3) * vocabulary_bytes(shape, layout, training)
        alone = rows + layers
        alone = alone + only_where(2 * rows > alone, 2 * rows - alone)
        is_trained = training.adapters is None and training.tuning.frozen is None
        # From the second micro-batch on what is reduced lies beside what it is added to.
        reduced = 2 * rows * (1 + (layout.micro_batches(training.global_batch) > 1) / layout.shard_ranks)
        return cls(
            first=(2 * rows + layers if both else alone) * bool(held.embeddings),
            tied=rows * bool(both),
            head_slope=slope * bool(both) * is_trained,
            ahead=rows * (bool(held.embeddings) and not both),
            next_layer=layers / 2 * (held.layers > 1),
            head_buffer=rows * (not both),
            of_head=(slope + reduced) * (not both) * is_trained,
            slope=slope,
            reduced=reduced,
        )

    def last_bytes(self, layer: Real, boundary: Real) -> tuple[Real, Real]:
        """Return what is there as the embedding's gradient comes, and as it is reduced; `layer`: the first one's."""
        # One that is the head's as well is gathered still, and has the sum of both gradients beside them.
        own = self.tied + self.head_slope + 2 * self.slope if np.any(self.tied) else self.ahead + self.slope
        return layer + boundary + own, self.slope + self.reduced


def gradients_appear(layout: Layout, training: Training) -> Real:
    """Return 1 where torch has no gradients before the first backward pass of a step, since `zero_grad` drops them.

    So it is with FSDP2, and on one GPU; DDP's are views of its buckets, a pipeline's add up unsharded.
    """
    if training.framework != "torch" or layout.pp > 1 or training.optimizer.in_backward:
        return 0
    return 1 * ((layout.zero >= 2) | (layout.gpus == 1))


def frozen_gradient_bytes(layout: Layout, training: Training, parameters: Real) -> Real:
    """Return the gradient of frozen parameters that are one flat tensor with trained ones.

    It is whole while micro-batches add up without traffic, and sharded with one micro-batch.
    """
    if not training.tuning.flat or training.adapters is None:
        return 0.0
    shards = 1 + (layout.micro_batches(training.global_batch) == 1) * (layout.shard_ranks - 1)
    return (layout.zero == 3) * training.activation_bytes * parameters / shards


def cast_bytes(shape: ModelShape, layout: Layout, training: Training, held: Holding, parameters: Real) -> Real:
    """Return 16-bit copies of this rank's trained parameters that live through a forward pass, in torch below ZeRO-3.

    Autocast keeps a copy of each matrix until the pass is done, of all but the embedding (a look-up is no product).
    ZeRO-2 is FSDP2 that shards again after the backward pass only, embedding included. Of fp32 adapters it is all.
    """
    if training.adapters is not None:
        unlike = training.optimizer.weight_bytes > training.activation_bytes
        return unlike * (layout.zero < 2) * training.activation_bytes * parameters
    rows = padded_vocab(shape, layout, training) * shape.hidden / layout.tp
    frozen = training.tuning.frozen
    looked_up = held.embeddings * (not (shape.tied and held.heads)) * (frozen is None or not frozen.embeddings)
    matrices = parameters - looked_up * rows
    sharded = (layout.zero == 2) * (layout.data_ranks > 1)
    casts = training.keeps_fp32 * (layout.zero < 3) * training.activation_bytes
    return casts * (matrices + sharded * (parameters - matrices))


def accumulated_bytes(layout: Layout, training: Training, gradients: Real) -> Real:
    """Return the gradients that add up beside DDP's buckets, which they are copied into after the last micro-batch.

    `zero_grad` drops the views of the buckets, and without traffic (`no_sync`) autograd makes tensors of its own.
    """
    adds_up = training.framework == "torch" and not training.optimizer.in_backward
    several = layout.micro_batches(training.global_batch) > 1
    return adds_up * several * (layout.zero < 2) * (layout.data_ranks > 1) * gradients


def shards_on_host(layout: Layout, training: Training) -> Real:
    """Return 1 where weights and gradients are on the host with the optimizer's states.

    That is FSDP2's `CPUOffloadPolicy`, torch's one way to offload an optimizer of sharded parameters.
    """
    offloads = training.framework == "torch" and layout.offload in ("optimizer", "both")
    return offloads * (layout.zero == 3)


def stays_whole(layout: Layout, training: Training) -> bool:
    """Return whether FSDP keeps a stage whole for all its micro-batches.

    Under a pipeline torchtitan does not shard again after a forward pass, and torch reduces gradients after the last
    micro-batch only: until then they add up unsharded, in the type that they are reduced in.
    """
    return training.framework == "torch" and layout.pp > 1


def unsharded_bytes(layout: Layout, training: Training, parameters: Real) -> tuple[Real, Real]:
    """Return the whole weights and fp32 gradients of a stage while its micro-batches pass, where FSDP keeps them."""
    kept = stays_whole(layout, training) * (layout.zero == 3) * (layout.shard_ranks > 1)
    return kept * training.activation_bytes * parameters, kept * 4 * parameters


def receiving_bytes(layout: Layout, training: Training, held: Holding, *, boundary: Real, flying: Real) -> Real:
    """Return what a torch pipeline receives into: a tensor for each micro-batch, made before the first one.

    Activations (those in flight are a layer's input and counted there) and their gradients, chunk by chunk
    (torch/distributed/pipelining/stage.py).
    """
    if training.framework != "torch" or layout.pp == 1:
        return 0.0
    count = layout.micro_batches(training.global_batch)
    waiting = (layout.chunks - held.embeddings) * (count - flying)
    return boundary * (waiting + (layout.chunks - held.heads) * count)


def gathered_head_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the head's whole weights with ZeRO-3."""
    rows = padded_vocab(shape, layout, training) * shape.hidden / layout.tp
    passing = (layout.zero == 3) * (not stays_whole(layout, training))
    return passing * training.activation_bytes * (rows + vocabulary_padding(shape, layout, training))


def arriving_bytes(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> Real:
    """Return one layer's weight gradients before they are added to the kept ones; FSDP2 reduces them in fp32."""
    if training.framework == "megatron":
        return 0.0
    if training.optimizer.in_backward and training.adapters is None and shape.latent is None and shape.experts is None:
        # Each gradient is used up as soon as it is there.
        largest = training.optimizer.gradient_bytes * max(each.inputs * each.outputs for each in layer_linears(shape))
        return np.where(layout.zero < 3, largest, _arriving(shape, layout, training, held))
    return _arriving(shape, layout, training, held)


def _arriving(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> Real:
    return weight_slopes_bytes(shape, layout, training, held) + reduced_bytes(shape, layout, training, held)


def weight_slopes_bytes(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> Real:
    """Return the gradients of one layer's weights as its backward pass makes them."""
    if training.adapters is not None:
        own = adapter_parameters(shape, training.adapters, expert=held.expert_layers > 0)
        return _adapter_bytes(layout, training) * own
    return training.optimizer.weight_bytes * _largest_layer(shape, layout, training, held, padded=False)


def _adapter_bytes(layout: Layout, training: Training) -> Real:
    """Return the bytes of an adapter's weight, or of its gradient, as a pass has it: FSDP gathers it in 16 bits."""
    kept = training.optimizer.weight_bytes
    return kept - (layout.zero == 3) * max(0.0, kept - training.activation_bytes)


def reduced_bytes(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> Real:
    """Return the fp32 buffer in which FSDP2 reduces one layer's gradients, until the next layer's takes its place."""
    reduced = 4 * (layout.zero == 3) * (training.framework == "torch")
    if training.adapters is not None:
        adapters, expert = training.adapters, held.expert_layers > 0
        padding = adapter_padding(shape, layout, training, adapters, expert=expert)
        return reduced * (adapter_parameters(shape, adapters, expert=expert) + padding)
    return reduced * _largest_layer(shape, layout, training, held)


def reduced_head_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the same of a head that has gradients and is no embedding."""
    reduced = 4 * (layout.zero == 3) * (training.framework == "torch") * (training.adapters is None)
    return reduced * (not shape.tied) * vocabulary_bytes(shape, layout, training) / training.activation_bytes


def embedding_gradient_bytes(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> Real:
    """Return the embedding's whole gradient, which no framework adds up inside the product, beside the first layer's.

    Under autocast it is fp32, and lies beside all gradients where it is added to one that is there: DDP's bucket, or
    that of an earlier micro-batch on one GPU; the layer's are gradients already. Where the head is the same matrix its
    gradient waits beside it until both are added.
    """
    rows = vocabulary_bytes(shape, layout, training)
    wide, several = 4 / training.activation_bytes * rows, layout.micro_batches(training.global_batch) > 1
    cast = 2 * wide if shape.tied and held.heads else wide * (several == (layout.gpus == 1))
    plain = rows + arriving_bytes(shape, layout, training, held)
    return plain + training.keeps_fp32 * (layout.zero < 2) * (cast - plain)


def vocabulary_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the bytes of this rank's part of an embedding or a head, as products read it."""
    return training.activation_bytes * padded_vocab(shape, layout, training) * shape.hidden / layout.tp


def step_moment_bytes(layout: Layout, training: Training, parameters: Real, shards: Real) -> Real:
    """Return what the optimizer's step needs for a moment, of the parameters that it updates on this GPU.

    torch's fused AdamW (torchtitan's default) needs nothing; the one over lists of tensors would make the roots of all
    second moments, 4 bytes. DeepSpeed makes fp32 gradients. InternEvo flattens 16-bit gradients (2, not with FSDP),
    makes fp32 ones (4), and its AdamW, torch 2.0's, makes roots and denominators (8): `internlm/solver/optimizer`.
    """
    if training.framework == "deepspeed" and training.optimizer.gradient_bytes < 4:
        return 4 * parameters / shards
    if training.framework == "internevo":
        return (12 + 2 * (layout.zero < 3)) * parameters / shards
    return 0.0


def _largest_layer(
    shape: ModelShape, layout: Layout, training: Training, held: Holding, *, padded: bool = True
) -> Real:
    """Return the elements of the largest layer, with the rows that FSDP2 pads it with."""
    largest: Real = 0
    for expert, count in ((False, held.dense_layers), (True, held.expert_layers)):
        if count:
            size = layer_parameters(shape, layout, expert).total
            size = size + padded * layer_padding(shape, layout, training, expert=expert).total
            largest = largest + only_where(size > largest, size - largest)
    return largest
