"""Softmax: three passes over a row fused to one read and one write.

Written with separate operations a row is read for its maximum, for the exponentials, for their sum and for the
division. Here it stays in registers in between: one read and one write an element, and the kernel is bound by these.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def softmax_kernel(source, target, columns, BLOCK: tl.constexpr):
    """Write the softmax of row `program_id(0)`; `BLOCK` is a power of two of at least `columns`."""
    first = tl.program_id(0).to(tl.int64) * columns
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(source + first + column, mask=inside, other=-float("inf")).to(tl.float32)
    # exp of a positive number may overflow; of x - max it cannot, and the quotient is the same.
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(target + first + column, e / tl.sum(e, axis=0), mask=inside)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax over the columns of a contiguous `x` of shape (rows, columns)."""
    rows, columns = x.shape
    y = torch.empty_like(x)
    block = triton.next_power_of_2(columns)
    softmax_kernel[(rows,)](x, y, columns, BLOCK=block, num_warps=min(16, max(4, block // 512)))
    return y
