"""The interval between saves of a running job: the plan's optimum for its measured costs and its own failures.

Before a job has any history its rate of failures is Llama 3's for its size. For other jobs on other machines that is a
guess: it is a prior, symmetric in the logarithm, which each hour of the job's life and each failure move.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from cordee.plan.survive import LLAMA3_MTBI_GPU_HOURS, best_period_s

PRIOR_SIGMA = math.log(10)
"""Assumed: two of three jobs fail at between a tenth of Llama 3's rate and ten times that."""

LLAMA3_PROCESS_FRACTION = 54 / 419
"""Llama 3 (arXiv:2407.21783, table 5): interruptions by software bugs, which leave the host and its memory alone."""

SAVE_S_MAX = 1800.0
"""No job that saves by itself goes on for longer than this without."""

_GRID = [2.0 ** (k / 2) for k in range(-40, 41)]  # multiples of Llama 3's rate: a millionth to a million times


@dataclass(frozen=True, slots=True)
class Lived:
    """One attempt: its ranks, how long it is known to have lived, and whether it was stopped before it had saved."""

    ranks: int
    seconds: float
    failed: bool


@dataclass(frozen=True, slots=True)
class SaveCost:
    """Seconds of a save of this job: it stops training, and is durable later; and of a restart."""

    stall_s: float
    upload_s: float
    restart_s: float


@dataclass(frozen=True, slots=True)
class Interval:
    """Seconds between two checkpoints, and between two captures in memory (None: they would not pay)."""

    save_s: float
    hold_s: float | None
    mtbi_s: float


def mtbi_s(history: Iterable[Lived], ranks: int) -> float:
    """Return the mean time between failures of a job of so many ranks: the posterior's geometric mean.

    The prior of the rate is log-normal around Llama 3's for a GPU, the failures of an attempt are Poisson.

    >>> round(mtbi_s([], 1024) / 3600, 1)
    49.5
    >>> round(mtbi_s([Lived(8, 3600, True)] * 10, 8) / 3600, 1)
    1.3
    """
    lived = list(history)
    gpu_hours = sum(each.ranks * each.seconds for each in lived) / 3600
    failures = sum(each.failed for each in lived)
    expected = gpu_hours / LLAMA3_MTBI_GPU_HOURS
    logs = [
        failures * math.log(times) - expected * times - math.log(times) ** 2 / (2 * PRIOR_SIGMA**2) for times in _GRID
    ]
    highest = max(logs)
    weights = [math.exp(each - highest) for each in logs]
    mean_log = sum(weight * math.log(times) for weight, times in zip(weights, _GRID, strict=True)) / sum(weights)
    return LLAMA3_MTBI_GPU_HOURS / ranks * 3600 / math.exp(mean_log)


def interval(history: Iterable[Lived], ranks: int, cost: SaveCost, *, save_s: float | None = None) -> Interval:
    """Return the best interval; `save_s` if that of checkpoints is given already.

    A capture in memory costs the stall of a checkpoint and helps only where the host stays: of Llama 3's failures an
    eighth, and of what this job fails more often than that, assumed, all. It pays where the store is slow, or where
    checkpoints were asked for more rarely than they would be.
    """
    mean_s = mtbi_s(history, ranks)
    best_s = best_period_s(mean_s, cost.restart_s, cost.stall_s, cost.upload_s)
    chosen_s = min(SAVE_S_MAX, best_s) if save_s is None else save_s
    llama_per_s = ranks / LLAMA3_MTBI_GPU_HOURS / 3600
    stays_per_s = min(1 / mean_s, llama_per_s) * LLAMA3_PROCESS_FRACTION + max(0.0, 1 / mean_s - llama_per_s)
    hold_s = best_period_s(1 / stays_per_s, cost.restart_s, cost.stall_s)
    return Interval(chosen_s, hold_s if hold_s <= chosen_s / 2 else None, mean_s)
