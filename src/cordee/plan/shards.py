"""The rows that FSDP2 gives to ranks: whole ones, so that the fullest rank has more than an even share of a tensor.

FSDP2 cuts each tensor by its first dimension into chunks of `ceil(rows / ranks)` rows; the last ranks have fewer, or
none. What is gathered, and the fp32 gradients that are reduced, have so many rows for every rank
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py). Flat buffers (Megatron-LM's, DeepSpeed's, FSDP1's) and packed
weights are divided evenly.

The experts of a layer are one tensor [experts, ...] for each of their matrices, in transformers as in torchtitan, which
cuts it by the second dimension where expert parallelism leaves fewer experts than ranks (`apply_fsdp`).
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cordee.hardware.arrays import Real
from cordee.plan.layout import Layout
from cordee.plan.states import (
    RankParameters,
    adapter_targets,
    holding,
    layer_linears,
    layer_parameters,
    padded_vocab,
    rank_parameters,
)
from cordee.plan.training import Adapters, Training
from cordee.workload.model import ModelShape

# A plan says that shares are uneven where the fullest rank has so much more than an even one.
WORTH_SAYING = 0.03

NO_PADDING = RankParameters(0.0, 0.0, 0.0)


class _Tensor(NamedTuple):
    """Elements of a tensor, and its rows; `divided`: tensor parallelism divides the rows."""

    elements: int
    rows: int
    divided: bool


def layer_padding(shape: ModelShape, layout: Layout, training: Training, *, expert: bool) -> RankParameters:
    """Return the elements by which a layer's rows on all ranks, each as full as the fullest, exceed its own.

    >>> from cordee.workload.load import load_shape
    >>> mixtral, training = load_shape("mixtral-8x7b"), Training(4096, 32)
    >>> padded = layer_padding(mixtral, Layout(dp=32, zero=3), training, expert=True)
    >>> float(padded.experts / mixtral.layer(0).experts)
    3.0
    >>> layer_padding(mixtral, Layout(dp=8, zero=3), training, expert=True) == NO_PADDING
    True
    """
    if training.framework != "torch" or training.tuning.flat:
        return NO_PADDING
    cut, ranks = _cuts_rows(layout, training), layout.shard_ranks
    dense: Real = 0.0
    for each in _dense_tensors(shape, expert):
        divided = layout.tp if each.divided else 1
        dense = dense + each.elements / layout.tp * (_padded(each.rows / divided, ranks) - 1)
    experts = layer_parameters(shape, layout, expert).experts * (expert_stretch(shape, layout, training) - 1)
    return RankParameters(cut * dense, experts, 0.0)


def vocabulary_padding(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the same of an embedding or a head."""
    if training.framework != "torch" or training.tuning.flat:
        return 0.0
    rows = padded_vocab(shape, layout, training) / layout.tp
    return _cuts_rows(layout, training) * rows * shape.hidden * (_padded(rows, layout.shard_ranks) - 1)


def rank_padding(shape: ModelShape, layout: Layout, training: Training, rank: int) -> RankParameters:
    """Return the same of all trained parameters on a rank of the pipeline."""
    if training.tuning.frozen is not None:
        return NO_PADDING
    held = holding(shape, layout, rank)
    if training.adapters is not None:
        each = [adapter_padding(shape, layout, training, training.adapters, expert=expert) for expert in (False, True)]
        return RankParameters(held.dense_layers * each[0] + held.expert_layers * each[1], 0.0, 0.0)
    ends = max(held.embeddings, held.heads) if shape.tied else held.embeddings + held.heads
    dense: Real = ends * vocabulary_padding(shape, layout, training)
    experts: Real = 0.0
    for expert, count in ((False, held.dense_layers), (True, held.expert_layers)):
        if count:
            layer = layer_padding(shape, layout, training, expert=expert)
            dense, experts = dense + count * layer.dense, experts + count * layer.experts
    return RankParameters(dense, experts, 0.0)


def frozen_padding(shape: ModelShape, layout: Layout, training: Training, rank: int) -> Real:
    """Return the same of stacks of experts that are frozen under adapters."""
    if training.adapters is None or shape.experts is None:
        return 0.0
    experts = rank_parameters(shape, layout, training, rank).experts
    return experts * (expert_stretch(shape, layout, training) - 1)


