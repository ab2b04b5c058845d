"""Profiles of PyTorch's profiler and of Cordee: reading, classes of kernels, breakdown of time, comparisons."""

from cordee.telemetry.profile.account import RankReport, account
from cordee.telemetry.profile.compare import (
    Efficiency,
    PlanComparison,
    ProfileComparison,
    compare,
    compare_with_plan,
    efficiency,
)
from cordee.telemetry.profile.defects import Defect
from cordee.telemetry.profile.kernels import KernelClass, KernelTable, load_kernels
from cordee.telemetry.profile.ranks import Skew, skew
from cordee.telemetry.profile.read import Profile, read_profile

__all__ = [
    "Defect",
    "Efficiency",
    "KernelClass",
    "KernelTable",
    "PlanComparison",
    "Profile",
    "ProfileComparison",
    "RankReport",
    "Skew",
    "account",
    "compare",
    "compare_with_plan",
    "efficiency",
    "load_kernels",
    "read_profile",
    "skew",
]  # fmt: skip
