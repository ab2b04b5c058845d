"""Peak bytes on one GPU of each pipeline rank: a timeline of events, of which the highest is the peak.

A step's memory is no sum: logits live when all activations do, a layer's temporaries when the logits are gone, and the
optimizer's when no activation is left. Sources: states ZeRO (arXiv:1910.02054, section 3); activations and buffers in
their own modules. `peak_bytes` takes layouts whose sizes are arrays; the rest describes one layout.
"""

from dataclasses import dataclass, fields
from typing import Generic, TypeVar

import numpy as np

from cordee.hardware.arrays import Real
from cordee.plan import activations as act
from cordee.plan import buffers as buf
from cordee.plan.backward import layer_backward_bytes
from cordee.plan.layout import Layout
from cordee.plan.loss import forward_loss_bytes, head_moment_bytes, loss_bytes, output_bytes
from cordee.plan.shards import frozen_padding, rank_padding
from cordee.plan.states import (
    Holding,
    all_adapter_parameters,
    frozen_bytes,
    holding,
    peak_ranks,
    rank_parameters,
    reference_bytes,
    stage_parameters,
    trained_parameters,
)
from cordee.plan.training import Training
from cordee.workload.model import ModelShape

__all__ = [
    "Moment", "RankMemory", "StageMemory", "peak_bytes", "rank_memory", "stage_parameters", "state_bytes",
]  # fmt: skip


N = TypeVar("N", int, Real)


@dataclass(frozen=True, slots=True)
class AllocatedBytes(Generic[N]):
    """Bytes that torch has allocated, part by part."""

    weights_bytes: N
    gradients_bytes: N
    optimizer_bytes: N
    activations_bytes: N
    loss_bytes: N
    buffers_bytes: N

    @property
    def allocated_bytes(self) -> N:
        """Bytes as torch's max_memory_allocated counts them."""
        states = self.weights_bytes + self.gradients_bytes + self.optimizer_bytes
        return states + self.activations_bytes + self.loss_bytes + self.buffers_bytes


@dataclass(frozen=True, slots=True)
class Moment(AllocatedBytes[Real]):
    """Bytes that torch has allocated at one event of the step."""

    event: str


@dataclass(frozen=True, slots=True)
class StageMemory(AllocatedBytes[int]):
    """Bytes that one GPU of one pipeline rank holds at its peak.

    `cached_bytes` are blocks that torch's allocator keeps as long as there is room and gives back before it fails: they
    show in nvidia-smi and decide nothing.
    """

    fragmentation_bytes: int
    context_bytes: int
    cached_bytes: int = 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes that torch's allocator cannot do without."""
        return self.allocated_bytes + self.fragmentation_bytes

    @property
    def held_bytes(self) -> int:
        """Bytes as torch's max_memory_reserved counts them where there is room."""
        return self.reserved_bytes + self.cached_bytes

    @property
    def total_bytes(self) -> int:
        """All parts: what it cannot do without."""
        return self.reserved_bytes + self.context_bytes

    @property
    def seen_bytes(self) -> int:
        """Bytes as nvidia-smi shows them where there is room."""
        return self.total_bytes + self.cached_bytes

    def parts(self) -> dict[str, int]:
        """Return the parts by name, without the unit."""
        names = [field.name for field in fields(self) if field.name != "cached_bytes"]
        return {name.removesuffix("_bytes"): getattr(self, name) for name in names}


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The ranks of the pipeline; the fullest one decides. `timelines` has each one's events in their order."""

    stages: tuple[StageMemory, ...]
    timelines: tuple[tuple[Moment, ...], ...] = ()

    @property
    def worst(self) -> StageMemory:
        """The fullest stage."""
        return max(self.stages, key=lambda stage: stage.total_bytes)

    @property
    def worst_stage(self) -> int:
        """Its index, the first among equals."""
        totals = [stage.total_bytes for stage in self.stages]
        return totals.index(max(totals))

    @property
    def worst_timeline(self) -> tuple[Moment, ...]:
        """The events of the fullest stage."""
        return self.timelines[self.worst_stage]

    @property
    def peak_event(self) -> str:
        """The event at which the fullest stage is at its peak."""
        return max(self.worst_timeline, key=lambda moment: moment.allocated_bytes).event

    @property
    def total_bytes(self) -> int:
        """Peak bytes on the fullest GPU."""
        return self.worst.total_bytes

    def shortfall_bytes(self, gpu_memory_bytes: int) -> int:
        """Return the bytes above the GPU's memory; 0 if it fits."""
        return max(0, self.total_bytes - gpu_memory_bytes)