def adapter_padding(
    shape: ModelShape, layout: Layout, training: Training, adapters: Adapters, *, expert: bool = False
) -> Real:
    """Return the same of one layer's adapters: one matrix of a target has as many rows as the rank of an adapter.

    Of a stack it has those of all experts.
    """
    if training.tuning.flat:
        return 0.0
    ranks = layout.shard_ranks
    padding: Real = 0.0
    for each in adapter_targets(shape, adapters, expert=expert):
        low = adapters.rank * max(1, each.stack)
        padding = padding + low * each.inputs * (_padded(low, ranks) - 1)
        padding = padding + low * each.outputs * (_padded(each.outputs, ranks) - 1)
    return _cuts_rows(layout, training) * padding


def uneven_rows(shape: ModelShape, layout: Layout, training: Training) -> str | None:
    """Return a sentence about the fullest rank where it has more than an even share of the states; None elsewhere."""
    padding, whole = rank_padding(shape, layout, training, 0), rank_parameters(shape, layout, training, 0)
    more = float(padding.total) / float(whole.total)
    if training.adapters is not None or more < WORTH_SAYING:
        return None
    ranks, moe = layout.shard_ranks, shape.experts
    held = f"the fullest rank holds {1 + more:.1f} times an even share of the states, and gathers as much more"
    if moe is None or not float(padding.experts) > float(padding.dense):
        return f"FSDP2 cuts tensors into whole rows, and some have fewer than {ranks}: {held}."
    rows = moe.routed // layout.ep
    return (
        f"FSDP2 cuts tensors into whole rows, and a layer's {rows} experts are {rows} rows on "
        f"{layout.expert_shard_ranks} ranks: {held}. HSDP over {rows} ranks or expert parallelism would divide them."
    )


def expert_stretch(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the rows of experts on all ranks, each as full as the fullest, over those that there are."""
    stretched = shape.experts is not None and training.framework == "torch" and not training.tuning.flat
    return 1 + _cuts_rows(layout, training) * (_expert_rows(shape, layout) - 1) if stretched else 1.0


def _cuts_rows(layout: Layout, training: Training) -> Real:
    """Return 1 where FSDP2 shards weights: ZeRO-3, and ZeRO-2 in mixed precision."""
    return 1 * ((layout.zero == 3) | (training.keeps_fp32 & (layout.zero == 2)))


def _padded(rows: Real, ranks: Real) -> Real:
    """Return the rows of all ranks, each as full as the fullest, over those that there are."""
    return -(-rows // ranks) * ranks / rows


def _expert_rows(shape: ModelShape, layout: Layout) -> Real:
    moe, ranks = shape.experts, layout.expert_shard_ranks
    assert moe is not None, "only a layer with experts is asked"
    up = 2 if shape.gated else 1
    by_width = (up * _padded(moe.ffn, ranks) + _padded(shape.hidden, ranks)) / (up + 1)
    is_by_width = (layout.ep > 1) & (layout.ep * ranks > moe.routed)
    return np.where(is_by_width, by_width, _padded(moe.routed / layout.ep, ranks))


@lru_cache(maxsize=256)
def _dense_tensors(shape: ModelShape, expert: bool) -> tuple[_Tensor, ...]:
    """Return the tensors of a layer that are no experts, without biases."""
    h, latent, moe = shape.hidden, shape.latent, shape.experts
    tensors = [_Tensor(shape.norm_parameters, h, False)] * 2
    if latent is None:
        linears = layer_linears(shape)
        of_attention = {"q", "k", "v", "qkv", "o"}
        tensors += [
            _Tensor(each.inputs * each.outputs, each.outputs, each.name != "o")
            for each in linears if each.name in of_attention
        ]  # fmt: skip
    else:
        heads, query = shape.heads, shape.heads * (latent.nope_dim + latent.rope_dim)
        low, expanded = latent.kv_rank + latent.rope_dim, heads * (latent.nope_dim + latent.v_dim)
        tensors += [
            _Tensor(query * (latent.q_rank or h), query, True), _Tensor(low * h, low, False),
            _Tensor(expanded * latent.kv_rank, expanded, True), _Tensor(heads * latent.v_dim * h, h, False),
        ]  # fmt: skip
        tensors += [] if latent.q_rank is None else [_Tensor(latent.q_rank * h, latent.q_rank, False)]
    inner = shape.ffn
    if expert and moe is not None:
        inner = moe.shared_ffn
        tensors.append(_Tensor(moe.routed * h, moe.routed, False))
    if inner:
        up = 2 if shape.gated else 1
        tensors += [_Tensor(inner * h, inner, True)] * up + [_Tensor(h * inner, h, False)]
    return tuple(tensors)
