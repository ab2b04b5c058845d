"""Measured speed-ups of products in a format over bf16, by GPU, engine and batch; read by `load.py`."""

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
