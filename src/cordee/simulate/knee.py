"""The knee of the frontier: the patience at which all four figures are good, of those that a server can run."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from cordee.schedule.policy import Policy
from cordee.simulate.metrics import Summary
from cordee.simulate.policies import NamedPolicy

WITHIN = 1.05
"""The mean JCT of a recommended policy over the shortest one, at most."""

RULE = (
    "of the patiences whose mean JCT is at most 5 % above the shortest, the one with the smallest product of "
    "p99 slowdown, longest time away and GPU-hours lost"
)

SAME = "all patiences give the same figures on this trace: any of them will do"

_LEAST_AWAY_S, _LEAST_LOST_GPU_HOURS = 60.0, 1.0  # less is as good


def can_be_chosen(named: NamedPolicy) -> bool:
    """Return whether a server can run the policy: Cordee's own with a patience (`cordee up --patience`)."""
    return replace(named.policy, patience=Policy().patience) == Policy() and named.policy.patience is not None


def knee(compared: Sequence[tuple[NamedPolicy, Summary]]) -> str | None:
    """Return the policy that `RULE` chooses, the default one of equals; None: no job ended under one to choose."""
    known = [(named, weighed(summary)) for named, summary in compared if can_be_chosen(named)]
    ended = [(named, figures) for named, figures in known if figures is not None]
    if not ended:
        return None
    within_s = WITHIN * min(figures.jct_s for _, figures in ended)
    near = [(named, figures) for named, figures in ended if figures.jct_s <= within_s]
    best, _ = min(near, key=lambda each: (_product(each[1]), each[1].jct_s, each[0].policy != Policy()))
    return best.name


class Weighed(NamedTuple):
    """The figures that the rule weighs: mean JCT, 99th percentile of slowdowns, longest time away, GPU-hours lost."""

    jct_s: float
    slowdown_p99: float
    away_s: float
    lost_gpu_hours: float


def weighed(summary: Summary) -> Weighed | None:
    """Return the figures of a run; None if no job ended."""
    jct, slowdown, away = summary.jct_s, summary.slowdown_p99, summary.away_s
    if jct is None or slowdown is None or away is None:
        return None
    return Weighed(jct.mean, slowdown, away.max, summary.lost_gpu_hours)


def _product(figures: Weighed) -> float:
    away_s = max(_LEAST_AWAY_S, figures.away_s)
    return figures.slowdown_p99 * away_s * max(_LEAST_LOST_GPU_HOURS, figures.lost_gpu_hours)