def state_bytes(shape: ModelShape, training: Training) -> int:
    """Return weights, gradients and optimizer states of the whole model, wherever they lie.

    >>> from cordee.workload.families import shape_from_config
    >>> config = dict(model_type="llama", hidden_size=8192, num_hidden_layers=80, num_attention_heads=64,
    ...               num_key_value_heads=8, intermediate_size=28672, vocab_size=128256)
    >>> state_bytes(shape_from_config(config, name="llama-3-70b"), Training(8192, 512))
    1128859303936
    """
    optimizer = training.optimizer
    if training.adapters is not None:
        trained = all_adapter_parameters(shape, training.adapters) * optimizer.bytes_per_parameter
        return round(float(frozen_bytes(shape, Layout(), training, 0)) + trained)
    if training.tuning.frozen is not None:
        own = trained_parameters(shape, Layout(), training, 0)
        kept = own.dense * optimizer.bytes_per_parameter + own.outer * optimizer.outer_extra_bytes
        return round(float(frozen_bytes(shape, Layout(), training, 0) + kept))
    outer_bytes = outer_parameters(shape) * optimizer.outer_extra_bytes
    return round(shape.parameter_count.total * optimizer.bytes_per_parameter + outer_bytes)


def gpu_state_bytes(shape: ModelShape, training: Training) -> int:
    """Return the part of the state that GPUs must hold: no paged moments, no gradients that are used up at once."""
    optimizer = training.optimizer
    away = (optimizer.moment_bytes if optimizer.paged else 0.0) + optimizer.in_backward * optimizer.gradient_bytes
    return state_bytes(shape, training) - round(away * float(trained_parameters(shape, Layout(), training, 0).total))


def outer_parameters(shape: ModelShape) -> int:
    """Return the parameters that are no matrix of a layer: embedding, head and norms."""
    count = shape.parameter_count
    return count.embedding + count.head + count.norms


def rank_memory(
    shape: ModelShape, layout: Layout, training: Training, cuda_bytes: float = buf.CUDA_BYTES
) -> RankMemory:
    """Return every pipeline rank of one layout: its events, and what it holds at the highest of them.

    `cuda_bytes` are the CUDA context and kernels of one process.
    """
    timelines = tuple(_one_each(timeline(shape, layout, training, rank)) for rank in range(layout.pp))
    context = round(float(buf.context_bytes(layout, cuda_bytes)))
    logits = float(output_bytes(shape, layout, training)) if training.loss_kind == "eager" else 0.0
    return RankMemory(tuple(_at_peak(moments, training, context, logits) for moments in timelines), timelines)


def _one_each(moments: tuple[Moment, ...]) -> tuple[Moment, ...]:
    """Return the fullest moment of each event, in the order of a step."""
    fullest: dict[str, Moment] = {}
    for moment in moments:
        before = fullest.setdefault(moment.event, moment)
        if moment.allocated_bytes > before.allocated_bytes:
            fullest[moment.event] = moment
    return tuple(fullest.values())


