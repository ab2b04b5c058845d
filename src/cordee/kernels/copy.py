"""Copy: neighbouring threads that read neighbouring elements, against threads that read apart.

The memory of a GPU answers in sectors of 32 bytes. With a stride of 1 a warp reads whole sectors, in loads of 16 bytes
a thread; with a stride of 4 each sector brings 2 useful elements of its 8, and no load can be wide.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def copy_kernel(source, target, n, STRIDE: tl.constexpr, BLOCK: tl.constexpr):
    """Write `source[i * STRIDE]` to `target[i]` for `BLOCK` values of `i` a program."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    tl.store(target + index, tl.load(source + index * STRIDE, mask=inside), mask=inside)


def copy(source: Tensor, stride: int = 1, block: int = 1024) -> Tensor:
    """Return every `stride`-th element of a contiguous 1-D `source`, as a new tensor of `len(source) // stride`."""
    n = source.numel() // stride
    target = torch.empty(n, dtype=source.dtype, device=source.device)
    copy_kernel[(triton.cdiv(n, block),)](source, target, n, STRIDE=stride, BLOCK=block, num_warps=4)
    return target
