"""A job's own limits of time and cost, over all its attempts; time in the queue does not count.

An attempt gets notice before its limit by the grace period, so that the limit is a ceiling; but the grace period takes
at most half of a limit.
"""

from cordee.events import Job
from cordee.units import US_PER_HOUR


def notice_at_us(job: Job, *, placed_us: int, used_us: int, used_cost: int, micro_usd_per_hour: int) -> int | None:
    """Return the time at which an attempt placed now gets notice for its job's limits; None without a limit.

    `used_us` and `used_cost` (micro-dollars x microseconds per hour) are those of the attempts before it.
    """
    ends = []
    if job.time_limit_us is not None:
        ends.append(before_grace_us(job.time_limit_us, job.grace_us) - used_us)
    if job.cost_limit_micro_usd is not None and micro_usd_per_hour > 0:
        whole_us = job.cost_limit_micro_usd * US_PER_HOUR // micro_usd_per_hour
        ends.append(before_grace_us(whole_us, job.grace_us) - used_cost // micro_usd_per_hour)
    return placed_us + min(ends) if ends else None


def before_grace_us(limit_us: int, grace_us: int) -> int:
    """Return the part of a limit that may pass before notice.

    >>> before_grace_us(100, 30), before_grace_us(40, 30)
    (70, 20)
    """
    return max(limit_us - grace_us, limit_us // 2)


def is_used_up(job: Job, used_us: int, used_cost: int) -> bool:
    """Return whether another attempt would be over the limits from its start."""
    if job.time_limit_us is not None and used_us >= before_grace_us(job.time_limit_us, job.grace_us):
        return True
    return job.cost_limit_micro_usd is not None and used_cost >= job.cost_limit_micro_usd * US_PER_HOUR
