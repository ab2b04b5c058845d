"""Cases of narrow formats: fp8 products on tensor cores, and frozen weights of 8 and 4 bits that are made 16-bit again.

QLoRA's product is a dequantisation and then a product of 16 bits (bitsandbytes' `MatMul4Bit`, and `MatMul8bitLt`
backward), so that only the first of the two is measured here.
"""

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product

import torch
from torch import Tensor

from cordee.errors import first_line
from cordee.hardware.measured import Refused
from cordee.train.calibration.cases import DTYPES, Maker
from cordee.train.calibration.timing import Case

FP8 = torch.float8_e4m3fn
BLOCK = 64  # elements of NF4 with one constant


def fp8_products(make: Maker) -> Iterator[Case]:
    """Yield a linear layer's three products on matrices that are fp8 already, with one scale for each matrix."""
    one, extent = torch.ones((), device=make.device.torch), make.extent

    def multiplied(a: Tensor, b: Tensor) -> Tensor:
        # cuBLASLt takes the second matrix with its columns in a row.
        return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)

    def matrix(rows: int, columns: int) -> Tensor:
        return make.tensor(rows, columns).to(FP8)

    for outputs, inputs, tokens in product(extent.sides[::2], extent.sides[::2], extent.tokens):
        at, flop = (tokens, outputs, inputs), 2.0 * tokens * outputs * inputs
        x, g, w = matrix(tokens, inputs), matrix(tokens, outputs), matrix(outputs, inputs)
        pairs = {
            "forward": (x, w),
            "inner": (g, w.t().contiguous()),
            "weight": (g.t().contiguous(), x.t().contiguous()),
        }
        for name, (a, b) in pairs.items():
            yield make.case(f"product fp8 {name}", at, flop, partial(multiplied, a, b), optional=True)


def dequantised(make: Maker) -> Iterator[Case | Refused]:
    """Yield dequantisations of square matrices to a precision of 16 bits, over the elements of their result."""
    if DTYPES[make.dtype].itemsize != 2:  # adapters are planned over these alone
        return
    for name, pack in (("int8", _int8), ("nf4", _nf4)):
        try:
            runs = {side: pack(make.tensor(side, side)) for side in make.extent.sides}
        except Exception as error:
            yield Refused(f"dequantise {name}", first_line(error))
            continue
        for side, run in runs.items():
            yield make.case(f"dequantise {name} {{}}", (side * side,), side * side, run, optional=True)


def _int8(weight: Tensor) -> Callable[[], Tensor]:
    """Return the dequantisation of whole numbers with a scale for each row, as `MatMul8bitLt` writes it."""
    scales = weight.float().abs().amax(dim=1, keepdim=True) / 127
    numbers = (weight / scales).round().to(torch.int8)
    return lambda: numbers.to(weight.dtype).mul_(scales)


def _nf4(weight: Tensor) -> Callable[[], Tensor]:
    """Return bitsandbytes' dequantisation of NF4.

    Raises:
        ImportError: it is not installed.
    """
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit

    numbers, state = quantize_4bit(weight, blocksize=BLOCK, quant_type="nf4")
    return partial(dequantize_4bit, numbers, state)
