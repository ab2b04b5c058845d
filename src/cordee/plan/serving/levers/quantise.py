"""Quantisation by batch: where a format of the weights is faster than bf16, and where it loses.

A small batch waits for weights, and fewer bytes of them arrive sooner. A large batch waits for products: a weight-only
format unpacks its weights for each of them and then multiplies in 16 bits, so it loses; a format with products of its
own (fp8, W8A8, nvfp4) does not. The figures are measured ones, of products or of whole steps.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf, log

from cordee.hardware.speedups import Speedups
from cordee.plan.serving.formats import WEIGHTS

EVEN = 0.05
"""A difference of 5 % is none: tables of two versions of an engine differ by as much."""
SAME_CHIP = (("A100-40", "A100-80"), ("H100", "H800", "H200"))
MEMORY_BATCH, COMPUTE_BATCH = 16, 256
"""A decode step of a few sequences waits for memory on each GPU of the catalogue, one of 256 and more for its units."""


@dataclass(frozen=True, slots=True)
class BatchRange:
    """Measured batches that follow each other; `high` None: as far as was measured."""

    low: float
    high: float | None

    def __str__(self) -> str:
        if self.high == self.low:
            return f"at {self.low:g}"
        return f"from {self.low:g}" if self.high is None else f"from {self.low:g} to {self.high:g}"


@dataclass(frozen=True, slots=True)
class FormatCrossover:
    """A format against bf16 by batch.

    Attributes:
        where: the GPU and engine, or the case.
        format: name of the weights' format.
        batches: tokens of a step, ascending.
        ratios: bf16 seconds over the format's, by batch.
    """

    where: str
    format: str
    batches: tuple[float, ...]
    ratios: tuple[float, ...]

    @property
    def even_at(self) -> tuple[float, ...]:
        """Batches at which both are equally fast, on straight lines between the logarithms, as rooflines are."""
        points = list(zip(self.batches, self.ratios, strict=True))
        return tuple(
            low * (high / low) ** (log(left) / log(left / right))
            for (low, left), (high, right) in pairwise(points)
            if (left - 1) * (right - 1) < 0 and low > 0
        )

    @property
    def losing(self) -> tuple[BatchRange, ...]:
        """Measured batches at which the format is slower by more than `EVEN`."""
        return self._ranges([ratio < 1 - EVEN for ratio in self.ratios])

    @property
    def winning(self) -> tuple[BatchRange, ...]:
        """Measured batches at which the format is faster by more than `EVEN`."""
        return self._ranges([ratio > 1 + EVEN for ratio in self.ratios])

    def _ranges(self, chosen: Sequence[bool]) -> tuple[BatchRange, ...]:
        found: list[BatchRange] = []
        for index, (batch, yes) in enumerate(zip(self.batches, chosen, strict=True)):
            if not yes:
                continue
            last = index == len(chosen) - 1
            if found and index and chosen[index - 1]:
                found[-1] = BatchRange(found[-1].low, None if last else batch)
            else:
                found.append(BatchRange(batch, None if last else batch))
        return tuple(found)

    @property
    def remark(self) -> str | None:
        """A sentence where the measurement contradicts a common claim; None: it does not."""
        small = [ratio for batch, ratio in zip(self.batches, self.ratios, strict=True) if batch <= MEMORY_BATCH]
        large = [ratio for batch, ratio in zip(self.batches, self.ratios, strict=True) if batch >= COMPUTE_BATCH]
        weight_only = self.format in WEIGHTS and WEIGHTS[self.format].weight_only
        if not small or not large:
            return None
        if weight_only and max(small) > 1 + EVEN and min(large) < 1 + EVEN:
            return (
                f"{max(small):.2f}x as fast up to batch {MEMORY_BATCH}, {min(large):.2f}x from {COMPUTE_BATCH}: "
                "the reverse of the claim that unpacking costs in small batches"
            )
        if max(small) < 1 + EVEN and max(large) < 1 + EVEN:
            return "against the claim that fewer bits are faster: it saves memory and no time at any batch"
        if not weight_only and max(small) < 1 + EVEN < max(large):
            return "saves no time in small batches, where the claim is that fewer bytes of weights do"
        return None

    def __str__(self) -> str:
        wins, loses = (", ".join(map(str, each)) or "at no batch" for each in (self.winning, self.losing))
        first = f"{self.format} on {self.where}, by tokens of a step: faster than bf16 {wins}, slower {loses}"
        return f"{first}; {self.remark}" if self.remark else first


def measured_crossover(speedups: Speedups) -> FormatCrossover:
    """Return the crossover of one measured table.

    >>> from cordee.hardware.load import load_speedups
    >>> row = next(row for row in load_speedups() if (row.gpu, row.format) == ("H200", "int4"))
    >>> measured_crossover(row).losing[0].low
    256.0
    """
    where = f"{speedups.gpu}, {speedups.engine} {speedups.version}"
    return FormatCrossover(where, speedups.format, tuple(map(float, speedups.batches)), speedups.ratios)


def find_crossovers(
    tables: Iterable[Speedups], gpu: str, format_name: str | None = None
) -> tuple[FormatCrossover, ...]:
    """Return the measured crossovers of a GPU, of one format or of all, a row for each engine and version.

    A format that was not measured on this GPU is taken from others with its chip, which the rows name.
    """
    return tuple(map(measured_crossover, find_rows(tables, gpu, format_name)))


def find_rows(tables: Iterable[Speedups], gpu: str, format_name: str | None = None) -> list[Speedups]:
    """Return the measured rows of a GPU, else those of a GPU with its chip if a format is named."""
    rows = [row for row in tables if format_name in (None, row.format)]
    chip = next((names for names in SAME_CHIP if gpu in names), (gpu,))
    return [row for row in rows if row.gpu == gpu] or [row for row in rows if row.gpu in chip and format_name]


def borrowed_kernels(tables: Iterable[Speedups], gpu: str, engine: str, format_name: str) -> str | None:
    """Return where the kernels of a weight-only format were measured, if not in this engine on this GPU; else None.

    >>> from cordee.hardware.load import load_speedups
    >>> borrowed_kernels(load_speedups(), "H200", "vllm", "int4")
    'int4 products measured on H200 in tensorrt-llm 1.2, not in vllm'
    """
    if not WEIGHTS[format_name].weight_only:
        return None
    found = find_rows(tables, gpu, format_name)
    if any((row.gpu, row.engine) == (gpu, engine) for row in found):
        return None
    if not found:
        return f"{format_name} products assumed, not measured"
    row = found[-1]
    where = "" if row.engine == engine else f", not in {engine}"
    return f"{format_name} products measured on {row.gpu} in {row.engine} {row.version}{where}"


def unpacking_crossover(
    pack_ratio: float, weights_s: float, token_s: float, *, unpack_s: float = 0.0, unpack_token_s: float = 0.0
) -> float:
    """Return the batch up to which a weight-only format is faster than its plain one, from a calibrated roofline.

    The plain product takes max(w, m t): w to read the weights, t for a token's FLOPs. The weight-only one reads w / r
    and unpacks: max(w / r, m t) + u + m v, with u for a kernel that unpacks once and v for one that does it again for
    each token. While reading decides both are equal at m = (w - w / r - u) / v, beyond that at m = (w - u) / (t + v).

    >>> unpacking_crossover(4.0, weights_s=1.0, token_s=0.01, unpack_s=0.2)
    80.0
    >>> unpacking_crossover(4.0, weights_s=1.0, token_s=0.01, unpack_token_s=0.25)
    3.0
    """
    gained_s = weights_s - weights_s / pack_ratio - unpack_s
    if gained_s <= 0:
        return 0.0
    while_reading = gained_s / unpack_token_s if unpack_token_s > 0 else inf
    if while_reading * token_s <= weights_s / pack_ratio:
        return while_reading
    return (weights_s - unpack_s) / (token_s + unpack_token_s)
