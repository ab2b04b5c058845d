"""Who has waited too long: they go first in their tier, push any level of it, and are left alone by it once they run.

They get a part of the GPUs that way (`Policy.patience_share`), the first of them first. Without that bound an
overloaded cluster would become a queue in the order of arrival.
"""

from bisect import bisect_right
from operator import itemgetter
from typing import TYPE_CHECKING

from cordee.ids import JobId
from cordee.schedule.records import Attempt, JobRecord

if TYPE_CHECKING:
    from cordee.schedule.state import State


def overdue(state: "State", now_us: int) -> frozenset[JobId]:
    """Of those who wait, whose turn it is because of that."""
    ages = (line.ages for line in state.waiting.lines.values())
    found = [each for due in ages for each in due[: bisect_right(due, now_us, key=itemgetter(0))]]
    left, first = _gpus_left(state) if found else 0, set[JobId]()
    for _, job_id in sorted(found):
        if left <= 0:
            break
        left -= state.jobs[job_id].job.gpus
        first.add(job_id)
    return frozenset(first)


def is_overdue(state: "State", record: JobRecord, attempt: Attempt) -> bool:
    """Whether an attempt that is being placed had waited so long that its own tier leaves it alone."""
    policy = state.policy
    if not policy.guards or policy.patience_us is None:
        return False
    waited_us = attempt.placed_us - record.submitted_us - record.used_us
    return waited_us >= policy.patience_us and _gpus_left(state) > 0


def _gpus_left(state: "State") -> float:
    rows = state.running.rows
    held = int(rows["gpus"][rows["overdue"]].sum())
    return state.policy.patience_share * state.quotas.offered.gpu_milli / 1000 - held
