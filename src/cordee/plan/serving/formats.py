"""Number formats of weights and of the KV cache: their size with scales, and the products that they allow."""

import difflib
from dataclasses import dataclass

from cordee.errors import LayoutError


@dataclass(frozen=True, slots=True)
class Format:
    """How numbers are stored.

    Attributes:
        bits: bits of one weight or one KV element, with its share of scales and zero points.
        products: dtype in which matrix products run: a weight-only format is unpacked to it first.
        weight_only: weights are unpacked before each product, so activations stay in `products`.
        keeps_head: the embedding, the output head, norms and routers stay in 16 bits.
    """

    name: str
    bits: float
    products: str
    weight_only: bool = False
    keeps_head: bool = True


WEIGHTS = {
    each.name: each
    for each in (
        Format("bf16", 16, "bf16"),
        Format("fp16", 16, "fp16"),
        Format("fp32", 32, "fp32"),
        Format("fp8", 8, "fp8"),
        # One 32-bit scale for each block of 128 x 128 weights: DeepSeek-V3, arXiv:2412.19437, section 3.3.2.
        Format("fp8-block", 8 + 32 / 128**2, "fp8"),
        Format("int8", 8, "int8"),
        Format("int8-wo", 8, "bf16", weight_only=True),
        # Groups of 128 weights share a 16-bit scale and a 4-bit zero point: AWQ, GPTQ.
        Format("int4", 4 + 20 / 128, "bf16", weight_only=True),
        Format("mxfp4", 4 + 8 / 32, "bf16", weight_only=True),  # an 8-bit scale for 32 weights: OCP MX 1.0
        Format("nvfp4", 4 + 8 / 16, "fp4"),  # an 8-bit scale for 16 weights
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
