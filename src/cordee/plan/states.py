"""The layers that a rank of the pipeline holds, and the parameters that one GPU of it works with.

Sizes (tp, ep, etp) may be NumPy arrays; the pipeline's are plain numbers. What ZeRO divides is in `memory.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from cordee.hardware.arrays import Real
from cordee.plan.layout import Layout
from cordee.plan.pipeline.schedules import find_schedule
from cordee.plan.split import stage_layers
from cordee.plan.training import STACKS, Adapters, Frozen, Training
from cordee.workload.model import ModelShape, ParameterCount, expert_layers_in

# Megatron-LM and DeepSpeed's Megatron pad the vocabulary to a multiple of this for each tensor-parallel rank.
VOCAB_MULTIPLE = 128


@dataclass(frozen=True, slots=True)
class Holding:
    """The part of the model on one pipeline rank: layers of each kind over its chunks, and the two ends."""

    dense_layers: int
    expert_layers: int
    embeddings: int
    heads: int

    @property
    def layers(self) -> int:
        """Layers of both kinds."""
        return self.dense_layers + self.expert_layers


@dataclass(frozen=True, slots=True)
class RankParameters:
    """Parameters that one GPU works with before ZeRO, by how they are sharded. Amounts may be arrays.

    `dense` are matrices and norms that all data ranks hold, `outer` those of them in embedding, head and norms,
    `experts` the routed ones, which fewer ranks hold.
    """

    dense: Real
    experts: Real
    outer: Real

    @property
    def total(self) -> Real:
        """All of them."""
        return self.dense + self.experts


def holding(shape: ModelShape, layout: Layout, rank: int) -> Holding:
    """Return what this rank of the pipeline holds under the layout's schedule.

    ZB-V and DualPipeV fold the pipeline: the first rank has both ends. DualPipe runs it from both ends: each rank has a
    stage and its mirror image, so everything is held twice.
    """
    return _holding(shape, (layout.pp, layout.vpp, rank), layout.schedule, layout.split)


@lru_cache(maxsize=65_536)
def _holding(shape: ModelShape, sizes: tuple[int, int, int], schedule: str, split: tuple[int, ...] | None) -> Holding:
    pp, vpp, rank = sizes
    placement = find_schedule(schedule).placement(pp, vpp)
    stages = placement.model_stages
    mine = tuple(stage % stages for stage in placement.stages_of(rank))
    per_stage = split if split is not None else stage_layers(shape.layers, stages)
    layers = experts = 0
    for stage in mine:
        first = sum(per_stage[:stage])
        layers += per_stage[stage]
        experts += expert_layers_in(shape, first, first + per_stage[stage])
    return Holding(layers - experts, experts, mine.count(0), mine.count(stages - 1))


def peak_ranks(shape: ModelShape, layout: Layout) -> tuple[int, ...]:
    """Return the ranks among which the fullest is: of those that hold the same layers, the one with most in flight."""
    lines = find_schedule(layout.schedule).in_flight
    fullest: dict[tuple[Holding, bool], int] = {}
    for rank in range(layout.pp):
        held = holding(shape, layout, rank), rank == 0
        before = fullest.setdefault(held, rank)
        if lines(layout.pp, rank, layout.chunks) > lines(layout.pp, before, layout.chunks):
            fullest[held] = rank
    return tuple(fullest.values())


def padded_vocab(shape: ModelShape, layout: Layout, training: Training) -> Real:
    """Return the rows of the embedding as the framework lays it out.

    >>> from cordee.workload.load import load_shape
    >>> llama = load_shape("llama-3-70b")
    >>> padded_vocab(llama, Layout(tp=4), Training(8192, 8, framework="megatron")), llama.vocab
    (128512, 128256)
    """
    if training.framework == "torch":
        return shape.vocab
    multiple = VOCAB_MULTIPLE * layout.tp
    return -(-shape.vocab // multiple) * multiple


def rank_parameters(shape: ModelShape, layout: Layout, training: Training, rank: int) -> RankParameters:
    """Return one GPU's parameters of this rank: matrices are divided over tp, experts over ep*etp, norms are not."""
    held = holding(shape, layout, rank)
    dense: Real = 0
    experts: Real = 0
    norms: Real = 0
    for expert, count in ((False, held.dense_layers), (True, held.expert_layers)):
        if count:
            layer = layer_parameters(shape, layout, expert)
            dense = dense + count * layer.dense
            experts = experts + count * layer.experts
            norms = norms + count * layer.outer
    rows = _part(padded_vocab(shape, layout, training), layout.tp) * shape.hidden
    outer: Real = norms
    if held.embeddings:
        outer = outer + held.embeddings * (rows + shape.learned_positions * shape.hidden)
    if held.heads:
        # A tied head needs its own copy of the embedding when the two ends are on different ranks.
        copies = max(0, held.heads - held.embeddings) if shape.tied else held.heads
        outer = outer + copies * rows + held.heads * shape.norm_parameters
    return RankParameters(dense + outer - norms, experts, outer)


