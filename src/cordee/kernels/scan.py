"""Inclusive scan: an operation in which each element depends on all before it.

Within a block the sums of ever longer neighbourhoods are combined, in log2(BLOCK) rounds; between the blocks of a row a
carry goes on. So each element is still read once and written once.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def scan_kernel(source, target, columns, BLOCK: tl.constexpr):
    """Write the running sums of row `program_id(0)`, block by block, in fp32."""
    first = tl.program_id(0).to(tl.int64) * columns
    carry = tl.sum(tl.zeros((BLOCK,), tl.float32), axis=0)
    for start in range(0, columns, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < columns
        x = tl.load(source + first + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(target + first + column, tl.cumsum(x, axis=0) + carry, mask=inside)
        carry += tl.sum(x, axis=0)


def scan(x: Tensor, block: int = 1024) -> Tensor:
    """Return the inclusive running sums along the columns of a contiguous `x` of shape (rows, columns)."""
    rows, columns = x.shape
    y = torch.empty_like(x)
    scan_kernel[(rows,)](x, y, columns, BLOCK=block, num_warps=4)
    return y
