"""Matrix product with weights of 4 bits, as serving uses it: a quarter of the bytes for the same product.

With few rows of `x` a product is bound by reading the weights, so 4 bits make it up to four times as fast; with many
it is bound by arithmetic, and unpacking only adds to that. The number of rows at which they meet is the crossover.
Tiles of 16 rows are too low for wgmma and tcgen05.mma, so all architectures use mma.sync here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def int4_gemm_kernel(x, packed, scales, y, m, n, k, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Write one tile of `y = x @ weight`, a group of rows of the weight at a time (their layout: `packing.pack`)."""
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    half = tl.arange(0, GROUP // 2)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(0, k // GROUP):
        at = group * (GROUP // 2) + half
        both = tl.load(packed + at.to(tl.int64)[:, None] * n + columns[None, :], mask=columns[None, :] < n, other=0)
        first = x + rows.to(tl.int64)[:, None] * k + group * GROUP + half[None, :]
        low = tl.load(first, mask=rows[:, None] < m, other=0.0)
        high = tl.load(first + GROUP // 2, mask=rows[:, None] < m, other=0.0)
        part = tl.dot(low, ((both & 15).to(tl.float32) - 8).to(low.dtype), input_precision="ieee")
        part = tl.dot(high, ((both >> 4).to(tl.float32) - 8).to(low.dtype), part, input_precision="ieee")
        # The scale is one for the whole group of a column, so it is applied to the sum.
        scale = tl.load(scales + group * n + columns, mask=columns < n, other=0.0).to(tl.float32)
        total += part * scale[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(y + rows.to(tl.int64)[:, None] * n + columns[None, :], total.to(y.dtype.element_ty), mask=inside)


def int4_gemm(x: Tensor, packed: Tensor, scales: Tensor, group: int = 128, block: tuple[int, int] = (16, 64)) -> Tensor:
    """Return `x @ weight` for a contiguous `x` (m, k) and a weight (k, n) packed by `packing.pack` with this group."""
    (m, k), n = x.shape, packed.shape[1]
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(n, block[1]), triton.cdiv(m, block[0]))
    int4_gemm_kernel[grid](x, packed, scales, y, m, n, k, group, *block, num_warps=4, num_stages=3)
    return y
