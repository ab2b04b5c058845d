"""Bytes of one layer's backward pass beside what was kept, where it is fullest: its tensors and weight gradients.

Activations go as gradients of weights come, so that the fullest moment is at the MLP's activation, after the MLP, or
when the whole layer has its gradients: whichever is largest. That is of torch's FSDP2, where weight gradients are
tensors until the layer is done; elsewhere both are counted whole.
"""

import numpy as np

from cordee.hardware.arrays import Real
from cordee.plan import activations as act
from cordee.plan import buffers as buf
from cordee.plan.layout import Layout
from cordee.plan.states import Holding, layer_parameters
from cordee.plan.training import Training
from cordee.workload.model import ModelShape


def layer_backward_bytes(shape: ModelShape, layout: Layout, training: Training, held: Holding) -> Real:
    """Return the bytes of a layer's backward pass beyond what was kept, without FSDP2's buffers."""
    own = act.backward_moment_bytes(shape, layout, training, held)
    if training.framework == "megatron":
        return own
    whole = buf.arriving_bytes(shape, layout, training, held) - buf.reduced_bytes(shape, layout, training, held)
    is_plain = training.adapters is None and training.tuning.frozen is None
    if training.framework != "torch" or buf.stays_whole(layout, training) or not is_plain:
        return own + whole
    moments = _of_experts(shape, layout, training) if held.expert_layers else _of_mlp(shape, layout, training, own)
    fullest: Real = 0.0
    for tensors, slopes in moments:
        fullest = np.maximum(fullest, tensors + training.optimizer.weight_bytes * slopes)
    return np.where(layout.zero == 3, fullest, own + whole)


def _of_mlp(shape: ModelShape, layout: Layout, training: Training, own: Real) -> list[tuple[Real, Real]]:
    """Return tensors in bytes and weight gradients in elements: at the activation, after the MLP, after the layer."""
    states, inner, matrix = _widths(shape, layout, training)
    up = 2 if shape.gated else 1
    # `own` has the gradients of the activation's inputs; its first one is the last that the MLP still has.
    after = own + up * states - (act.kept_widths(shape, training) + up - 1) * inner
    kept = act.layer_activation_bytes(shape, layout, training)
    return [
        (own, matrix),
        (after, (up + 1) * matrix),
        (own - up * inner - kept + 3 * states, layer_parameters(shape, layout, False).total),
    ]


def _of_experts(shape: ModelShape, layout: Layout, training: Training) -> list[tuple[Real, Real]]:
    """Return the same of a layer with experts, whose outputs are weighed first, in fp32."""
    moe = shape.experts
    assert moe is not None, "a layer with experts has some"
    states, _, _ = _widths(shape, layout, training)
    tokens, item = act.rank_tokens(layout, training), training.activation_bytes
    routed = item * tokens * act.routed_fraction(shape, layout, training) * shape.hidden
    inner = item * tokens * moe.per_token / layout.tp * training.imbalance_at(layout.ep) * moe.ffn
    up, parameters = (2 if shape.gated else 1), layer_parameters(shape, layout, True)
    shared = item * tokens * (1 + up) * moe.shared_ffn / layout.tp
    here = act.recomputed_bytes(shape, layout, training, expert=True) + states + shared
    kept = act.layer_activation_bytes(shape, layout, training, expert=True)
    weighed = training.tuning.weighs_outputs * routed
    after = up * inner + routed - act.kept_widths(shape, training) * inner - weighed
    return [
        (here + 3 * (4 / item) * routed, 0.0),
        (here + up * inner, parameters.experts / (up + 1)),
        (here + after, parameters.experts),
        (here - kept + 3 * states, parameters.total),
    ]


def _widths(shape: ModelShape, layout: Layout, training: Training) -> tuple[Real, Real, Real]:
    """Return the bytes of hidden states and of an inner tensor, and the elements of a matrix of a dense MLP."""
    states = act.boundary_bytes(shape, layout, training)
    inner = training.activation_bytes * act.rank_tokens(layout, training) * shape.ffn / layout.tp
    return states, inner, shape.hidden * shape.ffn / layout.tp
