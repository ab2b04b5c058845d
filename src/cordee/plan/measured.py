"""Seconds of a layer's parts from a calibration's tables, where the device has them; None where it has not.

The operations are those that eager PyTorch runs for a decoder layer, as Hugging Face's models write it: each is counted
once, with the backward pass that was measured for it. Sizes may be NumPy arrays.
"""

from typing import NamedTuple

import numpy as np

from cordee.hardware.arrays import Real
from cordee.hardware.catalog import Gpu
from cordee.hardware.measured import Measured
from cordee.plan.layout import Layout
from cordee.plan.training import Training
from cordee.workload.model import ModelShape

# Where branches join, their gradients are added: at both residuals, and at the inputs of q, k, v and of gate, up.
JOINS = 2
# Heads are brought into the order of tokens once forward; backward queries, keys, values and the result's gradient.
TURNS, TURNS_BACKWARD = 1, 4
# glibc maps blocks from here on anew each time, and unmaps them when they are freed; smaller ones it keeps after the
# first step (malloc.c, DEFAULT_MMAP_THRESHOLD_MAX: what its threshold grows to by itself).
MAPPED_BYTES = 32 << 20
# Tensors as large as its elements that an operation makes, forward and backward, as torch's dispatcher counts them.
MADE = {
    "norm": (3, 9), "layer-norm": (1, 1), "rotate": (4, 6), "gate": (2, 3), "gelu": (1, 1), "loss": (1, 2),
    "embedding": (0, 1),
}  # fmt: skip


class Seconds(NamedTuple):
    """Forward, gradient of the input, gradient of the weight."""

    forward: Real
    inner: Real
    weight: Real


def product_seconds(gpu: Gpu, precision: str, tokens: Real, outputs: Real, inputs: Real) -> Seconds | None:
    """Return the seconds of a linear layer's three products, if they were measured in this precision."""
    measured = gpu.measured
    if measured is None:
        return None
    forward, inner, weight = (measured.find("product", precision, each) for each in ("forward", "inner", "weight"))
    if forward is None or inner is None or weight is None:
        return None
    flop = 2.0 * tokens * outputs * inputs / _edge(measured, precision, outputs) / _edge(measured, precision, inputs)
    # A step is longer than a probe: its products run at the rate that power and heat allow.
    flop = flop / min(1.0, measured.numbers.get("sustained_fraction", 1.0))
    return Seconds(*(each.seconds(flop, tokens, outputs, inputs) for each in (forward, inner, weight)))


def linear_pages(gpu: Gpu, training: Training, tokens: Real, outputs: Real, inputs: Real) -> Seconds:
    """Return the seconds of new pages under the results of a linear layer's three products; a frozen one has two."""
    if gpu.measured is None:
        return Seconds(0.0, 0.0, 0.0)
    item, trained = training.activation_bytes, training.adapters is None
    sizes = tokens * outputs, tokens * inputs, trained * outputs * inputs
    return Seconds(*(_page_seconds(gpu.measured, item * each) for each in sizes))


def _page_seconds(measured: Measured, n_bytes: Real) -> Real:
    """Return the seconds in which a CPU's kernel maps the pages of one tensor, if it is large; 0 if none measured it.

    The first touch of a page is a fault, and the kernel fills it with zeros: half a nanosecond a byte, ten times what
    it takes to write it again. The probe writes what it has mapped; an operation's table has its own writing already.
    """
    fresh, kept = (measured.find("pages", each) for each in ("fresh", "kept"))
    if fresh is None or kept is None:
        return 0.0
    more = np.maximum(0.0, 1 / fresh.rate(n_bytes) - 1 / kept.rate(n_bytes))
    return np.where(np.asarray(n_bytes) >= MAPPED_BYTES, n_bytes * more, 0.0)


def _edge(measured: Measured, precision: str, elements: Real) -> Real:
    """Return the fraction of the rate that rows of so many elements reach, by their last bytes."""
    item = {"fp8": 1, "fp32": 4}.get(precision, 2)
    row_bytes = elements * item
    aligned = np.where(row_bytes % 128 == 0, 1.0, measured.numbers.get("unaligned_fraction", 1.0))
    return np.where(row_bytes % 16 == 0, aligned, measured.numbers.get("odd_fraction", 1.0))


def attention_seconds(gpu: Gpu, precision: str, flop: Real, head_dim: Real, tokens: Real) -> tuple[Real, Real] | None:
    """Return forward and backward seconds of causal attention with `flop` forward, if it was measured."""
    if gpu.measured is None:
        return None
    both = [gpu.measured.find("attention", _wide(precision), each) for each in ("forward", "backward")]
    if both[0] is None or both[1] is None:
        return None
    return both[0].seconds(flop, head_dim, tokens), both[1].seconds(flop, head_dim, tokens)


