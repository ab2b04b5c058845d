"""Bytes that forward passes keep for backward ones, and tensors that live only for a moment. Sizes may be NumPy arrays.

Sources: Korthikanti et al. 2022 (arXiv:2205.05198, section 4) for a layer with dropout and without flash attention;
the tensors that Transformer Engine's and Megatron-LM's modules save, counted by hand and held against SimuMax's
published measurements, for grouped-query and latent attention, gated MLPs, experts and context parallelism.
"""

import numpy as np

from cordee.hardware.arrays import Real, only_where
from cordee.plan.layout import Layout
from cordee.plan.pipeline.price import micro_batches_in_flight
from cordee.plan.states import (
    Holding,
    adapter_targets,
    counted_kinds,
    layer_kinds,
    layer_linears,
    widens,
)
from cordee.plan.training import Adapters, Training
from cordee.units import MiB
from cordee.workload.model import Experts, ModelShape

# Families whose code makes the router's weights 16-bit before they multiply the experts' outputs, and those whose
# router multiplies in fp32 (transformers 5).
ROUTED_IN_16_BITS = ("qwen2_moe", "qwen3_moe", "gpt_oss")
ROUTED_BY_FP32 = ("deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe", "kimi_k2")
# cuBLAS keeps 32 MiB of workspace on Hopper and later, Transformer Engine four times that for the experts' streams.
WORKSPACE_BYTES = 32 * MiB
EXPERT_WORKSPACE_BYTES = 128 * MiB


def rank_tokens(layout: Layout, training: Training) -> Real:
    """Return the tokens of one micro-batch on one GPU: context parallelism cuts the sequence."""
    return training.seq_tokens * layout.micro_batch / layout.cp


def hidden_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the bytes of one whole tensor of hidden states: 2*T*h."""
    return training.activation_bytes * rank_tokens(layout, training) * shape.hidden


def boundary_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the bytes between two layers: hidden states, divided over tp with sequence parallelism."""
    return hidden_bytes(shape, layout, training) / sequence_split(layout)


def sequence_split(layout: Layout) -> Real:
    """Return the ranks over which sequence parallelism cuts what tensor parallelism leaves whole."""
    return 1 + layout.sp * (layout.tp - 1)


