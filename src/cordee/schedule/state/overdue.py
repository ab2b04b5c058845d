"""Overdue jobs: they have waited too long, go first in their tier, and may preempt any level of it.

They get an allowance of GPUs this way, in the order of their waits; a part of a GPU counts as this part:

    allowance = patience_fraction x GPUs x GPUs / max(GPUs, GPUs that jobs hold + GPUs that waiting jobs ask for)

A preemption does not change their sum: what a victim held, it asks for. Otherwise a gang that preempts others would be
overdue no more once they wait, they would take their GPUs back, and it would preempt them again. Where little waits,
that is nearly `patience_fraction` of all GPUs, and the patience bounds every wait. Where a cluster is overloaded,
nearly every job waits that long; with a fixed fraction it would become a queue in the order of arrival, in which short
jobs wait behind long ones (docs/decisions/0032).

A job within the allowance is overdue once its patience is over, and its own tier does not preempt it any more. A gang
that is larger takes turns, by the GPU time that the allowance would have given it since its submission: it is overdue
once that covers what it has used and its patience more, and keeps its turn for as long as that covers what it uses. So
it gets through, but does not hold a small cluster until it ends. Where overdue jobs that hold their allowance leave too
few GPUs for the largest gang, each of them counts as all GPUs, because they keep that gang from starting
(docs/decisions/0069).
"""

import math
from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property
from heapq import merge
from operator import attrgetter, itemgetter
from typing import NamedTuple

from cordee.ids import JobId
from cordee.schedule.placement.mix import Mix
from cordee.schedule.policy import Policy
from cordee.schedule.quota.held import MILLI
from cordee.schedule.quota.quotas import Quotas
from cordee.schedule.state.order import level
from cordee.schedule.state.records import NEVER, Attempt, JobRecord
from cordee.schedule.state.running import Running
from cordee.schedule.state.waiting import Age, Line, LineKey, Waiting
from cordee.units import US_PER_S


class Allowances:
    """The allowances of overdue jobs now: one for each tier, since the demand of lower tiers does not count.

    Attributes:
        patience_us: the wait after which a job is overdue.
        held_gpus: GPUs of jobs that were overdue when they were placed.
    """

    def __init__(
        self, policy: Policy, patience_us: int, running: Running, waiting: Waiting, quotas: Quotas, mix: Mix
    ) -> None:
        self._policy, self._waiting, self._mix, self.patience_us = policy, waiting, mix, patience_us
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

    @cached_property
    def _largest_gpus(self) -> int:
        return self._mix.largest(self._gpus)

    def counted_gpus(self, tier: int, gpus: float) -> float:
        """Return the GPUs as which a job counts: its own, or all of them where it keeps the largest gang waiting."""
        keeps_waiting = gpus > 0 and self._largest_gpus > self._gpus - self.gpus(tier)
        return max(gpus, self._gpus) if keeps_waiting else gpus

    def ratio(self, tier: int, gpus: float) -> float:
        """Return how many allowances a job of this size would hold; infinite: it is never overdue."""
        allowance = self.gpus(tier)
        if self.patience_us >= NEVER or allowance <= 0:
            return math.inf
        return self.counted_gpus(tier, gpus) / allowance

    def wait_us(self, ratio: float, used_us: int = 0) -> int:
        """Return the wait after which a job of so many allowances is overdue that ran for `used_us`; NEVER: at none."""
        if ratio <= 1:
            return self.patience_us
        return NEVER if ratio == math.inf else _in_whole_s(self.patience_us * ratio + used_us * (ratio - 1))

    def turn_us(self, tier: int, gpus: float, waited_us: int, used_us: int) -> int:
        """Return how long an overdue job of this size keeps its turn; NEVER: until it ends."""
        allowance, counted = self.gpus(tier), self.counted_gpus(tier, gpus)
        if counted <= allowance:
            return NEVER
        return _in_whole_s((allowance * (waited_us + used_us) - counted * used_us) / (counted - allowance))


def _in_whole_s(us: float) -> int:
    return math.ceil(us / US_PER_S) * US_PER_S


class Due(NamedTuple):
    """The overdue jobs of one line, those that have waited longest first, and when the next one will be overdue."""

    ages: list[Age]
    next_us: int


def due_in(line: Line, allowances: Allowances, now_us: int) -> Due:
    """Return the jobs of a line that are overdue now; all jobs of a line ask for the same number of GPUs."""
    first_us = line.ages[0].since_us + allowances.patience_us
    if first_us > now_us:
        return Due([], min(first_us, NEVER))
    ratio = allowances.ratio(line.tier, line.gpu_milli / MILLI)
    wait_us = allowances.wait_us(ratio)
    if wait_us == NEVER:
        return Due([], NEVER)
    count = bisect_right(line.ages, now_us - wait_us, key=attrgetter("since_us"))
    ages, next_us = line.ages[:count], line.ages[count].since_us + wait_us if count < len(line.ages) else NEVER
    if ratio <= 1:
        return Due(ages, next_us)
    due = list[Age]()
    for age in ages:  # A gang that has run already waits longer.
        due_us = age.since_us + (allowances.wait_us(ratio, age.used_us) if age.used_us else wait_us)
        if due_us <= now_us:
            due.append(age)
        else:
            next_us = min(next_us, due_us)
    return Due(due, next_us)


def overdue(waiting: Waiting, allowances: Allowances, now_us: int) -> dict[LineKey, list[JobId]]:
    """Return the overdue jobs that go first, by line: those that waited longest, until the allowance is used up."""
    since_us = now_us - allowances.patience_us
    late = [(key, line) for key, line in waiting.lines.items() if line.ages[0].since_us <= since_us]
    most_gpus = max((allowances.gpus(line.tier) for _, line in late), default=0.0)
    first, held_gpus = dict[LineKey, list[JobId]](), allowances.held_gpus
    if held_gpus >= most_gpus:
        return first
    for age, key in merge(*(_of_line(key, due_in(line, allowances, now_us)) for key, line in late), key=itemgetter(0)):
        line = waiting.lines[key]
        if held_gpus < allowances.gpus(line.tier):
            held_gpus += line.gpu_milli / MILLI
            first.setdefault(key, []).append(age.job_id)
            if held_gpus >= most_gpus:
                break
    return first


def _of_line(key: LineKey, due: Due) -> Iterator[tuple[Age, LineKey]]:
    return ((age, key) for age in due.ages)


def overdue_until_us(record: JobRecord, attempt: Attempt, allowances: Allowances) -> int | None:
    """Return until when its own tier does not preempt an attempt whose job was overdue when it was placed.

    None: it was not, or the allowance was used up.
    """
    tier, gpus, waited_us = level(attempt.job.tier), attempt.gpu_milli / MILLI, attempt.placed_us - record.waits_from_us
    wait_us = allowances.wait_us(allowances.ratio(tier, gpus), record.used_us)
    if wait_us == NEVER or waited_us < wait_us or allowances.held_gpus >= allowances.gpus(tier):
        return None
    return min(NEVER, attempt.placed_us + allowances.turn_us(tier, gpus, waited_us, record.used_us))
