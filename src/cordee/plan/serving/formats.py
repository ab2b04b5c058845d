"""Number formats of weights and of the KV cache: their size with scales, and the products that they allow."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cordee.errors import LayoutError
from cordee.near import nearest


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


def _gguf(name: str, bits: float, spread: float = 0.0, **mixed: float) -> Format:
    """Return a GGUF type or mix: its embedding and head are quantised too; norms and routers stay in 32 bits."""
    return Format(f"gguf-{name}", bits, "int8", weight_only=True, keeps_head=False, spread=spread, mixed_bits=mixed)


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
        # Where a mix gives a few more tensors other bits, `spread` covers them.
        _gguf("q8_0", 8.5),
        _gguf("q6_k", 6.5625),
        _gguf("q5_k_m", 5.5, value=6.5625, down=6.5625, output=6.5625),
        _gguf("q5_k_s", 5.5, output=6.5625),
        _gguf("q5_1", 6.0, output=6.5625),
        _gguf("q5_0", 5.5, output=6.5625),
        _gguf("q4_k_m", 4.5, value=6.5625, down=6.5625, output=6.5625),
        _gguf("q4_k_s", 4.5, 0.03, output=6.5625),
        _gguf("q4_1", 5.0, output=6.5625),
        _gguf("q4_0", 4.5, output=6.5625),
        _gguf("iq4_nl", 4.5, 0.03, output=6.5625),
        _gguf("iq4_xs", 4.25, 0.03, output=6.5625),
        _gguf("q3_k_m", 3.4375, 0.06, value=4.5, down=4.5, output=6.5625),
        _gguf("q3_k_s", 3.4375, 0.03, output=6.5625),
        _gguf("q2_k", 2.625, 0.15, value=3.4375, down=3.4375, output=6.5625),
    )
}
"""Formats of weights, by name."""

GGUF = tuple(name for name in WEIGHTS if name.startswith("gguf-"))
"""Names of llama.cpp's types and mixes."""

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


_OTHER_NAMES = {
    "bfloat16": "bf16", "float16": "fp16", "f16": "fp16", "half": "fp16", "float32": "fp32", "f32": "fp32",
    "awq": "int4", "gptq": "int4", "w4a16": "int4", "w8a8": "int8", "w8a16": "int8-wo", "fp8_e4m3": "fp8",
}  # fmt: skip
"""Names of the same formats elsewhere."""


def find_format(table: dict[str, Format], name: str) -> Format:
    """Return the format of this name, in any case; a GGUF type also without `gguf-`, as files are called.

    >>> find_format(WEIGHTS, "Q4_K_M").name, find_format(WEIGHTS, "BF16").name, find_format(WEIGHTS, "awq").name
    ('gguf-q4_k_m', 'bf16', 'int4')

    Raises:
        LayoutError: no such format.
    """
    plain = name.strip().lower()
    for known in (plain, f"gguf-{plain}", _OTHER_NAMES.get(plain, "")):
        if known in table:
            return table[known]
    names = list(table) if table is KV else [each.removeprefix("gguf-") for each in table]
    near = nearest(plain.removeprefix("gguf-"), names)
    hint = (f"did you mean {near}? " if near else "") + f"known are {', '.join(table)}"
    raise LayoutError(f"unknown format {name!r}", hint=hint)


def default_format(checkpoint: str, served: Sequence[str]) -> Format:
    """Return the format of a checkpoint or, where an engine does not serve it, the smallest that holds as many bits.

    >>> default_format("fp8-block", ("gguf-q4_0", "gguf-q8_0", "bf16")).name
    'gguf-q8_0'

    Raises:
        LayoutError: the checkpoint's format is not known.
    """
    if checkpoint not in WEIGHTS:
        raise LayoutError(
            f"the checkpoint's weights are in {checkpoint!r}, which has no size here",
            hint="name the nearest with --weights: " + ", ".join(served),
        )
    native = WEIGHTS[checkpoint]
    if native.name in served:
        return native
    known = [WEIGHTS[name] for name in served]
    # Scales of blocks take less than a hundredth of a bit. A format for experts alone, or of uncertain size, is none
    # to assume.
    enough = [each for each in known if each.bits >= native.bits - 0.01 and not (each.experts_only or each.spread)]
    return min(enough, key=lambda each: each.bits)
