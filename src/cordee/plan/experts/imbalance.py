"""The imbalance of expert parallelism under measured loads, for the planner's step time and memory."""

from functools import lru_cache

from cordee.errors import LayoutError
from cordee.plan.experts.shape import Fleet, checked_loads
from cordee.plan.experts.solve import plan_experts

Loads = tuple[tuple[float, ...], ...]
"""Tokens of each expert in each layer; a value that can be a key."""
ImbalanceByEp = tuple[tuple[int, float], ...]
# Each expert stands once, so there are no replica counts to search for.
EFFORT = 0.0


@lru_cache(maxsize=16)
def imbalance_by_ep(loads: Loads, experts: int) -> ImbalanceByEp:
    """Return, for each number of ranks that divides the experts, the fullest rank's load over the mean of all ranks.

    Each expert stands on one rank, in the placement that `plan_experts` chooses. Every layer waits for its fullest
    rank, so the loads of the fullest ranks are summed over the layers.

    >>> imbalance_by_ep(((3.0, 1.0, 1.0, 1.0),), 4)
    ((1, 1.0), (2, 1.3333333333333333), (4, 2.0))

    Raises:
        InputError: loads that cannot be used.
        LayoutError: another number of experts.
    """
    checked = checked_loads(loads)
    if checked.shape[1] != experts:
        raise LayoutError(
            f"the expert loads are of {checked.shape[1]} experts, but the model has {experts} in a layer",
            hint="give one column for each routed expert",
        )
    found = []
    for ranks in (size for size in range(1, experts + 1) if experts % size == 0):
        held = plan_experts(checked, Fleet(ranks, experts), effort=EFFORT).gpu_loads(checked)
        found.append((ranks, float(held.max(axis=1).sum() / held.mean(axis=1).sum())))
    return tuple(found)
