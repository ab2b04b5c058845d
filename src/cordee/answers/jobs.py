"""Jobs, their attempts, forecasts and reasons to wait."""

from typing import Any, Literal

from cordee.answers.files import FilesView
from cordee.answers.view import View
from cordee.events import Estimate


class FailureView(View):
    """The rank that failed first, and its last lines."""

    rank: int | None
    exit_code: int | None
    signal: int | None
    tail: list[str]


class ComparisonView(View):
    """A planned and a measured value of a job, in `unit`.

    Nine of ten values are expected between `low` and `high`. `off_by` is the fraction by which the measured value
    exceeds the planned one. `missed` says whether it lies outside the interval.
    """

    quantity: str
    unit: str
    planned: float | None
    low: float | None
    high: float | None
    measured: float | None
    off_by: float | None
    missed: bool


class AttemptView(View):
    """One execution of a job. `leases` are the GPUs held, by node.

    `refused` counts impossible records of the ranks' spools; `refused_why` is the reason for the last one.
    """

    epoch: int
    state: str
    leases: dict[str, list[int]]
    placed_us: int
    notice_reason: str | None
    ended_us: int | None
    outcome: str | None
    why: str
    failure: FailureView | None
    refused: int = 0
    refused_why: str = ""


class JobView(View):
    """A job in a list; `sweep` is the id of the sweep of which it is a trial.

    While it runs, `steps_total` are its steps as its script reported them, and `left_us` is the time until the last one
    at its own pace.
    """

    job_id: str
    name: str
    owner: str
    queue: str
    tier: str
    gpus: int
    gpu_name: str | None
    state: str
    why: str
    epoch: int
    step: int | None
    checkpoint_step: int | None
    submitted_us: int
    ended_us: int | None
    sweep: str | None = None
    steps_total: int | None = None
    left_us: int | None = None


class JobDetailView(JobView):
    """A job with its attempts, its admitted spec, and the measured values of its newest attempt beside the estimate.

    `estimate` is the plan's answer for the GPUs of that attempt; `estimate_missed` has a sentence for each value
    outside it.
    """

    attempts: list[AttemptView]
    spec: dict[str, Any]
    estimate: Estimate | None
    measured: list[ComparisonView]
    estimate_missed: list[str]
    files: FilesView | None = None


class SpreadView(View):
    """Percentiles of a time over the draws: one in ten is earlier than p10. null: later than `seen_us`."""

    p10_us: int | None
    p50_us: int | None
    p90_us: int | None


class ForecastView(View):
    """A forecast of a job's next start and of its end, from `draws` runs of the scheduler forward from `at_us`.

    Every run went to `seen_us` or to the job's end; run times come from `learnt_from` jobs that have ended, and
    `source` names where that of this job comes from; `preemptions` is the mean number of notices to the job.
    """

    at_us: int
    draws: int
    seen_us: int
    learnt_from: int
    source: Literal["its own steps", "its plan", "other jobs"] = "other jobs"
    start: SpreadView
    end: SpreadView
    preemptions: float


class WhyView(View):
    """The reason for a job's state: `text` explains it, and it ends by `until_us`.

    `forecast` is set on request if the job has not ended. `left_us` is the time until its last step at its measured
    pace, if the script reported the number of steps. `failure` is that of its last attempt.
    """

    job_id: str
    state: str
    reason: str
    text: str
    gpus_needed: int
    gpus_free: int
    blocking: list[str]
    until_us: int | None
    left_us: int | None
    measured: list[ComparisonView]
    estimate_missed: list[str]
    failure: FailureView | None
    forecast: ForecastView | None = None
