"""Seconds of one transformer layer, and of the loss head, for one micro-batch: forward, and backward in two parts.

The sizes in a layout, and those of a dense shape, may be NumPy arrays. Communication is `comms.py`'s.
"""

from dataclasses import dataclass

import numpy as np

from cordee.hardware.arrays import Real
from cordee.hardware.catalog import Gpu
from cordee.plan.kernels import fused_attention_s, move_s, product_s, stream_s, unfused_attention_s
from cordee.plan.layout import Layout
from cordee.plan.measured import (
    attention_seconds,
    dequantise_seconds,
    head_operations,
    layer_operations,
    linear_pages,
    product_seconds,
)
from cordee.plan.states import Linear, layer_linears
from cordee.plan.training import Adapters, Training
from cordee.workload.model import Experts, LatentAttention, ModelShape

# 16-bit words that a layer's small kernels move for each token, counted along the layer: two norms (4h), two
# dropouts with residuals and masks (7h) forward; the backward pass moves twice as much.
HIDDEN_WORDS = 11
# Queries, keys and values are copied into their heads' order (and rotated) once: read and written.
HEAD_WORDS = 2
# One by one, as torch's dispatcher counts them: a rotation is two products, a negation, a joining and a sum.
EAGER_HEAD_WORDS = 10
# Two RMS norms that are composed of kernels, as eager PyTorch and Hugging Face's models have them: to fp32 (3 words),
# square (4), mean (2), product (4), back to 16 bits (3), times the weight (2), less the two of a fused one.
EAGER_NORM_WORDS = 2 * (18 - 2)
# A gated activation is two kernels then: its inner value is written and read again, for each of its outputs.
EAGER_GATE_WORDS = 2
# A router's permutation reads and writes each token's copies on their way out and back.
PERMUTE_WORDS = 4
# Experts with biases (gpt-oss's): the second product's is added expert by expert and the pieces are joined, and both
# halves of a gated activation are clamped and joined before its fused kernel (Megatron-LM, `TEGroupedMLP._apply_bias`
# and `weighted_bias_quick_geglu_impl`): words of each output, forward and backward. In 8 bits Transformer Engine's
# fused operations do both within the products (Megatron-Bridge's recipes, `use_transformer_engine_op_fuser`).
BIAS_WORDS, CLAMP_WORDS = (6, 8), (8, 15)
# 8-bit products cast their inputs: two bytes read, a byte and its transpose written. Transformer Engine finds the scale
# in the kernel before; torchao reads everything once more for it, and casts the weights in each pass of a micro-batch.
CAST_BYTES, TORCH_CAST_BYTES = 4, 6
# Bytes that the loss moves for each logit over its passes, in 16 and 32 bits (Megatron-LM's vocabulary-parallel loss).
LOGIT_MOVED_BYTES = 24
# An adapter's result is scaled and added to the frozen one forward: five words for each output. Backward its gradient
# is scaled (two) and that of the input added (three for each input).
ADAPTER_FORWARD_WORDS, ADAPTER_OUTPUT_WORDS, ADAPTER_INPUT_WORDS = 5, 2, 3
# DoRA's two scaled terms and their sum are fp32: 16-bit results read (2), fp32 ones written and read (10), each way.
MAGNITUDE_WORDS = 12
# Rows of a grouped product are filled up to whole tiles, expert by expert.
GROUP_TILE = 128


@dataclass(frozen=True, slots=True)
class Passes:
    """Forward, gradient of the input, gradient of the weights.

    Within forward `core_s` is the attention proper, and `moved_s` are kernels that only move memory.
    """

    forward_s: Real
    inner_s: Real
    weight_s: Real
    core_s: Real
    moved_s: Real = 0.0

    @property
    def backward_s(self) -> Real:
        """Both parts of the backward pass."""
        return self.inner_s + self.weight_s

    def times(self, count: Real) -> "Passes":
        """Return so many of these."""
        parts = self.forward_s, self.inner_s, self.weight_s, self.core_s, self.moved_s
        return Passes(*(part * count for part in parts))

    def __add__(self, other: "Passes") -> "Passes":
        return Passes(
            self.forward_s + other.forward_s,
            self.inner_s + other.inner_s,
            self.weight_s + other.weight_s,
            self.core_s + other.core_s,
            self.moved_s + other.moved_s,
        )


def rank_tokens(layout: Layout, training: Training) -> Real:
    """Return the tokens of one micro-batch on one rank."""
    return training.seq_tokens * layout.micro_batch / layout.cp


