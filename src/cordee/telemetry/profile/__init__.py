"""Profiles of PyTorch's profiler and of Cordee itself: read, classified, accounted, set beside each other."""

from cordee.telemetry.profile.account import RankReport, account
from cordee.telemetry.profile.compare import AgainstPlan, Comparison, Efficiency, against_plan, compare, efficiency
from cordee.telemetry.profile.faults import Fault
from cordee.telemetry.profile.kernels import Class, KernelTable, load_kernels
from cordee.telemetry.profile.ranks import Skew, skew
from cordee.telemetry.profile.read import Profile, read_profile

__all__ = [
    "AgainstPlan",
    "Class",
    "Comparison",
    "Efficiency",
    "Fault",
    "KernelTable",
    "Profile",
    "RankReport",
    "Skew",
    "account",
    "against_plan",
    "compare",
    "efficiency",
    "load_kernels",
    "read_profile",
    "skew",
]  # fmt: skip
