"""Low-rank adapters on a subject's linear layers, with the tensors that peft's `lora.Linear` and DoRA's make.

The frozen base is 16-bit, or packed into fewer bits as bitsandbytes has it: then its product makes a 16-bit copy of the
weight, forward and backward, and keeps the packed one alone. Embeddings, head and norms are frozen in 16 bits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cordee.errors import ShapeError
from cordee.plan.training import Adapters
from cordee.train.trace_memory.question import Question
from cordee.train.trace_memory.subject import Subject

# Names of the planner's matrices in transformers' models, and in torchtitan's.
_NAMES = {
    "q": ("q_proj", "wq"), "k": ("k_proj", "wk"), "v": ("v_proj", "wv"), "o": ("o_proj", "wo"),
    "gate": ("gate_proj", "w1"), "up": ("up_proj", "w3"), "down": ("down_proj", "w2"),
}  # fmt: skip


def adapt(subject: Subject, question: Question) -> None:
    """Freeze a model, pack its layers' matrices, and put adapters beside the chosen ones.

    Raises:
        ShapeError: a model whose matrices have other names.
    """
    adapters = question.adapters
    if adapters is None:
        return
    subject.module.requires_grad_(False)
    chosen = {name for target in adapters.targets for name in _NAMES[target]}
    put = 0
    for layer in subject.layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if not isinstance(child, nn.Linear):
                    continue
                base = child if adapters.base.bits == 16 else _Packed(child, adapters)
                is_chosen = name in chosen
                put += is_chosen
                parent.register_module(name, _Adapted(child, base, adapters) if is_chosen else base)
    if not put:
        hint = "adapters go on matrices of the names " + ", ".join(sorted(chosen))
        raise ShapeError("the model's layers have no matrix that an adapter was asked for", hint=hint)


class _Adapted(nn.Module):
    """A frozen product, and beside it one of low rank in fp32 that is trained; with DoRA lengths of rows as well."""

    def __init__(self, linear: nn.Linear, base: nn.Module, adapters: Adapters) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(0.05) if adapters.dropout else nn.Identity()
        self.down = nn.Linear(linear.in_features, adapters.rank, bias=False, dtype=torch.float32)
        self.up = nn.Linear(adapters.rank, linear.out_features, bias=False, dtype=torch.float32)
        lengths = nn.Parameter(torch.empty(linear.out_features, dtype=torch.float32)) if adapters.magnitudes else None
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

    def _scaled(self, x: torch.Tensor, frozen: torch.Tensor) -> torch.Tensor:
        """Return what DoRA adds: rows of the summed weight get their learned lengths (peft's `DoraLinearLayer`).

        The low-rank weight is written out as a product with an identity matrix. After dropout the frozen product is
        made anew, of the dropped input.
        """
        product = self.up(self.down(torch.eye(x.shape[-1], dtype=x.dtype, device=x.device))).T
        weight = (self.base.unpacked(x) if isinstance(self.base, _Packed) else self.base.weight).to(x.dtype)
        norm = torch.linalg.norm(weight + 2.0 * product.detach(), dim=1).detach()
        scale = (self.lengths / norm).view(1, -1)
        low = self.up(self.down(x))
        if not isinstance(self.dropout, nn.Identity):
            frozen = F.linear(x, weight)
        elif self.base.bias is not None:
            frozen = frozen - self.base.bias
        return (scale - 1) * frozen + scale * low * 2.0


class _Packed(nn.Module):
    """A frozen product whose weight is bytes."""

    def __init__(self, linear: nn.Linear, adapters: Adapters) -> None:
        super().__init__()
        self.shape, self.keeps_inputs = tuple(linear.weight.shape), adapters.base.keeps_inputs
        size = round(adapters.base.matrix_bytes(linear.in_features, linear.out_features))
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.uint8), requires_grad=False)
        self.bias = linear.bias

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the weight as it was before it was packed."""
        found: torch.Tensor = _PackedProduct.apply(
            x.to(_computes_in(x)), self.weight, self.bias, self.shape, self.keeps_inputs
        )
        return found

    def unpacked(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weight as it was before it was packed, in the type of products of x."""
        return x.new_empty(self.shape, dtype=_computes_in(x))


def _computes_in(x: torch.Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype


class _PackedProduct(torch.autograd.Function):
    """A product that unpacks its weight each time that it needs it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, packed: torch.Tensor, bias: Any, shape: Any, keeps_inputs: bool) -> Any:
        """Unpack, multiply, keep the bytes."""
        ctx.shape = shape
        ctx.save_for_backward(packed, *((x,) if keeps_inputs else ()))
        return F.linear(x, x.new_empty(shape), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Unpack again, and give the input its gradient."""
        (gradient,) = gradients
        return gradient @ gradient.new_empty(ctx.shape), None, None, None, None
