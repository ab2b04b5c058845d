"""Segments that torch reserves for a step of FSDP2 or of one GPU: its allocations in order, by the allocator's rules.

The order is that of torchtitan's Llama, as a trace of it shows (`train/trace_memory`): what a layer makes, keeps and
frees, FSDP2's buffers on streams of their own, the loss. Dense layers with grouped-query attention alone.
"""

from dataclasses import dataclass, field, replace

from cordee.plan import activations as act
from cordee.plan.allocator import CachingAllocator
from cordee.plan.buffers import vocabulary_bytes
from cordee.plan.layout import Layout
from cordee.plan.memory import RankMemory, StageMemory
from cordee.plan.states import layer_linears
from cordee.plan.training import Training
from cordee.workload.model import ModelShape

_GATHER, _REDUCE = 1, 2  # FSDP2's streams


def with_replay(memory: RankMemory, shape: ModelShape, layout: Layout, training: Training) -> RankMemory:
    """Return the memory of a rank with the segments that a replay keeps where there is room; as it was elsewhere."""
    plain = training.framework == "torch" and layout.pp == 1 and training.adapters is None and training.flash
    if not plain or shape.latent or shape.experts or not shape.gated or training.tuning.frozen:
        return memory
    if training.loss_kind not in ("eager", "compiled") or not (layout.zero == 3 or layout.gpus == 1):
        return memory
    return replace(memory, stages=tuple(_replayed(stage, shape, layout, training) for stage in memory.stages))