def layer_parameters(shape: ModelShape, layout: Layout, expert: bool) -> RankParameters:
    """Return one layer's parameters on one GPU; `outer` are its norms."""
    count, compressed = _layer_counts(shape, expert)
    tp = layout.tp
    attention = _part(count.attention - compressed, tp) + compressed
    if shape.latent is None:
        # Key and value heads are copied where there are fewer of them than ranks.
        copied = 2 * shape.hidden * shape.head_dim * (tp - shape.kv_heads) * (tp > shape.kv_heads)
        attention = _part(count.attention + copied, tp)
    dense = attention + _part(count.mlp, tp) + count.router + count.norms
    return RankParameters(dense, _part(count.experts, layout.ep * layout.expert_tp), count.norms)


class Linear(NamedTuple):
    """One matrix of a layer; those that read the same tensor name it alike.

    `stack`: of how many matrices a parameter is that is no linear module's: one tensor for all experts, or the router's
    (transformers 5). Neither bitsandbytes nor an adapter on modules takes it.
    """

    name: str
    inputs: int
    outputs: int
    reads: str
    stack: int = 0

    @property
    def elements(self) -> int:
        """Elements of all its matrices."""
        return self.inputs * self.outputs * max(1, self.stack)


@lru_cache(maxsize=256)
def layer_linears(shape: ModelShape, expert: bool = False) -> tuple[Linear, ...]:
    """Return the matrices of one layer, by `training.LINEARS`, `LATENT`, `STACKS` and `JOINED`.

    With `expert` of one whose MLP is a mixture of experts: shared ones are as the matrices of a dense MLP.
    """
    h, moe = shape.hidden, shape.experts if expert else None
    ffn = shape.ffn if moe is None else moe.shared_ffn
    widths = {"gate": ffn, "up": ffn} if shape.gated else {"up": ffn}
    found = _attention_linears(shape)
    if ffn:
        found += _reading("second norm", h, widths, "gate_up" if "gate_up" in shape.joined else None)
        found += (Linear("down", ffn, h, "product"),)
    if moe is not None:
        wide = (1 + shape.gated) * moe.ffn
        found += (
            Linear("router", h, moe.routed, "second norm", 1), Linear("experts", h, wide, "routed", moe.routed),
            Linear("experts", moe.ffn, h, "routed product", moe.routed),
        )  # fmt: skip
    return found


def _attention_linears(shape: ModelShape) -> tuple[Linear, ...]:
    h, latent = shape.hidden, shape.latent
    if latent is None:
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        heads = {"q": q, "k": kv, "v": kv}
        joined = "qkv" if "qkv" in shape.joined else None
        return (*_reading("first norm", h, heads, joined), Linear("o", q, h, "attention"))
    query = shape.heads * (latent.nope_dim + latent.rope_dim)
    queries: tuple[Linear, ...] = (Linear("q", h, query, "first norm"),)
    if latent.q_rank is not None:
        queries = Linear("q_a", h, latent.q_rank, "first norm"), Linear("q_b", latent.q_rank, query, "query norm")
    return (
        *queries, Linear("kv_a", h, latent.kv_rank + latent.rope_dim, "first norm"),
        Linear("kv_b", latent.kv_rank, shape.heads * (latent.nope_dim + latent.v_dim), "key norm"),
        Linear("o", shape.heads * latent.v_dim, h, "attention"),
    )  # fmt: skip