def layer_passes(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training, *, expert: bool = False) -> Passes:
    """Return the passes of one layer; with `expert`, of one whose MLP is a mixture of experts."""
    tokens, tp = rank_tokens(layout, training), layout.tp
    total = _products(gpu, training, tokens, _attention_sizes(shape, tp)) + _core(shape, gpu, layout, training)
    moe = shape.experts if expert else None
    inner = shape.ffn
    hidden = shape.hidden / np.where(layout.sp, tp, 1)
    words = HIDDEN_WORDS * hidden
    if moe is None:
        total += _products(gpu, training, tokens, _mlp_sizes(shape, shape.ffn, tp))
    else:
        local = np.maximum(1.0, moe.routed / layout.ep)
        rows = tokens * moe.per_token * layout.expert_tp / tp * training.imbalance_at(layout.ep)
        rows = np.ceil(rows / local / GROUP_TILE) * GROUP_TILE
        sizes = _mlp_sizes(shape, moe.ffn, layout.expert_tp)
        trained = training.adapters is not None and "experts" in training.adapters.targets
        total += _products(
            gpu, training, rows, sizes, fraction=gpu.efficiency.grouped_fraction, groups=local, trained=trained
        )
        if moe.shared_ffn:
            total += _products(gpu, training, tokens, _mlp_sizes(shape, moe.shared_ffn, tp))
        if shape.mlp_bias and training.precision != "fp8":
            total += _biased_passes(shape, gpu, moe, training, rows=local * rows)
        inner = moe.ffn * moe.per_token + moe.shared_ffn
        words = words + PERMUTE_WORDS * moe.per_token * shape.hidden / tp
    if training.adapters is not None:
        total += _adapter_passes(shape, gpu, training, training.adapters, tokens, expert=expert)
    small = layer_operations(shape, gpu, layout, training, tokens, inner) if moe is None else None
    if small is not None:
        for outputs, inputs in _matrices(shape, tp):
            total += Passes(*linear_pages(gpu, training, tokens, outputs, inputs), 0.0)
        return total + Passes(*small, 0.0, 0.0, small[0])
    words = words + _fused_words(shape, inner) / tp
    moved = move_s(gpu, training.activation_bytes * words * tokens)
    if not training.is_fused:
        more = _eager_words(shape, inner) / tp + (EAGER_NORM_WORDS if shape.norm == "rms" else 0) * hidden
        moved = moved + stream_s(gpu, training.activation_bytes * more * tokens)
    return (total + Passes(moved, 2 * moved, 0.0, 0.0, moved)).times(_software(gpu, training))


def _biased_passes(shape: ModelShape, gpu: Gpu, moe: Experts, training: Training, *, rows: Real) -> Passes:
    """Return the passes of biases and clamps over so many rows of experts."""
    forward, backward = (
        stream_s(gpu, training.activation_bytes * rows * (bias * shape.hidden + clamp * shape.gated * moe.ffn))
        for bias, clamp in zip(BIAS_WORDS, CLAMP_WORDS, strict=True)
    )
    return Passes(forward, backward, 0.0, 0.0, forward)


def _software(gpu: Gpu, training: Training) -> float:
    """Return how much longer products and kernels of these sizes take where they are not Megatron-LM's."""
    return 1.0 if training.framework in ("megatron", "deepspeed") else 1 / gpu.efficiency.portable_fraction


def _fused_words(shape: ModelShape, inner: Real) -> Real:
    """Return the 16-bit words that rotations and activations move for a token; they read inputs and write."""
    return HEAD_WORDS * (shape.heads + 2 * shape.kv_heads) * shape.head_dim + (shape.gated + 2) * inner


def _eager_words(shape: ModelShape, inner: Real) -> Real:
    """Return the words beyond, where rotations and gated activations are written out one by one."""
    turned = EAGER_HEAD_WORDS * (shape.heads + shape.kv_heads) if shape.norm == "rms" else 0
    return (turned - HEAD_WORDS * (shape.heads + 2 * shape.kv_heads)) * shape.head_dim + (
        shape.gated * EAGER_GATE_WORDS * inner
    )


