"""A controller that decides when to rebalance: hysteresis over a stream of windows of loads.

The excess is the fraction of expert time above the bound, on layers whose imbalance is more than noise. It must exceed
`start` for `patience` windows before replicas move; below `stop` the count starts again; after a move the controller
rests for `rest` windows. The estimate of the loads is updated by `noise.updated`.
"""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from cordee.hardware.arrays import Floats
from cordee.plan.experts.bound import least_max
from cordee.plan.experts.moves import MoveCosts, Rebalance, rebalance
from cordee.plan.experts.noise import beyond_noise, updated
from cordee.plan.experts.shape import ExpertPlacement


@dataclass(frozen=True, slots=True)
class RebalancePolicy:
    """Excess fractions at which counting starts and stops, windows to count, and windows to rest after a move."""

    start: float = 0.05
    stop: float = 0.02
    patience: int = 2
    rest: int = 2
    moved_fraction_max: float = 0.13
    costs: MoveCosts = field(default_factory=MoveCosts)


@dataclass(frozen=True, slots=True, eq=False)
class ControllerState:
    """The state of the controller: the placement, the estimate of the loads, and two counters of windows."""

    placement: ExpertPlacement
    mean: Floats | None = None
    variance: Floats | None = None
    streak: int = 0
    resting: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Observation:
    """The result of one window: `excess` fraction of time above the bound; `drift` is 1 for unchanged loads."""

    action: Literal["hold", "watch", "rest", "move"]
    excess: float
    drift: float
    rebalance: Rebalance | None


def observe(
    state: ControllerState, loads: Floats, policy: RebalancePolicy | None = None
) -> tuple[ControllerState, Observation]:
    """Process one window of counts; after a move the new state has the new placement."""
    policy = policy or RebalancePolicy()
    if state.mean is None or state.variance is None:
        mean, variance, drift = loads, np.maximum(loads, 1.0), 1.0
    else:
        mean, variance, spread = updated(state.mean, state.variance, loads)
        drift = float(spread.mean())
    excess = _excess(mean, variance, state.placement)
    streak = state.streak + 1 if excess > policy.start else 0 if excess < policy.stop else state.streak
    resting = max(0, state.resting - 1)
    if state.resting:
        next_state = ControllerState(state.placement, mean, variance, streak, resting)
        return next_state, Observation("rest", excess, drift, None)
    if streak < policy.patience:
        action: Literal["hold", "watch"] = "watch" if streak else "hold"
        return ControllerState(state.placement, mean, variance, streak, 0), Observation(action, excess, drift, None)
    found = rebalance(
        mean, state.placement, policy.costs, moved_fraction_max=policy.moved_fraction_max, variance=variance
    )  # fmt: skip
    if not found.pays:
        return ControllerState(state.placement, mean, variance, streak, 0), Observation("watch", excess, drift, found)
    # A jump of the loads may need more moves than one window allows: continue at the next one.
    unfinished = _excess(mean, variance, found.after) > policy.start
    streak, resting = (policy.patience, 0) if unfinished else (0, policy.rest)
    return ControllerState(found.after, mean, variance, streak, resting), Observation("move", excess, drift, found)


def _excess(mean: Floats, variance: Floats, placement: ExpertPlacement) -> float:
    """Return the fraction of expert time above the bound, on layers whose imbalance is more than noise."""
    now = placement.gpu_loads(mean).max(axis=1)
    real = beyond_noise(mean, variance, placement) > 1
    above: Floats = np.where(real, now - least_max(mean, placement.fleet), 0)
    return float(above.sum() / now.sum())