def _at_peak(moments: tuple[Moment, ...], training: Training, context: int, logits: float) -> StageMemory:
    peak = max(moments, key=lambda moment: moment.allocated_bytes)
    reserve = buf.FRAGMENTATION[training.framework]
    return StageMemory(
        weights_bytes=round(float(peak.weights_bytes)),
        gradients_bytes=round(float(peak.gradients_bytes)),
        optimizer_bytes=round(float(peak.optimizer_bytes)),
        activations_bytes=round(float(peak.activations_bytes)),
        loss_bytes=round(float(peak.loss_bytes)),
        buffers_bytes=round(float(peak.buffers_bytes)),
        fragmentation_bytes=round(float(reserve * peak.allocated_bytes)),
        context_bytes=context,
        cached_bytes=round(max(_cached_bytes(moments, training, peak), _hole_bytes(moments, reserve, peak, logits))),
    )


def _cached_bytes(moments: tuple[Moment, ...], training: Training, peak: Moment) -> float:
    """Return the blocks that stay with the allocator, since what comes next asks for other sizes.

    Those of the activations at the optimizer's step, or those of the step while activations live: the lesser of the
    two. With DeepSpeed's BF16 optimizer the weights as they were before it flattened them.
    """
    if training.framework == "deepspeed" and training.optimizer.gradient_bytes > training.activation_bytes:
        return float(peak.weights_bytes)
    first, *passes, step = moments
    # Gradients have blocks of their own, which the peak has counted where they were there.
    states = first.allocated_bytes + peak.gradients_bytes - first.gradients_bytes
    return float(max(0.0, min(max(each.allocated_bytes for each in passes), step.allocated_bytes) - states))


def _hole_bytes(moments: tuple[Moment, ...], reserve: float, peak: Moment, logits: float) -> float:
    """Return the 16-bit logits of a plain loss: free once it has made fp32 ones, for which their block is too small.

    They count as far as they lift the loss above the peak.
    """
    at_loss = max((moment.allocated_bytes for moment in moments if moment.event == "loss"), default=0.0)
    return float(max(0.0, logits - (1 + reserve) * (peak.allocated_bytes - at_loss))) if at_loss else 0.0


def peak_bytes(shape: ModelShape, layout: Layout, training: Training, cuda_bytes: float = buf.CUDA_BYTES) -> Real:
    """Return the bytes that the fullest GPU cannot do without: one array if the layout's sizes are arrays."""
    fullest: Real = 0.0
    for rank in peak_ranks(shape, layout):
        for moment in timeline(shape, layout, training, rank):
            fullest = np.maximum(fullest, moment.allocated_bytes)
    return fullest * (1 + buf.FRAGMENTATION[training.framework]) + buf.context_bytes(layout, cuda_bytes)


@dataclass(frozen=True, slots=True)
class _Standing:
    """Bytes that a rank holds through a step, to which each event adds its own; `whole_*` while micro-batches pass."""

    weights: Real
    gradients: Real
    optimizer: Real
    buffers: Real
    whole_weights: Real
    whole_gradients: Real

    def still(self, event: str, buffers: Real = 0.0, missing: Real = 0.0) -> Moment:
        """Return an event at which no micro-batch passes; `missing` is the part of the gradients that is not there."""
        held = self.gradients * (1 - missing)
        return Moment(self.weights, held, self.optimizer, 0.0, 0.0, self.buffers + buffers, event)

    def at(self, event: str, activations: Real, loss: Real, buffers: Real, missing: Real = 0.0) -> Moment:
        """Return an event of a micro-batch; `missing` are gradients that are not there yet."""
        weights, gradients = self.weights + self.whole_weights, self.gradients - missing + self.whole_gradients
        return Moment(weights, gradients, self.optimizer, activations, loss, self.buffers + buffers, event)


