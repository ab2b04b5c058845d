"""Sweeps as people see them: the fold's records as answers of the API. Pure."""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from cordee.answers.sweeps import SweepDetailView, SweepView, TrialView
from cordee.control.sweeps.policy import reached_target
from cordee.control.trials import Sweep, Trial, declared_spec
from cordee.ids import JobId


class Spent(NamedTuple):
    """GPU time and cost of a job so far."""

    gpu_us: int = 0
    micro_usd: int = 0


def sweep_view(sweep: Sweep, *, problem: str = "", notes: tuple[str, ...] = ()) -> SweepView:
    """Return a sweep without its trials; `problem` is the refusal of its next one."""
    return SweepView(**_fields(sweep, problem, notes))


def sweep_detail(sweep: Sweep, spent: Mapping[JobId, Spent], *, problem: str = "") -> SweepDetailView:
    """Return a sweep with its trials and what each has used."""
    trials = [trial_view(each, spent.get(each.job_id, Spent())) for each in sweep.trials.values()]
    micro_usd = sum(each.micro_usd or 0 for each in trials)
    best = sweep.best
    fields = _fields(sweep, problem, ()) | {
        "best": None if best is None else trial_view(best, spent.get(best.job_id, Spent()))
    }
    return SweepDetailView(
        **fields,
        trials=trials,
        gpu_us=sum(each.gpu_us or 0 for each in trials),
        micro_usd=micro_usd,
        target_micro_usd=None if reached_target(sweep) is None else micro_usd,
        spec=json.loads(sweep.spec),
    )


def trial_view(trial: Trial, spent: Spent | None = None) -> TrialView:
    """Return one trial; None: what it has used is not asked for."""
    return TrialView(
        number=trial.number,
        job_id=trial.job_id,
        values=trial.values,
        state=trial.state.value,
        step=trial.step,
        rung=len(trial.rungs),
        metric=trial.metric,
        metric_step=trial.metric_step,
        gpu_us=None if spent is None else spent.gpu_us,
        micro_usd=None if spent is None else spent.micro_usd,
        why=trial.why,
    )


def _fields(sweep: Sweep, problem: str, notes: tuple[str, ...]) -> dict[str, Any]:
    section, best = sweep.section, sweep.best
    return {
        "sweep_id": sweep.sweep_id,
        "name": declared_spec(sweep.spec).name,
        "owner": sweep.owner,
        "state": _state(sweep),
        "search": section.way,
        "metric": section.metric,
        "goal": section.goal,
        "target": section.target,
        "rung_steps": list(section.rung_steps),
        "eta": None if section.rungs is None else section.rungs.eta,
        "total": section.total,
        "max_running": section.max_running,
        "counts": dict(Counter(each.state.value for each in sweep.trials.values())),
        "best": None if best is None else trial_view(best),
        "declared_us": sweep.declared_us,
        "ended_us": sweep.ended_us,
        "why": sweep.why or (f"paused by {sweep.held_by}" if sweep.held_by else problem),
        "note": _unlogged(sweep),
        "notes": list(notes),
    }


def _state(sweep: Sweep) -> Literal["running", "paused", "stopping", "ended"]:
    if sweep.ended_us is None:
        return "paused" if sweep.held_by else "running"
    return "ended" if sweep.is_over else "stopping"


def _unlogged(sweep: Sweep) -> str:
    """Say that trials have ended or have reached a rung, and none has logged the metric."""
    name = sweep.section.metric
    ran = any(each.has_ended or each.rungs for each in sweep.trials.values())
    if name in sweep.logged or not ran:
        return ""
    logged = f"they log {', '.join(sweep.logged)}" if sweep.logged else "they log none"
    return f"no trial has logged the metric {name}: {logged}; in the loop, call job.log({name}=...)"
