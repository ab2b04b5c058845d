"""Times of day at which a job may start: a window, in microseconds since midnight at a fixed offset from UTC.

The window of a job that stops at its end closes by the grace period earlier: from then on it would get notice at once.
"""

from cordee.events import Job
from cordee.schedule.quota.day import DAY_US


def opens_us(job: Job, now_us: int) -> int | None:
    """Return when the window of a job opens; None: it is open, or the job has none.

    >>> from cordee.ids import JobId
    >>> from cordee.units import US_PER_HOUR
    >>> night = (22 * US_PER_HOUR, 6 * US_PER_HOUR, 0)
    >>> job = Job(job_id=JobId("a"), name="a", owner="me", gpus=1, window=night)
    >>> opens_us(job, 23 * US_PER_HOUR), opens_us(job, 7 * US_PER_HOUR) // US_PER_HOUR
    (None, 22)
    """
    if not job.window:
        return None
    begin_us, _, offset_us = job.window
    since_us = (now_us + offset_us - begin_us) % DAY_US
    return None if since_us < _length_us(job) else now_us - since_us + DAY_US


def closes_us(job: Job, now_us: int) -> int | None:
    """Return when the window of a job, which is open, closes; None: the job has none."""
    if not job.window:
        return None
    begin_us, _, offset_us = job.window
    return now_us - (now_us + offset_us - begin_us) % DAY_US + _length_us(job)


def _length_us(job: Job) -> int:
    begin_us, end_us, _ = job.window
    length_us = (end_us - begin_us) % DAY_US
    return max(1, length_us - job.grace_us) if job.window_stops else length_us