def _reading(reads: str, inputs: int, outputs: Mapping[str, int], joined: str | None) -> tuple[Linear, ...]:
    """Return the matrices that read one input: each by itself, or all of them as one of this name."""
    if joined is not None:
        return (Linear(joined, inputs, sum(outputs.values()), reads),)
    return tuple(Linear(name, inputs, size, reads) for name, size in outputs.items())


def adapter_targets(shape: ModelShape, adapters: Adapters, *, expert: bool = False) -> list[Linear]:
    """Return the matrices of a layer that have an adapter."""
    return [linear for linear in layer_linears(shape, expert) if linear.name in adapters.targets]


def adapter_parameters(shape: ModelShape, adapters: Adapters, *, expert: bool = False) -> int:
    """Return the parameters of one layer's adapters: rank x (inputs + outputs) of each target (arXiv:2106.09685).

    Of a stack for each of its matrices; with magnitudes one more for each output.
    """
    targets = adapter_targets(shape, adapters, expert=expert)
    lengths = adapters.magnitudes * sum(linear.outputs for linear in targets)
    return adapters.rank * sum(max(1, each.stack) * (each.inputs + each.outputs) for each in targets) + lengths


def all_adapter_parameters(shape: ModelShape, adapters: Adapters) -> int:
    """Return the parameters of the adapters of all layers."""
    return sum(count * adapter_parameters(shape, adapters, expert=expert) for expert, count in counted_kinds(shape))


def counted_kinds(shape: ModelShape) -> tuple[tuple[bool, int], ...]:
    """Return how many layers a model has without experts (False) and with them, of the kinds that it has."""
    kinds = (False, shape.layers - shape.expert_layers), (True, shape.expert_layers)
    return tuple((expert, count) for expert, count in kinds if count)


def quantised_saving_bytes(shape: ModelShape, adapters: Adapters, item: int, *, expert: bool = False) -> float:
    """Return the bytes by which one layer's frozen matrices are smaller than with `item` bytes an element.

    bitsandbytes quantises linear modules: stacks of experts stay as they are.
    """
    return sum(
        item * each.elements - adapters.base.matrix_bytes(each.inputs, each.outputs)
        for each in layer_linears(shape, expert) if not each.stack
    )  # fmt: skip


class LayerKinds(NamedTuple):
    """Layers of a model: trained ones, frozen ones that a backward pass goes through, and those before all trained."""

    trained: int
    passed: int
    skipped: int


def layer_kinds(shape: ModelShape, training: Training) -> LayerKinds:
    """Return how many layers are trained in full, and how many are frozen on either side of the first trained part."""
    frozen = training.tuning.frozen
    if frozen is None:
        return LayerKinds(shape.layers, 0, 0)
    skipped = frozen.without_gradient(shape.layers)
    return LayerKinds(shape.layers - len(frozen.layers), len(frozen.layers) - skipped, skipped)


def _frozen_parameters(shape: ModelShape, frozen: Frozen) -> RankParameters:
    """Return the parameters of frozen parts, all on one GPU; a tied head is frozen with the embeddings."""
    layer = layer_parameters(shape, Layout(), False)
    ends = frozen.embeddings * shape.parameter_count.embedding + frozen.head * shape.parameter_count.head
    return RankParameters(len(frozen.layers) * layer.dense + ends, 0, len(frozen.layers) * layer.outer + ends)


def trained_parameters(shape: ModelShape, layout: Layout, training: Training, rank: int) -> RankParameters:
    """Return the parameters of this rank that have gradients and moments: all that is not frozen, or only adapters."""
    if training.adapters is None:
        whole, frozen = rank_parameters(shape, layout, training, rank), training.tuning.frozen
        if frozen is None:
            return whole
        less = _frozen_parameters(shape, frozen)
        return RankParameters(whole.dense - less.dense, whole.experts, whole.outer - less.outer)
    held = holding(shape, layout, rank)
    each = [adapter_parameters(shape, training.adapters, expert=expert) for expert in (False, True)]
    return RankParameters(held.dense_layers * each[0] + held.expert_layers * each[1], 0, 0)


