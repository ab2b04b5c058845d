"""Bytes of the trial run by which an engine sizes its cache: a forward pass of the largest step, or the sampler's run.

Both are peaks of one allocator at different times, so the greater decides, not their sum.
"""

from cordee.plan.serving.case import ServingCase
from cordee.plan.serving.weights import vocabulary_rows

ELEMENT_BYTES = 2  # activations are in 16 bits


def activation_bytes(case: ServingCase) -> int:
    """Return the peak of torch's allocator above the weights in the trial run."""
    return round(max(forward_bytes(case), sampler_bytes(case)) + case.engine.memory.workspace_bytes)


def sampler_bytes(case: ServingCase) -> float:
    """Return the bytes of the sampler's trial run: logits, their sort, and what of the forward pass still lives.

    For each sequence and vocabulary entry: 2 bytes of logits, 4 as fp32, 12 of sorted values and indices, 12 of the
    sort's own buffers, 8 of indices: 38. The hidden states of the step and those of the sampled tokens remain.
    """
    sequences = min(case.max_sequences, case.max_batched_tokens)
    logits = sequences * vocabulary_rows(case.shape, 1) * case.engine.memory.sampler_bytes
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
