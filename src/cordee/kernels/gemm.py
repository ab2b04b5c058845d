"""Matrix product in tiles: the operation in which arithmetic outweighs memory.

A tile of BLOCK_M x BLOCK_N results reads (BLOCK_M + BLOCK_N) x k elements for 2 x BLOCK_M x BLOCK_N x k operations, so
larger tiles need less memory traffic; shared memory and registers bound them. `tl.dot` becomes mma.sync on Ampere,
wgmma on Hopper and tcgen05.mma on Blackwell.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def gemm_kernel(
    a, b, c, m, n, k, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr
):
    """Write one tile of `c = a @ b`; programs go down GROUP tiles of `a` before they move on, so that L2 holds both."""
    across = tl.cdiv(n, BLOCK_N)
    band = tl.program_id(0) // (GROUP * across)
    height = tl.minimum(tl.cdiv(m, BLOCK_M) - band * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * across)
    rows = (band * GROUP + within % height) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = (within // height) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # Rows past the end read row 0 again: a result that is not stored needs no mask on its inputs.
    a_tile = a + (rows % m).to(tl.int64)[:, None] * k + depth[None, :]
    b_tile = b + depth.to(tl.int64)[:, None] * n + (columns % n)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, k, BLOCK_K):
        left = k - start
        x = tl.load(a_tile, mask=depth[None, :] < left, other=0.0)
        y = tl.load(b_tile, mask=depth[:, None] < left, other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
        a_tile += BLOCK_K
        b_tile += BLOCK_K * n
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    tl.store(c + rows.to(tl.int64)[:, None] * n + columns[None, :], total.to(c.dtype.element_ty), mask=inside)


def gemm(a: Tensor, b: Tensor, block: tuple[int, int, int] = (128, 128, 64)) -> Tensor:
    """Return `a @ b` for contiguous `a` (m, k) and `b` (k, n), accumulated in fp32."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty((m, n), dtype=a.dtype, device=a.device)
    tiles = triton.cdiv(m, block[0]) * triton.cdiv(n, block[1])
    gemm_kernel[(tiles,)](a, b, c, m, n, k, *block, GROUP=8, num_warps=8, num_stages=3)
    return c
