"""Cases of the six Triton kernels: what one kernel reaches that a compiler or a fused framework would have written.

Coalesced and strided copies, rows in one read (softmax, scan, RMS norm), products by the size of their tiles, and
products with 4-bit weights by their rows. Only on a GPU: Triton's interpreter has the numbers and no times.
"""

from collections.abc import Iterator
from functools import partial

from cordee.errors import first_line
from cordee.hardware.measured import Refused
from cordee.plan.kernels import TILES
from cordee.train.calibration.cases import DTYPES, Maker
from cordee.train.calibration.timing import Case

STRIDE = 4
COLUMNS = 4096  # of rows
DEPTH = 32  # of a tile
GROUP = 128  # rows of a 4-bit weight with one scale


def fused(make: Maker) -> Iterator[Case | Refused]:
    """Yield the kernels as cases, over elements, elements of a tile, or rows; or why there are none."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        yield Refused("Triton kernels", first_line(error))
        return
    yield from _moving(make)
    if DTYPES[make.dtype].itemsize == 2:  # others use no tensor cores
        yield from _tiles(make)
        yield from _four_bits(make)


def _moving(make: Maker) -> Iterator[Case]:
    """Yield the kernels that memory bounds, over the elements of their result."""
    from cordee.kernels.copy import copy
    from cordee.kernels.rms_norm import rms_norm
    from cordee.kernels.scan import scan
    from cordee.kernels.softmax import softmax

    sizes = make.extent.elements[-3:]
    columns = min(COLUMNS, sizes[0])
    weight = make.tensor(columns)
    for elements in sizes:
        x, rows = make.tensor(elements), make.tensor(elements // columns, columns)
        part = elements // STRIDE
        runs = {
            "copy": (elements, partial(copy, x)),
            "strided": (part, partial(copy, x, stride=STRIDE)),
            "softmax": (elements, partial(softmax, rows)),
            "scan": (elements, partial(scan, rows)),
            "norm": (elements, partial(rms_norm, rows, weight)),
        }
        for name, (count, run) in runs.items():
            yield make.case(f"triton-{name} {{}}", (count,), count, run, optional=True)


def _tiles(make: Maker) -> Iterator[Case]:
    """Yield a large product with tiles of each size that the planner counts waves of."""
    from cordee.kernels.gemm import gemm

    side = make.extent.edge[1]
    a, b = make.tensor(side, side), make.tensor(side, side)
    for elements, (height, width) in {height * width: (height, width) for height, width, _ in TILES}.items():
        run = partial(gemm, a, b, block=(height, width, DEPTH))
        yield make.case("triton-tile {}", (elements,), 2.0 * side**3, run, optional=True)


def _four_bits(make: Maker) -> Iterator[Case]:
    """Yield products with a 4-bit weight over few to many rows, each beside PyTorch's with the same weight in 16."""
    from cordee.kernels.int4_gemm import int4_gemm
    from cordee.kernels.packing import pack, unpack

    side = make.extent.edge[1]
    packed, scales = pack(make.tensor(side, side), group=GROUP)
    weight = unpack(packed, scales, group=GROUP)
    for rows in (*make.extent.rows, *make.extent.tokens[:2]):
        x, flop = make.tensor(rows, side), 2.0 * rows * side * side
        block = (16, 64) if rows <= 16 else (64, 128)
        run = partial(int4_gemm, x, packed, scales, GROUP, block)
        yield make.case("triton-int4 {}", (rows,), flop, run, optional=True)
        yield make.case("triton-int4-beside {}", (rows,), flop, partial(x.matmul, weight))
