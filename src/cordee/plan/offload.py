"""Bytes of states or activations that are offloaded to the host. Sizes may be arrays."""

from cordee.hardware.arrays import Real, only_where
from cordee.plan.activations import in_flight, kept_bytes
from cordee.plan.buffers import shards_on_host
from cordee.plan.layout import Layout
from cordee.plan.states import holding, trained_parameters
from cordee.plan.training import Training
from cordee.workload.model import ModelShape


def host_optimizer_bytes(shape: ModelShape, layout: Layout, training: Training, rank: int) -> Real:
    """Return what the offloaded optimizer of one GPU keeps on the host: master weights and moments.

    Where its shards are there, their gradients as well, and weights that have no master.
    """
    optimizer, parameters = training.optimizer, trained_parameters(shape, layout, training, rank)
    shards = optimizer.gradient_bytes + (0 if optimizer.master_bytes else optimizer.weight_bytes)
    each = optimizer.master_bytes + optimizer.moment_bytes + shards_on_host(layout, training) * shards
    dense = parameters.dense * each + parameters.outer * optimizer.outer_extra_bytes
    if optimizer.paged and layout.offload not in ("optimizer", "both"):
        return paged_bytes(shape, layout, training, rank)
    return (layout.offload in ("optimizer", "both")) * (
        dense / _shards(layout, layout.shard_ranks)
        + parameters.experts * each / _shards(layout, layout.expert_shard_ranks)
    )


def paged_bytes(shape: ModelShape, layout: Layout, training: Training, rank: int = 0) -> Real:
    """Return the paged moments of one GPU, all of which the host must have room for."""
    parameters, optimizer = trained_parameters(shape, layout, training, rank), training.optimizer
    each = parameters.dense / _shards(layout, layout.shard_ranks)
    each = each + parameters.experts / _shards(layout, layout.expert_shard_ranks)
    return optimizer.paged * optimizer.moment_bytes * each


def host_activation_bytes(shape: ModelShape, layout: Layout, training: Training, rank: int) -> Real:
    """Return the offloaded activations of one GPU on the host: those of all but two layers."""
    held = holding(shape, layout, rank)
    flying = in_flight(layout, training, rank)
    away = 1 - 2 / (flying * held.layers)
    kept = away * flying * kept_bytes(shape, layout, training, held)
    return only_where(away > 0, kept) if layout.offload in ("activations", "both") else 0.0


def host_bytes(shape: ModelShape, layout: Layout, training: Training) -> float:
    """Return what the fullest GPU of a layout keeps on its host."""
    ranks = range(layout.pp)
    return max(
        float(
            host_optimizer_bytes(shape, layout, training, rank) + host_activation_bytes(shape, layout, training, rank)
        )
        for rank in ranks
    )


def _shards(layout: Layout, ranks: Real) -> Real:
    return 1 + (layout.zero >= 1) * (ranks - 1)
