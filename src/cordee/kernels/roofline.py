"""Measure the kernels on a GPU, each beside PyTorch's operation for the same, and hold them against the GPU's limits.

A kernel can take no less time than its bytes at the memory's speed, nor than its arithmetic at the tensor cores'
(Williams, Waterman and Patterson, Roofline, doi:10.1145/1498765.1498785). Times are medians of CUDA events; the L2
cache is written over before each run, so that nothing is read from it.
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cordee.kernels.catalogue import Measured
from cordee.kernels.copy import copy
from cordee.kernels.gemm import gemm
from cordee.kernels.int4_gemm import int4_gemm
from cordee.kernels.packing import pack, unpack
from cordee.kernels.rms_norm import rms_norm
from cordee.kernels.scan import scan
from cordee.kernels.softmax import softmax

_RUNS, _WARM = 50, 5
_L2_BYTES = 256 << 20  # more than any GPU's L2
_COLUMNS = 4096
_WIDTH = 8192  # of products
_ROWS_OF_X = (1, 4, 16, 32, 64, 128, 256, 512)

_Run = Callable[[], Tensor]
_Random = Callable[..., Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A kernel at one size, PyTorch's operation for the same, and the traffic and arithmetic of both."""

    shape: str
    run: _Run
    peer: str
    peer_run: _Run
    moved_bytes: float
    sector_bytes: float | None = None
    flop: float = 0.0


def measure(names: Sequence[str], seed: int = 0) -> Iterator[Measured]:
    """Yield these kernels' times on the first CUDA device, at sizes that fill it; the 4-bit product by rows.

    Raises:
        RuntimeError: torch has no CUDA device.
    """
    flush = torch.empty(_L2_BYTES, dtype=torch.uint8, device="cuda")
    generator = torch.Generator("cuda").manual_seed(seed)

    def random(*size: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(*size, generator=generator, device="cuda", dtype=dtype)

    for name in names:
        for case in _CASES[name](random):
            seconds, spread = _timed(case.run, flush)
            peer_seconds, _ = _timed(case.peer_run, flush)
            yield Measured(
                kernel=name,
                shape=case.shape,
                seconds=seconds,
                spread=spread,
                peer=case.peer,
                peer_seconds=peer_seconds,
                moved_bytes=case.moved_bytes,
                sector_bytes=case.moved_bytes if case.sector_bytes is None else case.sector_bytes,
                flop=case.flop,
            )


def _timed(run: _Run, flush: Tensor) -> tuple[float, float]:
    """Return the median seconds of a run on the current stream, and its 20th to 80th percentile over that."""
    for _ in range(_WARM):
        run()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_RUNS)]
    for begin, end in events:
        flush.zero_()
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) / 1e3 for begin, end in events)
    median = statistics.median(times)
    return median, (times[_RUNS * 4 // 5] - times[_RUNS // 5]) / median


def _copy(random: _Random) -> Iterator[_Case]:
    x = random(1 << 28)
    yield _Case(shape="1 GiB", run=lambda: copy(x), peer="clone", peer_run=x.clone, moved_bytes=2 * x.nbytes)


def _strided(random: _Random) -> Iterator[_Case]:
    x = random(1 << 28)
    part = x[::4]
    used = part.numel() * x.element_size()
    yield _Case(
        shape="256 MiB of 1 GiB",
        run=lambda: copy(x, stride=4),
        peer="contiguous",
        peer_run=part.contiguous,
        moved_bytes=2 * used,
        sector_bytes=x.nbytes + used,
    )


def _softmax(random: _Random) -> Iterator[_Case]:
    yield _over_rows(random(1 << 28).view(-1, _COLUMNS), softmax, "softmax", lambda x: x.softmax(dim=1))


def _scan(random: _Random) -> Iterator[_Case]:
    yield _over_rows(random(1 << 28).view(-1, _COLUMNS), scan, "cumsum", lambda x: x.cumsum(dim=1))


def _rms_norm(random: _Random) -> Iterator[_Case]:
    x, weight = random(1 << 28, dtype=torch.float16).view(-1, _COLUMNS), random(_COLUMNS, dtype=torch.float16)
    normed = torch.nn.functional.rms_norm
    yield _over_rows(x, lambda x: rms_norm(x, weight), "rms_norm", lambda x: normed(x, (_COLUMNS,), weight, 1e-6))


def _over_rows(x: Tensor, run: Callable[[Tensor], Tensor], peer: str, peer_run: Callable[[Tensor], Tensor]) -> _Case:
    return _Case(
        shape=f"{x.shape[0]:,} x {x.shape[1]:,}",
        run=lambda: run(x),
        peer=peer,
        peer_run=lambda: peer_run(x),
        moved_bytes=2 * x.nbytes,
    )


def _gemm(random: _Random) -> Iterator[_Case]:
    a, b = (random(_WIDTH, _WIDTH, dtype=torch.float16) for _ in range(2))
    yield _Case(
        shape=f"{_WIDTH:,} cubed",
        run=lambda: gemm(a, b),
        peer="matmul",
        peer_run=lambda: a @ b,
        moved_bytes=3 * a.nbytes,
        flop=2.0 * _WIDTH**3,
    )


def _int4_gemm(random: _Random) -> Iterator[_Case]:
    packed, scales = pack(random(_WIDTH, _WIDTH, dtype=torch.float16))
    weight = unpack(packed, scales)
    for rows in _ROWS_OF_X:
        x = random(rows, _WIDTH, dtype=torch.float16)
        block = (16, 64) if rows <= 16 else (64, 128)
        yield _Case(
            shape=f"{rows} x {_WIDTH:,} x {_WIDTH:,}",
            run=lambda x=x, block=block: int4_gemm(x, packed, scales, block=block),  # type: ignore[misc]
            peer="matmul of fp16",
            peer_run=lambda x=x: x @ weight,  # type: ignore[misc]
            moved_bytes=2 * x.nbytes + packed.nbytes + scales.nbytes,
            flop=2.0 * rows * _WIDTH**2,
        )


_CASES: dict[str, Callable[[_Random], Iterator[_Case]]] = {
    "copy": _copy,
    "strided copy": _strided,
    "softmax": _softmax,
    "scan": _scan,
    "rms norm": _rms_norm,
    "gemm": _gemm,
    "int4 gemm": _int4_gemm,
}