def timeline(shape: ModelShape, layout: Layout, training: Training, rank: int) -> tuple[Moment, ...]:
    """Return the events of one step on this rank of the pipeline.

    `states`: before anything runs. `forward`: after the forward pass of the last micro-batch in flight, and at its
    start. `loss`: on a rank with the head. `backward`: of the last layer, with its temporaries, and of the first.
    `embedding`: its gradient, when the activations of one micro-batch are gone. `step`: the optimizer's.
    """
    held = holding(shape, layout, rank)
    weights, gradients, optimizer, moment = _states(shape, layout, training, rank)
    standing = buf.standing_bytes(shape, layout, training, held) + act.WORKSPACE_BYTES
    parameters = rank_parameters(shape, layout, training, rank).total
    weights_whole, gradients_whole = buf.unsharded_bytes(layout, training, parameters)
    gradients_whole = gradients_whole + buf.accumulated_bytes(layout, training, gradients)
    cast = _cast_or_gathered_bytes(shape, layout, training, rank, held)
    # What recomputation drops of a layer are its casts as well; ZeRO-2 has gathered them.
    cast_back = cast * ((layout.zero == 2) | (layout.recompute == "none"))
    flying = act.in_flight(layout, training, rank)
    one = act.kept_bytes(shape, layout, training, held)
    boundary = act.boundary_bytes(shape, layout, training)
    standing = standing + buf.receiving_bytes(layout, training, held, boundary=boundary, flying=flying)
    kept = flying * one
    if layout.offload in ("activations", "both"):
        # What is used and what comes back next stay; the rest is on the host.
        kept = kept * np.minimum(1.0, 2 / (np.maximum(1.0, flying) * held.layers))
    # A rank in the middle keeps the gradient that it sent until it makes the next one.
    between = (rank > 0) * boundary
    gathered = buf.gathered_bytes(shape, layout, training, held)
    gathered_or_whole = gathered + act.dequantised_bytes(shape, training)
    backward = layer_backward_bytes(shape, layout, training, held) + gathered_or_whole
    appear = buf.gradients_appear(layout, training)
    first = appear * (layout.micro_batches(training.global_batch) == 1)
    always = _Standing(weights, gradients, optimizer, standing, weights_whole, gradients_whole)
    none, ends = first * gradients, buf.GatheredEnds.of(shape, layout, training, held)
    arrival = _Arrival.of(shape, layout, training, rank, first)
    moments = [always.still("states", missing=appear)]
    forward = act.forward_moment_bytes(shape, layout, training) + gathered_or_whole
    # The last layer gathers no other one.
    for left, ahead in ((kept, 0.0), (kept * (1 - 1 / arrival.layers), ends.next_layer)):
        passing = np.maximum(forward, gathered + ahead) + ends.tied + cast
        moments.append(always.at("forward", left + between, 0.0, passing, none))
    moments.append(always.at("forward", boundary, 0.0, ends.first, none))
    if held.heads:
        # FSDP2 has let go of the last layer when the head runs.
        beside = gathered * (1 - appear * (layout.zero == 3))
        head_cast = np.minimum(cast - cast_back, buf.vocabulary_bytes(shape, layout, training))
        passes = beside + cast + training.tuning.loss_within * ends.head_buffer, beside + cast_back + head_cast
        moments += _at_loss(shape, layout, training, always, (kept + between, passes, none))
        if np.any(ends.of_head):
            missing, reduced = arrival.sharded * arrival.missing(0) * gradients, gathered / 2 + ends.of_head
            moments.append(always.at("loss", kept + between, 0.0, arrival.sharded * reduced, missing))
    own = backward + ends.tied + ends.head_slope, gathered, ends.ahead if held.embeddings else None
    moments += _backward(always, (kept, between), cast_back, own, arrival)
    frozen = training.tuning.frozen
    if held.embeddings and training.adapters is None and not (frozen is not None and frozen.embeddings):
        rows = boundary + buf.embedding_gradient_bytes(shape, layout, training, held)
        left = np.maximum(0.0, kept - one)
        moments.append(always.at("embedding", left, 0.0, np.where(arrival.sharded, 0.0, rows)))
        comes, is_reduced = ends.last_bytes(arrival.reduced, boundary)
        missing = arrival.sharded * arrival.missing(arrival.layers) * gradients
        moments.append(always.at("embedding", left, 0.0, arrival.sharded * comes, missing))
        moments.append(always.at("embedding", left, 0.0, arrival.sharded * is_reduced))
    moments.append(always.still("step", moment))
    return tuple(moments)


