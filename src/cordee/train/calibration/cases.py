"""Cases that are measured on one device: products, attention, small operations, optimizer, host, a CPU's pages.

Operations are those of a decoder layer as eager PyTorch and Hugging Face's models have them, each with its backward
pass, since a backward pass is not a fixed multiple of the forward one.
"""

import mmap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as f
from torch import Tensor

from cordee.train.calibration.timing import Case, Device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDTH = 512  # of rows of the small operations
HEAD_DIM = 64
PAGES_BYTES = 32 << 20  # what glibc always gives back to the kernel


@dataclass(frozen=True, slots=True)
class Extent:
    """Sizes that show what a device does, and no more: tokens and matrices of products, elements, sequences, heads."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    sides: tuple[int, ...]
    edge: tuple[int, int]
    elements: tuple[int, ...]
    sequences: tuple[int, ...]
    head_dims: tuple[int, ...]
    attended: int
    experts: tuple[int, ...]
    logits: tuple[int, ...]
    parameters: tuple[int, ...]


EXTENTS = {
    "cpu": Extent(
        rows=(1, 16),
        tokens=(64, 256, 1024),
        sides=(128, 512, 2048),
        edge=(256, 1024),
        elements=(1 << 12, 1 << 15, 1 << 18, 1 << 20, 1 << 22),
        sequences=(64, 256, 1024),
        head_dims=(32, 64, 128),
        attended=1024,
        experts=(4,),
        logits=(1 << 18, 1 << 21, 1 << 23),
        parameters=(1 << 20, 1 << 23, 1 << 25),
    ),
    "cuda": Extent(
        rows=(1, 16, 64),
        tokens=(256, 1024, 4096, 16_384),
        sides=(1024, 2048, 4096, 8192, 16_384),
        edge=(4096, 8192),
        elements=(1 << 14, 1 << 17, 1 << 20, 1 << 23, 1 << 25, 1 << 27),
        sequences=(512, 1024, 4096, 16_384, 65_536),
        head_dims=(64, 128),
        attended=16_384,
        experts=(8, 64),
        logits=(1 << 23, 1 << 26, 1 << 28),
        parameters=(1 << 20, 1 << 24, 1 << 27),
    ),
}


def cases(make: "Maker") -> list[Case]:
    """Return all cases of a device in one precision, in their fixed order."""
    extent = make.extent
    return [
        *_products(make, extent),
        *_edges(make, extent),
        *_grouped(make, extent),
        *_attention(make, extent),
        *_operations(make, extent),
        *_losses(make, extent),
        *_optimizer(make, extent),
        *_host(make),
        *_pages(make),
    ]


class Maker:
    """Makes tensors on a device, from one seed, and cases of one precision."""

    def __init__(self, device: Device, dtype: str) -> None:
        self.device, self.dtype, self.extent = device, dtype, EXTENTS[device.kind]
        self._generator = torch.Generator(device.torch).manual_seed(0)
        self._kept: dict[tuple[int, ...], Tensor] = {}

    def tensor(self, *size: int) -> Tensor:
        """Return random numbers, the same tensor each time: cases only read."""
        if size not in self._kept:
            made = torch.randn(*size, generator=self._generator, device=self.device.torch, dtype=torch.float32)
            self._kept[size] = made.to(DTYPES[self.dtype])
        return self._kept[size]

    def leaf(self, *size: int) -> Tensor:
        """Return random numbers that have a gradient."""
        return self.tensor(*size).detach().clone().requires_grad_()

    def whole(self, below: int, *size: int) -> Tensor:
        """Return random whole numbers."""
        return torch.randint(below, size, generator=self._generator, device=self.device.torch)

    def case(
        self, words: str, at: Sequence[float], work: float, run: Callable[[], object], *,
        before: Callable[[int], object] | None = None, optional: bool = False,
    ) -> Case:  # fmt: skip
        """Return a case; `{}` in the words of its table stands for the precision."""
        where = tuple(float(each) for each in at)
        return Case(words.format(self.dtype), where, float(work), run, before=before, optional=optional)

    def both(
        self, name: str, at: Sequence[float], work: float, forward: Callable[[], Tensor], leaves: Sequence[Tensor]
    ) -> Iterator[Case]:
        """Yield the forward and the backward pass of an operation as two cases.

        Each backward pass has a forward pass of its own, all of them ahead of the sample: what it reads lies where
        nobody has been since, and is freed by it.
        """
        gradient = torch.ones_like(forward())
        results: list[Tensor] = []

        def before(times: int) -> None:
            results[:] = [forward() for _ in range(times)]

        def backward() -> object:
            return torch.autograd.grad(results.pop(), leaves, gradient)

        yield self.case(f"{name} {{}} forward", at, work, forward)
        yield self.case(f"{name} {{}} backward", at, work, backward, before=before)


def _products(make: Maker, extent: Extent) -> Iterator[Case]:
    """Yield a linear layer's three products: forward, gradient of the input, gradient of the weight."""
    for outputs in extent.sides:
        for inputs in extent.sides:
            weight = make.tensor(outputs, inputs)
            for tokens in (*extent.rows, *extent.tokens):
                at, flop = (tokens, outputs, inputs), 2.0 * tokens * outputs * inputs
                x, g = make.tensor(tokens, inputs), make.tensor(tokens, outputs)
                yield make.case("product {} forward", at, flop, partial(f.linear, x, weight))
                if tokens in extent.tokens:
                    yield make.case("product {} inner", at, flop, partial(torch.mm, g, weight))
                    yield make.case("product {} weight", at, flop, partial(torch.mm, g.t(), x))


