"""The price of a preemption: the expected loss of an attempt.

    GPUs x price x ( [grace < save] x work since the last durable commit + [grace >= save] x save + restart )

`expected_loss` is this loss as it is known; the notice announces it. `charge` is the loss that the choice of victims
weighs, and there no attempt becomes dear by silence: work counts for one declared checkpoint interval at most; a job
that reported no checkpoint counts as if it had checkpointed at its declared interval, each durable as late as a first
one; an unprotected job, which cannot save, counts its work up to one interval. Without prices, GPU time decides.
"""

from typing import NamedTuple

from cordee.events import Job
from cordee.schedule.state.records import Attempt
from cordee.units import US_PER_HOUR


class Cost(NamedTuple):
    """A loss: money, and the GPU time behind it."""

    micro_usd: int
    gpu_us: int


def expected_loss(attempt: Attempt, now_us: int) -> Cost:
    """Return the loss expected from a notice given now."""
    return _loss(attempt, _since_durable_us(attempt, now_us))


def charge(attempt: Attempt, now_us: int) -> Cost:
    """Return the loss that the choice of victims weighs; its work is one declared checkpoint interval at most."""
    job, since_us = attempt.job, _since_durable_us(attempt, now_us)
    silent = job.protected and attempt.captured_us is None and job.checkpoint_every_us > 0
    every_us = max(0, job.checkpoint_every_us)
    return _loss(attempt, min(work_at_risk_us(since_us, every_us, late_us(job), silent=silent), every_us))


def late_us(job: Job) -> int:
    """Return the assumed delay from the time a checkpoint is due until it is durable; a first one follows a restart."""
    return job.restart_us + job.save_us


def work_at_risk_us(since_us: int, every_us: int, late_us: int, *, silent: bool) -> int:
    """Return the work that no durable checkpoint holds; `Running.at_risk_us` is the same for columns.

    An attempt that reported no checkpoint yet counts as if it had written one every `every_us`, each durable `late_us`
    after it was due.

    >>> [work_at_risk_us(since, 30, 3, silent=True) for since in (20, 32, 33, 50, 63)]
    [20, 32, 3, 20, 3]
    >>> work_at_risk_us(50, 30, 3, silent=False)
    50
    """
    if not silent or not every_us:
        return since_us
    return since_us - max(0, since_us - late_us) // every_us * every_us


def _since_durable_us(attempt: Attempt, now_us: int) -> int:
    if attempt.started_us is None:
        return 0
    return max(0, now_us - max(attempt.started_us, attempt.captured_us or 0))


def _loss(attempt: Attempt, work_us: int) -> Cost:
    job = attempt.job
    saves = job.protected and job.grace_us >= job.save_us
    lost_us = (job.save_us if saves else work_us) + job.restart_us
    milli = sum(lease.gpu_milli for lease in attempt.leases)
    return Cost(attempt.micro_usd_per_hour * lost_us // US_PER_HOUR, milli * lost_us // 1000)