@dataclass(frozen=True, slots=True)
class _Arrival:
    """The order in which the gradients of a rank's layers come as its activations go.

    `layers`: how many; `head` and `embedding`: parts of the gradients that those have, the rest is the layers'. `first`
    is 1 where no gradient was there before. FSDP2 (`sharded` 1) reduces each layer's while the next layer's come:
    `reduced`, and the head's beside the last layer, `reduced_head`.
    """

    layers: int
    head: Real
    embedding: Real
    first: Real
    sharded: Real
    reduced: Real
    reduced_head: Real

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout, training: Training, rank: int, first: Real) -> "_Arrival":
        """Return how they come on a rank of the pipeline."""
        held = holding(shape, layout, rank)
        reduced = buf.reduced_bytes(shape, layout, training, held)
        frozen = training.tuning.frozen is not None or training.adapters is not None
        rows = buf.vocabulary_bytes(shape, layout, training) / training.activation_bytes
        whole = rank_parameters(shape, layout, training, rank), rank_padding(shape, layout, training, rank)
        end = 0.0 if frozen else rows / sum(each.total for each in whole)
        sharded = buf.gradients_appear(layout, training) * (layout.zero == 3)
        head = buf.reduced_head_bytes(shape, layout, training) * bool(held.heads)
        return cls(
            max(1, held.layers), end * held.heads * (not shape.tied), end * held.embeddings, first, sharded,
            reduced, reduced + sharded * (head - reduced),
        )  # fmt: skip

    def missing(self, done: int) -> Real:
        """Return the part of the gradients that is missing when so many layers have theirs."""
        layers = 1 - self.head - self.embedding
        return self.first * (1 - self.head - layers * min(done, self.layers) / self.layers)


def _backward(
    always: _Standing, kept: tuple[Real, Real], cast: Real, buffers: tuple[Real, Real, Real | None], arrival: _Arrival
) -> list[Moment]:
    """Return a layer's backward pass where it may be fullest: in the last layer, that before it, the second, the first.

    `kept` are activations and what lies beside them, `buffers` a layer's, what is gathered of two layers, and what is
    in place of the second one where the first layer passes.
    """
    activations, between = kept
    own, gathered, ahead = buffers
    layers = arrival.layers
    with_first = own + arrival.reduced
    if ahead is not None:  # with the first layer FSDP2 gathers the embedding, and no further layer
        with_first = with_first - gathered / 2 + ahead
    moments = []
    for done, beside in (
        (0, own + arrival.reduced_head),
        (1, own + arrival.reduced),
        (layers - 2, own + arrival.reduced),
        (layers - 1, with_first),
    ):
        passed = min(max(0, done), layers - 1)
        left, missing = 1 - passed / layers, arrival.missing(passed) * always.gradients
        moments.append(always.at("backward", left * activations + between, 0.0, beside + left * cast, missing))
    return moments


def _at_loss(
    shape: ModelShape,
    layout: Layout,
    training: Training,
    always: _Standing,
    beside: tuple[Real, tuple[Real, Real], Real],
) -> list[Moment]:
    """Return the events of a rank with the head: as its forward pass ends, and in the backward pass of the loss.

    `beside` are activations, the buffers of both passes, and missing gradients.
    """
    kept, passes, missing = beside
    logits, output = loss_bytes(shape, layout, training), output_bytes(shape, layout, training)
    own = head_moment_bytes(shape, layout, training) + buf.gathered_head_bytes(shape, layout, training)
    head, within = act.dequantised_head_bytes(shape, training), forward_loss_bytes(shape, layout, training)
    if training.loss_kind == "eager":  # its fp32 tensors are gone when the head's product has its turn again
        logits, within = np.maximum(logits, output + head), np.maximum(within, output + head)
    else:
        own = own + head
    forward, backward = (own + each for each in passes)
    moments = [always.at("loss", kept, within, forward, missing), always.at("loss", kept, logits, backward, missing)]
    stage = training.tuning.stage
    if stage is not None and stage.sequences_together > 1 and stage.free_passes:
        # The reference passes while the policy's activations and logits wait for their loss.
        both = logits if training.loss_kind == "chunked" else 2 * output
        moments.append(always.at("reference", kept, both, forward, missing))
    return moments