def head_passes(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training) -> Passes:
    """Return the passes of the output projection and the loss, over a vocabulary that tp divides."""
    tokens, vocab = rank_tokens(layout, training), np.ceil(shape.vocab / layout.tp / 128) * 128
    moved = move_s(gpu, LOGIT_MOVED_BYTES * tokens * vocab) / 2
    forward, backward = head_operations(shape, gpu, layout, training, tokens) or (moved, moved)
    product = _product_passes(gpu, training, tokens, (vocab, shape.hidden))
    product += Passes(*linear_pages(gpu, training, tokens, vocab, shape.hidden), 0.0)
    frozen = training.tuning.frozen
    if frozen is not None and frozen.head:
        product = Passes(product.forward_s, product.inner_s, 0.0, 0.0)
    return (product + Passes(forward, backward, 0.0, 0.0)).times(_software(gpu, training))


def _attention_sizes(shape: ModelShape, tp: Real) -> list[tuple[Real, Real]]:
    """Return output and inner dimension of each projection of the attention."""
    if shape.latent is not None:
        return _latent_sizes(shape, shape.latent, tp)
    heads, kv_heads = shape.heads / tp, np.maximum(shape.kv_heads / tp, 1)
    return [((heads + 2 * kv_heads) * shape.head_dim, shape.hidden), (shape.hidden, heads * shape.head_dim)]


def _latent_sizes(shape: ModelShape, latent: LatentAttention, tp: Real) -> list[tuple[Real, Real]]:
    heads, key_dim = shape.heads / tp, latent.nope_dim + latent.rope_dim
    queries = [(heads * key_dim, shape.hidden)]
    if latent.q_rank is not None:
        queries = [(latent.q_rank, shape.hidden), (heads * key_dim, latent.q_rank)]
    down = (latent.kv_rank + latent.rope_dim, shape.hidden)
    up = (heads * (latent.nope_dim + latent.v_dim), latent.kv_rank)
    return [*queries, down, up, (shape.hidden, heads * latent.v_dim)]


def _mlp_sizes(shape: ModelShape, ffn: Real, tp: Real) -> list[tuple[Real, Real]]:
    return [((shape.gated + 1) * ffn / tp, shape.hidden), (shape.hidden, ffn / tp)]


def _matrices(shape: ModelShape, tp: Real) -> list[tuple[Real, Real]]:
    """Return the sizes of a dense layer's matrices one by one, as eager models have them."""
    queries, keys = (np.maximum(heads / tp, 1) * shape.head_dim for heads in (shape.heads, shape.kv_heads))
    attention = [(queries, shape.hidden), (keys, shape.hidden), (keys, shape.hidden), (shape.hidden, queries)]
    if shape.latent is not None:
        attention = _latent_sizes(shape, shape.latent, tp)
    inner = [(shape.ffn / tp, shape.hidden)] * (1 + shape.gated)
    return [*attention, *inner, (shape.hidden, shape.ffn / tp)]


def _products(
    gpu: Gpu, training: Training, tokens: Real, sizes: list[tuple[Real, Real]],
    *, fraction: float = 1.0, groups: Real = 1, trained: bool = False,
) -> Passes:  # fmt: skip
    """Return the passes of products with these matrices; `groups` of each (experts), with so many tokens each."""
    bits = {"fp8": 8, "fp32": 32}.get(training.precision, 16)
    total = Passes(0.0, 0.0, 0.0, 0.0)
    for n, k in sizes:
        total += _product_passes(
            gpu, training, tokens, (n, k), bits=bits, fraction=fraction, groups=groups, trained=trained
        )
        rows = groups * tokens
        if bits == 8 and training.framework == "torch":
            weights = stream_s(gpu, TORCH_CAST_BYTES * groups * n * k)
            inputs, outputs = (stream_s(gpu, TORCH_CAST_BYTES * rows * width) for width in (k, n))
            total += Passes(inputs + weights, outputs + weights, 0.0, 0.0)
        elif bits == 8:
            total += Passes(move_s(gpu, CAST_BYTES * rows * k), move_s(gpu, CAST_BYTES * rows * n), 0.0, 0.0)
    return total


def _adapter_passes(
    shape: ModelShape, gpu: Gpu, training: Training, adapters: Adapters, tokens: Real, *, expert: bool
) -> Passes:
    """Return the passes of a layer's adapters, and of making its quantised matrices 16-bit again, in each pass once."""
    total, item = Passes(0.0, 0.0, 0.0, 0.0), training.activation_bytes
    for linear in layer_linears(shape, expert):
        if linear.stack:
            if linear.name in adapters.targets:
                total += _stack_passes(gpu, training, adapters, linear)
            continue
        if adapters.base_bits < 16:
            elements = linear.inputs * linear.outputs
            made = dequantise_seconds(gpu, adapters.base.name, training.precision, elements)
            if made is None:
                made = move_s(gpu, adapters.base.matrix_bytes(linear.inputs, linear.outputs) + item * elements)
            total += Passes(made, made, 0.0, 0.0)
        if linear.name in adapters.targets:
            for size in ((adapters.rank, linear.inputs), (linear.outputs, adapters.rank)):
                total += _product_passes(gpu, training, tokens, size, trained=True)
            added = item * tokens * ADAPTER_FORWARD_WORDS * linear.outputs
            back = item * tokens * (ADAPTER_OUTPUT_WORDS * linear.outputs + ADAPTER_INPUT_WORDS * linear.inputs)
            total += Passes(move_s(gpu, added), move_s(gpu, back), 0.0, 0.0)
            if adapters.magnitudes:
                total += _magnitude_passes(gpu, training, linear, tokens)
    return total


