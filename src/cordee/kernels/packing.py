"""Weights of 4 bits: whole numbers from -8 to 7, two in a byte, with a scale for each group of rows of a column."""

import torch
from torch import Tensor


def pack(weight: Tensor, group: int = 128) -> tuple[Tensor, Tensor]:
    """Quantise `weight` (k, n) to `packed` (k / 2, n) of uint8 and `scales` (k / group, n) in the dtype of `weight`.

    The low four bits of byte j of a group hold its row j, the high ones its row `group / 2 + j`, so that each half
    of a group is a matrix of its own. Stored numbers are 8 higher than they mean.

    Raises:
        ValueError: k is no multiple of the group, or the group is odd.
    """
    k, n = weight.shape
    if group % 2 or k % group:
        raise ValueError(f"{k} rows do not divide into even groups of {group}")
    grouped = weight.reshape(k // group, group, n).float()
    # A column of zeros has any scale. 7 and not 8: the range is symmetric, so that zero stays zero.
    scales = (grouped.abs().amax(dim=1) / 7).clamp_min(torch.finfo(weight.dtype).tiny).to(weight.dtype)
    stored = (grouped / scales.float()[:, None]).round().clamp(-8, 7).add(8).to(torch.uint8)
    low, high = stored.split(group // 2, dim=1)
    return (low | high << 4).reshape(k // 2, n).contiguous(), scales


def unpack(packed: Tensor, scales: Tensor, group: int = 128) -> Tensor:
    """Return the weights (k, n) that `pack` stored, in the dtype of the scales."""
    n = packed.shape[1]
    halves = packed.reshape(-1, group // 2, n)
    stored = torch.cat((halves & 15, halves >> 4), dim=1).to(torch.float32) - 8
    return (stored * scales.float()[:, None]).to(scales.dtype).reshape(-1, n)