def _cast_or_gathered_bytes(shape: ModelShape, layout: Layout, training: Training, rank: int, held: Holding) -> Real:
    """Return 16-bit copies that live through a forward pass: casts, and what FSDP2 keeps gathered."""
    trained = trained_parameters(shape, layout, training, rank).total
    narrow = (not training.keeps_fp32) * training.activation_bytes * trained
    gathered = narrow + frozen_bytes(shape, layout, training, rank)
    return buf.cast_bytes(shape, layout, training, held, trained) + _stays_gathered(layout, training) * gathered


def _stays_gathered(layout: Layout, training: Training) -> Real:
    """Return 1 where torch's FSDP2 shards all weights and keeps them gathered until the backward pass."""
    return (training.framework == "torch") * (layout.zero == 2) * (layout.data_ranks > 1)


def _states(shape: ModelShape, layout: Layout, training: Training, rank: int) -> tuple[Real, Real, Real, Real]:
    """Return weights, gradients, what the optimizer keeps, and what its step needs for a moment."""
    parameters, optimizer, zero = trained_parameters(shape, layout, training, rank), training.optimizer, layout.zero
    frozen, reference = frozen_bytes(shape, layout, training, rank), reference_bytes(shape, layout, training, rank)
    sharded = np.maximum(zero >= 3, _stays_gathered(layout, training))
    # A reference has no backward pass after which ZeRO-2 would shard it again.
    stretched = training.activation_bytes * frozen_padding(shape, layout, training, rank)
    weights: Real = (frozen + stretched) / (1 + sharded * (layout.shard_ranks - 1))
    weights = weights + reference / (1 + (zero >= 3) * (layout.shard_ranks - 1))
    gradients: Real = 0.0
    kept: Real = 0.0
    moment: Real = 0.0
    # Moments that CUDA can move to the host are none that the GPU cannot do without.
    own: Real = optimizer.master_bytes + (0 if optimizer.paged else optimizer.moment_bytes)
    wide = training.keeps_fp32
    own = own - wide * optimizer.master_bytes
    padding = rank_padding(shape, layout, training, rank)
    for each_rank, more, shards in (
        (parameters.dense, padding.dense, layout.shard_ranks),
        (parameters.experts, padding.experts, layout.expert_shard_ranks),
    ):
        count = each_rank + more
        each = optimizer.weight_bytes + wide * (optimizer.master_bytes - optimizer.weight_bytes)
        weights = weights + each * count / (1 + np.maximum(sharded, wide * (zero >= 2)) * (shards - 1))
        standing = optimizer.gradient_bytes + wide * (optimizer.master_bytes - optimizer.gradient_bytes)
        standing = (not optimizer.in_backward) * standing
        gradients = gradients + standing * count / (1 + (zero >= 2) * (shards - 1))
        over = 1 + (zero >= 1) * (shards - 1)
        kept = kept + own * count / over
        moment = moment + buf.step_moment_bytes(layout, training, count, over)
    gradients = gradients + buf.frozen_gradient_bytes(
        layout, training, rank_parameters(shape, layout, training, rank).total
    )
    kept = kept + optimizer.outer_extra_bytes * parameters.outer / (1 + (zero >= 1) * (layout.shard_ranks - 1))
    if layout.offload in ("optimizer", "both"):
        here = 1 - buf.shards_on_host(layout, training)
        weights, gradients, kept, moment = here * weights, here * gradients, 0.0 * kept, 0.0 * moment
    return weights, gradients, kept, moment
