"""Low-rank adapters on a subject's linear layers, with the tensors that peft's `lora.Linear` and DoRA's make.

The frozen base is 16-bit, or packed into fewer bits as bitsandbytes has it: then its product makes a 16-bit copy of the
weight, forward and backward, and keeps the packed one alone. Embeddings, head and norms are frozen in 16 bits, or in
32 as peft's `prepare_model_for_kbit_training` makes them.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from cordee.errors import ShapeError
from cordee.plan.training import JOINED, LINEARS, Adapters, Base
from cordee.train.trace_memory.question import Question
from cordee.train.trace_memory.subject import Subject

# The planner's matrices in modules of these names: transformers', torchtitan's and Megatron-LM's. A module that has
# several of them has one adapter. The name before the last tells apart what has one name at two places.
_QKV, _GATE_UP = JOINED["qkv"], JOINED["gate_up"]
_PARTS: dict[str, tuple[str, ...]] = {
    "q_proj": ("q",), "k_proj": ("k",), "v_proj": ("v",), "o_proj": ("o",), "out_proj": ("o",),
    "gate_proj": ("gate",), "up_proj": ("up",), "down_proj": ("down",),
    "wq": ("q",), "wk": ("k",), "wv": ("v",), "wo": ("o",), "w1": ("gate",), "w3": ("up",), "w2": ("down",),
    "qkv_proj": _QKV, "query_key_value": _QKV, "c_attn": _QKV, "linear_qkv": _QKV, "gate_up_proj": _GATE_UP,
    "attention.dense": ("o",), "self_attention.dense": ("o",), "self_attn.dense": ("o",), "attn.c_proj": ("o",),
    "dense_h_to_4h": ("up",), "fc1": ("up",), "c_fc": ("up",), "linear_fc1": _GATE_UP,
    "dense_4h_to_h": ("down",), "fc2": ("down",), "mlp.c_proj": ("down",), "linear_fc2": ("down",),
    "linear_proj": ("o",), "q_a_proj": ("q_a",), "q_b_proj": ("q_b",), "kv_a_proj_with_mqa": ("kv_a",),
    "kv_b_proj": ("kv_b",),
}  # fmt: skip


def adapt(subject: Subject, question: Question) -> Subject:
    """Freeze a model, pack its layers' matrices, and put adapters beside the chosen ones.

    Raises:
        ShapeError: a model whose matrices have other names.
    """
    adapters = question.adapters
    if adapters is None:
        return subject
    subject.module.requires_grad_(False)
    sharded = question.zero >= 2 and question.fsdp > 1  # where all of a layer must have one type
    # peft's `autocast_adapter_dtype` makes them fp32, but where all is trained in 16 bits.
    kept = torch.bfloat16 if question.weights == "bf16" else torch.float32
    chosen = {part for target in adapters.targets for part in JOINED.get(target, (target,))}
    every = chosen.issuperset(LINEARS)  # whatever its name is, as in peft
    # transformers quantises no module that its code asks to keep in fp32: T5 casts to the type of one.
    whole = set(getattr(subject.module, "_keep_in_fp32_modules", None) or ())
    put = 0
    for layer in subject.layers:
        for path, parent in list(layer.named_modules()):
            for name, child in list(parent.named_children()):
                if not _is_product(child):
                    continue
                base = child if adapters.base.bits == 16 or name in whole else _Packed(child, adapters)
                parts = _PARTS.get(f"{path.rpartition('.')[2]}.{name}") or _PARTS.get(name, ())
                is_chosen = every or not chosen.isdisjoint(parts)
                put += is_chosen
                parent.register_module(name, _Adapted(child, base, adapters, kept) if is_chosen else base)
        put += _adapt_parameters(layer, adapters, kept)
    if not put:
        names = (name for name, parts in _PARTS.items() if not chosen.isdisjoint(parts))
        hint = "adapters go on matrices of the names " + ", ".join(sorted(names))
        raise ShapeError("the model's layers have no matrix that an adapter was asked for", hint=hint)
    if adapters.base.head:
        subject = _with_packed_head(subject, adapters)
    if adapters.widened and not sharded:
        for each in subject.module.parameters():
            each.data = each.data.float() if each.dtype == torch.bfloat16 else each.data
    return subject


def _adapt_parameters(layer: nn.Module, adapters: Adapters, kept: torch.dtype) -> int:
    """Put adapters on the chosen parameters that are no module's matrix: stacks of experts, a router's weight."""
    put = 0
    for parent in list(layer.modules()):
        for name, child in list(parent.named_children()):
            own = dict(child.named_parameters(recurse=False))
            stacks = [each for each, weight in own.items() if weight.ndim == 3 and each.endswith("_proj")]
            routes = type(child).__name__.endswith("Router") and "weight" in own
            chosen = stacks * ("experts" in adapters.targets) + ["weight"] * (routes and "router" in adapters.targets)
            adapted = child
            for each in chosen:
                adapted = _Stacked(adapted, each, adapters, kept)
            parent.register_module(name, adapted)
            put += len(chosen)
    return put


def elements(module: nn.Module) -> int:
    """Return the number of a module's parameters; a packed matrix has those that it had before."""
    packed = [each for each in module.modules() if isinstance(each, _Packed)]
    hidden: int = sum(math.prod(each.shape) - each.weight.numel() for each in packed)
    held: int = sum(each.numel() for each in module.parameters())
    return held + hidden


