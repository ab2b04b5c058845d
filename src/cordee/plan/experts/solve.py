"""A placement from scratch: first placements of several kinds, each improved by small moves; the best of each layer."""

import numpy as np

from cordee.plan.experts.bound import least_max
from cordee.plan.experts.improve import Search
from cordee.plan.experts.pack import node_orders, pack, replica_counts
from cordee.plan.experts.pairs import pair_counts
from cordee.plan.experts.shape import Fleet, Floats, Ints, Placement, gpu_loads

STEPS = 400
"""Moves of a layer from scratch; 55 were the most that real loads took."""


LEANS = (0.0, -0.2, 0.2, 0.4)
"""Ways to deal out replicas that are tried, in this order; the first is the usual one."""
GOOD = 1.0005
"""A layer whose fullest GPU is within this of the bound is not tried again."""


def plan_experts(loads: Floats, fleet: Fleet, *, effort: float = 1.0) -> Placement:
    """Replicate and place the experts of each layer from their loads.

    Args:
        loads: layers x experts, tokens.
        fleet: where they go; it is checked.
        effort: how much of the search for replica counts to do on GPUs of two slots; 1 is a fraction of a second.

    Raises:
        LayoutError: the experts cannot be placed on this fleet.
    """
    fleet.check(loads.shape[1])
    least = least_max(loads, fleet)
    best = np.zeros((len(loads), fleet.gpus, fleet.slots), dtype=np.int64)
    reached = np.full(len(loads), np.inf)
    # Where counts are searched for, several ways to start share the effort if it is large enough to share.
    leans = LEANS if fleet.slots > 2 or effort >= len(LEANS) else LEANS[:1]
    effort /= len(leans)
    for lean in leans:
        rows = np.flatnonzero(reached > least * GOOD)
        for start in _starts(loads[rows], fleet, lean, effort) if len(rows) else ():
            search = Search(loads[rows], start, fleet.domains)
            search.run(least[rows], STEPS)
            found = gpu_loads(loads[rows], search.slots).max(axis=1)
            better = found < reached[rows]
            best[rows[better]], reached[rows[better]] = search.slots[better], found[better]
    return Placement(fleet, best, loads.shape[1])


def _starts(loads: Floats, fleet: Fleet, lean: float, effort: float) -> list[Ints]:
    """First placements: one for each way to put groups on nodes that is worth it."""
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
