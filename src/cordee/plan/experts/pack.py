"""First placements: replicas of each expert, groups of each node, and the GPU of each replica.

All layers at once. The two rules of thumb are those of every expert balancer: the next replica goes to the expert
whose replicas are hottest (which minimises the hottest replica), the next heaviest replica to the emptiest GPU.
"""

from itertools import combinations
from math import comb, factorial

import numpy as np

from cordee.hardware.arrays import Floats, Ints
from cordee.plan.experts.shape import Fleet

PACKINGS_MAX = 3000
"""Most packings of groups on nodes that are enumerated; beyond, a heuristic and a weaker bound are used."""


def replica_counts(loads: Floats, replicas: int, *, lean: float = 0.0) -> Ints:
    """Return the replica counts that minimise the hottest replica: each next one goes to the hottest.

    With a `lean` other than 0 the next one goes to the largest load / (count + lean) instead: above 0 hot experts get
    more of them, below 0 fewer. Where slots are few, one of these often packs better.
    """
    problems, experts = loads.shape
    counts = np.ones((problems, experts), dtype=np.int64)
    replica_load = loads / (1 + lean)
    rows = np.arange(problems)
    for _ in range(replicas - experts):
        hottest = replica_load.argmax(axis=1)
        counts[rows, hottest] += 1
        replica_load[rows, hottest] = loads[rows, hottest] / (counts[rows, hottest] + lean)
    return counts


def pack(loads: Floats, counts: Ints, gpus: int, slots: int) -> Ints:
    """Place the heaviest replica first, each on the emptiest GPU with a free slot."""
    problems, experts = loads.shape
    rows = np.arange(problems)
    expert = np.repeat(np.tile(np.arange(experts), problems), counts.ravel()).reshape(problems, gpus * slots)
    replica_load = np.take_along_axis(loads / counts, expert, axis=1)
    order = np.argsort(-replica_load, axis=1, kind="stable")
    expert, replica_load = np.take_along_axis(expert, order, axis=1), np.take_along_axis(replica_load, order, axis=1)
    filled = np.zeros((problems, gpus), dtype=np.int64)
    load = np.zeros((problems, gpus))
    placed = np.zeros((problems, gpus, slots), dtype=np.int64)
    for at in range(gpus * slots):
        gpu = load.argmin(axis=1)
        slot = filled[rows, gpu]
        placed[rows, gpu, slot] = expert[:, at]
        filled[rows, gpu] = slot + 1
        # A full GPU takes no more.
        load[rows, gpu] = np.where(slot + 1 == slots, np.inf, load[rows, gpu] + replica_load[:, at])
    return placed


def packings(groups: int, nodes: int) -> Ints | None:
    """Return every packing of groups on equal nodes, equally many on each: rows of groups in the order of nodes.

    >>> packings(4, 2).tolist()
    [[0, 1, 2, 3], [0, 2, 1, 3], [0, 3, 1, 2]]

    None if there are too many to try.
    """
    each = groups // nodes
    if factorial(groups) // (factorial(each) ** nodes * factorial(nodes)) > PACKINGS_MAX or comb(groups, each) > 10**6:
        return None

    def ways(left: tuple[int, ...]) -> list[tuple[int, ...]]:
        if not left:
            return [()]
        return [
            (left[0], *others, *rest)
            for others in combinations(left[1:], each - 1)
            for rest in ways(tuple(group for group in left[1:] if group not in others))
        ]

    return np.array(ways(tuple(range(groups))), dtype=np.int64)


def group_loads(loads: Floats, fleet: Fleet) -> Floats:
    """Return the load of each group in each layer."""
    found: Floats = loads.reshape(len(loads), fleet.groups, -1).sum(axis=2)
    return found


def node_orders(loads: Floats, fleet: Fleet) -> list[Ints]:
    """Return the packings to try: the heuristic one, and the one with the lightest worst node."""
    heavy = group_loads(loads, fleet)
    each = fleet.groups // fleet.nodes
    thumb = pack(heavy, np.ones_like(heavy, dtype=np.int64), fleet.nodes, each).reshape(len(loads), -1)
    ways = packings(fleet.groups, fleet.nodes)
    if ways is None:
        return [thumb]
    best = ways[_worst_nodes(heavy, ways, fleet.nodes).argmin(axis=1)]
    return [thumb] if (np.sort(best) == np.sort(thumb)).all() and (best == thumb).all() else [thumb, best]


def lightest_worst_node(loads: Floats, fleet: Fleet) -> Floats:
    """Return a lower bound on the load of the heaviest node; exact where packings are enumerated."""
    heavy = group_loads(loads, fleet)
    ways = packings(fleet.groups, fleet.nodes)
    if ways is not None:
        exact: Floats = _worst_nodes(heavy, ways, fleet.nodes).min(axis=1)
        return exact
    # The node of the heaviest group has some others, and no lighter ones than the lightest.
    rising = np.sort(heavy, axis=1)
    least: Floats = rising[:, -1] + rising[:, : fleet.groups // fleet.nodes - 1].sum(axis=1)
    weaker: Floats = np.maximum(least, heavy.sum(axis=1) / fleet.nodes)
    return weaker


def _worst_nodes(heavy: Floats, ways: Ints, nodes: int) -> Floats:
    found: Floats = heavy[:, ways].reshape(len(heavy), len(ways), nodes, -1).sum(axis=3).max(axis=2)
    return found