def _with_packed_head(subject: Subject, adapters: Adapters) -> Subject:
    """Return a model whose output head is packed as its layers are."""
    head = next((each for each in reversed(subject.tail) if _is_product(each)), None)
    if head is None:
        raise ShapeError("the model has no output head to quantise", hint="leave --quantize-head out")
    packed = _Packed(head, adapters)
    for parent in list(subject.module.modules()):
        for name, child in list(parent.named_children()):
            if child is head:
                parent.register_module(name, packed)
    return replace(subject, tail=tuple(packed if each is head else each for each in subject.tail))


def _is_product(module: nn.Module) -> bool:
    """Return whether a module is a matrix with or without a bias; GPT-2's are stored the other way round."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def _widths(product: nn.Module) -> tuple[int, int]:
    """Return the inputs and outputs of a product."""
    outputs, inputs = product.weight.shape if isinstance(product, nn.Linear) else reversed(product.weight.shape)
    return inputs, outputs


class _Adapted(nn.Module):
    """A frozen product, and beside it a trained one of low rank, in its own type; with DoRA lengths of rows too."""

    def __init__(self, product: nn.Module, base: nn.Module, adapters: Adapters, kept: torch.dtype) -> None:
        super().__init__()
        inputs, outputs = _widths(product)
        self.base = base
        self.dropout = nn.Dropout(adapters.dropout) if adapters.dropout else nn.Identity()
        self.down = nn.Linear(inputs, adapters.rank, bias=False, dtype=kept)
        self.up = nn.Linear(adapters.rank, outputs, bias=False, dtype=kept)
        lengths = nn.Parameter(torch.empty(outputs, dtype=kept)) if adapters.magnitudes else None
        self.register_parameter("lengths", lengths)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return both products' sum, in the type of the frozen one."""
        frozen = self.base(x)
        # Under autocast peft leaves the inputs of quantised layers as they are.
        stays = isinstance(self.base, _Packed) and torch.is_autocast_enabled("cpu")
        dropped = self.dropout(x if stays else x.to(self.down.weight.dtype))
        added = self.up(self.down(dropped)) * 2.0 if self.lengths is None else self._scaled(dropped, frozen)
        found: torch.Tensor = (frozen + added).to(frozen.dtype)
        return found

    @property
    def weight(self) -> torch.Tensor:
        """Return the frozen weight, as peft's layers do: T5 asks for its type."""
        found: torch.Tensor = self.base.weight
        return found

    @property
    def bias(self) -> torch.Tensor | None:
        """Return the frozen bias."""
        found: torch.Tensor | None = self.base.bias
        return found

    def _scaled(self, x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        """Return what DoRA adds: rows of the summed weight get their learned lengths (peft's `DoraLinearLayer`).

        The low-rank weight is written out as a product with an identity matrix. After dropout the frozen product is
        made anew, of the dropped input.
        """
        product = self.up(self.down(torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))).T
        weight = self._frozen_weight(x).to(x.dtype)
        norm = torch.linalg.norm(weight + 2.0 * product.detach(), dim=1).detach()
        scale = (self.lengths / norm).view(1, -1)
        low = self.up(self.down(x))
        if not isinstance(self.dropout, nn.Identity):
            frozen = F.linear(x, weight)
        elif self.base.bias is not None:
            frozen = frozen - self.base.bias
        return (scale - 1) * frozen + scale * low * 2.0

    def _frozen_weight(self, x: torch.Tensor) -> torch.Tensor:
        if isinstance(self.base, _Packed):
            return self.base.unpacked(x)
        weight: torch.Tensor = self.base.weight
        return weight if isinstance(self.base, nn.Linear) else weight.T


