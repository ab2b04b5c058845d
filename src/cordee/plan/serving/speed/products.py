"""Seconds of a matrix product in a number format: its roofline, times the fraction of it that was measured.

A product of m tokens with an n x k weight moves the weight in its format and the activations in theirs, and computes
2 m n k FLOPs; the slower of both is the roofline (Williams et al. 2009). Measured grids say what fraction of it kernels
reach by m, n and k; a GPU without them reaches the fractions of efficiency.toml.
"""

from cordee.hardware.catalog import Gpu
from cordee.plan.serving.formats import Format

MEASURED_AS = {"fp16": "bf16", "int8-wo": "int4", "mxfp4": "int4", "fp8-block": "fp8"}
"""Formats whose kernels are alike: the second stands for the first where that was not measured."""


UNPACKED_FRACTION = 0.62
"""Part of the 16-bit kernels' fraction of the roofline that weight-only kernels keep.

On A100 int4 is 2.5 times as fast as bf16 at m = 1, where its 4.16 bits a weight would make it 3.8 (speedups.toml).
"""


def peak_flop_per_s(gpu: Gpu, dtype: str) -> float:
    """Return the dense rate of products in `dtype`; a GPU without such units computes them in 16 bits."""
    if dtype in gpu.flop_per_s:
        return gpu.flop_per_s[dtype]
    if dtype == "int8":  # as fast as fp8 where there is fp8, and twice the 16-bit rate on A100 (NVIDIA's datasheets)
        return gpu.flop_per_s.get("fp8", 2 * gpu.peak16_flop_per_s)
    return gpu.peak16_flop_per_s


def computed_in(gpu: Gpu, weights: Format) -> str:
    """Return the dtype in which this GPU multiplies: one that lacks the format's units unpacks to 16 bits."""
    return weights.products if weights.products in (*gpu.flop_per_s, "int8") else "bf16"


def roofline_s(gpu: Gpu, weights: Format, m: float, n: float, k: float) -> float:
    """Return the seconds of an m x n x k product at the nameplate's rates."""
    dtype = computed_in(gpu, weights)
    activation = {"fp8": 1.0, "int8": 1.0, "fp4": 0.5, "fp32": 4.0}.get(dtype, 2.0)
    moved = weights.bits / 8 * n * k + activation * m * k + 2 * m * n
    return max(2 * m * n * k / peak_flop_per_s(gpu, dtype), moved / gpu.memory_bytes_per_s)


def product_s(gpu: Gpu, weights: Format, m: float, n: float, k: float) -> float:
    """Return the seconds of the product of m tokens with an n x k weight in this format.

    >>> from cordee.hardware.load import load_catalogue
    >>> from cordee.plan.serving.formats import WEIGHTS
    >>> h100 = load_catalogue().find_gpu("H100")
    >>> product_s(h100, WEIGHTS["int4"], 1, 8192, 8192) < product_s(h100, WEIGHTS["bf16"], 1, 8192, 8192)
    True
    """
    ideal = roofline_s(gpu, weights, m, n, k)
    grid = gpu.kernels.find("product", weights.name, MEASURED_AS.get(weights.name, weights.name))
    if grid is not None:
        return ideal / grid.fraction(m, n, k)
    grid = gpu.kernels.find("product", computed_in(gpu, weights), "bf16")
    if grid is not None:
        return ideal / grid.fraction(m, n, k) / (UNPACKED_FRACTION if weights.weight_only else 1.0)
    return ideal / _assumed_fraction(gpu, weights, m, n, k) + gpu.efficiency.launch_s


def _assumed_fraction(gpu: Gpu, weights: Format, m: float, n: float, k: float) -> float:
    moved = weights.bits / 8 * n * k / gpu.memory_bytes_per_s
    computed = 2 * m * n * k / peak_flop_per_s(gpu, computed_in(gpu, weights))
    if moved > computed:
        return gpu.efficiency.memory_fraction
    fraction = gpu.efficiency.product8_fraction if weights.bits <= 8 else gpu.efficiency.product_fraction
    return fraction * gpu.board_ratio
