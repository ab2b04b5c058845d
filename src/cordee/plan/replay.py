"""Segments that torch reserves for a step of FSDP2 or of one GPU: its allocations in order, by the allocator's rules.

The order is that of torchtitan's Llama, as a trace of it shows (`train/trace_memory`): what a layer makes, keeps and
frees, FSDP2's buffers on streams of their own, the loss. Dense layers with grouped-query attention alone; adapters
where layers are recomputed, so that they keep nothing of their own.
"""

from dataclasses import dataclass, field, replace

from cordee.plan import activations as act
from cordee.plan.allocator import CachingAllocator
from cordee.plan.buffers import vocabulary_bytes
from cordee.plan.layout import Layout
from cordee.plan.memory import RankMemory, StageMemory
from cordee.plan.states import adapter_parameters, layer_linears
from cordee.plan.training import JOINED, Adapters, Training
from cordee.workload.model import ModelShape

_GATHER, _REDUCE = 1, 2  # FSDP2's streams


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
    _Step(allocator, _Sizes.of(shape, layout, training), shape.layers, layout.recompute).run()
    return allocator


def _with_segments(stage: StageMemory, shape: ModelShape, layout: Layout, training: Training) -> StageMemory:
    allocator = replayed(shape, layout, training)
    beyond = allocator.reserved_bytes_peak - allocator.allocated_bytes_peak
    return replace(stage, cached_bytes=max(0, beyond - stage.fragmentation_bytes))


@dataclass(frozen=True, slots=True)
class _Low:
    """Bytes of adapters in 16 bits: all of a layer, each one's tensor of its rank, frozen matrices made 16-bit again.

    `low` is 0 for a matrix without an adapter, `unpacked` for one that is not packed.
    """

    layer: int
    low: tuple[int, ...]
    unpacked: tuple[int, ...]

    @classmethod
    def of(cls, shape: ModelShape, tokens: float, adapters: Adapters, item: int) -> "_Low":
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
class _Sizes:
    """Bytes of one tensor each, on one GPU."""

    hidden: int
    query: int
    key: int
    inner: int
    statistics: int
    logits: int
    matrices: tuple[int, ...]
    vocab: int
    shards: int
    is_divided: bool
    is_compiled: bool
    is_fused: bool
    is_within: bool
    low: _Low | None

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout, training: Training) -> "_Sizes":
        tokens = float(act.rank_tokens(layout, training))
        each = training.activation_bytes * tokens / layout.tp
        item, adapters, linears = training.activation_bytes, training.adapters, layer_linears(replace(shape, joined=()))
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
            logits=round(float(act.output_bytes(shape, layout, training))),
            matrices=matrices,
            vocab=round(float(vocabulary_bytes(shape, layout, training))),
            shards=layout.shard_ranks if layout.zero == 3 else 1,
            is_divided=layout.tp > 1,
            is_compiled=training.loss_kind == "compiled",
            is_fused=training.is_fused,
            is_within=training.tuning.loss_within,
            low=None if adapters is None else _Low.of(shape, tokens, adapters, item),
        )

    @property
    def group(self) -> tuple[int, ...]:
        """Bytes that FSDP2 gathers of a layer."""
        return self.matrices if self.low is None else (*self.matrices, self.low.layer)

    @property
    def trained(self) -> tuple[int, ...]:
        """Bytes of a layer that have gradients."""
        return self.matrices if self.low is None else (self.low.layer,)

    def of_product(self, index: int) -> tuple[int, int]:
        """Bytes of the input and the output of a layer's product."""
        hidden, query, key, inner = self.hidden, self.query, self.key, self.inner
        return ((hidden, query), (hidden, key), (hidden, key), (query, hidden), (hidden, inner), (hidden, inner),
                (inner, hidden))[index]  # fmt: skip


