"""Segments that torch reserves for a step of FSDP2 or of one GPU: its allocations in order, by the allocator's rules.

Dense layers with grouped-query attention alone; adapters where layers are recomputed, so that they keep nothing of
their own.
"""

from dataclasses import replace

from cordee.plan.allocator import CachingAllocator
from cordee.plan.layout import Layout
from cordee.plan.memory import RankMemory, StageMemory
from cordee.plan.replay_sizes import TensorSizes
from cordee.plan.replay_step import ReplayedStep
from cordee.plan.training import Training
from cordee.workload.model import ModelShape


def with_replay(memory: RankMemory, shape: ModelShape, layout: Layout, training: Training) -> RankMemory:
    """Return the memory of a rank with the segments that a replay keeps where there is room; as it was elsewhere."""
    if not is_replayed(shape, layout, training):
        return memory
    return replace(memory, stages=tuple(_with_segments(stage, shape, layout, training) for stage in memory.stages))


def is_replayed(shape: ModelShape, layout: Layout, training: Training) -> bool:
    """Return whether the order of a step's allocations is known."""
    adapters = training.adapters
    known = adapters is None or (layout.recompute == "full" and not adapters.magnitudes and not adapters.joined)
    plain = training.framework == "torch" and layout.pp == 1 and known and training.flash and not training.tuning.flat
    if not plain or shape.latent or shape.experts or not shape.gated or training.tuning.frozen:
        return False
    return training.loss_kind in ("eager", "compiled") and (layout.zero == 3 or layout.gpus == 1)


def replayed(shape: ModelShape, layout: Layout, training: Training, limit_bytes: int | None = None) -> CachingAllocator:
    """Return the allocator after two steps, on a GPU that gives torch so many bytes.

    Raises:
        OutOfMemoryError: they are too few.
    """
    allocator = CachingAllocator(limit_bytes)
    count = layout.micro_batches(training.global_batch)
    ReplayedStep(allocator, TensorSizes.of(shape, layout, training), shape.layers, layout.recompute, count).run()
    return allocator


def _with_segments(stage: StageMemory, shape: ModelShape, layout: Layout, training: Training) -> StageMemory:
    allocator = replayed(shape, layout, training)
    beyond = allocator.reserved_bytes_peak - allocator.allocated_bytes_peak
    return replace(stage, cached_bytes=max(0, beyond - stage.fragmentation_bytes))
