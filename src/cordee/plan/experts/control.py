"""When to rebalance, window by window: hysteresis over a stream of loads.

What is lost is counted against the bound and only on layers whose imbalance is more than noise. It has to stay above
`start` for `patience` windows before anything is moved, falls back to rest only below `stop`, and after moves that
brought it below `start` the next `rest` windows only watch. Between, what is believed of the loads follows
`drift.updated`.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cordee.plan.experts.bound import least_max
from cordee.plan.experts.drift import beyond_noise, updated
from cordee.plan.experts.moves import Costs, Rebalance, rebalance
from cordee.plan.experts.shape import Floats, Placement


@dataclass(frozen=True, slots=True)
class Policy:
    """Shares of expert time lost at which it starts and stops to count windows; how many; how long it rests then."""

    start: float = 0.05
    stop: float = 0.02
    patience: int = 2
    rest: int = 2
    moved_share_max: float = 0.13
    costs: Costs = field(default_factory=Costs)


@dataclass(frozen=True, slots=True, eq=False)
class Watch:
    """What the controller knows: the placement, what it believes of the loads, and its two counters."""

    placement: Placement
    mean: Floats | None = None
    variance: Floats | None = None
    streak: int = 0
    resting: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """What one window led to. `lost` is the share of expert time above the bound; `drift` is 1 where all is noise."""

    action: Literal["hold", "watch", "rest", "move"]
    lost: float
    drift: float
    rebalance: Rebalance | None


def observe(watch: Watch, loads: Floats, policy: Policy | None = None) -> tuple[Watch, Seen]:
    """Take in one window of counts, and say whether to move; the new state has the new placement then."""
    policy = policy or Policy()
    if watch.mean is None or watch.variance is None:
        mean, variance, drift = loads, np.maximum(loads, 1.0), 1.0
    else:
        mean, variance, spread = updated(watch.mean, watch.variance, loads)
        drift = float(spread.mean())
    lost = _lost(mean, variance, watch.placement)
    streak = watch.streak + 1 if lost > policy.start else 0 if lost < policy.stop else watch.streak
    resting = max(0, watch.resting - 1)
    if watch.resting:
        return Watch(watch.placement, mean, variance, streak, resting), Seen("rest", lost, drift, None)
    if streak < policy.patience:
        action: Literal["hold", "watch"] = "watch" if streak else "hold"
        return Watch(watch.placement, mean, variance, streak, 0), Seen(action, lost, drift, None)
    found = rebalance(
        mean, watch.placement, policy.costs, moved_share_max=policy.moved_share_max, variance=variance
    )  # fmt: skip
    if not found.pays:
        return Watch(watch.placement, mean, variance, streak, 0), Seen("watch", lost, drift, found)
    # A jump of the loads takes more than one window may move: it goes on at the next one.
    unfinished = _lost(mean, variance, found.after) > policy.start
    streak, resting = (policy.patience, 0) if unfinished else (0, policy.rest)
    return Watch(found.after, mean, variance, streak, resting), Seen("move", lost, drift, found)


def _lost(mean: Floats, variance: Floats, placement: Placement) -> float:
    """The share of the experts' time that the bound would not need, on layers where it is not noise."""
    now = placement.gpu_loads(mean).max(axis=1)
    real = beyond_noise(mean, variance, placement) > 1
    above: Floats = np.where(real, now - least_max(mean, placement.fleet), 0)
    return float(above.sum() / now.sum())
