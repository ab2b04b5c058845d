"""Run times for draws: a job's estimate, else the run times of similar jobs that ran longer than it has run.

If no run time is known, and beyond the longest one, the median of the time left is the time t that the job has run:
P(longer than x) = t / x. The uniform numbers come from the caller.
"""

from cordee.events import Job
from cordee.ids import JobId
from cordee.schedule.forecast.snapshot import Snapshot
from cordee.units import US_PER_S

_SHORTEST_US = 60 * US_PER_S  # if nothing is known


def drawn_us(snapshot: Snapshot, job: Job, ran_us: int, u: float) -> int:
    """Return the run time left to a job that has run for `ran_us`, for a uniform u in [0, 1)."""
    if job.estimate_us is not None and ran_us < job.estimate_us:
        return job.estimate_us - ran_us
    # With m longer run times, the next one is equally likely in each of the m gaps before them and beyond the longest.
    longer = snapshot.history.longer(job, ran_us)
    gap = int(u * (len(longer) + 1))
    if gap < len(longer):
        return max(1, longer[gap] - ran_us)
    since_us = longer[-1] if longer else max(ran_us, _SHORTEST_US)
    return max(1, int(since_us / (1 - (u * (len(longer) + 1) - gap))) - ran_us)


def left_us(snapshot: Snapshot, job_id: JobId, now_us: int, u: float) -> int:
    """Return the run time left to a job that has not ended."""
    record, attempt = snapshot.jobs[job_id], snapshot.attempts.get(job_id)
    ran_us = record.used_us + (0 if attempt is None else max(0, now_us - attempt.placed_us))
    return drawn_us(snapshot, record.job, ran_us, u)
