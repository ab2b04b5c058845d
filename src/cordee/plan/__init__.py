"""What a run needs before it runs: memory, layouts, time, survival, money. Pure: facts come in as arguments."""

from cordee.plan.curve import scaling_curve
from cordee.plan.launch import launch_settings
from cordee.plan.layout import Layout, Training, parse_layout
from cordee.plan.longest import longest_contexts
from cordee.plan.search import Candidate, Plan, Remedy, Verdict, check_fit, fewest_gpus_to_hold, plan_layouts
from cordee.plan.why import why_not

__all__ = [
    "Candidate",
    "Layout",
    "Plan",
    "Remedy",
    "Training",
    "Verdict",
    "check_fit",
    "fewest_gpus_to_hold",
    "launch_settings",
    "longest_contexts",
    "parse_layout",
    "plan_layouts",
    "scaling_curve",
    "why_not",
]
