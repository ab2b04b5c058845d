"""What the host has to issue for one layer: kernels as torch's dispatcher counts them, bytes of the small ones, and how
long a forward pass takes with and without autograd, a backward pass, and going back into a layer to recompute it.

Kernels and bytes are counted on tensors without data. Times are CPU seconds with tiny tensors, where the work itself is
nothing: only their ratios are used (`src/cordee/plan/host.py`). Fused kernels stand in as one operation.
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as f
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
FREE = (
    "view", "reshape", "t.", "transpose", "permute", "expand", "slice", "select", "split", "unsqueeze", "detach",
    "_unsafe_view", "alias", "squeeze", "as_strided", "empty", "unbind", "chunk",
)  # fmt: skip
LAYERS, ROUNDS = 8, 60


class Counting(TorchDispatchMode):
    """Counts kernels, and bytes that those other than products read and write."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels, self.moved_bytes = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if func.__name__.startswith(FREE):
            return out
        self.kernels += 1
        if not func.__name__.startswith(PRODUCTS):
            tensors = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
            self.moved_bytes += sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        return out


def fused(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel each way."""

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *args):  # type: ignore[no-untyped-def]
            return forward(*args)

        @staticmethod
        def backward(ctx, gradient):  # type: ignore[no-untyped-def]
            return backward(gradient)

    return Fused.apply


flash = fused(lambda q, k, v: q, lambda g: (g, g, g))
softmax = fused(torch.tanh, torch.sign)
add_bias_dropped = fused(lambda x, b, r: x + r, lambda g: (torch.sign(g), g.sum((0, 1)), g))
gelu_of_biased = fused(lambda x, b: torch.tanh(x), lambda g: (torch.sign(g), g.sum((0, 1))))


def rotated(x: torch.Tensor, angle: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, -1)
    return x * angle + torch.cat((-right, left), -1) * angle


class Eager(nn.Module):
    """A Llama layer in plain torch; its norms and its attention are kernels of their own, as torch has them today."""

    def __init__(self, hidden: int, heads: int, how: dict[str, Any]) -> None:
        super().__init__()
        self.heads, wide = heads, hidden * 11 // 4
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, bias=False, **how) for _ in range(2))
        self.qkvo = nn.ModuleList(nn.Linear(hidden, hidden, bias=False, **how) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, wide, bias=False, **how) for _ in range(2))
        self.down = nn.Linear(wide, hidden, bias=False, **how)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, batch, hidden = x.shape
        angle = torch.empty(hidden // self.heads, dtype=x.dtype, device=x.device)
        y = self.norms[0](x)
        q, k, v = (one(y).view(tokens, batch, self.heads, -1) for one in self.qkvo[:3])
        y = flash(rotated(q, angle), rotated(k, angle), v)
        x = x + self.qkvo[3](y.reshape(tokens, batch, hidden))
        y = self.norms[1](x)
        return x + self.down(f.silu(self.gate(y)) * self.up(y))


class Fused(nn.Module):
    """A layer as Megatron-LM has had it since 2021: attention written out, small operations fused."""

    def __init__(self, hidden: int, heads: int, how: dict[str, Any]) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, **how) for _ in range(2))
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, **how), nn.Linear(hidden, hidden, bias=False, **how)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False, **how)
        self.down = nn.Linear(4 * hidden, hidden, bias=False, **how)
        self.biases = nn.ParameterList(torch.zeros(size, **how) for size in (hidden, 4 * hidden, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, batch, hidden = x.shape
        q, k, v = self.qkv(self.norms[0](x)).view(tokens, batch, self.heads, -1).chunk(3, -1)
        q, k, v = (one.reshape(tokens, batch * self.heads, -1).transpose(0, 1) for one in (q, k, v))
        scores = torch.baddbmm(torch.empty(len(q), tokens, tokens, dtype=x.dtype, device=x.device), q, k.mT, beta=0.0)
        y = torch.bmm(f.dropout(softmax(scores), 0.1), v).transpose(0, 1).reshape(tokens, batch, hidden)
        x = add_bias_dropped(self.out(y), self.biases[0], x)
        y = gelu_of_biased(self.up(self.norms[1](x)), self.biases[1])
        return add_bias_dropped(self.down(y), self.biases[2], x)


def counts(kind: type[nn.Module]) -> dict[str, float]:
    """Kernels each way, and 16-bit words per token and hidden element (of the fused layer with its scores)."""
    tokens, hidden = 2048, 4096
    layer = kind(hidden, 32, {"dtype": torch.bfloat16, "device": "meta"})
    x = torch.empty(tokens, 1, hidden, dtype=torch.bfloat16, device="meta", requires_grad=True) * 1
    with Counting() as forward:
        y = layer(x)
    with Counting() as backward:
        y.backward(torch.empty_like(y))
    told = {"weights": len(list(layer.parameters()))}
    for name, seen in (("forward", forward), ("backward", backward)):
        told |= {f"{name}_kernels": seen.kernels, f"{name}_words": seen.moved_bytes / 2 / tokens / hidden}
    return told


def least_us(kind: type[nn.Module]) -> dict[str, float]:
    """Microseconds of host for one layer: forward without and with autograd, backward, and both when it recomputes."""
    layers = [kind(16, 2, {"dtype": torch.float32, "device": "cpu"}) for _ in range(LAYERS)]

    def once(again: bool, grad: bool) -> tuple[float, float]:
        x = torch.randn(4, 1, 16, requires_grad=True)
        start = time.process_time()
        with torch.set_grad_enabled(grad):
            y = x * 1
            for layer in layers:
                y = checkpoint(layer, y, use_reentrant=True) if again else layer(y)
        middle = time.process_time()
        if grad:
            y.sum().backward()
        return (middle - start) / LAYERS * 1e6, (time.process_time() - middle) / LAYERS * 1e6

    told = {"forward_without_autograd": min(once(False, False)[0] for _ in range(ROUNDS))}
    for name, again in (("", False), ("recomputing_", True)):
        runs = [once(again, True) for _ in range(ROUNDS)]
        told |= {f"{name}forward": min(r[0] for r in runs), f"{name}backward": min(r[1] for r in runs)}
    return told


def main() -> None:
    """Count, time, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    report = {kind.__name__.lower(): {"counts": counts(kind), "us": least_us(kind)} for kind in (Fused, Eager)}
    if given.json:
        print(json.dumps(report, indent=1))
        return
    for name, told in report.items():
        us, seen = told["us"], told["counts"]
        kernel_us = us["forward"] / seen["forward_kernels"]
        sums = seen["backward_kernels"] + seen["weights"]
        more = us["recomputing_forward"] + us["recomputing_backward"] - 2 * us["forward"] - us["backward"]
        print(
            f"{name}: kernels {seen['forward_kernels']} forward, {seen['backward_kernels']} backward, "
            f"{seen['weights']} gradient sums; words {seen['forward_words']:.1f}h, {seen['backward_words']:.1f}h\n"
            f"  autograd makes a forward pass {us['forward'] / us['forward_without_autograd']:.2f} times as long; "
            f"a kernel {kernel_us:.1f} us forward, {us['backward'] / sums / kernel_us:.2f} of it backward; "
            f"recomputing costs {more / kernel_us:.0f} kernels more than its forward pass"
        )


if __name__ == "__main__":
    main()
