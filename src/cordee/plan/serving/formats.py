"""Number formats of weights and of the KV cache: their size with scales, and the products that they allow."""

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from cordee.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Format:
    """A way to store numbers.

    Attributes:
        bits: bits of one weight or one KV element, with its share of scales and zero points.
        products: dtype in which matrix products run: a weight-only format is unpacked to it first.
        weight_only: weights are unpacked before each product, so activations stay in `products`.
        keeps_head: the embedding, the output head, norms and routers stay in 16 bits.
        experts_only: only routed experts are in this format, the rest in 16 bits.
        keeps_mixers: attention and recurrent layers stay in 16 bits.
        padded_hidden: experts are stored as if the hidden size were the next multiple of this (1: as it is).
        spread: how much checkpoints of this format differ in size, since some keep attention or more in 16 bits.
        mixed_bits: a GGUF mix: bits of the parts that differ: `value` and `down` in about half of the layers,
            `output` and `embedding`.
    """

    name: str
    bits: float
    products: str
    weight_only: bool = False
    keeps_head: bool = True
    experts_only: bool = False
    keeps_mixers: bool = False
    padded_hidden: int = 1
    spread: float = 0.0
    mixed_bits: Mapping[str, float] = field(default_factory=dict, hash=False)


def _gguf(name: str, bits: float, **mixed: float) -> Format:
    """Return a GGUF type or mix: its embedding and head are quantised too; norms and routers stay in 32 bits."""
    return Format(f"gguf-{name}", bits, "int8", weight_only=True, keeps_head=False, mixed_bits=mixed)


WEIGHTS = {
    each.name: each
    for each in (
        Format("bf16", 16, "bf16"),
        Format("fp16", 16, "fp16"),
        Format("fp32", 32, "fp32", keeps_head=False),
        Format("fp8", 8, "fp8"),
        # One 32-bit scale for each block of 128 x 128 weights: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.
        Format("fp8-block", 8 + 32 / 128**2, "fp8"),
        Format("int8", 8, "int8"),
        Format("int8-wo", 8, "bf16", weight_only=True),
        # Groups of 128 weights share a 16-bit scale and a 4-bit zero point: AWQ, GPTQ.
        Format("int4", 4 + 20 / 128, "bf16", weight_only=True, spread=0.05),
        # An 8-bit scale for 32 weights: OCP MX 1.0. gpt-oss has its experts so, and engines pad them to full tiles.
        Format("mxfp4", 4 + 8 / 32, "bf16", weight_only=True, experts_only=True, padded_hidden=256),
        Format("nvfp4", 4 + 8 / 16, "fp4", spread=0.15),  # an 8-bit scale for 16 weights
        # llama.cpp, ggml-common.h: a block's bytes x 8 / its weights. In the K mixes, half of the layers have more
        # bits for values and for the down projection (llama-quant.cpp, use_more_bits), and the head has 6.5625.
        _gguf("q8_0", 8.5),
        _gguf("q6_k", 6.5625),
        _gguf("q5_k_m", 5.5, value=6.5625, down=6.5625, output=6.5625),
        _gguf("q4_k_m", 4.5, value=6.5625, down=6.5625, output=6.5625),
        _gguf("q4_0", 4.5, output=6.5625),
    )
}
"""Formats of weights, by name."""

KV = {
    each.name: each
    for each in (
        Format("bf16", 16, "bf16"),
        Format("fp16", 16, "fp16"),
        Format("fp32", 32, "fp32"),
        Format("fp8", 8, "bf16"),
        Format("int8", 8, "bf16"),
        Format("q8_0", 8.5, "bf16"),
        Format("q4_0", 4.5, "bf16"),
        Format("nvfp4", 4 + 8 / 16, "bf16"),
    )
}
"""Formats of the KV cache, by name."""


def find_format(table: dict[str, Format], name: str) -> Format:
    """Return the format of this name.

    Raises:
        LayoutError: no such format.
    """
    if name in table:
        return table[name]
    near = difflib.get_close_matches(name, table, n=1)
    did_you_mean = f"did you mean {near[0]}? " if near else ""
    raise LayoutError(f"unknown format {name!r}", hint=f"{did_you_mean}known are {', '.join(table)}")
