"""Bytes of the KV cache on one GPU: heads, latents, windows and recurrent states, for a token and for a sequence.

Per token and layer: 2 x key-value heads x width, or the latent and its rotary part for MLA (arXiv:2405.04434, section
2.1). A window keeps its last tokens; a recurrent layer keeps a state that does not grow with the sequence.
"""

import math
from collections import Counter
from collections.abc import Mapping
from functools import lru_cache

from cordee.plan.serving.case import ServingCase, ServingLayout
from cordee.plan.serving.formats import Format
from cordee.plan.serving.memory.weights import stage_layers
from cordee.workload.layers import LayerKind
from cordee.workload.model import ModelShape

_ALONE = ServingLayout()
INDEX_SCALE_BYTES = 4  # DeepSeek-V3.2 stores the indexer's keys in 8 bits with one 32-bit scale a token


def kv_bytes_per_token(case: ServingCase, stage: int = 0) -> int:
    """Return the bytes that one more token takes on one GPU while no window is full."""
    return math.ceil(sum(_bytes_by_kind(case.shape, case.layout, case.kv, stage).values()))


def kv_bytes(case: ServingCase, length_tokens: int, stage: int = 0) -> int:
    """Return the bytes of one sequence of this length on one GPU."""
    return sequence_bytes(case.shape, case.kv, length_tokens, case.engine.block_tokens, case.layout, stage)


def sequence_bytes(
    shape: ModelShape,
    kv: Format,
    length_tokens: int,
    block_tokens: int = 1,
    layout: ServingLayout = _ALONE,
    stage: int = 0,
) -> int:
    """Return the bytes of one sequence of this length on one GPU, in whole blocks, with its recurrent states.

    A window's blocks are rounded up and one more is held, since a window that moves begins and ends inside a block.
    """
    whole = math.ceil(length_tokens / block_tokens) * block_tokens
    window = window_tokens(shape)
    near = whole if window is None else min(whole, (math.ceil(window / block_tokens) + 1) * block_tokens)
    tokens: dict[LayerKind, int] = {"full": whole, "window": near}
    stored = sum(size * tokens[kind] for kind, size in _bytes_by_kind(shape, layout, kv, stage).items())
    return math.ceil(stored) + state_bytes(shape, layout, stage)


def state_bytes(shape: ModelShape, layout: ServingLayout, stage: int = 0) -> int:
    """Return the bytes of one sequence's recurrent states on one GPU; their heads are cut by tp."""
    mixed = shape.mixed
    if mixed is None or mixed.recurrent is None:
        return 0
    layers = stage_layers(shape.layers, layout.pp, stage)
    recurrent = sum(shape.kind(index) == "recurrent" for index in layers)
    return math.ceil(recurrent * mixed.recurrent.state_bytes() / layout.tp)


def window_tokens(shape: ModelShape) -> int | None:
    """Return the tokens that a windowed layer keeps; None without such layers."""
    window = None if shape.mixed is None else shape.mixed.window
    return None if window is None else window.tokens


def is_linear(shape: ModelShape) -> bool:
    """Return whether each token of a sequence takes the same bytes: no window, no recurrent layer."""
    return shape.mixed is None or set(shape.mixed.kinds) <= {"full", "mlp", "experts"}


@lru_cache(maxsize=4096)
def _bytes_by_kind(shape: ModelShape, layout: ServingLayout, kv: Format, stage: int) -> Mapping[LayerKind, float]:
    """Return the bytes of one token in all layers of a stage that keep keys and values, by their kind."""
    shared = 0 if shape.mixed is None else shape.mixed.kv_shared
    own = shape.layers - shared
    kinds = Counter(shape.kind(index) for index in stage_layers(shape.layers, layout.pp, stage) if index < own)
    return {
        kind: count * layer_bytes_per_token(shape, kind, layout.tp, kv)
        for kind, count in kinds.items()
        if kind in ("full", "window")
    }


@lru_cache(maxsize=4096)
def layer_bytes_per_token(shape: ModelShape, kind: LayerKind, tp: int, kv: Format) -> float:
    """Return the bytes of one token in one attention layer of this kind on one of tp GPUs.

    Every GPU has at least one key-value head; a latent is copied to each of them.
    """
    latent = shape.latent
    if latent is not None:
        index = latent.index_dim + INDEX_SCALE_BYTES if latent.index_heads else 0
        return (latent.kv_rank + latent.rope_dim) * kv.bits / 8 + index
    kv_heads, head_dim = shape.kv_shape(kind)
    return 2 * max(1, math.ceil(kv_heads / tp)) * head_dim * kv.bits / 8
