"""A step's tensors, one by one, in the order in which torchtitan's Llama or transformers' makes and frees them.

The orders are those that traces show (`train/trace_memory`): what a layer makes, keeps and frees, FSDP2's buffers on
streams of their own, the loss, the optimizer's states.
"""

from dataclasses import dataclass, field

from cordee.plan import activations as act
from cordee.plan.allocator import CachingAllocator
from cordee.plan.replay_sizes import TensorSizes

_GATHER, _REDUCE = 1, 2  # FSDP2's streams


@dataclass(slots=True)
class ReplayedStep:
    """Runs the step twice: the second one finds the segments of the first."""

    allocator: CachingAllocator
    sizes: TensorSizes
    layers: int
    recompute: str
    micro_batches: int = 1
    held: dict[str, int] = field(default_factory=dict)
    count: int = 0

    def run(self) -> None:
        """Allocate and free as two steps do."""
        sizes, low = self.sizes, self.sizes.low
        ends = [(sizes.vocab,)] if sizes.code.is_tied else [(sizes.vocab,)] * 2
        groups = [ends[0], *(sizes.matrices,) * self.layers, *ends[1:]]
        if low is not None:
            for index, whole in enumerate(each for group in groups for each in group):
                self.make(f"frozen {index}", whole // sizes.shards)
            groups = [(low.layer,)] * self.layers
        for index, whole in enumerate(each for group in groups for each in group):
            for state in ("weights", "first", "second"):
                self.make(f"{state} {index}", 2 * whole // sizes.shards)
        self.make("workspace", act.WORKSPACE_BYTES)
        for _ in range(2):
            self.step()

    def step(self) -> None:
        """Pass as many micro-batches as there are kinds of: the first one, and one that adds to its gradients."""
        for _ in range(min(2, self.micro_batches)):
            self.forward()
            self.loss()
            self.backward()
        self.drop(*[name for name in self.held if name.startswith("gradient")])

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

    def gather(self, name: str, whole: int) -> None:
        """Gather a group's weights into one buffer; fp32 shards are made 16-bit first."""
        if self.sizes.shards == 1:
            return
        if self.sizes.low is None:
            self.make("shard", whole // self.sizes.shards, _GATHER)
        self.make(f"{name} buffer", whole, _GATHER)
        self.drop("shard")

    def copy_out(self, name: str, matrices: tuple[int, ...]) -> None:
        """Copy gathered weights out of their buffer."""
        for index, size in enumerate(matrices if self.sizes.shards > 1 else ()):
            self.make(f"{name} {index}", size)

    def release(self, name: str) -> None:
        """Free what was copied out."""
        self.drop(*(f"{name} {index}" for index in range(len(self.sizes.group))))

    def reduce(self, name: str, whole: int, *slopes: str) -> None:
        """Reduce a group's gradients: in an fp32 buffer that stays until the next one, and out of it a shard."""
        whole, shards = 2 * whole, self.sizes.shards
        self.drop("reduced")
        if shards > 1:
            self.make("reduced", whole)
            self.drop(*slopes[1:])  # the first one goes when all are reduced
        is_first = f"gradient {name}" not in self.held
        self.make(f"gradient {name}" if is_first else "added", whole // shards, _REDUCE if shards > 1 else 0)
        self.drop("added", *slopes)

    def forward(self) -> None:
        """The embedding and the layers; a layer's buffer goes when the next layer's is copied out."""
        self.gather("embedding", self.sizes.of_embedding)
        self.copy_out("embedding", (self.sizes.vocab,))
        self.make("input 0", self.sizes.hidden)
        if not (self.sizes.code.is_tied or self.sizes.code.stays_gathered):
            self.drop("embedding 0")
        for layer in range(self.layers):
            self.gather(f"layer {layer}", self.sizes.of_layer)
            self.copy_out(f"layer {layer}", self.sizes.group)
            self.drop("embedding buffer", f"layer {layer - 1} buffer")
            self.layer(layer, keep=self.recompute)
            if not self.sizes.code.stays_gathered:
                self.release(f"layer {layer}")
            if self.sizes.code.is_composite and self.recompute == "none" and layer:
                self.drop(f"input {layer}")  # its norm keeps it in fp32; the first one is the model's own

    def layer(self, layer: int, *, keep: str) -> None:
        """One layer forward; `keep` is the recomputation that it is for."""
        is_all, is_half = keep == "none", keep == "selective"
        self.attention(layer, keep)
        self.norm(f"second norm {layer}", kept=is_all)
        gate, up, down = 4, 5, 6
        self.product(gate, f"gate {layer}", layer)
        self.activate(layer)
        if not (is_all or is_half):
            self.drop(f"gate {layer}")
        self.product(up, f"up {layer}", layer)
        self.make(f"product {layer}", self.sizes.inner)
        if not is_all:
            self.drop(f"active {layer}", f"up {layer}")
        self.product(down, f"down {layer}", layer)
        if not is_all:
            self.drop(f"product {layer}", f"second norm {layer}")
        self.make(f"input {layer + 1}", self.sizes.hidden)
        self.drop(*(() if is_half and not self.sizes.code.is_fused else (f"down {layer}",)))
        if self.sizes.code.is_composite:
            self.drop(f"middle {layer}")
        if not is_all:
            self.drop(f"middle {layer}", *(f"low {index} {layer}" for index in range(7)))

    def attention(self, layer: int, keep: str) -> None:
        """The first norm, the attention and its residual."""
        sizes, is_all = self.sizes, keep == "none"
        q, k, v, o = range(4)
        self.norm(f"norm {layer}", kept=is_all)
        self.product(q, f"raw query {layer}", layer)
        self.product(k, f"raw key {layer}", layer)
        self.product(v, f"value {layer}", layer)
        self.rotate(f"query {layer}", sizes.query)
        self.rotate(f"key {layer}", sizes.key)
        raw = (f"raw key {layer}",) if keep == "selective" else (f"raw key {layer}", f"raw query {layer}")
        self.drop(*(reversed(raw) if sizes.code.is_composite else raw))
        self.make(f"attended {layer}", sizes.query)
        self.make(f"statistics {layer}", sizes.statistics)
        if keep == "full":
            self.drop(f"statistics {layer}")
        self.product(o, "out", layer)
        if not is_all:
            self.drop(f"query {layer}", f"key {layer}")
        if keep == "full":
            self.drop(f"value {layer}", f"attended {layer}")
        if not is_all:
            self.drop(f"norm {layer}")
        self.make(f"middle {layer}", sizes.hidden)
        self.drop("out")

    def again(self, layer: int) -> None:
        """Make again what a recomputed layer has dropped, up to the last tensor that its backward pass reads."""
        sizes, is_half = self.sizes, self.recompute == "selective"
        q, k, v, o, gate, up, down = range(7)
        self.norm(f"norm {layer}", kept=True)
        if not is_half:
            self.product(q, f"raw query {layer}", layer)
        self.product(k, f"raw key {layer}", layer)
        if not is_half:
            self.product(v, f"value {layer}", layer)
        self.rotate(f"query {layer}", sizes.query)
        self.rotate(f"key {layer}", sizes.key)
        self.drop(f"raw key {layer}", f"raw query {layer}")
        if not is_half:
            self.make(f"attended {layer}", sizes.query)
            self.make(f"statistics {layer}", sizes.statistics)
        self.product(o, "out", layer)
        self.make(f"middle {layer}", sizes.hidden)
        self.drop("out")
        self.norm(f"second norm {layer}", kept=True)
        if not is_half:
            self.product(gate, f"gate {layer}", layer)
        self.activate(layer)
        self.product(up, f"up {layer}", layer)
        self.make(f"product {layer}", sizes.inner)
        if sizes.low is not None:  # its tensor of the adapter's rank is the last one
            self.product(down, "down", layer)
            self.drop("down")
        if sizes.code.is_composite:
            self.drop(f"middle {layer}")

    def activate(self, layer: int) -> None:
        """The activation of the gate, where it is a kernel of its own."""
        if not self.sizes.code.is_fused:
            self.make(f"active {layer}", self.sizes.inner)

    def norm(self, name: str, *, kept: bool) -> None:
        """One norm forward; transformers' keeps its input in fp32, and a scaled one if it is trained."""
        hidden = self.sizes.hidden
        if not self.sizes.code.is_composite:
            self.make(name, hidden)
            return
        self.make(f"{name} wide", 2 * hidden)
        self.make("square", 2 * hidden)
        self.drop("square")
        self.make("scaled wide", 2 * hidden)
        if not kept:
            self.drop(f"{name} wide")
        self.make(f"{name} scaled", hidden)
        self.make(name, hidden)
        if not kept or self.sizes.low is not None:
            self.drop(f"{name} scaled")
        self.drop("scaled wide")

    def norm_backward(self, name: str, slope: str, found: str) -> None:
        """The gradient of a norm's input, from that of its result."""
        hidden = self.sizes.hidden
        if not self.sizes.code.is_composite:
            self.make(found, hidden)
            self.drop(slope)
            return
        self.make("by weight", hidden)
        if self.sizes.low is None:
            self.make("to weight", hidden)
        self.drop("to weight", slope, f"{name} scaled")
        self.make("one wide", 2 * hidden)
        self.drop("by weight")
        self.make("two wide", 2 * hidden)
        self.make("three wide", 2 * hidden)
        self.drop("two wide", "one wide")
        for each in ("four wide", "five wide", "six wide", "seven wide"):
            self.make(each, 2 * hidden)
        self.drop("six wide", "five wide", "four wide", f"{name} wide")
        self.make("eight wide", 2 * hidden)
        self.drop("three wide", "seven wide")
        self.make(found, hidden)
        self.drop("eight wide")

    def rotate(self, name: str, size: int) -> None:
        """Rotate queries or keys: as complex numbers in fp32, or in halves."""
        if self.sizes.code.is_fused:
            self.make(name, size)
        elif not self.sizes.code.is_composite:
            self.make("wide", 2 * size)
            self.make("turned", 2 * size)
            self.make(name, size)
            self.drop("turned", "wide")
        else:
            self.make("by cosine", size)
            self.make("half", size // 2)
            self.make("joined", size)
            self.drop("half")
            self.make("by sine", size)
            self.drop("joined")
            self.make(name, size)
            self.drop("by cosine", "by sine")

    def rotate_backward(self, name: str, size: int) -> None:
        """Turn the gradient of rotated queries or keys back."""
        if self.sizes.code.is_fused:
            return
        if not self.sizes.code.is_composite:
            self.make("wide", 2 * size)
            self.drop(name)
            self.make("turned", 2 * size)
            self.drop("wide")
            self.make(name, size)
            self.drop("turned")
            return
        self.make("by sine", size)
        self.make("half", size // 2)
        self.make("joined", size)
        self.drop("half")
        self.make("other", size)
        self.drop("by sine")
        self.make("turned", size)
        self.drop("joined", "other")
        self.make("by cosine", size)
        self.drop(name)
        self.make(name, size)
        self.drop("turned", "by cosine")

    def product(self, index: int, name: str, layer: int) -> None:
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
        self.make(f"low {index} {layer}", adapted)
        self.make("unscaled", output)
        self.make("scaled", output)
        self.drop("unscaled")
        self.make(name, output)
        self.drop("frozen result", "scaled")

    def product_backward(self, index: int, name: str, layer: int) -> None:
        """The gradients of one product: of its weight, or of its adapter, and of its input."""
        low, (taken, output) = self.sizes.low, self.sizes.of_product(index)
        if low is None:
            self.make(f"weight slope {index}", self.sizes.matrices[index])
            self.make(name, taken)
            return
        if low.low[index]:
            self.make("scaled", output)
            self.make("low slope", low.low[index])
            self.drop("scaled")
            self.make("through low", taken)
            self.drop("low slope", f"low {index} {layer}")
        if low.unpacked[index]:
            self.make("unpacked", low.unpacked[index])
        self.make("through frozen", taken)
        self.drop("unpacked")
        self.make(name, taken)
        self.drop("through low", "through frozen")

    def loss(self) -> None:
        """The head, the loss and the head's backward pass."""
        sizes, code = self.sizes, self.sizes.code
        wide, last = 2 * sizes.logits, f"layer {self.layers - 1}"
        head = "embedding" if code.is_tied else "head"
        if not code.is_tied:
            self.gather("head", sizes.of_head)
            self.copy_out("head", (sizes.vocab,))
            self.drop(f"{last} buffer")
        self.norm("normed", kept=True)
        if code.is_composite:
            self.drop(f"input {self.layers}", *(("input 0",) if self.recompute == "none" else ()))
        self.make("logits", sizes.logits)
        self.drop(*(() if code.is_within else ("head buffer",)), f"{last} buffer")
        if code.is_compiled:
            self.make("slope", sizes.logits)
            self.drop("logits")
        else:
            self.make("fp32 logits", wide)
            self.make("log probabilities", wide)
            # A frozen head does not read what it is given again.
            self.drop("fp32 logits", *(() if sizes.low is None else ("normed",)), "head buffer", "logits")
            self.make("one-hot", wide)
            if code.is_divided:
                self.make("exponentials", wide)
            self.make("wide slope", wide)
            self.drop("one-hot", "exponentials", "log probabilities")
            self.make("slope", sizes.logits)
            self.drop("wide slope")
        if not code.stays_gathered:
            self.gather(last, sizes.of_layer)
        if sizes.low is None:
            self.make("head slope", sizes.vocab)
        self.make("hidden slope", sizes.hidden)
        self.drop("slope", "normed")
        self.norm_backward("normed", "hidden slope", f"slope {self.layers}")
        self.drop(f"input {self.layers}", *(() if code.is_tied else (f"{head} 0", "head buffer")))
        if sizes.low is None and not code.is_tied:
            self.reduce("head", sizes.of_head, "head slope")

    def backward(self) -> None:
        """The layers and the embedding."""
        sizes = self.sizes
        for layer in reversed(range(self.layers)):
            if not sizes.code.stays_gathered:
                self.gathered_ahead(layer)
            if self.recompute != "none":
                self.again(layer)
            self.mlp_backward(layer)
            self.attention_backward(layer)
            self.release(f"layer {layer}")
            slopes = (f"weight slope {index}" for index in (6, 5, 4, 3, 2, 1, 0))
            self.reduce(f"layer {layer}", sizes.of_layer if sizes.low is None else sizes.low.layer, "", *slopes)
        self.embedding_backward()
        self.drop("reduced")

    def gathered_ahead(self, layer: int) -> None:
        """Copy a layer out that was gathered ahead, and gather what comes next."""
        self.copy_out(f"layer {layer}", self.sizes.group)
        self.drop(f"layer {layer} buffer")
        if layer:
            self.gather(f"layer {layer - 1}", self.sizes.of_layer)
        elif not self.sizes.code.is_tied:
            self.gather("embedding", self.sizes.of_embedding)

    def embedding_backward(self) -> None:
        """The embedding, whose gradient as a head has waited where both are one matrix."""
        sizes = self.sizes
        if not (sizes.code.is_tied or sizes.code.stays_gathered):
            self.copy_out("embedding", (sizes.vocab,))
            self.drop("embedding buffer")
        if sizes.low is not None:
            self.drop("slope 0", "embedding 0")
            return
        self.make("rows", sizes.vocab)
        self.drop("slope 0")
        if sizes.code.is_tied:
            self.make("sum", sizes.vocab)
            self.drop("head slope", "rows")
        self.drop("embedding 0")
        self.reduce("embedding", sizes.of_embedding, "sum" if sizes.code.is_tied else "rows")

    def mlp_backward(self, layer: int) -> None:
        """One layer's MLP, backward."""
        sizes = self.sizes
        gate, up, down = 4, 5, 6
        self.product_backward(down, "dproduct", layer)
        self.drop(f"product {layer}", f"down {layer}")
        self.make("dactive", sizes.inner)
        self.make("dup", sizes.inner)
        self.drop(f"active {layer}", f"up {layer}", "dproduct")
        self.product_backward(up, "one", layer)
        self.drop("dup")
        self.make("dgate", sizes.inner)
        self.drop(f"gate {layer}", "dactive")
        self.product_backward(gate, "two", layer)
        self.drop(f"second norm {layer}", "dgate")
        self.make("three", sizes.hidden)
        self.drop("one", "two")
        self.norm_backward(f"second norm {layer}", "three", "four")
        self.drop(f"middle {layer}")
        self.make("middle slope", sizes.hidden)
        self.drop(f"slope {layer + 1}", "four")

    def attention_backward(self, layer: int) -> None:
        """One layer's attention, backward."""
        sizes = self.sizes
        q, k, v, o = range(4)
        self.product_backward(o, "dattended", layer)
        self.make("sums", 2 * sizes.query)
        self.make("expanded keys", sizes.query)
        self.make("expanded values", sizes.query)
        self.make("dquery", sizes.query)
        self.make("dkey", sizes.key)
        self.make("dvalue", sizes.key)
        self.drop("expanded values", "expanded keys", "sums")
        self.drop(*(f"{name} {layer}" for name in ("query", "key", "value", "attended", "statistics")), "dattended")
        self.rotate_backward("dkey", sizes.key)
        self.rotate_backward("dquery", sizes.query)
        self.product_backward(v, "from dvalue", layer)
        self.drop("dvalue")
        self.product_backward(k, "from dkey", layer)
        self.drop("dkey")
        self.make("both", sizes.hidden)
        self.drop("from dvalue", "from dkey")
        self.product_backward(q, "from dquery", layer)
        self.drop(f"norm {layer}", "dquery")
        self.make("all three", sizes.hidden)
        self.drop("both", "from dquery")
        self.norm_backward(f"norm {layer}", "all three", "through norm")
        self.drop(f"input {layer}", f"raw query {layer}")
        self.make(f"slope {layer}", sizes.hidden)
        self.drop("middle slope", "through norm")
