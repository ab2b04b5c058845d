"""The loss in a step's memory: logits, what is made of them, and what lies beside them."""

import numpy as np

from cordee.hardware.arrays import Real, only_where
from cordee.plan.activations import boundary_bytes, hidden_bytes, rank_tokens, sequence_split
from cordee.plan.layout import Layout
from cordee.plan.states import padded_vocab, widens
from cordee.plan.training import Training
from cordee.workload.model import ModelShape

# Bytes a logit at the peak of the loss. Fused: the bf16 logits become their own gradient. Parallel: bf16 logits, an
# fp32 copy, and its gradient in bf16. Compiled: bf16 logits and their gradient. Eager: fp32 log-probabilities, their
# one-hot gradient, and that of the logits.
LOGIT_BYTES = {"fused": 2, "parallel": 8, "compiled": 4, "eager": 12}
LOGIT_BYTES_FP32 = {"fused": 4, "parallel": 12, "compiled": 8, "eager": 12}
# torch's loss over divided logits, backward: log-probabilities, one-hot gradient, their exponentials, the sum, in fp32
# (torch/distributed/tensor/parallel/loss.py).
DIVIDED_LOGIT_BYTES = 16


def loss_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the bytes of the logits and their gradient."""
    if training.loss_kind == "chunked":
        return _chunked_loss_bytes(shape, layout, training)
    each: Real = (LOGIT_BYTES_FP32 if training.precision == "fp32" else LOGIT_BYTES)[training.loss_kind]
    if training.loss_kind == "eager" and training.framework == "torch":
        each = each + only_where(layout.tp > 1, DIVIDED_LOGIT_BYTES - each)
    return each / training.activation_bytes * output_bytes(shape, layout, training)


def forward_loss_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the bytes of a loss as the forward pass ends; of an eager one logits, in fp32 as well, and logarithms.

    The input of a frozen head is still there, of which `head_moment_bytes` knows nothing.
    """
    whole = loss_bytes(shape, layout, training)
    if training.loss_kind != "eager":
        return whole
    frozen = training.adapters is not None and not training.is_fused
    logits = 5 * output_bytes(shape, layout, training)
    return np.minimum(whole, logits) + frozen * boundary_bytes(shape, layout, training)


def _chunked_loss_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the bytes of a loss with the head in it: a chunk's logits, which become their gradient, and two gradients.

    Liger's chunks are of so many tokens, in a power of two, that their logits are about as large as the hidden states.
    The gradients of these and of a trained head are there when the forward pass ends.
    """
    tokens, vocab = rank_tokens(layout, training), padded_vocab(shape, layout, training) / layout.tp
    chunk = np.minimum(tokens, 2 ** np.ceil(np.log2(np.ceil(tokens / np.ceil(vocab / shape.hidden)))))
    frozen = training.tuning.frozen
    trained = training.adapters is None and not (frozen is not None and frozen.head)
    elements: Real = chunk * vocab + tokens * shape.hidden + trained * vocab * shape.hidden
    return training.activation_bytes * elements


def output_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the bytes of the logits of one micro-batch, as the head makes them."""
    tokens, vocab = rank_tokens(layout, training), padded_vocab(shape, layout, training)
    return training.activation_bytes * tokens * vocab / layout.tp


def head_moment_bytes(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the bytes beside the logits: the last layer's output, the norm's, its gradient; whole where sp gathers."""
    whole, cut = hidden_bytes(shape, layout, training), boundary_bytes(shape, layout, training)
    is_cut = sequence_split(layout) > 1
    found = 2 * cut + whole + only_where(is_cut, whole + cut)
    adapters, composite = training.adapters, training.tuning.composite_norms
    if training.framework == "torch" and training.loss_kind == "eager" and (adapters is None or not training.is_fused):
        # An eager loss is done when that gradient comes. A norm that is written out keeps its input in fp32, what it
        # scales and its result, or that input alone where norm and head are frozen.
        states = 2 + training.keeps_fp32 * (layout.zero < 2)
        if shape.norm == "rms" and (composite or adapters is not None):
            states = 4 if adapters is None else 2
        found = states * cut + only_where(is_cut, whole)
    # A frozen fp32 head has a 16-bit copy until its product has passed backward, beside the last layer's fp32 output.
    wide = widens(layout, training)
    return found + wide * (2 * cut + training.activation_bytes * shape.vocab * shape.hidden - found)
