"""What a run needs before it runs: memory, layouts, time, survival, money. Pure: facts come in as arguments."""

from cordee.plan.layout import Layout, Training, parse_layout
from cordee.plan.search import Candidate, Plan, Remedy, Verdict, check_fit, fewest_gpus_to_hold, plan_layouts

__all__ = [
    "Candidate",
    "Layout",
    "Plan",
    "Remedy",
    "Training",
    "Verdict",
    "check_fit",
    "fewest_gpus_to_hold",
    "parse_layout",
    "plan_layouts",
]
