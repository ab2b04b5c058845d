"""Seconds of one layer's attention on one GPU: prompts are bound by FLOPs, single tokens by the bytes of their KV.

Scores and values cost 2 x heads x (key_dim + value_dim) FLOPs for each pair of a new token and one that it sees
(arXiv:2205.14135, section 2). Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) multiplies its heads with
one shared latent vector in decode, and with unpacked keys and values in prefill.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cordee.hardware.catalog import Gpu
from cordee.plan.serving.formats import Format
from cordee.plan.serving.speed.products import peak_flop_per_s
from cordee.workload.layers import LayerKind
from cordee.workload.model import ModelShape

# Sequences as long as this reach half of the rate in fused attention, where nothing was measured (as in training).
HALF_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Attention:
    """The attention of one layer on one GPU of a tensor-parallel group.

    Attributes:
        heads: query heads on this GPU.
        kv_heads: KV heads on this GPU.
        key_dim: elements of a query or key that are multiplied for a score.
        value_dim: elements of a value.
        kv_elements: elements that one token leaves in the KV cache of this GPU and layer.
        latent: keys and values are unpacked from one latent vector.
        window: tokens that a token sees at most; None: all before it.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    kv_elements: int
    latent: bool = False
    window: int | None = None

    @property
    def pair_flop(self) -> float:
        """FLOPs of a new token with one that it sees."""
        return 2.0 * self.heads * (self.key_dim + self.value_dim)


def prefill_attention(shape: ModelShape, tp: int, kind: LayerKind = "full") -> Attention:
    """Return the attention that prompts pass: latent keys and values are unpacked for each head."""
    heads = -(-shape.heads // tp)
    if shape.latent is not None:
        key_dim = shape.latent.nope_dim + shape.latent.rope_dim
        return Attention(heads, heads, key_dim, shape.latent.v_dim, shape.latent.kv_rank + shape.latent.rope_dim, True)
    all_kv_heads, dim = shape.kv_shape(kind)
    kv_heads = -(-all_kv_heads // tp)
    window = shape.mixed.window if shape.mixed is not None and kind == "window" else None
    seen = None if window is None else window.tokens
    return Attention(heads, kv_heads, dim, dim, 2 * kv_heads * dim, window=seen)


def decode_attention(shape: ModelShape, tp: int, kind: LayerKind = "full", *, grouped_reads: bool = True) -> Attention:
    """Return the attention of single tokens: heads share the latent vector where there is one.

    Without `grouped_reads` each query head reads the keys and values of its group for itself.
    """
    if shape.latent is None:
        found = prefill_attention(shape, tp, kind)
        if grouped_reads:
            return found
        read = found.kv_elements * found.heads // found.kv_heads
        return replace(found, kv_heads=found.heads, kv_elements=read)
    rank, rope = shape.latent.kv_rank, shape.latent.rope_dim
    return Attention(-(-shape.heads // tp), 1, rank + rope, rank, rank + rope, True)


def seen_pairs(new: float, past: float, window: int | None) -> float:
    """Return the pairs of a new token and one that it sees, itself included.

    >>> seen_pairs(3, 0, None), seen_pairs(3, 10, None), seen_pairs(3, 10, 4), seen_pairs(3, 0, 2)
    (6.0, 36.0, 12.0, 5.0)
    """
    if window is None or new + past <= window:
        return new * past + new * (new + 1) / 2
    below = max(0.0, min(new, window - past))  # tokens that still see all before them
    return below * past + below * (below + 1) / 2 + (new - below) * window


def prefill_roofline_s(gpu: Gpu, attention: Attention, kv: Format, new: float, past: float) -> float:
    """Return the seconds of `new` tokens that see each other causally and all of `past` ones, or their window."""
    flop = attention.pair_flop * seen_pairs(new, past, attention.window)
    seen = new + past if attention.window is None else min(new + past, new + attention.window)
    moved = attention.pair_flop * new + kv.bits / 8 * attention.kv_elements * seen
    return max(flop / peak_flop_per_s(gpu, "bf16"), moved / gpu.memory_bytes_per_s)


def prefill_attention_s(gpu: Gpu, attention: Attention, kv: Format, chunks: Sequence[tuple[float, float]]) -> float:
    """Return the seconds of one kernel for chunks of prompts: for each its new tokens and those in the cache."""
    ideal = sum(prefill_roofline_s(gpu, attention, kv, new, past) for new, past in chunks)
    if ideal <= 0:
        return 0.0
    tokens = sum(new for new, _ in chunks)
    # A kernel is filled by all prompts of a step; its rate follows from the length of what each token sees.
    length = sum(new * (new + 2 * past) for new, past in chunks) / tokens
    grid = gpu.kernels.find("latent_prefill" if attention.latent else "prefill", kv.name, "bf16")
    if grid is not None:
        return ideal / grid.fraction(attention.heads * len(chunks), attention.key_dim, length)
    reached = gpu.efficiency.vendor_attention_fraction * length / (length + HALF_TOKENS)
    return ideal / reached + gpu.efficiency.launch_s


def decode_roofline_s(gpu: Gpu, attention: Attention, kv: Format, sequences: float, context: float) -> float:
    """Return the seconds of one token each for sequences with so many tokens of context in all."""
    moved = kv.bits / 8 * attention.kv_elements * context + attention.pair_flop * sequences
    return max(attention.pair_flop * context / peak_flop_per_s(gpu, "bf16"), moved / gpu.memory_bytes_per_s)


def decode_attention_s(
    gpu: Gpu, attention: Attention, kv: Format, sequences: float, context: float, *, each: int = 1
) -> float:
    """Return the seconds of `each` tokens for sequences with so many tokens of context in all."""
    if sequences <= 0:
        return 0.0
    length = max(1.0, context / sequences)
    if attention.window is not None:
        length = min(length, attention.window)
    ideal = decode_roofline_s(gpu, attention, kv, sequences, length * sequences)
    computed = each * attention.pair_flop * length * sequences / peak_flop_per_s(gpu, "bf16")
    grid = gpu.kernels.find("latent_decode" if attention.latent else "decode", kv.name, "bf16")
    if grid is None:
        return max(ideal, computed) / gpu.efficiency.memory_fraction + gpu.efficiency.launch_s
    if attention.latent:
        return max(ideal, computed) / grid.fraction(attention.heads, sequences, length)
    group, rows = attention.heads / attention.kv_heads, sequences * attention.kv_heads
    return max(ideal, computed) / grid.fraction(group, rows, length, attention.key_dim)