class _Packed(nn.Module):
    """A frozen product whose weight is bytes."""

    def __init__(self, product: nn.Module, adapters: Adapters) -> None:
        super().__init__()
        inputs, outputs = _widths(product)
        self.shape, self.base = (outputs, inputs), adapters.base
        size = round(adapters.base.matrix_bytes(inputs, outputs))
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
        self.bias = product.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight as it was before it was packed, and return the result in the type of x."""
        found: torch.Tensor = _PackedProduct.apply(x, self.weight, self.bias, self.shape, self.base)
        return found

    def unpacked(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weight as it was before it was packed, in the type of products of x."""
        return x.new_empty(self.shape, dtype=_computes_in(x))


def _computes_in(x: torch.Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


class _PackedProduct(torch.autograd.Function):
    """A product that unpacks its weight each time that it needs it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: Any, shape: Any, base: Base) -> Any:
        """Unpack, multiply in the type of products, keep the bytes, and the input as it came where the base does so."""
        ctx.shape, ctx.copies, ctx.type, ctx.computes = shape, base.copies, x.dtype, _computes_in(x)
        ctx.save_for_backward(packed, *((x,) if base.keeps_inputs else ()))
        narrow = x.to(ctx.computes)
        weight, *_others = (narrow.new_empty(shape) for _ in range(base.copies))
        return F.linear(narrow, weight, None if bias is None else bias.to(narrow.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Unpack again, and give the input its gradient."""
        gradient = gradients[0].to(ctx.computes)
        weight, *_others = (gradient.new_empty(ctx.shape) for _ in range(ctx.copies))
        return (gradient @ weight).to(ctx.type), None, None, None, None


class _Stacked(nn.Module):
    """A module with an adapter on a parameter, a stack of matrices or one, with the tensors of peft's `ParamWrapper`.

    While the module runs, the parameter is the frozen one plus the product of both factors, for all experts at once.
    """

    def __init__(self, base: nn.Module, name: str, adapters: Adapters, kept: torch.dtype) -> None:
        super().__init__()
        inner = base.inner if isinstance(base, _Stacked) else base
        weight: torch.Tensor = getattr(inner, name)
        self.count = weight.shape[0] if weight.ndim == 3 else 1
        self.turned = weight.ndim == 3 and bool(getattr(inner, "is_transposed", False))
        inputs, outputs = weight.shape[-2:] if self.turned else reversed(weight.shape[-2:])
        self.base, self.name = base, name
        self.down = nn.Linear(inputs, adapters.rank * self.count, bias=False, dtype=kept)
        self.up = nn.Linear(adapters.rank * self.count, outputs, bias=False, dtype=kept)

    @property
    def inner(self) -> nn.Module:
        """Return the module that has the parameter, below all that are around it."""
        return self.base.inner if isinstance(self.base, _Stacked) else self.base

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module with the summed parameter."""
        with self._summed():
            return self.base(*args, **kwargs)

    @contextmanager
    def _summed(self) -> Iterator[None]:
        weight: torch.Tensor = getattr(self.inner, self.name)
        frozen = weight.requires_grad
        proxy = _Delta(self.up.weight @ self.down.weight, weight.dtype) if self.count == 1 else self._factors(weight)
        parametrize.register_parametrization(self.inner, self.name, proxy)
        self.inner.parametrizations[self.name].original.requires_grad_(frozen)
        try:
            with parametrize.cached():
                yield
        finally:
            parametrize.remove_parametrizations(self.inner, self.name, leave_parametrized=False)

    def _factors(self, weight: torch.Tensor) -> "_Factors":
        down = self.down.weight.reshape(self.count, -1, self.down.weight.shape[-1])
        up = self.up.weight.reshape(self.up.weight.shape[0], -1, self.count).permute(2, 0, 1)
        left, right = (down.transpose(-2, -1), up.transpose(-2, -1)) if self.turned else (up, down)
        return _Factors(left.to(weight.dtype), right.to(weight.dtype))


class _Factors(nn.Module):
    """A stack, plus the products of two factors for each of its matrices (peft's `_LoraFactorsProxy`)."""

    def __init__(self, left: torch.Tensor, right: torch.Tensor) -> None:
        super().__init__()
        self.left, self.right = left, right

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the sum in the type of the stack."""
        with torch.autocast(weight.device.type, enabled=False):
            return torch.baddbmm(weight, self.left, self.right, alpha=2.0)


class _Delta(nn.Module):
    """A matrix plus another one that is written out (peft's `_LoraParameterProxy`)."""

    def __init__(self, product: torch.Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.delta = (product * 2.0).to(dtype)

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the sum."""
        return weight + self.delta