def layer_activation_bytes(
    shape: ModelShape, layout: Layout, training: Training, *, expert: bool = False, scores: bool = False
) -> Real:
    """Return the bytes that one layer keeps of one micro-batch for its backward pass.

    Per token: inputs and outputs of the two norms (4h, divided over tp only with sequence parallelism, and in torch the
    outputs not even then), queries, keys, values, the attention's output, and the MLP's inner widths, which tensor
    parallelism divides. Dropout adds masks of one byte. Without flash attention the scores add 2 bytes per head and
    pair of tokens, 5 with dropout. Ulysses keeps the attention's output before and after its exchange.
    """
    if training.adapters is not None:
        return _adapted_layer_bytes(shape, layout, training, training.adapters, expert=expert, scores=scores)
    tokens, split, tp = rank_tokens(layout, training), sequence_split(layout), layout.tp
    if shape.latent is not None:
        heads_wide, compressed = _latent_widths(shape)
        attention_out = shape.heads * shape.latent.v_dim
    else:
        kv_heads = shape.kv_heads + (tp > shape.kv_heads) * (tp - shape.kv_heads)
        attention_out = shape.heads * shape.head_dim
        heads_wide, compressed = 2 * attention_out + 2 * kv_heads * shape.head_dim, 0
    if layout.cp_kind == "ulysses":
        heads_wide = heads_wide + (layout.cp > 1) * attention_out
    per_token: Real = (4 * shape.hidden + compressed) / split + heads_wide / tp
    normed = _head_norm_bytes(shape, training) / tp
    if training.framework == "torch" and not training.tuning.regathers:
        # DTensor keeps what it gathers for the products, the results of the two norms; Megatron-LM gathers them anew.
        per_token = per_token + 2 * shape.hidden * (1 - 1 / split)
        per_token = per_token + _beside_views(shape) / tp
    moe = shape.experts
    if expert and moe is not None:
        widths = kept_widths(shape, training)
        per_token = per_token + widths * moe.shared_ffn / tp
        copies = 1 + training.tuning.weighs_outputs
        per_token = per_token + copies * routed_fraction(shape, layout, training) * shape.hidden
        per_token = per_token + moe.per_token / tp * training.imbalance_at(layout.ep) * widths * moe.ffn
    else:
        per_token = per_token + kept_widths(shape, training) * shape.ffn / tp
    total = tokens * (training.activation_bytes * per_token + 4 * shape.heads / tp + normed)
    if training.keeps_fp32:
        # Autocast keeps hidden states, the inputs of the norms, in fp32, and each product casts its own input.
        products = (1 if "qkv" in shape.joined else 3) + (2 if shape.gated and "gate_up" not in shape.joined else 1)
        casts = 4 * shape.hidden / split + 2 * (products - 2) * shape.hidden
        total = total + (layout.zero < 2) * tokens * casts
    if training.tuning.composite_norms and shape.norm == "rms":
        # Two norms, each with its input in fp32 and what it is scaled to, in place of its 16-bit input.
        total = total + tokens * 2 * 4 * shape.hidden / split
    total = total + tokens * _composite_gelu_bytes(shape, layout, training) * shape.ffn / tp
    if keeps_fp8(training):
        # Products keep their inputs in one byte, but the attention's output is kept in two as well, for itself.
        inner = _product_inputs(shape, layout, training, expert=expert)
        total = total - tokens * (2 * shape.hidden / split + inner - attention_out / tp)
    if training.dropout:
        total = total + tokens * 2 * shape.hidden / split
    if scores:
        total = total + score_bytes(shape, layout, training)
    return total


def _adapted_layer_bytes(
    shape: ModelShape, layout: Layout, training: Training, adapters: Adapters, *, expert: bool, scores: bool
) -> Real:
    """Return what a layer with frozen matrices keeps: a frozen product needs its weight only, an adapter its input.

    Norms keep their input (an eager RMSNorm in fp32), the attention its queries, keys, values and output, an eager
    gated activation gate, silu and up (fused: gate and up). An adapter's input is kept once for all that read it, but
    for each target where it is cast, and what it makes of it, as wide as its rank; with dropout each target keeps a
    copy of its own and a mask of a byte.
    A joined product stays whole, since the attention keeps its values as a view, and so do its adapter's outputs, since
    their copying keeps its source. Source: what autograd saves of each function in peft's `lora.Linear`, Hugging Face's
    Llama and LitGPT's.
    """
    item, eager = training.activation_bytes, not training.is_fused
    wide = widens(layout, training) * (4 - item)  # more bytes of hidden states, and of what is made of them
    # Autocast's layer norm keeps its input in fp32 as well.
    norm: Real = 4 if eager and shape.norm == "rms" else item + (4 - item) * _under_autocast(layout, training)
    attention, compressed = _attended_widths(shape)
    inner, moe = adapted_widths(shape, training), shape.experts if expert else None
    ffn = shape.ffn if moe is None else moe.shared_ffn
    per_token: Real = _head_norm_bytes(shape, training)
    per_token += norm * (2 * shape.hidden + compressed) + item * attention + (item + wide) * inner * ffn
    per_token += 4 * shape.heads
    # Values that are made 16-bit for the attention are no view of a joined product.
    per_token += item * _beside_views(shape) * (1 - widens(layout, training))
    modules = [each for each in layer_linears(shape, expert) if not each.stack]
    targets = [each for each in modules if each.name in adapters.targets]
    if adapters.joined:
        own = [linear for linear in targets if linear.name in ("q", "k", "v")]
        per_token += item * ((shape.heads + shape.kv_heads) * shape.head_dim + sum(linear.outputs for linear in own))
    if adapters.dropout:
        read = targets if not adapters.joined else {linear.reads: linear for linear in targets}.values()
        per_token += (item + 1) * sum(linear.inputs for linear in read)
    if not adapters.dropout or adapters.base.keeps_inputs:
        # The attention keeps its own output already.
        readers = modules if adapters.base.keeps_inputs else targets
        distinct = {linear.reads: linear.inputs for linear in readers if linear.reads != "attention"}
        once, cast = sum(distinct.values()), _casts_inputs(layout, training, adapters)
        # Over a quantised base the attention's output is 16-bit as it is.
        recast = [each for each in targets if adapters.base_bits == 16 or each.reads != "attention"]
        copied: Real = (not adapters.dropout) * item * sum(linear.inputs for linear in recast)
        kept = adapters.base.keeps_inputs * (item + wide) * once
        per_token = per_token + cast * (copied + kept) + (1 - cast) * item * once
    per_token += item * adapters.rank * len(targets)
    per_token = per_token + _composite_gelu_bytes(shape, layout, training) * ffn + 2 * training.dropout * shape.hidden
    weights: Real = 0
    if adapters.magnitudes:
        # peft's `DoraLinearLayer`: the frozen product and the adapter's; after dropout the first of them is made anew,
        # of a matrix that is 16-bit for it alone.
        per_token = per_token + (2 * item + wide) * sum(linear.outputs for linear in targets)
        made = (adapters.dropout > 0) * np.maximum(adapters.base_bits < 16, _casts_inputs(layout, training, adapters))
        weights = weights + made * item * sum(linear.inputs * linear.outputs for linear in targets)
    if moe is not None:
        of_token, of_layer = _routed_bytes(shape, layout, training, adapters, moe)
        per_token, weights = per_token + of_token, weights + of_layer
    total = rank_tokens(layout, training) * per_token + weights
    return total + score_bytes(shape, layout, training) if scores else total


