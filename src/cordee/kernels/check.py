"""Compare each kernel's numbers with the same in fp64, within the bound that its rounding errors allow.

In Triton's interpreter where no GPU is: TRITON_INTERPRET=1 must be set before anything imports Triton. Only fp32 and
fp16: `tl.dot` of bf16 gives wrong numbers in the interpreter, without an error (triton 3.9).

The bounds are those of Higham, Accuracy and Stability of Numerical Algorithms (2nd edition, 3.1 and 4.2): a sum of n
terms in any order has an error of at most (n - 1) u times the sum of their magnitudes, where u is half the distance
from 1 to the next number (2^-24 in fp32, 2^-11 in fp16); a result that is stored in fp16 is rounded once more.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from cordee.kernels.catalogue import Checked
from cordee.kernels.copy import copy
from cordee.kernels.gemm import gemm
from cordee.kernels.int4_gemm import int4_gemm
from cordee.kernels.packing import pack, unpack
from cordee.kernels.rms_norm import rms_norm
from cordee.kernels.scan import scan
from cordee.kernels.softmax import softmax

_U32 = 2.0**-24
_DTYPES = (torch.float32, torch.float16)
# A few operations whose own error is at most 2 units each: exp, division, root (CUDA C++ Programming Guide, 14.1).
_FEW = 8.0

_Parts = tuple[Tensor, Tensor, Tensor]
"""What the kernel gave, the same in fp64, and the largest error that each element may have before it is stored."""


def check(names: Sequence[str], seed: int = 0, device: str = "cpu") -> Iterator[Checked]:
    """Yield the comparison of each of these kernels, at sizes that no block divides, on random inputs of this seed."""
    for name, shape, run in (case for case in _CASES if case[0] in names):
        for dtype in _DTYPES:
            generator = torch.Generator().manual_seed(seed)
            result, wanted, bound = run(lambda *size, g=generator: torch.randn(*size, generator=g), dtype, device)
            assert result.dtype == dtype, f"{name} returned {result.dtype}"
            stored = 0.0 if dtype == torch.float32 else 2.0**-11
            # 2^-25 is half of the smallest number that fp16 has.
            allowed = bound + stored * wanted.abs() + (2.0**-25 if stored else 0.0)
            off = (result.double() - wanted).abs()
            error = torch.where(off == 0, 0.0, off / allowed).max().item()
            yield Checked(
                kernel=name,
                dtype=str(dtype).removeprefix("torch."),
                shape=shape,
                where="interpreter" if device == "cpu" else torch.cuda.get_device_name(),
                error=error,
            )


_Random = Callable[..., Tensor]


def _copy(random: _Random, dtype: torch.dtype, device: str) -> _Parts:
    x = random(4_099).to(dtype).to(device)
    return copy(x), x.double(), torch.zeros(4_099, dtype=torch.double, device=device)


def _strided(random: _Random, dtype: torch.dtype, device: str) -> _Parts:
    x = random(4 * 1_027).to(dtype).to(device)
    return copy(x, stride=4), x[::4].double(), torch.zeros(1_027, dtype=torch.double, device=device)


def _softmax(random: _Random, dtype: torch.dtype, device: str) -> _Parts:
    # With this factor a row's exponents reach -100, and without the maximum they would overflow fp32.
    x = (30 * random(7, 781)).to(dtype).to(device)
    wanted = x.double().softmax(dim=1)
    reach = (x.double() - x.double().amax(dim=1, keepdim=True)).abs()
    # The argument's rounding becomes a relative error of exp; the terms of the sum bring theirs in weighted by size.
    # Below the smallest normal number results may be zero.
    return softmax(x), wanted, _U32 * (reach + 781 + 40 + _FEW) * wanted + 2.0**-126


def _scan(random: _Random, dtype: torch.dtype, device: str) -> _Parts:
    x = random(5, 2_500).to(dtype).to(device)
    size = x.double().abs().cumsum(dim=1)
    return scan(x), x.double().cumsum(dim=1), _U32 * torch.arange(1, 2_501, device=device) * size


def _rms_norm(random: _Random, dtype: torch.dtype, device: str) -> _Parts:
    x, weight = (3 * random(7, 781)).to(dtype).to(device), random(781).to(dtype).to(device)
    square = x.double().square().mean(dim=1, keepdim=True)
    wanted = x.double() / (square + 1e-6).sqrt() * weight.double()
    # The square root halves the relative error of the sum.
    return rms_norm(x, weight), wanted, _U32 * (781 / 2 + _FEW) * wanted.abs()


def _gemm(random: _Random, dtype: torch.dtype, device: str) -> _Parts:
    a, b = random(65, 130).to(dtype).to(device), random(130, 97).to(dtype).to(device)
    size = a.double().abs() @ b.double().abs()
    return gemm(a, b, block=(32, 32, 32)), a.double() @ b.double(), 130 * _U32 * size


def _int4_gemm(random: _Random, dtype: torch.dtype, device: str) -> _Parts:
    x, weight = random(17, 256).to(dtype).to(device), random(256, 80).to(dtype).to(device)
    packed, scales = pack(weight, group=64)
    # In fp64 from what is stored: numbers times scales, before their product is rounded to the dtype.
    exact = unpack(packed, scales.double(), group=64)
    size = x.double().abs() @ exact.abs()
    result = int4_gemm(x, packed, scales, group=64, block=(16, 32))
    return result, x.double() @ exact, (256 + _FEW) * _U32 * size


_CASES: tuple[tuple[str, str, Callable[[_Random, torch.dtype, str], _Parts]], ...] = (
    ("copy", "4,099", _copy),
    ("strided copy", "1,027 of 4,108", _strided),
    ("softmax", "7 x 781", _softmax),
    ("scan", "5 x 2,500", _scan),
    ("rms norm", "7 x 781", _rms_norm),
    ("gemm", "65 x 130 x 97", _gemm),
    ("int4 gemm", "17 x 256 x 80", _int4_gemm),
)
