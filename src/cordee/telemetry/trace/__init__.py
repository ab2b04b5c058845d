"""Traces of PyTorch's profiler and of Cordee itself: read, classified, accounted, set beside each other."""

from cordee.telemetry.trace.account import RankReport, account
from cordee.telemetry.trace.compare import AgainstPlan, Comparison, Efficiency, against_plan, compare, efficiency
from cordee.telemetry.trace.faults import Fault
from cordee.telemetry.trace.kernels import Class, KernelTable, load_kernels
from cordee.telemetry.trace.ranks import Skew, skew
from cordee.telemetry.trace.read import Trace, read_trace

__all__ = [
    "AgainstPlan", "Class", "Comparison", "Efficiency", "Fault", "KernelTable", "RankReport", "Skew", "Trace",
    "account", "against_plan", "compare", "efficiency", "load_kernels", "read_trace", "skew",
]  # fmt: skip
