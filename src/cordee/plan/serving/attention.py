"""Seconds of one layer's attention on one GPU: prompts are bound by FLOPs, single tokens by the bytes of their KV.

Scores and values cost 4 x heads x head_dim FLOPs for each pair of a new token and one that it sees
(arXiv:2205.14135, section 2). Latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1) multiplies its heads with
one shared latent vector in decode, and with unpacked keys and values in prefill.
"""

from dataclasses import dataclass

from cordee.hardware.catalog import Gpu
from cordee.plan.serving.formats import Format
from cordee.plan.serving.products import peak_flop_per_s
from cordee.workload.model import ModelShape


@dataclass(frozen=True, slots=True)
class Attention:
    """What attention is to one GPU of a tensor-parallel group.

    Attributes:
        heads: query heads on this GPU.
        kv_heads: KV heads on this GPU.
        key_dim: elements of a query or key that are multiplied for a score.
        value_dim: elements of a value.
        kv_elements: elements that one token leaves in the KV cache of this GPU and layer.
        latent: keys and values are unpacked from one latent vector.
    """

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    kv_elements: int
    latent: bool = False


def prefill_attention(shape: ModelShape, tp: int) -> Attention:
    """Return the attention that prompts pass: latent keys and values are unpacked for each head."""
    heads = -(-shape.heads // tp)
    if shape.latent is not None:
        key_dim = shape.latent.nope_dim + shape.latent.rope_dim
        return Attention(heads, heads, key_dim, shape.latent.v_dim, shape.latent.kv_rank + shape.latent.rope_dim, True)
    kv_heads = -(-shape.kv_heads // tp)
    return Attention(heads, kv_heads, shape.head_dim, shape.head_dim, 2 * kv_heads * shape.head_dim)


def decode_attention(shape: ModelShape, tp: int) -> Attention:
    """Return the attention of single tokens: heads share the latent vector where there is one."""
    if shape.latent is None:
        return prefill_attention(shape, tp)
    rank, rope = shape.latent.kv_rank, shape.latent.rope_dim
    return Attention(-(-shape.heads // tp), 1, rank + rope, rank, rank + rope, True)


def prefill_roofline_s(gpu: Gpu, attention: Attention, kv: Format, new: float, past: float) -> float:
    """Return the seconds of `new` tokens that see each other causally and all of `past` ones."""
    pairs = new * past + new * (new + 1) / 2
    flop = 2 * attention.heads * (attention.key_dim + attention.value_dim) * pairs
    queries = 2 * attention.heads * (attention.key_dim + attention.value_dim) * new
    moved = queries + kv.bits / 8 * attention.kv_elements * (new + past)
    return max(flop / peak_flop_per_s(gpu, "bf16"), moved / gpu.memory_bytes_per_s)


def prefill_attention_s(gpu: Gpu, attention: Attention, kv: Format, new: float, past: float = 0) -> float:
    """Return the seconds of `new` tokens of a prompt of which `past` tokens are in the cache already."""
    if new <= 0:
        return 0.0
    ideal = prefill_roofline_s(gpu, attention, kv, new, past)
    name = "latent_prefill" if attention.latent else "prefill"
    grid = gpu.kernels.find(name, kv.name, "bf16")
    if grid is not None:
        return ideal * 100 / grid.at(attention.heads, attention.key_dim, new)
    seen = new + past
    reached = gpu.efficiency.vendor_attention_fraction * seen / (seen + 512)
    return ideal / reached + gpu.efficiency.launch_s


def decode_roofline_s(gpu: Gpu, attention: Attention, kv: Format, sequences: float, context: float) -> float:
    """Return the seconds of one token each for sequences with so many tokens of context in all."""
    flop = 2 * attention.heads * (attention.key_dim + attention.value_dim) * context
    moved = kv.bits / 8 * attention.kv_elements * context
    moved += 2 * attention.heads * (attention.key_dim + attention.value_dim) * sequences
    return max(flop / peak_flop_per_s(gpu, "bf16"), moved / gpu.memory_bytes_per_s)


def decode_attention_s(gpu: Gpu, attention: Attention, kv: Format, sequences: float, context: float) -> float:
    """Return the seconds of one token each for sequences with so many tokens of context in all."""
    if sequences <= 0:
        return 0.0
    ideal = decode_roofline_s(gpu, attention, kv, sequences, context)
    name = "latent_decode" if attention.latent else "decode"
    grid = gpu.kernels.find(name, kv.name, "bf16")
    if grid is not None:
        group = attention.heads / attention.kv_heads
        return ideal * 100 / grid.at(group, sequences * attention.kv_heads, context / sequences)
    return ideal / gpu.efficiency.memory_fraction + gpu.efficiency.launch_s
