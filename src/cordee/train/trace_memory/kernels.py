"""Operators that are one kernel on a GPU and several on a CPU: here they are one as well, with a GPU's tensors.

Each is a custom operator, so that selective recomputation and the tracker see it as they would see the GPU's. What they
keep for the backward pass, and what that allocates, is that of PyTorch's CUDA kernels: `_fused_rms_norm` (input, rstd),
FlashAttention 2 (q, k, v, output, logsumexp; backward an fp32 accumulator of dq and, with grouped queries, expanded dk
and dv; aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp), `native_dropout` (a mask of one byte).
"""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

# Functions that CUDA's autocast runs in fp32 and the CPU's does not (its fp32 list, aten/src/ATen/autocast_mode.h).
_IN_FP32: tuple[tuple[Any, str], ...] = (
    (F, "softmax"), (torch, "softmax"), (torch.Tensor, "softmax"), (F, "log_softmax"), (torch, "log_softmax"),
    (F, "layer_norm"), (F, "group_norm"), (F, "cross_entropy"), (F, "nll_loss"), (F, "mse_loss"), (F, "softplus"),
    (torch, "pow"), (torch.Tensor, "pow"), (torch, "rsqrt"), (torch.Tensor, "rsqrt"), (torch, "exp"),
    (torch.Tensor, "exp"), (torch, "cumsum"), (torch.Tensor, "cumsum"), (torch, "sum"), (torch.Tensor, "sum"),
)  # fmt: skip


@torch.library.custom_op("cordee_trace::rms_norm", mutates_args=())
def _rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    rstd = torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + eps)
    return (x.float() * rstd).to(x.dtype) * weight, rstd


@_rms_norm.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@torch.library.custom_op("cordee_trace::rms_norm_backward", mutates_args=())
def _rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    with torch.enable_grad():
        inner, scale = x.detach().float().requires_grad_(), weight.detach().float().requires_grad_()
        out = inner * torch.rsqrt(inner.pow(2).mean(-1, keepdim=True) + 1e-6) * scale
        dx, dw = torch.autograd.grad(out, (inner, scale), grad.float())
    return dx.to(x.dtype), dw.to(weight.dtype)


@_rms_norm_backward.register_fake
def _(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, _ = inputs
    ctx.save_for_backward(x, weight, output[1])
    ctx.mark_non_differentiable(output[1])


def _norm_gradients(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    dx, dw = torch.ops.cordee_trace.rms_norm_backward(grad, *ctx.saved_tensors)
    return dx, dw, None


_rms_norm.register_autograd(_norm_gradients, setup_context=_keep_norm)


@register_sharding(torch.ops.cordee_trace.rms_norm.default)
def _(x: Any, weight: Any, eps: float) -> Any:
    whole, cut = Replicate(), Shard(1)
    return [([each, each], [each, whole, None]) for each in (whole, cut)]


@register_sharding(torch.ops.cordee_trace.rms_norm_backward.default)
def _(grad: Any, x: Any, weight: Any, rstd: Any) -> Any:
    # Each rank has the gradient that its part of the sequence gives the weight.
    whole, cut = Replicate(), Shard(1)
    return [([whole, whole], [whole, whole, whole, whole]), ([cut, Partial()], [cut, cut, whole, cut])]


@torch.library.custom_op("cordee_trace::attention", mutates_args=())
def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2).contiguous().transpose(1, 2), q.new_zeros(q.shape[:-1], dtype=torch.float32)


@_attention.register_fake
def _(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool, scale: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, tokens, _ = q.shape
    # The kernel writes tokens outermost, so that the heads join without a copy.
    out = q.new_empty((batch, tokens, heads, v.shape[-1])).transpose(1, 2)
    return out, q.new_empty((batch, heads, tokens), dtype=torch.float32)


@torch.library.custom_op("cordee_trace::attention_backward", mutates_args=())
def _attention_backward(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    with torch.enable_grad():
        leaves = [each.detach().requires_grad_() for each in (q, k, v)]
        out = F.scaled_dot_product_attention(
            leaves[0], leaves[1], leaves[2], mask, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        dq, dk, dv = torch.autograd.grad(out, leaves, grad)
    return dq.clone(), dk.clone(), dv.clone()


@_attention_backward.register_fake
def _(
    grad: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _keep_attention(ctx: Any, inputs: Any, output: Any) -> None:
    q, k, v, mask, causal, scale = inputs
    ctx.save_for_backward(q, k, v, mask, *output)
    ctx.causal, ctx.scale = causal, scale
    ctx.mark_non_differentiable(output[1])


def _attention_gradients(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
    q, k, v, mask, _out, lse = ctx.saved_tensors
    scratch = [torch.empty_like(q, dtype=torch.float32), torch.empty_like(lse)]
    if q.shape[1] != k.shape[1]:
        scratch += [torch.empty_like(q), torch.empty_like(q)]
    found = torch.ops.cordee_trace.attention_backward(grad, q, k, v, mask, ctx.causal, ctx.scale)
    del scratch
    return *found, None, None, None


_attention.register_autograd(_attention_gradients, setup_context=_keep_attention)

# Selective recomputation keeps the attention's result, as torchtitan's list of operators says of the GPU's.
KEPT_OPERATORS = (torch.ops.cordee_trace.attention.default,)


@contextmanager
def gpu_kernels() -> Iterator[None]:
    """Call those operators, and follow CUDA's autocast, wherever a model asks torch for a function.

    Names are replaced, since a mode for functions is not active where a checkpoint recomputes.
    """
    originals = {(owner, name): getattr(owner, name) for owner, name in _IN_FP32}
    fused = {"scaled_dot_product_attention": _attend, "rms_norm": _normalise, "dropout": _drop}
    originals |= {(F, name): getattr(F, name) for name in fused}
    for (owner, name), original in originals.items():
        replacement = fused.get(name) if owner is F else None
        setattr(owner, name, replacement or _like_cuda(original))
    try:
        yield
    finally:
        for (owner, name), original in originals.items():
            setattr(owner, name, original)


def _like_cuda(original: Any) -> Any:
    @functools.wraps(original)
    def called(*args: Any, **kwargs: Any) -> Any:
        if torch.is_autocast_enabled("cpu"):
            args = tuple(_in_fp32(each) for each in args)
        return original(*args, **kwargs)

    return called


def _attend(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    if torch.is_autocast_enabled("cpu"):
        to = torch.get_autocast_dtype("cpu")
        query, key, value = query.to(to), key.to(to), value.to(to)
    return torch.ops.cordee_trace.attention(query, key, value, attn_mask, is_causal, scale)[0]


def _normalise(x: Any, normalized_shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    # A compiler takes the norm apart, and fuses its parts itself.
    if weight is None or len(normalized_shape) != 1 or torch.compiler.is_compiling():
        return torch.rms_norm(x, normalized_shape, weight, eps)
    return torch.ops.cordee_trace.rms_norm(x, weight, 1e-6 if eps is None else eps)[0]


def _drop(x: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return torch.native_dropout(x, p, True)[0] if training and p > 0 else x


def _in_fp32(value: Any) -> Any:
    half = isinstance(value, torch.Tensor) and value.dtype in (torch.bfloat16, torch.float16)
    return value.float() if half else value
