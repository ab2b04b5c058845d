"""Bytes of the weights on one GPU of a replica: what tensor, pipeline and expert parallelism cut, copy and pad.

Projections and MLPs are cut by tp; routers, norms and the compressing matrices of latent attention are copied, and so
are key-value heads where there are fewer than tp. The embedding and the head are cut along a padded vocabulary.
"""

import math
from functools import lru_cache

from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.formats import Format
from cordee.workload.model import ModelShape

VOCAB_PADDING = 64  # vLLM, vocab_parallel_embedding.py, DEFAULT_VOCAB_PADDING_SIZE; SGLang has the same


def stage_layers(layers: int, pp: int, stage: int) -> range:
    """Return the layers of one pipeline stage; what does not divide goes to the stages before the last.

    >>> [len(stage_layers(61, 4, stage)) for stage in range(4)]
    [15, 15, 16, 15]
    """
    sizes = [layers // pp] * pp
    for index in range(layers % pp):
        sizes[-(index + 2) if pp > 1 else 0] += 1
    first = sum(sizes[:stage])
    return range(first, first + sizes[stage])


def weights_bytes(case: ServingCase, stage: int = 0) -> int:
    """Return the bytes of the weights and of the table of rotary positions on one GPU of this pipeline stage."""
    return _weights_bytes(case.shape, case.layout, case.weights, stage) + rotary_bytes(case.shape)


def rotary_bytes(shape: ModelShape) -> int:
    """Return the bytes of the cosines and sines of all positions, 16 bit, which engines make when they load weights.

    >>> from cordee.workload.load import load_shape
    >>> rotary_bytes(load_shape("llama-3-8b"))  # 8192 positions of 128
    2097152
    """
    if shape.learned_positions:
        return 0
    width = shape.latent.rope_dim if shape.latent is not None else shape.head_dim
    return shape.positions * width * 2


def vocabulary_rows(shape: ModelShape, tp: int) -> int:
    """Return the rows of the embedding on one GPU."""
    return math.ceil(math.ceil(shape.vocab / VOCAB_PADDING) * VOCAB_PADDING / tp)


@lru_cache(maxsize=4096)
def _weights_bytes(shape: ModelShape, layout: ServingLayout, weights: Format, stage: int) -> int:
    total = sum(_layer_bytes(shape, layout, weights, index) for index in stage_layers(shape.layers, layout.pp, stage))
    first, last = stage == 0, stage == layout.pp - 1
    rows = vocabulary_rows(shape, layout.tp) * shape.hidden
    output_bits = _bits(weights, "output", 16.0 if weights.keeps_head else weights.bits)
    embedding_bits = output_bits if shape.tied else _bits(weights, "embedding", _outer_bits(weights))
    if first:
        total += rows * embedding_bits / 8 + shape.learned_positions * shape.hidden * 2 + shape.encoder * 2 / layout.tp
    if last:
        total += shape.norm_parameters * 2
        # A tied head needs a copy of its own only where the embedding is on another stage.
        total += 0 if shape.tied and first else rows * output_bits / 8
    return math.ceil(total)


def _outer_bits(weights: Format) -> float:
    return 16.0 if weights.keeps_head else weights.bits


def _bits(weights: Format, part: str, otherwise: float) -> float:
    return weights.mixed_bits.get(part, otherwise)


def _layer_bytes(shape: ModelShape, layout: ServingLayout, weights: Format, index: int) -> float:
    count, tp, kind = shape.layer(index), layout.tp, shape.kind(index)
    dense_bits = 16.0 if weights.experts_only else weights.bits
    mixer_bits = 16.0 if weights.keeps_mixers else dense_bits
    copied = _copied_mixer(shape, index, tp)
    total = ((count.attention + copied * (tp - 1)) * mixer_bits / tp + count.mlp * dense_bits / tp) / 8
    total += (count.router + count.norms) * (2 if weights.keeps_head else 4)
    if count.experts:
        total += _expert_bytes(shape, layout, weights)
    if weights.mixed_bits and _has_more_bits(index, shape.layers):
        value = shape.hidden * math.prod(shape.kv_shape(kind)) if kind in ("full", "window") else 0
        ffn = shape.experts.routed * shape.experts.ffn if count.experts and shape.experts else shape.ffn
        total += value * (_bits(weights, "value", weights.bits) - weights.bits) / 8 / tp
        total += shape.hidden * ffn * (_bits(weights, "down", weights.bits) - weights.bits) / 8 / tp
    return total


def _expert_bytes(shape: ModelShape, layout: ServingLayout, weights: Format) -> float:
    moe = shape.experts
    assert moe is not None, "a layer with experts has their sizes"
    spread = layout.tp * layout.dp
    width = moe.latent or shape.hidden
    padded = math.ceil(width / weights.padded_hidden) * weights.padded_hidden / width
    # Scales are not padded with their weights: gpt-oss loads so, see benchmarks/results.
    bits = weights.bits if weights.padded_hidden == 1 else weights.bits + (padded - 1) * math.floor(weights.bits)
    held = math.ceil(moe.routed / spread) if layout.ep else moe.routed / spread
    return held * shape.expert_parameters * bits / 8


def _copied_mixer(shape: ModelShape, index: int, tp: int) -> int:
    """Return the parameters of a layer's mixer that each of the tp GPUs holds whole, as far as cutting them errs.

    Key-value heads: with tp of twice their number, each GPU holds one head: twice its part of an even cut.
    """
    kind, latent = shape.kind(index), shape.latent
    if kind not in ("full", "window") or tp == 1:
        return 0
    if latent is not None:
        compressed = shape.hidden * ((latent.q_rank or 0) + latent.kv_rank + latent.rope_dim)
        index_whole = latent.index_heads * (latent.index_dim * (latent.q_rank or shape.hidden) + shape.hidden)
        return compressed + index_whole
    kv_heads, head_dim = shape.kv_shape(kind)
    if kv_heads >= tp:
        return 0
    return round(2 * shape.hidden * head_dim * (tp - kv_heads) / (tp - 1))


def _has_more_bits(index: int, layers: int) -> bool:
    """Return whether a GGUF K mix gives this layer more bits: the first and last eighth, and each third between."""
    eighth = layers // 8
    return index < eighth or index >= 7 * layers // 8 or (index - eighth) % 3 == 2