def _stack_passes(gpu: Gpu, training: Training, adapters: Adapters, linear: Linear) -> Passes:
    """Return the passes of an adapter on a stack: all of it is read and written with the product of two factors added.

    Backward the stack's gradient is read once for each factor. Source: peft's `ParamWrapper`.
    """
    item, rank, groups = training.activation_bytes, adapters.rank, linear.stack
    added = product_s(gpu, linear.outputs, linear.inputs, rank, groups=groups)
    thin = product_s(gpu, linear.outputs, rank, linear.inputs, groups=groups)
    thin = thin + product_s(gpu, rank, linear.inputs, linear.outputs, groups=groups)
    return Passes(np.maximum(added, stream_s(gpu, 2.0 * item * linear.elements)), 0.0, thin, 0.0)


def _magnitude_passes(gpu: Gpu, training: Training, linear: Linear, tokens: Real) -> Passes:
    """Return the passes that DoRA adds to a target: the frozen product once more, and the lengths of the rows.

    Source: peft's `DoraLinearLayer.forward`. The low-rank product is written out through an identity matrix and added
    to the weight (six passes over the matrix); outputs are scaled in fp32.
    """
    frozen = _product_passes(gpu, training, tokens, (linear.outputs, linear.inputs))
    item, scaled = training.activation_bytes, MAGNITUDE_WORDS * tokens * linear.outputs
    lengths = stream_s(gpu, item * (6.0 * linear.inputs * linear.outputs + linear.inputs**2))
    return frozen + Passes(stream_s(gpu, item * scaled) + lengths, stream_s(gpu, item * scaled), 0.0, 0.0)


def _product_passes(
    gpu: Gpu, training: Training, tokens: Real, size: tuple[Real, Real],
    *, bits: int = 16, fraction: float = 1.0, trained: bool = False, groups: Real = 1,
) -> Passes:  # fmt: skip
    """Return the passes of one product; beside adapters only what is `trained` has a gradient of its weight."""
    n, k = size
    # A micro-batch's gradient is read and added to the sum that is kept, which is read and written.
    accumulated_bytes = 2 + 2 * training.optimizer.gradient_bytes
    precision = "bf16" if training.precision == "fp8" and bits == 16 else training.precision  # the head's
    if isinstance(groups, int) and (found := product_seconds(gpu, precision, tokens, n, k)) is not None:
        kept = found.weight if training.adapters is None or trained else 0.0
        return Passes(found.forward, found.inner, kept, 0.0)
    forward = product_s(gpu, tokens, n, k, bits=bits, fraction=fraction, groups=groups)
    inner = product_s(gpu, tokens, k, n, bits=bits, fraction=fraction, groups=groups)
    if training.adapters is not None and not trained:
        return Passes(forward, inner, 0.0, 0.0)
    weight = product_s(gpu, n, k, tokens, bits=bits, fraction=fraction, groups=groups)
    weight = weight + stream_s(gpu, accumulated_bytes * groups * n * k)
    return Passes(forward, inner, weight, 0.0)


def _core(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training) -> Passes:
    """Return the passes of scores and values: fused, which skips what a causal mask hides, or written out."""
    tokens = rank_tokens(layout, training)
    if training.flash:
        flop = shape.attention_flop_per_token(training.attended_tokens) * tokens / layout.tp
        length = training.attended_tokens / layout.cp
        forward, backward = attention_seconds(
            gpu, training.precision, flop, shape.head_dim, length
        ) or fused_attention_s(gpu, flop, length, kind=training.attention_kind)
    else:
        batch = layout.micro_batch * shape.heads / layout.tp
        forward, backward = unfused_attention_s(gpu, batch, training.seq_tokens, shape.head_dim)
    return Passes(forward, backward, 0.0, forward)
