"""Expert replicas and their placement on GPUs from measured loads: from scratch, or by few moves. Pure."""

from cordee.plan.experts.bound import balance_bound, least_max
from cordee.plan.experts.control import ControllerState, Observation, RebalancePolicy, observe
from cordee.plan.experts.mappings import MAPPING_FORMATS, MappingFormat, log2phy, mapping, phy2log
from cordee.plan.experts.moves import MoveCosts, Rebalance, rebalance
from cordee.plan.experts.noise import beyond_noise, updated
from cordee.plan.experts.shape import ExpertPlacement, Fleet, checked_loads, checked_placement, trivial_placement
from cordee.plan.experts.solve import plan_experts

__all__ = [
    "MAPPING_FORMATS",
    "ControllerState",
    "ExpertPlacement",
    "Fleet",
    "MappingFormat",
    "MoveCosts",
    "Observation",
    "Rebalance",
    "RebalancePolicy",
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
