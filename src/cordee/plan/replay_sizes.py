"""Sizes of the tensors of a step of a dense decoder on one GPU, and what its code is like, for a replay of them."""

from dataclasses import dataclass, replace

from cordee.plan import activations as act
from cordee.plan.buffers import vocabulary_bytes
from cordee.plan.layout import Layout
from cordee.plan.loss import output_bytes
from cordee.plan.states import adapter_parameters, layer_linears, layer_parameters
from cordee.plan.training import JOINED, Adapters, Training
from cordee.workload.model import ModelShape


@dataclass(frozen=True, slots=True)
class LowRank:
    """Bytes of adapters in 16 bits: all of a layer, each one's tensor of its rank, frozen matrices made 16-bit again.

    `low` is 0 for a matrix without an adapter, `unpacked` for one that is not packed.
    """

    layer: int
    low: tuple[int, ...]
    unpacked: tuple[int, ...]

    @classmethod
    def of(cls, shape: ModelShape, tokens: float, adapters: Adapters, item: int) -> "LowRank":
        linears, base = layer_linears(replace(shape, joined=())), adapters.base
        targets = {part for name in adapters.targets for part in JOINED.get(name, (name,))}
        return cls(
            layer=item * adapter_parameters(shape, adapters),
            low=tuple(round(item * tokens * adapters.rank) * (linear.name in targets) for linear in linears),
            unpacked=tuple(
                item * base.copies * linear.inputs * linear.outputs * (base.bits < 16) for linear in linears
            ),
        )


@dataclass(frozen=True, slots=True)
class StepCode:
    """Properties of the code of a step.

    They are a loss over divided logits, compiled, or within the forward pass; small operations that are one kernel;
    norms and rotations of many kernels, as transformers writes them; one matrix for embedding and head; FSDP2 that
    shards again after the backward pass only (ZeRO-2).
    """

    is_divided: bool
    is_compiled: bool
    is_fused: bool
    is_within: bool
    is_composite: bool
    is_tied: bool
    stays_gathered: bool


@dataclass(frozen=True, slots=True)
class TensorSizes:
    """Bytes of one tensor each, on one GPU."""

    hidden: int
    query: int
    key: int
    inner: int
    statistics: int
    logits: int
    matrices: tuple[int, ...]
    vocab: int
    norm: int
    small: int
    shards: int
    code: "StepCode"
    low: LowRank | None

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout, training: Training) -> "TensorSizes":
        tokens = float(act.rank_tokens(layout, training))
        each = training.activation_bytes * tokens / layout.tp
        item, adapters, linears = training.activation_bytes, training.adapters, layer_linears(replace(shape, joined=()))
        elements = [linear.inputs * linear.outputs for linear in linears]
        packed = None if adapters is None or adapters.base.bits == 16 else adapters.base
        matrices = tuple(
            round(item * linear.inputs * linear.outputs / layout.tp)
            if packed is None
            else round(packed.matrix_bytes(linear.inputs, linear.outputs))
            for linear in linears
        )
        return cls(
            hidden=round(float(act.boundary_bytes(shape, layout, training))),
            query=round(each * shape.heads * shape.head_dim),
            key=round(each * shape.kv_heads * shape.head_dim),
            inner=round(each * shape.ffn),
            statistics=round(4 * tokens * shape.heads / layout.tp),
            logits=round(float(output_bytes(shape, layout, training))),
            matrices=matrices,
            vocab=round(float(vocabulary_bytes(shape, layout, training))),
            norm=item * shape.norm_parameters,
            small=round(item * float(layer_parameters(shape, layout, False).total - sum(elements) / layout.tp)),
            shards=layout.shard_ranks if layout.zero >= 2 else 1,
            code=StepCode(
                is_divided=layout.tp > 1,
                is_compiled=training.loss_kind == "compiled",
                is_fused=training.is_fused,
                is_within=training.tuning.loss_within,
                is_composite=training.tuning.composite_norms or (adapters is not None and not training.is_fused),
                is_tied=shape.tied,
                stays_gathered=layout.zero == 2,
            ),
            low=None if adapters is None else LowRank.of(shape, tokens, adapters, item),
        )

    @property
    def group(self) -> tuple[int, ...]:
        """Bytes that FSDP2 gathers of a layer."""
        return self.matrices if self.low is None else (*self.matrices, self.low.layer)

    @property
    def of_layer(self) -> int:
        """Bytes of a layer's buffer, with its norms and biases."""
        return sum(self.group) + self.small

    @property
    def of_embedding(self) -> int:
        """Bytes of the buffer of the embedding, which has the last norm where it is the head."""
        return self.vocab + self.code.is_tied * self.norm

    @property
    def of_head(self) -> int:
        """Bytes of the buffer of the head and the last norm."""
        return self.vocab + self.norm

    def of_product(self, index: int) -> tuple[int, int]:
        """Bytes of the input and the output of a layer's product."""
        hidden, query, key, inner = self.hidden, self.query, self.key, self.inner
        return ((hidden, query), (hidden, key), (hidden, key), (query, hidden), (hidden, inner), (hidden, inner),
                (inner, hidden))[index]  # fmt: skip
