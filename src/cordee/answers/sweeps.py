"""Requests and answers of the HTTP API about sweeps, as pydantic models."""

from typing import Any, Literal

from pydantic import Field

from cordee.answers.submissions import Submission
from cordee.answers.view import View
from cordee.workload.sweep import Value


class SweepSubmission(Submission):
    """A client's request to create a sweep: `job_id` is the sweep's id, and `spec` has a section `sweep`."""


class TrialView(View):
    """One trial of a sweep.

    `metric` is the newest value of the sweep's metric, logged when `metric_step` steps were done. `rung` counts the
    rungs that it has reached. GPU time and cost are those of all its attempts; null where they were not asked for.
    """

    number: int
    job_id: str
    values: dict[str, Value]
    state: Literal["queued", "running", "paused", "done", "failed", "stopped"]
    step: int
    rung: int
    metric: float | None
    metric_step: int | None
    gpu_us: int | None
    micro_usd: int | None
    why: str


class SweepView(View):
    """A sweep without its trials.

    `total` is the number of trials that it may start; `counts` are those by state; `rung_steps` are empty without
    rungs. `best` is the trial with the best newest metric of those at the highest rung. `why` is the reason for its
    end, or what keeps its next trial from starting; `note` says that no trial has logged the metric.
    """

    sweep_id: str
    name: str
    owner: str
    state: Literal["running", "paused", "stopping", "ended"]
    search: Literal["grid", "random", "bayes"]
    metric: str
    goal: Literal["min", "max"]
    target: float | None
    rung_steps: list[int]
    eta: int | None
    total: int
    max_running: int
    counts: dict[str, int]
    best: TrialView | None
    declared_us: int
    ended_us: int | None
    why: str
    note: str
    notes: list[str] = Field(default_factory=list)


class SweepDetailView(SweepView):
    """A sweep with its trials. The sums are those of all trials.

    `target_micro_usd` is what the sweep has cost if it has reached its target, null if not.
    """

    trials: list[TrialView]
    gpu_us: int
    micro_usd: int
    target_micro_usd: int | None
    spec: dict[str, Any]
