"""Overdue jobs: they have waited too long, go first in their tier, and may preempt any level of it.

Once they run, their own tier does not preempt them. They get an allowance of GPUs this way, in the order of their
waits; a part of a GPU counts as this part:

    allowance = patience_fraction x GPUs x GPUs / max(GPUs, GPUs that jobs hold + GPUs that waiting jobs ask for)

A preemption does not change their sum: what a victim held, it asks for. Otherwise a gang that preempts others would be
overdue no more once they wait, they would take their GPUs back, and it would preempt them again. Where little waits,
that is nearly `patience_fraction` of all GPUs, and the patience bounds every wait. Where a cluster is overloaded,
nearly every job waits that long; with a fixed fraction it would become a queue in the order of arrival, in which short
jobs wait behind long ones. A gang that is larger than the allowance is overdue after a wait that is longer by as much,
so that it does not hold a small cluster for most of the time (docs/decisions/0032). The patience is a multiple of how
long the jobs run that hold the cluster, so it is learnt from the jobs that ended (docs/decisions/0036).
"""

from bisect import bisect_right
from collections.abc import Iterator
from heapq import merge
from itertools import islice
from operator import itemgetter
from typing import NamedTuple

from cordee.ids import JobId
from cordee.schedule.policy import Policy
from cordee.schedule.quota.held import MILLI
from cordee.schedule.quota.quotas import Quotas
from cordee.schedule.state.order import level
from cordee.schedule.state.records import NEVER, Attempt, JobRecord
from cordee.schedule.state.running import Running
from cordee.schedule.state.waiting import Line, Waiting


class Allowances:
    """The allowances of overdue jobs now: one for each tier, since the demand of lower tiers does not count.

    Attributes:
        patience_us: the wait after which a job is overdue.
        held_gpus: GPUs of jobs that were overdue when they were placed.
    """

    def __init__(self, policy: Policy, patience_us: int, running: Running, waiting: Waiting, quotas: Quotas) -> None:
        self._policy, self._waiting, self.patience_us = policy, waiting, patience_us
        self._gpus, self._leased_gpus = quotas.offered.gpu_milli / MILLI, quotas.held_milli / MILLI
        self.held_gpus = running.overdue_milli / MILLI
        self._of_tiers: dict[int, float] = {}

    def gpus(self, tier: int) -> float:
        """Return the number of GPUs that overdue jobs of a tier may hold."""
        found = self._of_tiers.get(tier)
        if found is None:
            found = self._of_tiers[tier] = self._of_tier(tier)
        return found

    def _of_tier(self, tier: int) -> float:
        if self._gpus <= 0:
            return 0.0
        asked_gpus = max(self._gpus, self._leased_gpus + self._waiting.asked_milli(tier) / MILLI)
        return self._policy.patience_fraction * self._gpus**2 / asked_gpus

    def extra_us(self, tier: int, gpus: float) -> int:
        """Return how much longer than the patience a job of this size has to wait; NEVER: it is never overdue."""
        allowance = self.gpus(tier)
        if self.patience_us >= NEVER or allowance <= 0:
            return NEVER
        return max(0, int(self.patience_us * (gpus / allowance - 1)))


class Due(NamedTuple):
    """Overdue jobs of one line: how many they are, and when the next one will be."""

    jobs: int
    next_us: int


def due_in(line: Line, allowances: Allowances, now_us: int) -> Due:
    """Return how many jobs of a line are overdue now; all jobs of a line ask for the same number of GPUs."""
    first_us = line.ages[0][0] + allowances.patience_us
    if first_us > now_us:
        return Due(0, min(first_us, NEVER))
    extra_us = allowances.extra_us(line.tier, line.gpu_milli / MILLI)
    if extra_us == NEVER:
        return Due(0, NEVER)
    wait_us = allowances.patience_us + extra_us
    count = bisect_right(line.ages, now_us - wait_us, key=itemgetter(0))
    return Due(count, line.ages[count][0] + wait_us if count < len(line.ages) else NEVER)


def overdue(waiting: Waiting, allowances: Allowances, now_us: int) -> frozenset[JobId]:
    """Return the overdue jobs that go first: those that have waited longest, until their allowance is used up."""
    since_us = now_us - allowances.patience_us
    late = [line for line in waiting.lines.values() if line.ages[0][0] <= since_us]
    most_gpus = max((allowances.gpus(line.tier) for line in late), default=0.0)
    first, held_gpus = set[JobId](), allowances.held_gpus
    if held_gpus >= most_gpus:
        return frozenset()
    for _, job_id, tier, gpus in merge(*(_ages(line, due_in(line, allowances, now_us).jobs) for line in late)):
        if held_gpus < allowances.gpus(tier):
            held_gpus += gpus
            first.add(job_id)
            if held_gpus >= most_gpus:
                break
    return frozenset(first)


def _ages(line: Line, count: int) -> Iterator[tuple[int, JobId, int, float]]:
    """Yield the first jobs of a line: the time since which each waits, its id, its tier and its GPUs."""
    gpus = line.gpu_milli / MILLI
    return ((age, job_id, line.tier, gpus) for age, job_id in islice(line.ages, count))


def is_overdue(record: JobRecord, attempt: Attempt, allowances: Allowances) -> bool:
    """Return whether the job of an attempt is overdue when it is placed, and the allowance is not used up."""
    tier = level(attempt.job.tier)
    extra_us = allowances.extra_us(tier, attempt.gpu_milli / MILLI)
    late = extra_us != NEVER and attempt.placed_us - record.waits_from_us >= allowances.patience_us + extra_us
    return late and allowances.held_gpus < allowances.gpus(tier)