def _attended_widths(shape: ModelShape) -> tuple[int, int]:
    """Return the widths that an attention without trained matrices keeps, and those that norms within it read.

    These are queries, keys, values and output. Latent attention's values are a view of the product that expands them,
    whose part of the keys stays beside the new keys.
    """
    latent = shape.latent
    if latent is None:
        return 2 * (shape.heads + shape.kv_heads) * shape.head_dim, 0
    each = 2 * (latent.nope_dim + latent.rope_dim) + latent.nope_dim + 2 * latent.v_dim
    return shape.heads * each, (latent.q_rank or 0) + latent.kv_rank


def adapted_widths(shape: ModelShape, training: Training) -> int:
    """Return the inner tensors that a frozen MLP keeps: gate, silu and up where the activation is written out.

    That of experts with biases clamps gate and up, and has a sigmoid and sums beside both (gpt-oss).
    """
    if not shape.gated:
        return 1
    written_out = 6 if shape.experts is not None and shape.mlp_bias else 3
    return 2 if training.is_fused else written_out


def _routed_bytes(
    shape: ModelShape, layout: Layout, training: Training, adapters: Adapters, moe: Experts
) -> tuple[Real, Real]:
    """Return what frozen experts and their router keep of a token, and of a layer however many tokens it has.

    The inner tensors of each of its experts, and their outputs, since the router's weights multiply these and have a
    gradient; what adapters read. Beside them probabilities in fp32, and indices of the sorting, four of eight bytes for
    each expert. A stack with an adapter is written out with it, and kept.
    """
    item, each = training.activation_bytes, moe.per_token * training.imbalance_at(layout.ep)
    stacks = [linear for linear in adapter_targets(shape, adapters, expert=True) if linear.stack]
    read = sum(linear.inputs for linear in stacks if linear.name == "experts")
    once = shape.hidden * ("router" in adapters.targets) + (shape.hidden + 1) * moe.shared_gate
    small = 4 * moe.routed + moe.per_token * (4 * 8 + 2 * 4)
    of_token = item * (each * (adapted_widths(shape, training) * moe.ffn + shape.hidden + read) + once) + small
    weights: Real = item * sum(linear.elements for linear in stacks)
    if shape.family in ROUTED_BY_FP32:  # FSDP2 gathers its matrix in 16 bits
        weights = weights + (layout.zero >= 2) * 4 * moe.routed * shape.hidden
    return of_token, weights