def frozen_bytes(shape: ModelShape, layout: Layout, training: Training, rank: int) -> Real:
    """Return the bytes of this rank's frozen weights before ZeRO: 16-bit ones, and matrices in the base's bits."""
    if training.adapters is None:
        frozen = training.tuning.frozen
        return 0.0 if frozen is None else training.activation_bytes * _frozen_parameters(shape, frozen).dense
    item, base = training.activation_bytes, training.adapters.base
    whole, held = item * rank_parameters(shape, layout, training, rank).total, holding(shape, layout, rank)
    head = base.head * held.heads * (item * shape.vocab * shape.hidden - base.matrix_bytes(shape.hidden, shape.vocab))
    wide = widens(layout, training) * (4 - item) * rank_parameters(shape, layout, training, rank).outer
    saved = [quantised_saving_bytes(shape, training.adapters, item, expert=expert) for expert in (False, True)]
    return whole + wide - held.dense_layers * saved[0] - held.expert_layers * saved[1] - head


def widens(layout: Layout, training: Training) -> Real:
    """Return 1 where embeddings, head, norms and hidden states are fp32 over a quantised base, else 0."""
    adapters = training.adapters
    return (adapters is not None and adapters.widened) * (layout.zero < 2)


def reference_bytes(shape: ModelShape, layout: Layout, training: Training, rank: int) -> Real:
    """Return the bytes of this rank's frozen copy of the model that a stage compares with, before ZeRO; 0 without one.

    It is as the base under adapters is, or in 16 bits.
    """
    stage = training.tuning.stage
    if stage is None or not stage.has_copy:
        return 0.0
    if training.adapters is not None:
        return frozen_bytes(shape, layout, training, rank)
    return training.activation_bytes * rank_parameters(shape, layout, training, rank).total


def flop_per_token(shape: ModelShape, training: Training) -> float:
    """Return the FLOPs of a token in training, without recomputation.

    A frozen matrix has no gradient of its own: its forward product and that of its input's gradient are two of three.
    Layers before all that is trained have the forward pass only.
    """
    whole = shape.train_flop_per_token(training.attended_tokens)
    frozen = training.tuning.frozen
    if frozen is not None:
        layer, kinds = layer_parameters(shape, Layout(), False), layer_kinds(shape, training)
        products = 2 * float(layer.dense - layer.outer)
        forward = products + shape.attention_flop_per_token(training.attended_tokens)
        head = 2 * frozen.head * shape.vocab * shape.hidden
        return whole - kinds.passed * products - kinds.skipped * 2 * forward - head
    if training.adapters is None:
        return whole
    frozen_matrices = shape.matmul_parameters
    if "experts" in training.adapters.targets and shape.experts is not None:  # whose stacks have a gradient as a whole
        frozen_matrices -= shape.parameter_count.experts * shape.experts.per_token // shape.experts.routed
    modules = replace(training.adapters, targets=tuple(set(training.adapters.targets) - set(STACKS)))
    return whole - 2 * frozen_matrices + 6 * all_adapter_parameters(shape, modules)


@lru_cache(maxsize=1024)
def _layer_counts(shape: ModelShape, expert: bool) -> tuple[ParameterCount, int]:
    """Return a layer's parameters, and those of latent attention's compressing matrices, which tp copies."""
    index = next(i for i in range(shape.layers) if shape.is_expert_layer(i) == expert)
    latent = shape.latent
    compressed = 0
    if latent is not None:
        compressed = shape.hidden * ((latent.q_rank or 0) + latent.kv_rank + latent.rope_dim)
    return shape.layer(index), compressed


def stage_parameters(shape: ModelShape, layout: Layout, stage: int, layers: range) -> Real:
    """Return the parameters of one GPU of a plain pipeline's stage with these layers, before ZeRO, not padded."""
    experts = expert_layers_in(shape, layers.start, layers.stop)
    total: Real = 0
    for expert, count in ((True, experts), (False, len(layers) - experts)):
        if count:
            total = total + count * layer_parameters(shape, layout, expert).total
    rows = _part(shape.vocab, layout.tp) * shape.hidden
    if stage == 0:
        total = total + rows + shape.learned_positions * shape.hidden
    if stage == layout.pp - 1:
        own = layout.pp > 1 if shape.tied else True
        total = total + own * rows + shape.norm_parameters
    return total


def _part(amount: Real, ranks: Real) -> Real:
    return -(-amount // ranks)