def dequantise_seconds(gpu: Gpu, base: str, precision: str, elements: Real) -> Real | None:
    """Return the seconds in which a frozen matrix of this format becomes 16-bit again, if that was measured."""
    table = None if gpu.measured is None else gpu.measured.find("dequantise", base, precision)
    return None if table is None else table.seconds(elements, elements)


def _wide(precision: str) -> str:
    """Return the precision of activations."""
    return "bf16" if precision == "fp8" else precision


class _Operations:
    """Sums of operations of one precision; `missing` if one of them has no table."""

    def __init__(self, measured: Measured, precision: str) -> None:
        self._measured, self._precision = measured, _wide(precision)
        self.forward_s: Real = 0.0
        self.backward_s: Real = 0.0
        self.missing = False

    def both(self, name: str, elements: Real, times: Real = 1) -> None:
        """Count an operation, forward and backward, with the new pages of what it makes."""
        item = 4 if name == "loss" or self._precision == "fp32" else 2
        pages = _page_seconds(self._measured, item * elements)
        forward, backward = (
            self._seconds(elements, name, self._precision, each) + made * pages
            for each, made in zip(("forward", "backward"), MADE[name], strict=True)
        )
        self.forward_s, self.backward_s = self.forward_s + times * forward, self.backward_s + times * backward

    def plain(self, name: str, elements: Real, *, forward: Real = 0, backward: Real = 0) -> None:
        """Count an operation without a backward pass of its own, so many times in each pass."""
        seconds = self._seconds(elements, name, self._precision)
        self.forward_s, self.backward_s = self.forward_s + forward * seconds, self.backward_s + backward * seconds

    def _seconds(self, elements: Real, *name: str) -> Real:
        table = self._measured.find(*name)
        if table is None:
            self.missing = True
            return 0.0
        return table.seconds(elements, elements)


def layer_operations(
    shape: ModelShape, gpu: Gpu, layout: Layout, training: Training, tokens: Real, inner: Real
) -> tuple[Real, Real] | None:
    """Return forward and backward seconds of all that is no product and no attention in an eager layer."""
    if gpu.measured is None or training.is_fused:
        return None
    counted, tp = _Operations(gpu.measured, training.precision), layout.tp
    hidden = tokens * shape.hidden / np.where(layout.sp, tp, 1)
    queries, keys = (tokens * heads * shape.head_dim / tp for heads in (shape.heads, shape.kv_heads))
    counted.both("norm" if shape.norm == "rms" else "layer-norm", hidden, 2)
    if not shape.learned_positions:
        counted.both("rotate", queries)
        counted.both("rotate", keys)
    counted.both("gate" if shape.gated else "gelu", tokens * inner / tp)
    counted.plain("add", hidden, forward=2, backward=JOINS + 2 + shape.gated)
    counted.plain("turn", queries, forward=TURNS, backward=TURNS_BACKWARD)
    count = training.global_batch / (layout.dp * layout.micro_batch)
    weights = (shape.attention_parameters + shape.mlp_parameters(shape.ffn)) / tp
    counted.plain("add", weights, backward=(count - 1) / count)
    return None if counted.missing else (counted.forward_s, counted.backward_s)


def head_operations(
    shape: ModelShape, gpu: Gpu, layout: Layout, training: Training, tokens: Real
) -> tuple[Real, Real] | None:
    """Return forward and backward seconds of the last norm, the loss, and the embeddings' dense gradient."""
    if gpu.measured is None or training.loss_kind != "eager":
        return None
    counted = _Operations(gpu.measured, training.precision)
    counted.both("norm" if shape.norm == "rms" else "layer-norm", tokens * shape.hidden)
    counted.both("loss", tokens * shape.vocab / layout.tp)
    counted.both("embedding", shape.vocab * shape.hidden / layout.tp)
    counted.plain("add", shape.vocab * shape.hidden / layout.tp, backward=1.0 * shape.tied)
    return None if counted.missing else (counted.forward_s, counted.backward_s)


def update_seconds(gpu: Gpu, training: Training, parameters: Real) -> Real | None:
    """Return the seconds of the optimizer, if it is AdamW with 32-bit states and was measured."""
    if gpu.measured is None or training.optimizer.name != "adamw":
        return None
    table = gpu.measured.find("adamw-fused")
    return None if table is None else table.seconds(parameters, parameters)