def _head_norm_bytes(shape: ModelShape, training: Training) -> Real:
    """Return what norms of queries and keys (Qwen3) keep of a token: their input, and a statistic of each head in fp32.

    Written out, the input is fp32, and a norm that is trained keeps what it scales as well.
    """
    if not shape.qk_norm:
        return 0
    item, trained = training.activation_bytes, training.adapters is None
    written_out = training.tuning.composite_norms if trained else not training.is_fused
    each = 4 + item * trained if written_out else item
    return (shape.heads + shape.kv_heads) * (shape.head_dim * each + 4)


def _composite_gelu_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return what a GELU that is written out keeps of each inner element, beyond its input and its result.

    It is half of the input, times 1 + tanh(c (input + 0.0447 input ** 3)): kept are the input for the power, the tanh
    and the sum with 1, beside half of the input. Autocast makes the power fp32, and so the three.
    """
    if not training.tuning.composite_gelu or shape.gated:
        return 0
    item = training.activation_bytes
    return 3 * (item + (4 - item) * _under_autocast(layout, training))


def _under_autocast(layout: Layout, training: Training) -> Real:
    """Return 1 where torch.autocast casts around operations: fp32 weights below FSDP2, or fp32 adapters or ends."""
    if training.adapters is None:
        return training.keeps_fp32 * (layout.zero < 2)
    unlike = (training.optimizer.weight_bytes > training.activation_bytes) * (layout.zero < 2)
    return np.maximum(unlike, widens(layout, training))


def _beside_views(shape: ModelShape) -> int:
    """Return the width that a joined product of queries, keys and values keeps beside the attention's tensors.

    The values are a view of it, so that all of it stays; queries and keys are new tensors once they are rotated.
    """
    rotates = "qkv" in shape.joined and not shape.learned_positions
    return rotates * (shape.heads + shape.kv_heads) * shape.head_dim


def _casts_inputs(layout: Layout, training: Training, adapters: Adapters) -> Real:
    """Return 1 where each target makes a 16-bit copy of its input for itself.

    peft's `lora.Linear` makes inputs as wide as fp32 adapters, and torch.autocast makes them 16-bit again. Its layers
    over quantised weights leave inputs as they are, which are 16-bit but for fp32 hidden states, and FSDP2 gathers
    adapters in 16 bits.
    """
    casts = adapters.base_bits == 16 and not adapters.joined
    unlike = (casts and training.optimizer.weight_bytes > training.activation_bytes) * (layout.zero < 2)
    return np.maximum(unlike, widens(layout, training))


def dequantised_bytes(shape: ModelShape, training: Training) -> float:
    """Return the bytes of the largest quantised matrix of a layer, in 16 bits again while its product runs.

    DoRA writes out the low-rank product of a target through an identity matrix, scales it and adds it to the weight.
    """
    adapters = training.adapters
    if adapters is None:
        return 0.0
    linears = [each for kind, _ in counted_kinds(shape) for each in layer_linears(shape, kind) if not each.stack]
    copies = (adapters.base_bits < 16) * adapters.base.copies
    elements = [copies * each.inputs * each.outputs for each in linears]
    if adapters.magnitudes:
        targets = [each for each in linears if each.name in adapters.targets]
        elements += [(copies + 3) * each.inputs * each.outputs + each.inputs**2 for each in targets]
    return float(training.activation_bytes * max(elements))


def dequantised_head_bytes(shape: ModelShape, training: Training) -> float:
    """Return the bytes of a quantised output head, in 16 bits again while its product runs."""
    adapters = training.adapters
    if adapters is None or not adapters.base.head:
        return 0.0
    return training.activation_bytes * adapters.base.copies * shape.vocab * shape.hidden


def keeps_fp8(training: Training) -> bool:
    """Return whether products keep 8-bit inputs: Transformer Engine does, torchao's Float8Linear keeps 16-bit."""
    return training.precision == "fp8" and training.framework == "megatron"


