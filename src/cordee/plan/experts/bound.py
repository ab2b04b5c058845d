"""An upper bound on the balance of any placement on a fleet.

It holds for any placement whose replicas share their expert's load evenly. A GPU carries at least the mean; the
fullest one at least the hottest replica, whatever the replica counts; and, with groups on nodes, at least its share
of the heaviest node under the best packing. `prove.py` has a tighter one for two slots a GPU.
"""

import numpy as np

from cordee.hardware.arrays import Floats
from cordee.plan.experts.pack import lightest_worst_node, replica_counts
from cordee.plan.experts.shape import Fleet


def least_max(loads: Floats, fleet: Fleet) -> Floats:
    """Return a proven lower bound on the load of each layer's fullest GPU."""
    mean = loads.sum(axis=1) / fleet.gpus
    hottest = (loads / replica_counts(loads, fleet.replicas)).max(axis=1)
    least: Floats = np.maximum(mean, hottest)
    if fleet.domains > 1:
        least = np.maximum(least, lightest_worst_node(loads, fleet) / (fleet.gpus // fleet.nodes))
    return least


def balance_bound(loads: Floats, fleet: Fleet) -> Floats:
    """Return the upper bound on balance (mean over max) of each layer."""
    bound: Floats = loads.sum(axis=1) / fleet.gpus / least_max(loads, fleet)
    return bound
