"""Seconds of single kernels on one GPU: products with tiles and waves, attention, and what only moves memory.

All sizes may be NumPy arrays that broadcast. Nothing here knows a model or a layout; `step.py` puts layers together.
"""

import numpy as np

from cordee.hardware.arrays import Real
from cordee.hardware.catalog import Gpu
from cordee.plan.training import Attention

# Output tiles that one multiprocessor computes, and the part of its rate that each reaches: a smaller tile loads more
# bytes for each product, 4/3, 2 and 8/3 times those of the largest (NVIDIA, Matrix Multiplication Background User's
# Guide, section 4.1). The part of it that costs time is assumed where no calibration measured it.
TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.8), (128, 64, 0.55), (64, 64, 0.4))
# Rows that are no multiple of 128 bytes lose part of the rate on chips since A100, rows that are no multiple of 16 take
# the slow path (same guide, section 2). It does not say how much: the fractions are assumed, the first so that a hidden
# size of 14,400 in place of 13,824 costs about what it cost in BLOOM's search for a layout.
LINE_BYTES = 128
UNALIGNED_FRACTION = 0.7
ODD_FRACTION = 0.5
# Steps of the inner product before a tile's pipeline is full, as elements of the inner dimension.
FILL_ELEMENTS = 64
# Fused attention recomputes its scores in the backward pass: five products for two (arXiv:2205.14135, appendix B).
FLASH_BACKWARD = 2.5
# The first FlashAttention's part of the second's rate: 25 to 40 % of the peak for 50 to 73 % (arXiv:2307.08691,
# abstract), the middles of both.
FIRST_GENERATION = 0.53
# Sequences as long as this reach half of the rate in fused attention.
FLASH_HALF_TOKENS = 512
# 16-bit words moved for each score of unfused attention: written, softmax, dropout and its mask, read; backwards the
# same and their gradients (counted along the graph of Korthikanti et al. 2022, arXiv:2205.05198, figure 3).
SCORE_WORDS_FORWARD = 6.5
SCORE_WORDS_BACKWARD = 10.0


def product_s(gpu: Gpu, m: Real, n: Real, k: Real, *, bits: int = 16, fraction: float = 1.0, groups: Real = 1) -> Real:
    """Return the seconds of an m x n x k product: whole waves of whole tiles, or its bytes if they take longer.

    With `groups` it is so many of them side by side, each with matrices of its own: one for each expert.
    """
    peak = gpu.peak16_flop_per_s * gpu.efficiency.product_fraction
    if bits == 8:
        peak = gpu.peak_flop_per_s("fp8") * gpu.efficiency.product8_fraction
    elif bits == 32:
        peak = gpu.peak32_flop_per_s * gpu.efficiency.product_fraction
    per_unit = fraction * gpu.board_ratio * peak / gpu.efficiency.units * row_fraction(n, bits) * row_fraction(k, bits)
    depth = 2.0 * (k + FILL_ELEMENTS)
    fastest: Real = np.inf
    for height, width, assumed in TILES:
        tile_fraction = tile_rate_fraction(gpu, height * width, assumed)
        tiles = groups * np.ceil(m / height) * np.ceil(n / width)
        wave = height * width * depth / (per_unit * tile_fraction)
        fastest = np.minimum(fastest, waves(tiles, gpu.efficiency.units) * wave)
    moved = groups * (bits / 8 * (m * k + k * n) + 2.0 * m * n)
    return (
        np.maximum(fastest, moved / (gpu.memory_bytes_per_s * gpu.efficiency.memory_fraction)) + gpu.efficiency.launch_s
    )


def tile_rate_fraction(gpu: Gpu, elements: int, assumed: float) -> float:
    """Return a tile's rate over the fastest one's, as a calibration measured it with a Triton kernel."""
    table = None if gpu.measured is None else gpu.measured.find("triton-tile", "bf16")
    return assumed if table is None else float(table.rate(elements)) / table.best


def waves(tiles: Real, units: int) -> Real:
    """Return the rounds of so many tiles on so many multiprocessors: the last one lasts as long as the others.

    >>> float(waves(108, 108)), float(waves(109, 108))
    (1.0, 2.0)
    """
    return np.ceil(tiles / units)


def row_fraction(elements: Real, bits: int = 16) -> Real:
    """Return the fraction of the rate that rows of so many elements reach.

    >>> float(row_fraction(13824 // 8)), round(float(row_fraction(14400 // 8)), 2), float(row_fraction(109))
    (1.0, 0.7, 0.5)
    """
    row_bytes = elements * bits // 8
    aligned = np.where(row_bytes % LINE_BYTES == 0, 1.0, UNALIGNED_FRACTION)
    return np.where(row_bytes % 16 == 0, aligned, ODD_FRACTION)


def move_s(gpu: Gpu, n_bytes: Real) -> Real:
    """Return the seconds to read or write so many bytes of the GPU's own memory."""
    return n_bytes / (gpu.memory_bytes_per_s * gpu.efficiency.memory_fraction)


def stream_s(gpu: Gpu, n_bytes: Real) -> Real:
    """Return the seconds of large kernels that do nothing but stream: copies, casts, pointwise ones, the optimizer."""
    return n_bytes / (gpu.memory_bytes_per_s * gpu.efficiency.stream_fraction)


def fused_attention_s(gpu: Gpu, flop: Real, tokens: Real, *, kind: Attention = "second") -> tuple[Real, Real]:
    """Return forward and backward seconds of fused attention with `flop` forward in sequences of so many tokens.

    The vendor's own kernels (cuDNN) know the chip better than portable ones.
    """
    fraction = gpu.efficiency.vendor_attention_fraction if kind == "vendor" else gpu.efficiency.attention_fraction
    fraction *= FIRST_GENERATION if kind == "first" else 1.0
    rate = gpu.peak16_flop_per_s * fraction * tokens / (tokens + FLASH_HALF_TOKENS)
    return flop / rate + gpu.efficiency.launch_s, FLASH_BACKWARD * flop / rate + gpu.efficiency.launch_s


def unfused_attention_s(gpu: Gpu, batch_heads: Real, tokens: Real, head_dim: Real) -> tuple[Real, Real]:
    """Return forward and backward seconds of attention that writes its scores: the whole square, bound by memory."""
    scores = batch_heads * tokens * tokens
    # Batched products whose rows are no multiple of 16 bytes leave the tensor cores.
    peak = np.where(head_dim * 2 % 16 == 0, gpu.peak16_flop_per_s, gpu.peak_flop_per_s("fp32"))
    rate = peak * gpu.efficiency.product_fraction * gpu.board_ratio * head_dim / (head_dim + FILL_ELEMENTS)
    product = 2.0 * scores * head_dim / rate
    forward = 2 * product + move_s(gpu, 2 * SCORE_WORDS_FORWARD * scores)
    backward = 4 * product + move_s(gpu, 2 * SCORE_WORDS_BACKWARD * scores)
    return forward + 4 * gpu.efficiency.launch_s, backward + 8 * gpu.efficiency.launch_s
