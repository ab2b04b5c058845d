"""The cheapest set of attempts that frees a number of GPUs of one node or of one queue: a covering knapsack."""

from collections.abc import Iterable
from math import gcd
from typing import NamedTuple

from cordee.ids import JobId
from cordee.schedule.preemption.loss import Cost

_EXACT_CELLS = 400_000
"""The largest number of steps of the exact search, about 0.2 s; beyond it the search is greedy."""


class Victim(NamedTuple):
    """An attempt that could be preempted."""

    job_id: JobId
    gpus: int  # GPUs that it would free
    cost: Cost
    level: int  # of its tier


def choose(candidates: Iterable[Victim], need: int) -> tuple[Victim, ...] | None:
    """Return the cheapest set that frees at least `need` GPUs; ties by fewest jobs, then lowest tiers, then job ids.

    No member is superfluous. The search is exact up to a size, then greedy by cost per GPU.
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
    """Keep the cheapest victims of each size, as many as one set could need; the best set needs no others."""
    by_size: dict[int, list[Victim]] = {}
    for victim in sorted(candidates, key=lambda each: (_weight(each), each.job_id)):
        same = by_size.setdefault(min(victim.gpus, need), [])
        if victim.gpus and len(same) * victim.gpus < need:
            same.append(victim)
    return sorted((each for same in by_size.values() for each in same), key=lambda each: (_weight(each), each.job_id))


def _exact(victims: list[Victim], units: int, unit: int) -> list[Victim]:
    """Solve a covering knapsack: best[u] is the least weight that frees u units or more."""
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
