"""How often to checkpoint, and what a preemption costs with and without one.

Period: the maximum of availability A(t) = (1 - C/t) * M / (M + R + t/2), where a period t ends with a checkpoint of C
seconds, interruptions come every M seconds on average, and each costs a restart of R and half a period of work.
"""

import math
from dataclasses import dataclass

from cordee.plan.cost import hold_usd
from cordee.plan.layout import Training
from cordee.workload.model import ModelShape

# Llama 3 (arXiv:2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on 16,384 H100s.
LLAMA3_MTBI_GPU_HOURS = 54 * 24 * 16_384 / 419


@dataclass(frozen=True, slots=True)
class Survival:
    """What a job of this size has to expect. Seconds are wall clock; dollars are those of all its GPUs."""

    checkpoint_bytes: int
    checkpoint_s: float
    restart_s: float
    mtbi_s: float
    period_s: float
    goodput: float
    usd_per_hour: float | None
    lost_usd_worst: float | None
    lost_usd_expected: float | None
    lost_usd_with_notice: float | None

    @property
    def notice_needed_s(self) -> float:
        """Notice within which a last checkpoint can be written, once the step in progress is done."""
        return self.checkpoint_s


def checkpoint_bytes(shape: ModelShape, training: Training) -> int:
    """What one checkpoint of the whole model weighs: master weights and moments, 12 bytes a parameter for AdamW."""
    return round(shape.parameters * training.optimizer.checkpoint_bytes_per_parameter)


def best_period_s(mtbi_s: float, restart_s: float, checkpoint_s: float) -> float:
    """The period (work and its checkpoint) that keeps the most time useful.

    >>> round(best_period_s(6000, 600, 10), 1)
    373.5
    """
    c = checkpoint_s
    return c + math.sqrt(2 * (mtbi_s + restart_s) * c + c * c)


def young_s(mtbi_s: float, checkpoint_s: float) -> float:
    """Young 1974: work between checkpoints for a cheap checkpoint and no restart.

    >>> young_s(5000, 10)
    316.22776601683796
    """
    return math.sqrt(2 * checkpoint_s * mtbi_s)


def daly_s(mtbi_s: float, checkpoint_s: float) -> float:
    """Daly 2006, equation 37: the higher-order estimate of the work between checkpoints.

    >>> round(daly_s(6000, 10), 1)
    339.8
    """
    if checkpoint_s >= 2 * mtbi_s:
        return mtbi_s
    ratio = checkpoint_s / (2 * mtbi_s)
    return young_s(mtbi_s, checkpoint_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint_s


def goodput(period_s: float, mtbi_s: float, restart_s: float, checkpoint_s: float) -> float:
    """The useful share of held time at this period.

    >>> round(goodput(373.5, 6000, 600, 10), 4)
    0.8604
    """
    return (1 - checkpoint_s / period_s) * mtbi_s / (mtbi_s + restart_s + period_s / 2)


def lost_usd(gpus: int, lost_s: float, restart_s: float, usd_per_gpu_hour: float) -> float:
    """Dollars of work that is done again, and of the restart.

    >>> round(lost_usd(64, 47 * 3600, 0, 2.99))
    8994
    """
    return hold_usd(gpus, lost_s + restart_s, usd_per_gpu_hour)


def survival(
    shape: ModelShape,
    training: Training,
    gpus: int,
    *,
    storage_bytes_per_s: float,
    start_s: float,
    mtbi_s: float | None = None,
    period_s: float | None = None,
    usd_per_gpu_hour: float | None = None,
) -> Survival:
    """What this job has to expect from interruptions.

    Args:
        shape: the model.
        training: its optimizer decides the checkpoint's size.
        gpus: the job's total.
        storage_bytes_per_s: what all its nodes together write and read.
        start_s: from the stop until ranks run again, before they read the checkpoint.
        mtbi_s: mean time between interruptions; None takes Llama 3's rate for so many GPUs.
        period_s: the period to judge; None takes the best one.
        usd_per_gpu_hour: None leaves the dollars out.
    """
    n_bytes = checkpoint_bytes(shape, training)
    write_s = n_bytes / storage_bytes_per_s
    restart_s = start_s + write_s
    between_s = mtbi_s if mtbi_s is not None else LLAMA3_MTBI_GPU_HOURS / gpus * 3600
    chosen_s = period_s if period_s is not None else best_period_s(between_s, restart_s, write_s)

    def usd(lost_s: float) -> float | None:
        if usd_per_gpu_hour is None:
            return None
        return lost_usd(gpus, lost_s, restart_s, usd_per_gpu_hour)

    return Survival(
        checkpoint_bytes=n_bytes,
        checkpoint_s=write_s,
        restart_s=restart_s,
        mtbi_s=between_s,
        period_s=chosen_s,
        goodput=goodput(chosen_s, between_s, restart_s, write_s),
        usd_per_hour=None if usd_per_gpu_hour is None else hold_usd(gpus, 3600, usd_per_gpu_hour),
        lost_usd_worst=usd(chosen_s),
        lost_usd_expected=usd(chosen_s / 2),
        lost_usd_with_notice=usd(0.0),
    )
