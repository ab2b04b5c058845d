"""A placement from scratch: several first placements, each improved by local search; the best of each layer."""

import numpy as np

from cordee.hardware.arrays import Floats, Ints
from cordee.plan.experts.bound import least_max
from cordee.plan.experts.improve import PlacementSearch
from cordee.plan.experts.pack import node_orders, pack, replica_counts
from cordee.plan.experts.replica_counts import pair_counts
from cordee.plan.experts.shape import ExpertPlacement, Fleet, gpu_loads

STEPS = 400
"""Most moves of a layer; real loads took up to 55."""


LEANS = (0.0, -0.2, 0.2, 0.4)
"""Biases of the replica counts to try, in this order; the first is the usual rule."""
GOOD = 1.0005
"""A layer whose fullest GPU is within this factor of the bound is done."""


def plan_experts(loads: Floats, fleet: Fleet, *, effort: float = 1.0) -> ExpertPlacement:
    """Replicate and place the experts of each layer from their loads.

    Args:
        loads: layers x experts, tokens.
        fleet: the GPUs; it is checked.
        effort: how much of the search for replica counts to do on GPUs of two slots; 1 is a fraction of a second.

    Raises:
        LayoutError: the experts cannot be placed on this fleet.
    """
    fleet.check(loads.shape[1])
    least = least_max(loads, fleet)
    best = np.zeros((len(loads), fleet.gpus, fleet.slots), dtype=np.int64)
    reached = np.full(len(loads), np.inf)
    # With a search for replica counts, several starts divide a large effort.
    leans = LEANS if fleet.slots > 2 or effort >= len(LEANS) else LEANS[:1]
    effort /= len(leans)
    for lean in leans:
        rows = np.flatnonzero(reached > least * GOOD)
        for start in _starts(loads[rows], fleet, lean, effort) if len(rows) else ():
            search = PlacementSearch(loads[rows], start, fleet.domains)
            search.run(least[rows], STEPS)
            found = gpu_loads(loads[rows], search.slots).max(axis=1)
            better = found < reached[rows]
            best[rows[better]], reached[rows[better]] = search.slots[better], found[better]
    return ExpertPlacement(fleet, best, loads.shape[1])


def _starts(loads: Floats, fleet: Fleet, lean: float, effort: float) -> list[Ints]:
    """Return the first placements: one for each packing of groups on nodes to try."""
    layers, experts = loads.shape
    if fleet.domains == 1:
        return [_pack(loads, fleet.gpus, fleet.slots, lean, effort)]
    each, per_group = experts // fleet.nodes, experts // fleet.groups
    starts = []
    for order in node_orders(loads, fleet):
        expert = (order[:, :, None] * per_group + np.arange(per_group)).reshape(layers * fleet.nodes, each)
        own = np.take_along_axis(np.repeat(loads, fleet.nodes, axis=0), expert, axis=1)
        local = _pack(own, fleet.gpus // fleet.nodes, fleet.slots, lean, effort)
        slots = np.take_along_axis(expert, local.reshape(len(local), -1), axis=1)
        starts.append(slots.reshape(layers, fleet.gpus, fleet.slots))
    return starts


def _pack(loads: Floats, gpus: int, slots: int, lean: float, effort: float) -> Ints:
    counts = replica_counts(loads, gpus * slots, lean=lean)
    if slots == 2:
        counts = pair_counts(loads, counts, gpus, effort)
    return pack(loads, counts, gpus, slots)
