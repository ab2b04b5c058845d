"""A tighter bound for GPUs of two slots, proven with a linear program; it needs scipy.

The conditions of `pairs.py` are linear in "expert e has c replicas". If their relaxation has no solution for a maximum
of T, no placement reaches T. The program (HiGHS) only proposes a price for each condition and for a slot. That these
prices refute T is then added up here, over every number of replicas, so nothing has to be believed of the solver.
"""

import numpy as np

from cordee.errors import MissingExtraError
from cordee.hardware.arrays import Floats
from cordee.plan.experts.bound import least_max
from cordee.plan.experts.shape import Fleet

CHOICES = 24
"""Most replica counts of an expert in the program, from the fewest; the check uses all."""
HALVINGS = 8
SURE = 1e-7


def least_max_of_pairs(loads: Floats, fleet: Fleet, reached: Floats) -> Floats:
    """Return a proven lower bound on the fullest GPU of each layer, between the plain bound and a placement's.

    Raises:
        MissingExtraError: scipy is not installed.
    """
    least = least_max(loads, fleet)
    if fleet.slots != 2:
        return least
    found = least.copy()
    for layer, load in enumerate(loads):
        low, high = float(least[layer]), float(reached[layer])
        for _ in range(HALVINGS if high > low * (1 + 1e-4) else 0):
            middle = (low + high) / 2
            low, high = (middle, high) if _refuted(load, fleet, middle) else (low, middle)
        found[layer] = low
    return found


def _refuted(load: Floats, fleet: Fleet, top: float) -> bool:
    """Return whether no replica counts meet the conditions of this maximum, by dual prices that are checked here."""
    fewest = np.maximum(np.ceil(load / top * (1 - 1e-12)), 1.0)
    # One expert can have at most the slots that the fewest replicas of all leave.
    spare = fleet.replicas - int(fewest.sum())
    if spare < 0:
        return True
    counts: Floats = fewest[:, None] + np.arange(spare + 1)
    each = load[:, None] / counts
    # Between two sizes that a replica can have, the condition of the larger one sentence more.
    x = np.append(np.unique(each[each > top / 2]), top)
    prices = _prices(counts[:, :CHOICES], each[:, :CHOICES], fleet, top, x)
    if prices is None:
        return False
    condition, slot = prices
    # The cheapest number of replicas of every expert at these prices.
    cheapest = (counts * (_value(each, top, x) @ condition + slot)).min(axis=1)
    return bool(cheapest.sum() - slot * fleet.replicas > SURE)


def _value(load: Floats, top: float, x: Floats) -> Floats:
    """Return what a replica of this load adds to each condition: 1 if at least x, -1 if it fits beside x."""
    found: Floats = (load[..., None] >= x).astype(np.float64)
    found -= load[..., None] <= top * (1 + 1e-12) - x
    return found


def _prices(counts: Floats, each: Floats, fleet: Fleet, top: float, x: Floats) -> tuple[Floats, float] | None:
    """Return prices of the conditions and of a slot that may refute this maximum: duals of the relaxation."""
    try:
        from scipy.optimize import linprog
    except ImportError:
        hint = "pip install 'cordee[exact]'"
        raise MissingExtraError("the bound for two slots a GPU needs scipy", hint=hint) from None
    experts, choices = counts.shape
    terms = counts[..., None] * _value(each, top, x)
    # Variables: one for each (expert, count), and the worst violation, which is minimised.
    above = np.concatenate([terms.reshape(-1, len(x)).T, -np.ones((len(x), 1))], axis=1)
    one_each = np.repeat(np.eye(experts), choices, axis=1)
    equal = np.concatenate([np.vstack([one_each, counts.reshape(1, -1)]), np.zeros((experts + 1, 1))], axis=1)
    done = linprog(
        np.append(np.zeros(counts.size), 1.0),
        A_ub=above,
        b_ub=np.zeros(len(x)),
        A_eq=equal,
        b_eq=np.append(np.ones(experts), float(fleet.replicas)),
        bounds=[(0, None)] * counts.size + [(None, None)],
        method="highs",
    )
    if done.status != 0 or done.fun <= SURE:
        return None
    return np.maximum(-done.ineqlin.marginals, 0), -float(done.eqlin.marginals[-1])
