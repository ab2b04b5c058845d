"""Cases beyond what every device can do: narrow formats and Triton's kernels, and the reasons where there are none."""

from collections.abc import Iterator

from cordee.hardware.measured import Refused
from cordee.train.calibration.cases import Maker
from cordee.train.calibration.fused import fused
from cordee.train.calibration.quantised import dequantised, fp8_products
from cordee.train.calibration.timing import Case, able


def beyond(make: Maker) -> tuple[list[Case], list[Refused]]:
    """Return the cases that this device can run, each tried once, and what was refused.

    A CPU has neither fp8 products that anyone plans with, nor a compiler for Triton's kernels: its interpreter gives
    numbers and no times.
    """
    every = list(_listed(make))
    found, refused = able([each for each in every if isinstance(each, Case)])
    return found, [*(each for each in every if isinstance(each, Refused)), *refused]


def _listed(make: Maker) -> Iterator[Case | Refused]:
    if make.device.kind == "cuda":
        yield from fp8_products(make)
        yield from fused(make)
    yield from dequantised(make)
