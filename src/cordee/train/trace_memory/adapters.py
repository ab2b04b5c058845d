"""Low-rank adapters on a subject's linear layers, with the tensors that peft's `lora.Linear` makes.

The frozen base is 16-bit, or packed into fewer bits as bitsandbytes has it: then its product makes a 16-bit copy of the
weight, forward and backward, and keeps the packed one alone. Embeddings, head and norms are frozen in 16 bits.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from cordee.errors import LayoutError, ShapeError
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
        LayoutError: DoRA, which is not traced.
    """
    adapters = question.adapters
    if adapters is None:
        return
    if adapters.magnitudes:
        raise LayoutError("DoRA's magnitudes are not traced", hint="trace --train lora; the plan counts them")
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
    """A frozen product, and beside it one of low rank in fp32 that is trained."""

    def __init__(self, linear: nn.Linear, base: nn.Module, adapters: Adapters) -> None:
        super().__init__()
        self.base = base
        self.dropout = nn.Dropout(0.05) if adapters.dropout else nn.Identity()
        self.down = nn.Linear(linear.in_features, adapters.rank, bias=False, dtype=torch.float32)
        self.up = nn.Linear(adapters.rank, linear.out_features, bias=False, dtype=torch.float32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return both products' sum, in the type of the frozen one."""
        frozen = self.base(x)
        low = self.up(self.down(self.dropout(x.to(self.down.weight.dtype))))
        found: torch.Tensor = (frozen + low * 2.0).to(frozen.dtype)
        return found


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
        to = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        found: torch.Tensor = _PackedProduct.apply(x.to(to), self.weight, self.bias, self.shape, self.keeps_inputs)
        return found


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
