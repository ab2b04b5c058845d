"""Bytes in which nine of ten peaks are expected, by what published runs held beside what is planned for them.

The fifth and the ninety-fifth percentile of (measured - planned) / planned. Where there is room torch also holds what
it has freed, so that what a run needs is at most what it was seen to hold. A plan fits by its own number; one whose
upper end does not is `tight`.
"""

from dataclasses import dataclass, replace
from typing import Literal

from cordee.hardware.catalog import Gpu
from cordee.plan.memory import StageMemory
from cordee.plan.training import Framework, Training


@dataclass(frozen=True, slots=True)
class Residuals:
    """The interval of a framework's peaks, as fractions of the planned ones, and the runs that it is from."""

    low: float
    high: float
    runs: int
    source: str


# `benchmarks/memory_intervals.py` computes them, and how many runs they cover; runs whose framework only resembles
# these (nanotron, ms-swift) are left out. All of torch's runs held more than planned, 0.4 % or more: its interval
# begins at the plan. Peaks with adapters are as torch allocated them, -10.5 to +3.8 %; what the allocator needs on top
# is within -3.7 and +8.3 % of the plan by traces (`traced_memory.py`), which adds in squares.
RESIDUALS: dict[Framework | Literal["adapters"], Residuals] = {
    "torch": Residuals(0.0, 0.146, 20, "torchtitan on 8 to 512 H100s"),
    "megatron": Residuals(-0.068, 0.034, 68, "SimuMax on B200, and Zero Bubble's table 4"),
    "deepspeed": Residuals(-0.030, 0.126, 75, "BigScience's search for BLOOM"),
    "internevo": Residuals(-0.016, 0.235, 16, "InternEvo's table of memory"),
    "adapters": Residuals(-0.111, 0.091, 34, "LitGPT and torchtune with adapters"),
}


def residuals_of(training: Training) -> Residuals:
    """Return the interval of plans like this one."""
    return RESIDUALS[training.framework if training.adapters is None else "adapters"]


def needed_interval_bytes(planned_bytes: int, training: Training) -> tuple[int, int]:
    """Return the bytes that nine of ten runs like this one need.

    >>> needed_interval_bytes(10**10, Training(2048, 8))
    (10000000000, 11460000000)
    """
    found = residuals_of(training)
    return round(planned_bytes * (1 + found.low)), round(planned_bytes * (1 + found.high))


def held_surely(gpu: Gpu, training: Training) -> Gpu:
    """Return the GPU with so much less memory that what is planned to fit there fits at its upper end here."""
    return replace(gpu, memory_bytes=int(gpu.memory_bytes / (1 + residuals_of(training).high)))


def seen_interval_bytes(stage: StageMemory, training: Training, gpu_memory_bytes: int) -> tuple[int, int] | None:
    """Return what nvidia-smi is expected to show in nine of ten runs like this one, at most the GPU's memory.

    None where nothing was published to tell by (with adapters), and where the plan does not fit.

    >>> stage = StageMemory(10**10, 0, 0, 0, 0, 0, fragmentation_bytes=0, context_bytes=0)
    >>> seen_interval_bytes(stage, Training(2048, 8), 80 * 10**9)
    (10000000000, 11460000000)
    """
    if training.adapters is not None or stage.total_bytes > gpu_memory_bytes:
        return None
    low, high = needed_interval_bytes(stage.seen_bytes, training)
    return min(gpu_memory_bytes, low), min(gpu_memory_bytes, high)
