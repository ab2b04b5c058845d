"""Bytes of the trial run by which an engine sizes its cache: a forward pass of the largest step, or the sampler's run.

Both are peaks of one allocator at different times, so the greater decides, not their sum.
"""

from cordee.hardware.catalog import Gpu
from cordee.plan.serving.case import ServingCase
from cordee.plan.serving.memory.weights import vocabulary_rows

ELEMENT_BYTES = 2  # activations are in 16 bits


def activation_bytes(case: ServingCase) -> int:
    """Return the peak of torch's allocator above the weights in the trial run."""
    rule = case.engine.memory.trial
    libraries = rule.workspace_bytes if has_fast_links(case.gpu) else rule.small_workspace_bytes
    if rule.counts_reserved:
        return round(reserved_bytes(case) + sampler_bytes(case) + libraries)
    # A step's forward pass uses the experts' buffers that a sampler's run finds still held.
    workspace = expert_workspace_bytes(case) if rule.expert_workspace else 0.0
    return round(max(forward_bytes(case), sampler_bytes(case) + workspace) + libraries + encoder_bytes(case))


def encoder_bytes(case: ServingCase) -> int:
    """Return the bytes of a step's embeddings, which a model with an encoder gets as input, and of its outputs.

    The encoder's own forward pass is not modelled: it ends before the decoder's begins.
    """
    return 2 * case.max_batched_tokens * case.shape.hidden * ELEMENT_BYTES if case.shape.encoder else 0


def has_fast_links(gpu: Gpu) -> bool:
    """Return whether the GPU is of the generation of H100 or later, with NVLink 4 or later: its libraries take more."""
    return gpu.link.startswith("NVLink") and gpu.link >= "NVLink 4"


def sampler_bytes(case: ServingCase) -> float:
    """Return the bytes of the sampler's trial run: logits, their sort, and what of the forward pass still lives.

    For each sequence and vocabulary entry: 2 bytes of logits, 4 as fp32, 12 of sorted values and indices, 12 of the
    sort's own buffers, 8 of indices: 38. The hidden states of the step and those of the sampled tokens remain.
    Later versions do not sort: 14, of which 2 and 4 are the logits and the rest copies.
    """
    sequences = min(case.max_sequences, case.max_batched_tokens)
    logits = sequences * vocabulary_rows(case.shape, 1) * case.engine.memory.trial.sampler_bytes
    return logits + (case.max_batched_tokens + sequences) * case.shape.hidden * ELEMENT_BYTES


def forward_bytes(case: ServingCase) -> float:
    """Return the bytes of the widest moment in a layer: hidden state and residual, and a block's products."""
    shape, tp = case.shape, case.layout.tp
    up = 2 if shape.gated else 1
    wide = [(up + 1) * shape.ffn / tp]
    value_dim = shape.latent.v_dim if shape.latent is not None else shape.head_dim
    keys = shape.heads * (shape.head_dim + value_dim) if shape.latent is not None else 2 * shape.kv_heads * value_dim
    wide.append((shape.heads * (shape.head_dim + value_dim) + keys) / tp)
    moe = shape.experts
    if moe is not None:
        spread = tp if case.layout.ep else tp * case.layout.dp
        # The fused kernel: products up and down share one buffer, the activation has its own (vLLM, fused_moe.py).
        ffn = moe.ffn / (1 if case.layout.ep else spread)
        routed = moe.per_token * (max(up * ffn, moe.latent or shape.hidden) + ffn)
        wide.append(routed + (up + 1) * moe.shared_ffn / tp)
    if shape.mixed is not None and shape.mixed.recurrent is not None:
        recurrent = shape.mixed.recurrent
        wide.append((2 * recurrent.conv_width + 3 * recurrent.inner) / tp)
    return case.max_batched_tokens * ELEMENT_BYTES * (max(wide) + 2 * shape.hidden)


def reserved_bytes(case: ServingCase) -> float:
    """Return the bytes that an allocator without reuse between sizes reserves in a forward pass that is not compiled.

    Beside what is live at the widest moment: attention's queries, keys, values and outputs.
    """
    shape, tp = case.shape, case.layout.tp
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim / tp
    return forward_bytes(case) + case.max_batched_tokens * ELEMENT_BYTES * attention


def expert_workspace_bytes(case: ServingCase) -> float:
    """Return the bytes of the two buffers that the kernel of 16 or 8 bit experts keeps; 0 without experts.

    One holds the activations or the outputs of all routed tokens, the other both products up or the inputs of the
    product down (vLLM, TritonExperts.workspace_shapes). Kernels of 4-bit experts keep none.
    """
    moe = case.shape.experts
    if moe is None or case.weights.bits < 8 or case.weights.experts_only:
        return 0.0
    ffn = moe.ffn / (1 if case.layout.ep else case.layout.tp * case.layout.dp)
    hidden = moe.latent or case.shape.hidden
    up = 2 if case.shape.gated else 1
    routed = case.max_batched_tokens * moe.per_token * ELEMENT_BYTES
    return routed * (max(ffn, hidden) + max(up * ffn, hidden))
