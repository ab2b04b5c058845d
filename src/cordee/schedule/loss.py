"""What a push costs, and the cheapest set of attempts that frees so many GPUs; `victims.py` says of which nodes.

What an attempt would lose (docs/design/schedule.md says why):

    GPUs x price x ( [grace < save] x work since the last durable commit + [grace >= save] x save + restart )

`expected_loss` is that, honestly: what the notice announces. `charge` is what the choice weighs, and there nobody makes
itself dear by keeping silent: work counts at most one declared checkpoint interval; a job that told of no checkpoint is
taken to have checkpointed at its declared interval, durable as late as a first one is; an unprotected job, which cannot
save, counts its work up to one interval. Without prices, GPU time decides.
"""

from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

from cordee.events import Job
from cordee.ids import JobId
from cordee.schedule.records import Attempt
from cordee.units import US_PER_HOUR

_EXACT_CELLS = 400_000
"""Above so many steps of the exact search a greedy one is used: about 0.2 s."""


class Cost(NamedTuple):
    """What is lost: money, and the GPU time behind it."""

    micro_usd: int
    gpu_us: int


class Victim(NamedTuple):
    """An attempt that could be pushed aside."""

    job_id: JobId
    gpus: int  # that it would free in the pool
    cost: Cost
    level: int  # of its tier


def min_run_us(job: Job, epoch: int) -> int:
    """How long this attempt may run before it is pushed. A first one has no restart behind it that it could waste."""
    return job.min_run_us if epoch > 1 else 0


def expected_loss(attempt: Attempt, now_us: int) -> Cost:
    """What a notice given now is expected to lose."""
    return _loss(attempt, _since_durable_us(attempt, now_us))


def charge(attempt: Attempt, now_us: int) -> Cost:
    """What the choice of victims weighs; never more work than one declared checkpoint interval."""
    job, since_us = attempt.job, _since_durable_us(attempt, now_us)
    silent = job.protected and attempt.captured_us is None and job.checkpoint_every_us > 0
    every_us = max(0, job.checkpoint_every_us)
    return _loss(attempt, min(work_at_risk_us(since_us, every_us, late_us(job), silent=silent), every_us))


def late_us(job: Job) -> int:
    """How long after a checkpoint is due it is taken to be durable: the first one comes after a restart as well."""
    return job.restart_us + job.save_us


def work_at_risk_us(since_us: int, every_us: int, late_us: int, *, silent: bool) -> int:
    """Return the work that no durable checkpoint holds; `Running.at_risk_us` is the same for columns.

    An attempt that reported no checkpoint yet is taken to have written them every `every_us`, each durable so long
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


def choose(candidates: Iterable[Victim], need: int) -> tuple[Victim, ...] | None:
    """The cheapest set that frees at least `need` GPUs; ties by fewest jobs, then lowest tiers, then job ids.

    No member can be left out. Exact up to a size, then greedy by cost per GPU.
    """
    assert need > 0, "nothing has to be freed"
    victims = _contenders(candidates, need)
    if sum(victim.gpus for victim in victims) < need:
        return None
    unit = gcd(*(victim.gpus for victim in victims))
    units = -(-need // unit)
    chosen = _exact(victims, units, unit) if units * len(victims) <= _EXACT_CELLS else _greedy(victims, need)
    return tuple(sorted(chosen, key=lambda victim: victim.job_id))


def _weight(victim: Victim) -> tuple[int, int, int, int]:
    return (victim.cost.micro_usd, victim.cost.gpu_us, 1, -victim.level)


def _contenders(candidates: Iterable[Victim], need: int) -> list[Victim]:
    """Of each size only as many as could be needed together, the cheapest: no best set has another."""
    by_size: dict[int, list[Victim]] = {}
    for victim in sorted(candidates, key=lambda each: (_weight(each), each.job_id)):
        same = by_size.setdefault(min(victim.gpus, need), [])
        if victim.gpus and len(same) * victim.gpus < need:
            same.append(victim)
    return sorted((each for same in by_size.values() for each in same), key=lambda each: (_weight(each), each.job_id))


def _exact(victims: list[Victim], units: int, unit: int) -> list[Victim]:
    """Covering knapsack: best[u] is the least weight that frees u units or more."""
    best: list[tuple[int, int, int, int] | None] = [(0, 0, 0, 0)] + [None] * units
    taken: list[list[int]] = []
    for victim in victims:
        size, (usd, gpu_us, _, below) = victim.gpus // unit, _weight(victim)
        by_this: list[int] = []
        for amount in range(units, 0, -1):
            before = best[max(0, amount - size)]
            if before is None:
                continue
            weight = (before[0] + usd, before[1] + gpu_us, before[2] + 1, before[3] + below)
            now = best[amount]
            if now is None or weight < now:
                best[amount] = weight
                by_this.append(amount)
        taken.append(by_this)
    chosen: list[Victim] = []
    amount = units
    for victim, amounts in zip(reversed(victims), reversed(taken), strict=True):
        if amount > 0 and amount in amounts:
            chosen.append(victim)
            amount = max(0, amount - victim.gpus // unit)
    return chosen


def _per_gpu(victim: Victim) -> tuple[float, float, JobId]:
    return (victim.cost.micro_usd / victim.gpus, victim.cost.gpu_us / victim.gpus, victim.job_id)


def _greedy(victims: list[Victim], need: int) -> list[Victim]:
    chosen: list[Victim] = []
    freed = 0
    for victim in sorted(victims, key=_per_gpu):
        if freed >= need:
            break
        chosen.append(victim)
        freed += victim.gpus
    for victim in sorted(chosen, key=lambda each: (_weight(each), each.job_id), reverse=True):
        if freed - victim.gpus >= need:
            chosen.remove(victim)
            freed -= victim.gpus
    return chosen
