"""Seconds that the traffic of a layout takes, kind by kind, before anything hides it. Sizes may be NumPy arrays.

Ranks stand in the order tp, cp, dp, pp (the innermost first), as Megatron-LM places them; experts over tp, cp and dp.
"""

import numpy as np

from cordee.hardware.arrays import Real
from cordee.hardware.catalog import Gpu
from cordee.hardware.collectives import Group, group_of
from cordee.plan.layer import rank_tokens
from cordee.plan.layout import Layout
from cordee.plan.training import Training
from cordee.workload.model import ModelShape


def tensor_layer_s(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training) -> Real:
    """Return the seconds of one all-reduce of a layer's activations, or of what replaces it with `sp`.

    A layer has two of them forward and two backward (Megatron-LM, arXiv:1909.08053, section 3).
    """
    group = group_of(gpu, layout.tp, 1)
    n_bytes = training.activation_bytes * rank_tokens(layout, training) * shape.hidden
    return np.where(layout.sp, 2 * group.gather_s(n_bytes), group.reduce_s(n_bytes))


def context_layer_s(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training) -> Real:
    """Return the seconds of context parallelism's forward traffic in one layer; backward it is twice as much.

    Ring and all-gather bring every rank the keys and values of the others; Ulysses trades tokens for heads and back
    (arXiv:2309.14509, section 3).
    """
    group = group_of(gpu, layout.cp, layout.tp)
    word_bytes, tokens = training.activation_bytes, rank_tokens(layout, training)
    keys = np.maximum(shape.kv_heads / layout.tp, 1) * shape.head_dim
    if shape.latent is not None:
        keys = shape.heads / layout.tp * (shape.latent.nope_dim + shape.latent.rope_dim + shape.latent.v_dim) / 2
    if layout.cp_kind == "ulysses":
        queries = shape.heads * shape.head_dim / layout.tp
        return 4 * group.exchange_s(word_bytes * tokens * (2 * queries + 2 * keys) / 4)
    return group.gather_s(word_bytes * tokens * 2 * keys * layout.cp)


def expert_layer_s(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training) -> Real:
    """Return the seconds of tokens to their experts, or back: a layer does both, forward and backward."""
    moe = shape.experts
    if moe is None:
        return 0.0
    group = group_of(gpu, layout.ep, layout.expert_tp)
    tokens = rank_tokens(layout, training) / layout.tp
    return training.imbalance_at(layout.ep) * group.exchange_s(
        training.activation_bytes * tokens * moe.per_token * shape.hidden
    )


def stage_send_s(shape: ModelShape, gpu: Gpu, layout: Layout, training: Training) -> Real:
    """Return the seconds of a micro-batch's activations to the next stage; each tp rank sends its part.

    Megatron-LM's scatter and gather (arXiv:2104.04473, section 4.1); DeepSpeed partitions its pipeline's messages too.
    """
    stride = layout.tp * layout.cp * layout.dp
    group = group_of(gpu, layout.pp, stride)
    n_bytes = training.activation_bytes * rank_tokens(layout, training) * shape.hidden
    return np.where(layout.pp > 1, group.send_s(n_bytes / layout.tp), 0.0)


def shard_group(gpu: Gpu, layout: Layout) -> Group:
    """Return the ranks over which ZeRO shards."""
    return group_of(gpu, layout.shard_ranks, layout.tp)


def bucket_bytes(layout: Layout, training: Training, element_bytes: float) -> Real:
    """Return the bytes of one message of gradients, or of weights: each of them has its own latency.

    DistributedDataParallel cuts 25 MiB buckets (`bucket_cap_mb`), Megatron-LM at least 40 M elements and a million for
    each rank (`core/distributed/distributed_data_parallel.py`), so that latency stays small; DeepSpeed 500 M elements
    (`reduce_bucket_size`), InternEvo 512 MB.
    """
    if training.framework == "torch":
        return 25.0 * 2**20
    if training.framework == "internevo":
        return 512.0 * 2**20
    elements = 5e8 if training.framework == "deepspeed" else np.maximum(40e6, 1e6 * layout.data_ranks)
    return elements * element_bytes


def data_messages(layout: Layout, training: Training, n_bytes: Real, *, element_bytes: float, layers: Real) -> Real:
    """Return the messages that so many bytes of gradients or weights are sent in; FSDP sends block by block."""
    cut = np.maximum(1.0, n_bytes / bucket_bytes(layout, training, element_bytes))
    by_block = layout.zero == 3 if training.framework != "torch" else layout.zero >= 2
    return np.where(by_block, layers, cut)


def gradient_s(gpu: Gpu, layout: Layout, n_bytes: Real, messages: Real = 1) -> Real:
    """Return the seconds to reduce gradients: an all-reduce, or with ZeRO a reduce-scatter in the shard group.

    Shard groups that are copies of each other then all-reduce their shards.
    """
    shards = layout.shard_ranks
    copies = layout.data_ranks / shards
    across = group_of(gpu, copies, layout.tp * shards).reduce_s(n_bytes / shards, messages)
    scattered = shard_group(gpu, layout).gather_s(n_bytes, messages) + np.where(copies > 1, across, 0.0)
    whole = group_of(gpu, layout.data_ranks, layout.tp).reduce_s(n_bytes, messages)
    return np.where(layout.zero == 0, whole, scattered)
