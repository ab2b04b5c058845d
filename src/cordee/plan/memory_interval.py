"""Bytes in which nine of ten peaks are expected: what published runs held, beside what is planned for them.

The fifth and the ninety-fifth percentile of (measured - planned) / planned, of peaks as torch reserves them where there
is room; the planned ones without a replay. It is printed and decides nothing: a plan fits by its own number.
"""

from dataclasses import dataclass

from cordee.plan.memory import StageMemory
from cordee.plan.training import Framework, Training


@dataclass(frozen=True, slots=True)
class Residuals:
    """The interval of a framework's peaks, as fractions of the planned ones, and the runs that it is from."""

    low: float
    high: float
    runs: int
    source: str


# `benchmarks/planner_accuracy.py` has each run. Runs whose framework only resembles these (nanotron) are left out.
RESIDUALS: dict[Framework, Residuals] = {
    "torch": Residuals(-0.020, 0.110, 20, "torchtitan on 8 to 512 H100s"),
    "megatron": Residuals(-0.068, 0.034, 68, "SimuMax on B200, and Zero Bubble's table 4"),
    "deepspeed": Residuals(-0.030, 0.126, 75, "BigScience's search for BLOOM"),
    "internevo": Residuals(-0.016, 0.235, 16, "InternEvo's table of memory"),
}


def seen_interval_bytes(stage: StageMemory, training: Training, gpu_memory_bytes: int) -> tuple[int, int] | None:
    """Return what nvidia-smi is expected to show in nine of ten runs like this one, at most the GPU's memory.

    None where nothing was published to tell by (adapters), and where the plan does not fit.

    >>> stage = StageMemory(10**10, 0, 0, 0, 0, 0, fragmentation_bytes=0, context_bytes=0)
    >>> seen_interval_bytes(stage, Training(2048, 8), 80 * 10**9)
    (9800000000, 11100000000)
    """
    if training.adapters is not None or stage.total_bytes > gpu_memory_bytes:
        return None
    found = RESIDUALS[training.framework]
    low, high = (min(gpu_memory_bytes, round(stage.seen_bytes * (1 + edge))) for edge in (found.low, found.high))
    return low, high
