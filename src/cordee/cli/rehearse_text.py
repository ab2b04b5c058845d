"""Results of rehearsals in words."""

from collections.abc import Mapping
from typing import Any

from cordee.answers.submissions import RehearsalView
from cordee.units import US_PER_S, format_bytes, format_duration, plural


def summary(found: RehearsalView, now_us: int) -> str:
    """Return a result as one line of `cordee run` shows it."""
    ago = f"{format_duration(max(1, round((now_us - found.ended_us) / US_PER_S)))} ago"
    if not found.passed:
        return f"failed its rehearsal {ago}: {found.why}"
    save = "" if found.save_us is None else f", save {format_duration(found.save_us / US_PER_S)}"
    return f"rehearsed ({plural(found.steps, 'step')}{save}, {ago})"


def measured(found: RehearsalView) -> Mapping[str, str]:
    """Return what was measured, in words."""
    times: dict[str, Any] = {"step": found.step_us, "save": found.save_us, "restart": found.restart_us}
    rows = {what: format_duration(us / US_PER_S) for what, us in times.items() if us is not None}
    if found.peak_bytes is not None:
        rows = {"peak memory": f"{format_bytes(found.peak_bytes)} a rank"} | rows
    if found.grace_s is not None:
        rows["grace period"] = f"{format_duration(found.grace_s)}, unless the job names one"
    return rows
