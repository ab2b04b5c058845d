"""Replicate and place the experts of a model on GPUs from their loads, anew or by few moves. Pure: loads come in."""

from cordee.plan.experts.bound import balance_bound, least_max
from cordee.plan.experts.control import Policy, Seen, Watch, observe
from cordee.plan.experts.drift import beyond_noise, updated
from cordee.plan.experts.layouts import LAYOUTS, Layout, log2phy, mapping, phy2log
from cordee.plan.experts.moves import Costs, Rebalance, rebalance
from cordee.plan.experts.shape import Fleet, Placement, checked_loads, checked_placement, trivial_placement
from cordee.plan.experts.solve import plan_experts

__all__ = [
    "LAYOUTS",
    "Costs",
    "Fleet",
    "Layout",
    "Placement",
    "Policy",
    "Rebalance",
    "Seen",
    "Watch",
    "balance_bound",
    "beyond_noise",
    "checked_loads",
    "checked_placement",
    "least_max",
    "log2phy",
    "mapping",
    "observe",
    "phy2log",
    "plan_experts",
    "rebalance",
    "trivial_placement",
    "updated",
]
