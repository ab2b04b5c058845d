"""Measured speed-ups of products in a format over bf16, by GPU, engine and batch; read by `load.py`."""

import math
from dataclasses import dataclass

from cordee.hardware.catalog import Source


@dataclass(frozen=True, slots=True)
class Speedups:
    """One format in one engine on one GPU: bf16 seconds over the format's at each batch (tokens of a step)."""

    gpu: str
    engine: str
    version: str
    format: str
    batches: tuple[int, ...]
    ratios: tuple[float, ...]
    source: Source

    def at(self, batch: float) -> float:
        """Return the speed-up at this batch, linear between the logarithms; beyond the table its nearest figure.

        >>> source = Source("by hand", "2026-11")
        >>> Speedups("H200", "vllm", "1", "int4", (1, 4), (2.0, 1.0), source).at(2)
        1.5
        """
        if batch <= self.batches[0]:
            return self.ratios[0]
        for low, high, left, right in zip(self.batches, self.batches[1:], self.ratios, self.ratios[1:], strict=False):
            if batch <= high:
                return left + (right - left) * math.log(batch / low) / math.log(high / low)
        return self.ratios[-1]
