"""Segments that torch reserves for a step of FSDP2 or of one GPU: its allocations in order, by the allocator's rules.

Dense layers with grouped-query attention alone.
"""

from dataclasses import replace

from cordee.plan.allocator import CachingAllocator, needed_bytes
from cordee.plan.layout import Layout
from cordee.plan.memory import RankMemory, StageMemory
from cordee.plan.replay_sizes import TensorSizes
from cordee.plan.replay_step import ReplayedStep
from cordee.plan.training import Training
from cordee.workload.model import ModelShape


def with_replay(memory: RankMemory, shape: ModelShape, layout: Layout, training: Training) -> RankMemory:
    """Return the memory of a rank with the segments that a replay needs, and keeps where there is room.

    It is as it was where the order of allocations is not known.
    """
    if not is_replayed(shape, layout, training):
        return memory
    return replace(memory, stages=tuple(_with_segments(stage, shape, layout, training) for stage in memory.stages))


def is_replayed(shape: ModelShape, layout: Layout, training: Training) -> bool:
    """Return whether the order of a step's allocations is known."""
    adapters = training.adapters
    known = adapters is None or not (adapters.magnitudes or adapters.joined or adapters.dropout)
    plain = training.framework == "torch" and layout.pp == 1 and known and training.flash and not training.tuning.flat
    if not plain or shape.latent or shape.experts or not shape.gated or training.tuning.frozen:
        return False
    is_sharded = layout.zero == 3 or (layout.zero == 2 and training.keeps_fp32)
    return training.loss_kind in ("eager", "compiled") and (is_sharded or layout.gpus == 1)


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
    free, needed = needed_bytes(lambda limit_bytes: replayed(shape, layout, training, limit_bytes))
    return replace(
        stage,
        fragmentation_bytes=needed - free.allocated_bytes_peak,
        cached_bytes=free.reserved_bytes_peak - needed,
    )