@dataclass(slots=True)
class _Step:
    """Runs the step twice: the second one finds the segments of the first."""

    allocator: CachingAllocator
    sizes: _Sizes
    layers: int
    recompute: str
    held: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def run(self) -> None:
        """Allocate and free as two steps do."""
        sizes = self.sizes
        wholes = [sizes.vocab, *(sum(sizes.trained),) * self.layers, sizes.vocab]
        if sizes.low is not None:
            for index in range(self.layers + 2):
                frozen = sum(sizes.matrices) if 0 < index <= self.layers else sizes.vocab
                self.make(f"frozen {index}", frozen // sizes.shards)
            wholes = wholes[1:-1]
        for index, whole in enumerate(wholes):
            for state in ("weights", "first", "second"):
                self.make(f"{state} {index}", 2 * whole // sizes.shards)
        self.make("workspace", act.WORKSPACE_BYTES)
        for _ in range(2):
            self.forward()
            self.loss()
            self.backward()

    def make(self, name: str, size: int, stream: int = 0) -> None:
        """Allocate a tensor; of that name there is none."""
        self.count += 1
        self.held[name] = self.count
        self.allocator.allocate(self.count, size, stream)

    def drop(self, *names: str) -> None:
        """Free tensors, those that are there."""
        for name in names:
            if name in self.held:
                self.allocator.free(self.held.pop(name))

    def gather(self, name: str, matrices: tuple[int, ...]) -> None:
        """Gather a group's weights into one buffer, and copy them out of it."""
        if self.sizes.shards == 1:
            return
        self.make(f"{name} buffer", sum(matrices), _GATHER)
        for index, size in enumerate(matrices):
            self.make(f"{name} {index}", size)

    def gathered(self, name: str) -> None:
        """Free what was gathered."""
        self.drop(f"{name} buffer", *(f"{name} {index}" for index in range(len(self.sizes.group))))

    def reduce(self, name: str, matrices: tuple[int, ...]) -> None:
        """Reduce a group's gradients: into a buffer in fp32 that stays until the next one, and out of it a shard."""
        whole = 2 * sum(matrices)
        self.drop("reduced")
        if self.sizes.shards > 1:
            self.make("reduced", whole)
        self.make(f"gradient {name}", whole // self.sizes.shards, _REDUCE if self.sizes.shards > 1 else 0)

    def forward(self) -> None:
        """The embedding and the layers."""
        self.gather("embedding", (self.sizes.vocab,))
        self.make("input 0", self.sizes.hidden)
        self.gathered("embedding")
        for layer in range(self.layers):
            self.gather(f"layer {layer}", self.sizes.group)
            self.drop(f"layer {layer - 1} buffer")
            self.layer(layer, keep=self.recompute)
            self.make(f"input {layer + 1}", self.sizes.hidden)
            self.drop("down")
            self.gathered(f"layer {layer}")
            if self.sizes.shards > 1:
                self.make(f"layer {layer} buffer", sum(self.sizes.group), _GATHER)

    def layer(self, layer: int, *, keep: str) -> None:
        """One layer forward; `keep` is the recomputation that it is for."""
        sizes = self.sizes
        self.make(f"norm {layer}", sizes.hidden)
        q, k, v, o, gate, up, down = range(7)
        self.product(q, "raw query")
        self.product(k, "raw key")
        self.product(v, f"value {layer}")
        for name, size in (("query", sizes.query), ("key", sizes.key)):
            if not sizes.is_fused:
                self.make("wide", 2 * size)
                self.make("turned", 2 * size)
            self.make(f"{name} {layer}", size)
            self.drop("wide", "turned")
        self.drop("raw key", "raw query")
        self.make(f"attended {layer}", sizes.query)
        self.make(f"statistics {layer}", sizes.statistics)
        self.product(o, "out")
        self.make(f"middle {layer}", sizes.hidden)
        self.drop("out")
        self.make(f"second norm {layer}", sizes.hidden)
        self.product(gate, f"gate {layer}")
        if not sizes.is_fused:
            self.make(f"active {layer}", sizes.inner)
        self.product(up, f"up {layer}")
        self.make(f"product {layer}", sizes.inner)
        self.product(down, "down")
        kept = {
            "none": _MADE,
            "selective": ("query", "value", "attended", "statistics", "gate", "second norm"),
            "full": (),
        }[keep]
        self.drop(*(f"{name} {layer}" for name in _MADE if name not in kept))

    def product(self, index: int, name: str) -> None:
        """One product forward, with its adapter: the frozen one's result, the adapter's, that scaled, and the sum."""
        low, (_, output) = self.sizes.low, self.sizes.of_product(index)
        unpacked, adapted = (0, 0) if low is None else (low.unpacked[index], low.low[index])
        if unpacked:
            self.make("unpacked", unpacked)
        if not adapted:
            self.make(name, output)
            self.drop("unpacked")
            return
        self.make("frozen result", output)
        self.drop("unpacked")
        self.make(f"low {index}", adapted)
        self.make("unscaled", output)
        self.make("scaled", output)
        self.drop("unscaled")
        self.make(name, output)
        self.drop("frozen result", "scaled")

    def product_backward(self, index: int, name: str) -> None:
        """The gradients of one product: of its weight, or of its adapter, and of its input."""
        low, (taken, output) = self.sizes.low, self.sizes.of_product(index)
        if low is None:
            self.make(f"weight slope {index}", self.sizes.matrices[index])
            self.make(name, taken)
            return
        if low.low[index]:
            self.make("scaled", output)
            self.make("low slope", low.low[index])
            self.make("through low", taken)
            self.drop("low slope", "scaled", f"low {index}")
        if low.unpacked[index]:
            self.make("unpacked", low.unpacked[index])
        self.make("through frozen", taken)
        self.drop("unpacked")
        self.make(name, taken)
        self.drop("through low", "through frozen")

    def loss(self) -> None:
        """The head, the loss and the head's backward pass."""
        sizes = self.sizes
        wide = 2 * sizes.logits
        self.gather("head", (sizes.vocab,))
        self.make("normed", sizes.hidden)
        self.make("logits", sizes.logits)
        self.drop(*(() if sizes.is_within else ("head buffer",)), f"layer {self.layers - 1} buffer")
        if sizes.is_compiled:
            self.make("slope", sizes.logits)
            self.drop("logits")
        else:
            self.make("fp32 logits", wide)
            self.drop(*(() if sizes.is_within else ("logits",)))
            self.make("log probabilities", wide)
            self.drop("fp32 logits", "logits", "head buffer")
            self.make("one-hot", wide)
            if sizes.is_divided:
                self.make("exponentials", wide)
            self.make("wide slope", wide)
            self.drop("one-hot", "exponentials", "log probabilities")
            self.make("slope", sizes.logits)
            self.drop("wide slope")
        if sizes.low is None:
            self.make("head weight slope", sizes.vocab)
        self.make("hidden slope", sizes.hidden)
        self.drop("slope", "normed")
        self.make(f"slope {self.layers}", sizes.hidden)
        self.drop("hidden slope", f"input {self.layers}", "head 0", "head buffer")
        if sizes.low is None:
            self.reduce("head", (sizes.vocab,))
        self.drop("head weight slope")

    def backward(self) -> None:
        """The layers and the embedding, and the optimizer, after which no gradient is left."""
        sizes = self.sizes
        self.gather(f"layer {self.layers - 1}", sizes.group)
        for layer in reversed(range(self.layers)):
            self.drop(f"layer {layer} buffer")
            if sizes.shards > 1:
                ahead = sum(sizes.group) if layer else sizes.vocab
                self.make(f"layer {layer - 1} ahead", ahead, _GATHER)
            if self.recompute != "none":
                self.drop(*(f"{name} {layer}" for name in _MADE))
                self.layer(layer, keep="none")
                self.drop("down")
            self.layer_backward(layer)
            self.gathered(f"layer {layer}")
            self.reduce(f"layer {layer}", sizes.trained)
            self.drop(*(f"weight slope {index}" for index in range(len(sizes.matrices))), f"input {layer}")
            if layer:
                for index, size in enumerate(sizes.group if sizes.shards > 1 else ()):
                    self.make(f"layer {layer - 1} {index}", size)
                self.drop(f"layer {layer - 1} ahead")
        if sizes.shards > 1:
            self.make("embedding 0", sizes.vocab)
        self.drop("layer -1 ahead")
        if sizes.low is None:
            self.make("rows", sizes.vocab)
            self.reduce("embedding", (sizes.vocab,))
        self.drop("slope 0", "embedding 0")
        self.drop("rows", "reduced", *[name for name in self.held if name.startswith("gradient")])

    def layer_backward(self, layer: int) -> None:
        """One layer backward: its MLP, then its attention."""
        sizes = self.sizes
        q, k, v, o, gate, up, down = range(7)
        self.product_backward(down, "dproduct")
        self.drop(f"product {layer}")
        self.make("dactive", sizes.inner)
        self.make("dup", sizes.inner)
        self.drop("dproduct", f"up {layer}", f"active {layer}")
        self.product_backward(up, "one")
        self.drop("dup")
        self.make("dgate", sizes.inner)
        self.drop("dactive", f"gate {layer}")
        self.product_backward(gate, "two")
        self.drop("dgate", f"second norm {layer}")
        self.make("three", sizes.hidden)
        self.drop("one", "two", f"middle {layer}", f"slope {layer + 1}")
        self.product_backward(o, "dattended")
        self.make("sums", 2 * sizes.query)
        self.make("expanded keys", sizes.query)
        self.make("expanded values", sizes.query)
        self.make("dquery", sizes.query)
        self.make("dkey", sizes.key)
        self.make("dvalue", sizes.key)
        self.drop("dattended", "sums", "expanded keys", "expanded values")
        self.drop(*(f"{name} {layer}" for name in ("query", "key", "value", "attended", "statistics")))
        for name, matrix in (("dvalue", v), ("dkey", k), ("dquery", q)):
            self.product_backward(matrix, f"from {name}")
            self.drop(name)
        self.make(f"slope {layer}", sizes.hidden)
        self.drop("from dvalue", "from dkey", "from dquery", "three", f"norm {layer}")


_MADE = (
    "norm", "query", "key", "value", "attended", "statistics", "middle", "second norm", "gate", "active", "up",
    "product",
)  # fmt: skip