def _edges(make: Maker, extent: Extent) -> Iterator[Case]:
    """Yield products whose rows are no multiple of a cache line, or of 16 bytes, beside one that is."""
    tokens, side = extent.edge
    for more in (0, 8, 64, 128):
        x, w = make.tensor(tokens, side), make.tensor(side + more, side)
        flop = 2.0 * tokens * (side + more) * side
        yield make.case("edge {}", (1 + more,), flop, partial(f.linear, x, w))
    x, w = make.tensor(tokens, side), make.tensor(side + 1, side)
    yield make.case("edge {}", (2,), 2.0 * tokens * (side + 1) * side, partial(f.linear, x, w))


def _grouped(make: Maker, extent: Extent) -> Iterator[Case]:
    """Yield products of many experts side by side, with few and with many tokens each."""
    side = extent.sides[1]
    for experts in extent.experts:
        for tokens in extent.tokens[:2]:
            x, w = make.tensor(experts, tokens, side), make.tensor(experts, side, side)
            flop = 2.0 * experts * tokens * side * side
            yield make.case("grouped {}", (experts, tokens), flop, partial(torch.bmm, x, w))


def _attention(make: Maker, extent: Extent) -> Iterator[Case]:
    """Yield causal attention by sequence and head, counted as the half of the square that it computes."""
    for dim in extent.head_dims:
        for length in extent.sequences:
            heads = max(1, extent.attended // length)
            q, k, v = (make.leaf(1, heads, length, dim) for _ in range(3))
            flop = 2.0 * heads * length * length * dim

            forward = partial(f.scaled_dot_product_attention, q, k, v, is_causal=True)
            yield from make.both("attention", (dim, length), flop, forward, (q, k, v))


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.to(torch.float32)
    scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * scaled.to(x.dtype)


def _gated(x: Tensor, y: Tensor) -> Tensor:
    return f.silu(x) * y


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return f.cross_entropy(logits.float(), labels)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def _operations(make: Maker, extent: Extent) -> Iterator[Case]:
    """Yield the small operations of a layer, over the elements of their result."""
    for elements in extent.elements:
        rows = max(1, elements // WIDTH)
        x, y = make.leaf(rows, WIDTH), make.leaf(rows, WIDTH)
        w, b = make.leaf(WIDTH), make.leaf(WIDTH)
        heads = WIDTH // HEAD_DIM
        q = make.leaf(1, heads, rows, HEAD_DIM)
        cos, sin = make.tensor(1, 1, rows, HEAD_DIM), make.tensor(1, 1, rows, HEAD_DIM)
        at, count = (elements,), rows * WIDTH
        yield from make.both("norm", at, count, partial(_norm, x, w), (x, w))
        yield from make.both("layer-norm", at, count, partial(f.layer_norm, x, (WIDTH,), w, b), (x, w, b))
        yield from make.both("rotate", at, count, partial(_rotated, q, cos, sin), (q,))
        yield from make.both("gate", at, count, partial(_gated, x, y), (x, y))
        yield from make.both("gelu", at, count, partial(f.gelu, x), (x,))
        yield from make.both("softmax", at, count, partial(f.softmax, x, dim=-1), (x,))
        plain, other = x.detach(), y.detach()
        turned = q.detach().transpose(1, 2)
        yield make.case("add {}", at, count, partial(torch.add, plain, other))
        yield make.case("copy {}", at, count, plain.clone)
        yield make.case("turn {}", at, count, turned.contiguous)
        yield make.case("scan {}", at, count, partial(torch.cumsum, plain, dim=-1))


def _losses(make: Maker, extent: Extent) -> Iterator[Case]:
    """Yield the loss over logits, and the dense gradient of an embedding of as many elements."""
    vocab = 8192
    for count in extent.logits:
        tokens = count // vocab
        logits, labels = make.leaf(tokens, vocab), make.whole(vocab, tokens)
        yield from make.both("loss", (count,), count, partial(_loss, logits, labels), (logits,))
        table, ids = make.leaf(count // WIDTH, WIDTH), make.whole(count // WIDTH, 256)
        yield from make.both("embedding", (count,), count, partial(f.embedding, ids, table), (table,))


def _optimizer(make: Maker, extent: Extent) -> Iterator[Case]:
    """Yield fused and foreach AdamW over parameters, cut into matrices as a model's are."""
    for count in extent.parameters:
        for kind in ("fused", "foreach"):
            if kind == "foreach" and count != extent.parameters[1]:
                continue
            side = 512
            matrices = [make.leaf(side, side).to(torch.float32).detach() for _ in range(count // side**2)]
            for each in matrices:
                each.requires_grad_()
                each.grad = torch.full_like(each, 1e-3)
            optimizer = torch.optim.AdamW(matrices, lr=1e-6, fused=kind == "fused", foreach=kind == "foreach")
            yield make.case(f"adamw-{kind}", (count,), count, optimizer.step)


def _host(make: Maker) -> Iterator[Case]:
    """Yield chains of operations on next to nothing: what the host needs to issue one, with and without autograd."""
    length = 64
    tiny = make.tensor(8)
    leaf = make.leaf(8)

    def eager() -> Tensor:
        x = tiny
        for _ in range(length):
            x = x + tiny
        return x

    def recorded() -> Tensor:
        x = leaf
        for _ in range(length):
            x = x * tiny
        return x

    chain = recorded()
    gradient = torch.ones_like(chain)
    yield make.case("issue eager", (1,), length, eager)
    yield make.case("issue recorded", (1,), length, recorded)
    yield make.case(
        "issue backward", (1,), length, lambda: torch.autograd.grad(chain, (leaf,), gradient, retain_graph=True)
    )


def _pages(make: Maker) -> Iterator[Case]:
    """Yield writing memory that the kernel has to map first, and gets back, beside writing what the process keeps.

    What a GPU frees stays with torch.
    """
    if make.device.kind != "cpu":
        return
    kept = torch.empty(PAGES_BYTES, dtype=torch.uint8)

    def fresh() -> None:
        mapped = mmap.mmap(-1, PAGES_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        torch.frombuffer(mapped, dtype=torch.uint8).fill_(1)

    def again() -> None:
        kept.fill_(1)

    yield make.case("pages fresh", (PAGES_BYTES,), PAGES_BYTES, fresh)
    yield make.case("pages kept", (PAGES_BYTES,), PAGES_BYTES, again)
