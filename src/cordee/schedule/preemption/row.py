"""What the search for victims must know of an attempt, as a row of `running.Running`."""

from typing import Any

from cordee.schedule.order import level, pace
from cordee.schedule.policy import Policy
from cordee.schedule.preemption.loss import min_run_us
from cordee.schedule.preemption.running import NEVER
from cordee.schedule.records import Attempt, JobRecord


def columns_of(
    policy: Policy, record: JobRecord, attempt: Attempt, left_us: int | None, *, overdue: bool
) -> dict[str, Any]:
    """The row of an attempt, but for its queue's number; `overdue`: it waited too long, and its own tier leaves it."""
    job, placed_us, gpus = attempt.job, attempt.placed_us, attempt.gpus
    value, rate = pace(policy, gpus, record.served_gpu_us, left_us)
    exempt = is_exempt(record)
    rested = policy.preemptions_max is not None and record.pushes >= policy.preemptions_max
    slice_ends_us = placed_us + (policy.time_slice_us if attempt.epoch > 1 else 0)
    return {
        "gpus": gpus,
        "tier": level(job.tier),
        "priority": job.priority,
        "value": value,
        "pace": rate,
        "placed_us": placed_us,
        "rests_until_us": NEVER if exempt else rests_until_us(attempt),
        "slice_ends_us": NEVER if exempt or rested or overdue else slice_ends_us,
        "overdue": overdue,
        "ends_us": _ends_us(attempt, left_us),
        "rate": attempt.micro_usd_per_hour,
        "work_from_us": NEVER if attempt.started_us is None else max(attempt.started_us, attempt.captured_us or 0),
        "silent": job.protected and attempt.captured_us is None and job.checkpoint_every_us > 0,
        "saves": job.protected and job.grace_us >= job.save_us,
        "save_us": job.save_us,
        "awaited": job.protected and job.grace_us < job.save_us and job.checkpoint_every_us > 0,
        "restart_us": job.restart_us,
        "every_us": max(0, job.checkpoint_every_us),
    }


def is_exempt(record: JobRecord) -> bool:
    """Whether it was pushed as often as it allows."""
    return record.job.preemptions_max is not None and record.pushes >= record.job.preemptions_max


def rests_until_us(attempt: Attempt) -> int:
    """From when on another tier may push it."""
    min_us = min_run_us(attempt.job, attempt.epoch)
    if min_us <= 0:
        return 0
    return NEVER if attempt.started_us is None else attempt.started_us + min_us


def _ends_us(attempt: Attempt, left_us: int | None) -> int:
    """When its limit ends it at the latest, or its estimate; NEVER if nobody knows."""
    ends = NEVER if attempt.limit_at_us is None else attempt.limit_at_us + attempt.job.grace_us
    return ends if left_us is None else min(ends, attempt.placed_us + left_us)
