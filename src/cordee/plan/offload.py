"""States or activations on the host: their bytes there, and the time of their traffic. Sizes may be arrays.

The times are of the link alone; how much of them a step hides is for the step's model to say.
"""

from cordee.hardware.arrays import Real, only_where
from cordee.plan.activations import in_flight, kept_bytes
from cordee.plan.layout import Layout
from cordee.plan.states import holding, rank_parameters
from cordee.plan.training import Training
from cordee.workload.model import ModelShape


def host_optimizer_bytes(shape: ModelShape, layout: Layout, training: Training, rank: int) -> Real:
    """Return what the offloaded optimizer of one GPU keeps on the host: master weights and moments."""
    optimizer, parameters = training.optimizer, rank_parameters(shape, layout, training, rank)
    each = optimizer.master_bytes + optimizer.moment_bytes
    dense = parameters.dense * each + parameters.outer * optimizer.outer_extra_bytes
    return (layout.offload in ("optimizer", "both")) * (
        dense / _shards(layout, layout.shard_ranks)
        + parameters.experts * each / _shards(layout, layout.expert_shard_ranks)
    )


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


def host_traffic_s(
    shape: ModelShape, layout: Layout, training: Training, rank: int, host_bytes_per_s: float
) -> tuple[Real, Real]:
    """Return the seconds of a step in which the host link is busy: for the optimizer, and for activations.

    The optimizer's gradients go down and its new weights come up; each activation goes down once and comes up once.

    Args:
        shape: the model.
        layout: its `offload` decides.
        training: its optimizer has the bytes of a gradient and a weight.
        rank: of the pipeline.
        host_bytes_per_s: of one GPU's link, per direction, which both use at the same time.
    """
    optimizer, parameters = training.optimizer, rank_parameters(shape, layout, training, rank)
    own = parameters.dense / _shards(layout, layout.shard_ranks)
    own = own + parameters.experts / _shards(layout, layout.expert_shard_ranks)
    states = own * max(optimizer.gradient_bytes, optimizer.weight_bytes)
    kept = kept_bytes(shape, layout, training, holding(shape, layout, rank))
    steps = layout.micro_batches(training.global_batch)
    return (
        (layout.offload in ("optimizer", "both")) * states / host_bytes_per_s,
        (layout.offload in ("activations", "both")) * steps * kept / host_bytes_per_s,
    )


def _shards(layout: Layout, ranks: Real) -> Real:
    return 1 + (layout.zero >= 1) * (ranks - 1)
