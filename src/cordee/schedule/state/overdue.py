"""Overdue jobs: they have waited too long, go first in their tier, and may preempt any level of it.

Once they run, their own tier does not preempt them. They get a fraction of the GPUs this way
(`Policy.patience_fraction`), in the order of their waits: without this bound an overloaded cluster would become a queue
in the order of arrival.
"""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from operator import itemgetter

from cordee.ids import JobId
from cordee.schedule.policy import Policy
from cordee.schedule.quota.quotas import Quotas
from cordee.schedule.state.records import Attempt, JobRecord
from cordee.schedule.state.running import Running
from cordee.schedule.state.waiting import Waiting


def overdue(
    waiting: Waiting, jobs: Mapping[JobId, JobRecord], gpus: Callable[[], float], now_us: int
) -> frozenset[JobId]:
    """Return the overdue jobs that go first: those that have waited longest, up to a number of GPUs together."""
    ages = (line.ages for line in waiting.lines.values() if line.ages[0][0] <= now_us)
    found = [each for due in ages for each in due[: bisect_right(due, now_us, key=itemgetter(0))]]
    if not found:
        return frozenset()
    first, left_gpus = set[JobId](), gpus()
    for _, job_id in sorted(found):
        if left_gpus <= 0:
            break
        left_gpus -= jobs[job_id].job.gpus
        first.add(job_id)
    return frozenset(first)


def is_overdue(policy: Policy, record: JobRecord, attempt: Attempt) -> bool:
    """Return whether the job of an attempt was overdue when it was placed."""
    if not policy.guards or policy.patience_us is None:
        return False
    return attempt.placed_us - record.submitted_us - record.used_us >= policy.patience_us


def gpus_left(policy: Policy, running: Running, quotas: Quotas) -> float:
    """Return the number of GPUs that overdue jobs may still get."""
    rows = running.rows
    held = int(rows.ints["gpus"][rows.flags["overdue"]].sum())
    return policy.patience_fraction * quotas.offered.gpu_milli / 1000 - held
