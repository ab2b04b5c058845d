"""The knee of the frontier: the patience at which all four figures are good, of those that a server can run."""

import math
from collections.abc import Sequence
from dataclasses import replace

from cordee.schedule.policy import Policy
from cordee.simulate.metrics import Summary
from cordee.simulate.policies import NamedPolicy

WITHIN = 1.05
"""The mean JCT of a recommended policy over the shortest one, at most."""

RULE = (
    "of the patiences whose mean JCT is at most 5 % above the shortest, the one with the smallest product of "
    "p99 slowdown, longest time away and GPU-hours lost"
)

_LEAST_AWAY_S, _LEAST_LOST_GPU_HOURS = 60.0, 1.0  # less is as good


def can_be_chosen(named: NamedPolicy) -> bool:
    """Return whether a server can run the policy: Cordee's own with a patience (`cordee up --patience`)."""
    return replace(named.policy, patience=Policy().patience) == Policy() and named.policy.patience is not None


def knee(compared: Sequence[tuple[NamedPolicy, Summary]]) -> str | None:
    """Return the policy that `RULE` chooses; None: a server can run none of them."""
    known = [(named.name, summary) for named, summary in compared if can_be_chosen(named)]
    if not known:
        return None
    within_s = WITHIN * min(summary.jct_s.mean for _, summary in known)
    near = [(name, summary) for name, summary in known if summary.jct_s.mean <= within_s]
    return min(near, key=lambda each: (_product(each[1]), each[1].jct_s.mean))[0]


def _product(summary: Summary) -> float:
    figures = (
        summary.slowdown_p99,
        max(_LEAST_AWAY_S, summary.away_s.max),
        max(_LEAST_LOST_GPU_HOURS, summary.lost_gpu_hours),
    )
    return math.prod(figures)