def _replayed(stage: StageMemory, shape: ModelShape, layout: Layout, training: Training) -> StageMemory:
    allocator = CachingAllocator()
    _Step(allocator, _Sizes.of(shape, layout, training), shape.layers, layout.recompute).run()
    beyond = allocator.reserved_bytes_peak - allocator.allocated_bytes_peak
    return replace(stage, cached_bytes=max(0, beyond - stage.fragmentation_bytes))


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

    @classmethod
    def of(cls, shape: ModelShape, layout: Layout, training: Training) -> "_Sizes":
        tokens = float(act.rank_tokens(layout, training))
        each = training.activation_bytes * tokens / layout.tp
        matrices = tuple(
            round(training.activation_bytes * linear.inputs * linear.outputs / layout.tp)
            for linear in layer_linears(replace(shape, joined=()))
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
        )


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
        wholes = [sizes.vocab, *(sum(sizes.matrices),) * self.layers, sizes.vocab]
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
        self.drop(f"{name} buffer", *(f"{name} {index}" for index in range(len(self.sizes.matrices))))

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
            self.gather(f"layer {layer}", self.sizes.matrices)
            self.drop(f"layer {layer - 1} buffer")
            self.layer(layer, keep=self.recompute)
            self.make(f"input {layer + 1}", self.sizes.hidden)
            self.drop("down")
            self.gathered(f"layer {layer}")
            if self.sizes.shards > 1:
                self.make(f"layer {layer} buffer", sum(self.sizes.matrices), _GATHER)

    def layer(self, layer: int, *, keep: str) -> None:
        """One layer forward; `keep` is the recomputation that it is for."""
        sizes = self.sizes
        self.make(f"norm {layer}", sizes.hidden)
        self.make("raw query", sizes.query)
        self.make("raw key", sizes.key)
        self.make(f"value {layer}", sizes.key)
        for name, size in (("query", sizes.query), ("key", sizes.key)):
            if not sizes.is_fused:
                self.make("wide", 2 * size)
                self.make("turned", 2 * size)
            self.make(f"{name} {layer}", size)
            self.drop("wide", "turned")
        self.drop("raw key", "raw query")
        self.make(f"attended {layer}", sizes.query)
        self.make(f"statistics {layer}", sizes.statistics)
        self.make("out", sizes.hidden)
        self.make(f"middle {layer}", sizes.hidden)
        self.drop("out")
        self.make(f"second norm {layer}", sizes.hidden)
        self.make(f"gate {layer}", sizes.inner)
        if not sizes.is_fused:
            self.make(f"active {layer}", sizes.inner)
        self.make(f"up {layer}", sizes.inner)
        self.make(f"product {layer}", sizes.inner)
        self.make("down", sizes.hidden)
        kept = {
            "none": _MADE,
            "selective": ("query", "value", "attended", "statistics", "gate", "second norm"),
            "full": (),
        }[keep]
        self.drop(*(f"{name} {layer}" for name in _MADE if name not in kept))

    def loss(self) -> None:
        """The head, the loss and the head's backward pass."""
        sizes = self.sizes
        wide = 2 * sizes.logits
        self.gather("head", (sizes.vocab,))
        self.make("normed", sizes.hidden)
        self.make("logits", sizes.logits)
        self.drop("head buffer", f"layer {self.layers - 1} buffer")
        if sizes.is_compiled:
            self.make("slope", sizes.logits)
            self.drop("logits")
        else:
            self.make("fp32 logits", wide)
            self.drop("logits")
            self.make("log probabilities", wide)
            self.drop("fp32 logits")
            self.make("one-hot", wide)
            if sizes.is_divided:
                self.make("exponentials", wide)
            self.make("wide slope", wide)
            self.drop("one-hot", "exponentials", "log probabilities")
            self.make("slope", sizes.logits)
            self.drop("wide slope")
        self.make("head weight slope", sizes.vocab)
        self.make("hidden slope", sizes.hidden)
        self.drop("slope", "normed")
        self.make(f"slope {self.layers}", sizes.hidden)
        self.drop("hidden slope", f"input {self.layers}", "head 0")
        self.reduce("head", (sizes.vocab,))
        self.drop("head weight slope")

    def backward(self) -> None:
        """The layers and the embedding, and the optimizer, after which no gradient is left."""
        sizes = self.sizes
        self.gather(f"layer {self.layers - 1}", sizes.matrices)
        for layer in reversed(range(self.layers)):
            self.drop(f"layer {layer} buffer")
            if layer:
                self.make(f"layer {layer - 1} ahead", sum(sizes.matrices), _GATHER)
            if self.recompute != "none":
                self.drop(*(f"{name} {layer}" for name in _MADE))
                self.layer(layer, keep="none")
                self.drop("down")
            self.layer_backward(layer)
            self.gathered(f"layer {layer}")
            self.reduce(f"layer {layer}", sizes.matrices)
            self.drop(*(f"weight slope {index}" for index in range(len(sizes.matrices))), f"input {layer}")
            if layer:
                for index, size in enumerate(sizes.matrices if sizes.shards > 1 else ()):
                    self.make(f"layer {layer - 1} {index}", size)
                self.drop(f"layer {layer - 1} ahead")
        self.make("rows", sizes.vocab)
        self.drop("slope 0")
        self.reduce("embedding", (sizes.vocab,))
        self.drop("rows", "reduced", *[name for name in self.held if name.startswith("gradient")])

    def layer_backward(self, layer: int) -> None:
        """One layer backward: its MLP, then its attention."""
        sizes = self.sizes
        q, k, v, o, gate, up, down = range(7)
        self._weight(down)
        self.make("dproduct", sizes.inner)
        self.drop(f"product {layer}")
        self.make("dactive", sizes.inner)
        self.make("dup", sizes.inner)
        self.drop("dproduct", f"up {layer}", f"active {layer}")
        self._weight(up)
        self.make("one", sizes.hidden)
        self.drop("dup")
        self.make("dgate", sizes.inner)
        self.drop("dactive", f"gate {layer}")
        self._weight(gate)
        self.make("two", sizes.hidden)
        self.drop("dgate", f"second norm {layer}")
        self.make("three", sizes.hidden)
        self.drop("one", "two", f"middle {layer}", f"slope {layer + 1}")
        self._weight(o)
        self.make("dattended", sizes.query)
        self.make("sums", 2 * sizes.query)
        self.make("expanded keys", sizes.query)
        self.make("expanded values", sizes.query)
        self.make("dquery", sizes.query)
        self.make("dkey", sizes.key)
        self.make("dvalue", sizes.key)
        self.drop("dattended", "sums", "expanded keys", "expanded values")
        self.drop(*(f"{name} {layer}" for name in ("query", "key", "value", "attended", "statistics")))
        for name, matrix in (("dvalue", v), ("dkey", k), ("dquery", q)):
            self._weight(matrix)
            self.make(f"from {name}", sizes.hidden)
            self.drop(name)
        self.make(f"slope {layer}", sizes.hidden)
        self.drop("from dvalue", "from dkey", "from dquery", "three", f"norm {layer}")

    def _weight(self, index: int) -> None:
        self.make(f"weight slope {index}", self.sizes.matrices[index])


_MADE = (
    "norm", "query", "key", "value", "attended", "statistics", "middle", "second norm", "gate", "active", "up",
    "product",
)  # fmt: skip