def _product_inputs(shape: ModelShape, layout: Layout, training: Training, *, expert: bool) -> Real:
    """Return the widths of the inputs of the MLP's products that are not a norm's output."""
    moe = shape.experts
    if not expert or moe is None:
        return shape.ffn / layout.tp
    routed = moe.per_token / layout.tp * training.imbalance_at(layout.ep) * moe.ffn
    return moe.shared_ffn / layout.tp + routed + routed_fraction(shape, layout, training) * shape.hidden


def score_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the bytes of a layer's scores without flash: 5*a*s*T/tp with dropout, and 2 of the 5 without."""
    each = training.activation_bytes + (training.activation_bytes + 1) * training.dropout
    return each * shape.heads / layout.tp * training.seq_tokens * rank_tokens(layout, training)


def routed_fraction(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the copies of a token that this GPU's experts receive: top-k, less where tp divides tokens only."""
    assert shape.experts is not None, "only experts receive routed tokens"
    return shape.experts.per_token * layout.expert_tp / layout.tp * training.imbalance_at(layout.ep)


def _inner_widths(shape: ModelShape) -> int:
    return 3 if shape.gated else 2


def kept_widths(shape: ModelShape, training: Training) -> int:
    """Return the MLP's inner tensors that are kept: eager PyTorch has silu(gate) beside gate, up and their product."""
    return _inner_widths(shape) + (shape.gated and not training.is_fused)


def _latent_widths(shape: ModelShape) -> tuple[int, int]:
    """Return the widths that tp divides (expanded heads), and those that only sp does (compressed, around norms)."""
    latent = shape.latent
    assert latent is not None, "asked only of latent attention"
    expanded = shape.heads * (2 * (latent.nope_dim + latent.rope_dim) + 2 * latent.v_dim)
    return expanded, 2 * (latent.q_rank or 0) + 2 * latent.kv_rank + latent.rope_dim


def in_flight(layout: Layout, training: Training, rank: int) -> Real:
    """Return the micro-batches of all its layers that this rank of the pipeline holds at once."""
    steps = layout.micro_batches(training.global_batch)
    return micro_batches_in_flight(layout.schedule, layout.pp, rank, layout.chunks, steps)


def kept_bytes(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> Real:
    """Return what a rank's layers keep of one micro-batch: everything, or their inputs if all is recomputed."""
    if training.tuning.frozen is not None:
        return _kept_beside_frozen(shape, layout, training)
    whole: Real = 0.0
    scores = not training.flash and layout.recompute == "none"
    for expert, count in ((False, held.dense_layers), (True, held.expert_layers)):
        if count and _halves(layout, training):
            whole = whole + count * _selected_bytes(shape, layout, training, expert=expert)
        elif count:
            whole = whole + count * layer_activation_bytes(shape, layout, training, expert=expert, scores=scores)
    boundary = boundary_bytes(shape, layout, training)
    # Megatron-LM frees what a stage has sent on; others keep it as the root of the backward pass.
    sent = (layout.pp > 1) * (training.framework != "megatron") * boundary
    # Autocast's hidden states are fp32.
    kept_input = boundary * (1 + training.keeps_fp32 * (layout.zero < 2) + widens(layout, training))
    if layout.recompute != "full":
        return whole + sent - _unread_bytes(shape, layout, training, held)
    if layout.recompute_layers is None or layout.recompute_layers >= held.layers:
        return held.layers * kept_input + sent
    again = layout.recompute_layers
    return sent + again * kept_input + (held.layers - again) / held.layers * whole


def _unread_bytes(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> Real:
    """Return the input of the first norm, through which no gradient goes where what is before it is frozen.

    Of composite norms, whose input in fp32 is a tensor for it alone.
    """
    is_first = training.adapters is not None and held.embeddings > 0
    composite = is_first and shape.norm == "rms" and not training.is_fused
    return composite * rank_tokens(layout, training) * 4 * shape.hidden


def _kept_beside_frozen(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return what layers keep where some are frozen: those before all that is trained have no backward pass."""
    kinds = layer_kinds(shape, training)
    if layout.recompute == "full":
        return (kinds.trained + kinds.passed) * boundary_bytes(shape, layout, training)
    scores = not training.flash and layout.recompute == "none"
    passed = _adapted_layer_bytes(shape, layout, training, Adapters(targets=()), expert=False, scores=scores)
    if _halves(layout, training):
        trained = _selected_bytes(shape, layout, training, expert=False)
        # A pass through frozen matrices needs no product's input, but the checkpoint keeps its outputs all the same.
        passed = trained
    else:
        trained = layer_activation_bytes(shape, layout, training, scores=scores)
    return kinds.trained * trained + kinds.passed * passed


def _halves(layout: Layout, training: Training) -> bool:
    """Return whether selective recomputation is torchtitan's: every second product again, not the scores."""
    return (
        layout.recompute == "selective" and training.framework == "torch" and training.flash and not training.adapters
    )


def _selected_bytes(shape: ModelShape, layout: Layout, training: Training, *, expert: bool) -> Real:
    """Return what torchtitan's selective checkpoint keeps of a layer: input, attention, every second product.

    Of q, k, v, o, gate, up, down these are q, v, gate and, where it is not compiled, down
    (`activation_checkpoint.selective_ac_option = "op"`).
    """
    tokens, tp, heads = rank_tokens(layout, training), layout.tp, shape.heads
    if shape.latent is not None:
        value = heads * shape.latent.v_dim
        query = heads * (shape.latent.nope_dim + shape.latent.rope_dim)
    else:
        query, value = heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attended = heads * (shape.latent.v_dim if shape.latent is not None else shape.head_dim)
    moe = shape.experts
    if expert and moe is not None:
        inner = moe.shared_ffn / tp + moe.per_token / tp * training.imbalance_at(layout.ep) * moe.ffn
        outer = routed_fraction(shape, layout, training) * shape.hidden
    else:
        inner, outer = shape.ffn / tp, shape.hidden
    # No backward pass reads the result of down: an eager checkpoint keeps it all the same, a compiled one does not.
    outer = outer * (not training.is_fused)
    states = (1 + training.keeps_fp32 * (layout.zero < 2)) * shape.hidden / sequence_split(layout)
    per_token = states + (query + value + attended) / tp + inner + outer
    return tokens * (training.activation_bytes * per_token + 4 * heads / tp)


def forward_moment_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return what a layer that keeps only its input needs beside it at its MLP, of a dense layer in torch."""
    if training.framework != "torch" or shape.experts is not None or layout.recompute != "full":
        return 0.0
    inner = (2 + shape.gated - training.is_fused + (training.adapters is not None)) * shape.ffn / layout.tp
    states = 2 * shape.hidden / sequence_split(layout)
    return training.activation_bytes * rank_tokens(layout, training) * (inner + states)


def context_moment_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the keys and values of other ranks in one attention: two pairs in a ring, all where they are gathered.

    Backward there are as many gradients. Latent attention has a key and a value for each head.
    """
    latent = shape.latent
    if latent is not None:
        width = shape.heads * (latent.nope_dim + latent.rope_dim + latent.v_dim)
    else:
        width = 2 * shape.kv_heads * shape.head_dim
    own = training.activation_bytes * rank_tokens(layout, training) * width / layout.tp
    copies = {"ring": 2, "all-gather": layout.cp, "ulysses": 0}[layout.cp_kind]
    return (layout.cp > 1) * 2 * copies * own


def backward_moment_bytes(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> Real:
    """Return what the backward pass of a rank's larger kind of layer needs beside what was kept.

    Dense: the gradient that arrives (whole where sp gathers it), those of gate and up, and what was recomputed.
    Experts: three tensors of routed tokens and their inner gradients, as far as exchange and permutation overlap.
    """
    tokens, item = rank_tokens(layout, training), training.activation_bytes
    whole, cut = hidden_bytes(shape, layout, training), boundary_bytes(shape, layout, training)
    gathered = cut + only_where(sequence_split(layout) > 1, whole)
    attention = cut + context_moment_bytes(shape, layout, training)
    moment: Real = attention
    for expert, count in ((False, held.dense_layers), (True, held.expert_layers)):
        if not count:
            continue
        moe = shape.experts
        if expert and moe is not None:
            routed = item * tokens * routed_fraction(shape, layout, training) * shape.hidden
            inner = (
                item
                * tokens
                * moe.per_token
                / layout.tp
                * training.imbalance_at(layout.ep)
                * _inner_widths(shape)
                * moe.ffn
            )
            shared = item * tokens * _inner_widths(shape) * moe.shared_ffn / layout.tp
            here = gathered + cut + 3 * routed + inner + shared
            here = here + (EXPERT_WORKSPACE_BYTES if training.framework == "megatron" else 0)
            if training.adapters is not None:
                here = _adapted_experts_moment(shape, layout, training, training.adapters, moe)
        else:
            here = gathered + item * tokens * (_inner_widths(shape) - 1) * shape.ffn / layout.tp
            here = (1 + widens(layout, training)) * here
            # Gradients of a written out GELU: as many as it kept, one less below a frozen matrix.
            gelu = _composite_gelu_bytes(shape, layout, training) * (1 if training.adapters is None else 2 / 3)
            here = here + tokens * gelu * shape.ffn / layout.tp
        here = here + recomputed_bytes(shape, layout, training, expert=expert)
        moment = moment + only_where(here > moment, here - moment)
    return moment


def _adapted_experts_moment(
    shape: ModelShape, layout: Layout, training: Training, adapters: Adapters, moe: Experts
) -> Real:
    """Return what the backward pass of frozen experts needs beside what was kept, where it is fullest.

    Three tensors of their outputs in the type of the router's weights, and one more if that is fp32; or the gradients
    of the activation, whose outputs are gone; or the gradient of the second stack as a whole, from which its adapter's
    come. Shared experts have passed before.
    """
    tokens, item = rank_tokens(layout, training), training.activation_bytes
    each = item * tokens * moe.per_token * training.imbalance_at(layout.ep)
    routed, inner = each * shape.hidden, each * moe.ffn
    weighed = 3 * routed if shape.family in ROUTED_IN_16_BITS else (3 * 4 / item + 1) * routed
    moment = np.maximum(weighed, (1 + 2 * shape.gated) * inner - routed)
    if "experts" in adapters.targets:
        moment = np.maximum(moment, item * moe.routed * shape.hidden * moe.ffn + inner)
    passed = item * tokens * adapted_widths(shape, training) * moe.shared_ffn
    states = (1 + (moe.shared_ffn > 0)) * hidden_bytes(shape, layout, training)
    return states + moment - passed


def recomputed_bytes(shape: ModelShape, layout: Layout, training: Training, *, expert: bool) -> Real:
    """Return what a layer's backward pass makes again of what its forward pass has dropped."""
    if layout.recompute == "full":
        return layer_activation_bytes(shape, layout, training, expert=expert, scores=not training.flash)
    if _halves(layout, training):
        whole_layer = layer_activation_bytes(shape, layout, training, expert=expert)
        return whole_layer - _selected_bytes(shape, layout, training, expert=expert)
    if layout.recompute == "selective" and not training.flash:
        return score_bytes(shape, layout, training)
    return 0.0
