"""The shapes of what the HTTP API takes and answers, as pydantic models: the API's schema, and every verb's JSON."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from cordee.events import Estimate


class View(BaseModel):
    """What the API answers. Times are microseconds since the Unix epoch, money is integer micro-dollars."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class HealthView(View):
    """The server itself. `problem` is what keeps it from working, such as a full disk."""

    version: str
    pid: int
    home: str
    shutting_down: bool
    live_attempts: int
    log_number: int
    problem: str | None = None


class FailureView(View):
    """The rank that failed first, and its last lines."""

    rank: int | None
    exit_code: int | None
    signal: int | None
    tail: list[str]


class ComparisonView(View):
    """A value of a job as it was planned and as it is measured, in `unit`.

    Nine of ten values are planned between `low` and `high`; `off_by` is the fraction by which the measured value is
    above the planned one; `missed` says that it left the interval.
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

    `refused` counts records of the ranks' spools that say what cannot be; `refused_why` is the reason of the last one.
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
    """A job in a list."""

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


class JobDetailView(JobView):
    """A job with its attempts, its spec as it was admitted, and what its newest attempt measured beside its estimate.

    `estimate` is the plan's answer for the GPUs of that attempt; `estimate_missed` has a sentence for each value that
    left it.
    """

    attempts: list[AttemptView]
    spec: dict[str, Any]
    estimate: Estimate | None
    measured: list[ComparisonView]
    estimate_missed: list[str]


class SpreadView(View):
    """Percentiles of a time over the draws: one in ten is earlier than p10. null: later than `seen_us`."""

    p10_us: int | None
    p50_us: int | None
    p90_us: int | None


class ForecastView(View):
    """A forecast of a job's next start and of its end, from `draws` runs of the scheduler forward from `at_us`.

    Every run went to `seen_us` or to the job's end; run times come from `learnt_from` jobs that have ended, and
    `source` names where that of this job comes from; `preemptions` is how often the job gets notice, on average.
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
    """Why a job is where it is: one dominant reason, said in `text`; `until_us` is when it ends at the latest.

    `forecast` is there if it was asked for, and the job has not ended; `left_us` is the time until its last step at
    its own pace, where the script said how many there are. `failure` is that of its last attempt.
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


class NodeView(View):
    """A node.

    `used` names the attempt that holds each GPU; `unavailable` are GPUs with processes that are not Cordee's.
    `cordoned_by` is the operator who took the node out of use; with `drains` its attempts got notice too.
    """

    name: str
    up: bool
    epoch: int
    gpu_name: str
    gpus: int
    used: dict[int, str]
    unavailable: list[int]
    micro_usd_per_gpu_hour: int
    price_source: str
    cordoned_by: str | None = None
    cordon_why: str = ""
    drains: bool = False


class NodeOrder(View):
    """The reason for which an operator takes a node out of use, or back into it."""

    why: Annotated[str, Field(max_length=1000)] = ""


class QueueRules(View):
    """What a queue is to be. `gpu_us_per_day` and `micro_usd_per_day` are of 24 hours, sliding."""

    name: str
    parent: str | None = None
    quota_gpus: int = 0
    limit_gpus: int | None = None
    lend: bool = True
    weight: int = 1
    user_gpus: int | None = None
    gpu_us_per_day: int | None = None
    micro_usd_per_day: int | None = None


class QueueView(QueueRules):
    """A queue as it stands, those inside it counted in.

    GPUs are in thousandths. `lends` is what it leaves of its quota for others; `fair_share_ppb` what it borrowed,
    by its weight, in billionths of the cluster, now and in the past: the least is next.
    """

    depth: int
    held_gpu_milli: int
    borrowed_gpu_milli: int
    lends_gpu_milli: int
    fair_share_ppb: int
    users_gpu_milli: dict[str, int]
    day_gpu_us: int | None
    day_micro_usd: int | None
    running_jobs: int
    waiting_jobs: int
    waiting_gpu_milli: int


class QueuesView(View):
    """The tree of queues, each before those inside it; of a cluster with so many GPUs on nodes that stay."""

    at_us: int
    gpu_milli: int
    queues: list[QueueView]


class QueuesSubmission(View):
    """All queues that there shall be."""

    queues: list[QueueRules]


class SplitView(View):
    """GPU-microseconds or micro-dollars by class; the classes add up to `held` exactly."""

    held: int
    useful: int
    checkpoint: int
    restart: int
    stall: int
    lost: int
    unreported: int


class LostView(View):
    """What was lost for one cause, such as `preempt` or `failure`."""

    cause: str
    gpu_us: int
    micro_usd: int


class CostRowView(View):
    """What one job, user, queue or attempt held. `charged` is what others lost for it.

    `measured` is empty but for a job (its newest attempt) and an attempt.
    """

    key: str
    attempts: int
    gpu_us: SplitView
    micro_usd: SplitView
    lost_by_cause: list[LostView]
    charged_gpu_us: int
    charged_micro_usd: int
    steps: int
    steps_repeated: int
    tokens: int
    micro_usd_per_million_tokens: int | None
    price_sources: list[str]
    measured: list[ComparisonView]


class CostView(View):
    """The bill until `at_us`, by row, and of the whole cluster: capacity = held + idle."""

    by: str
    at_us: int
    rows: list[CostRowView]
    gpu_us: SplitView
    micro_usd: SplitView
    idle_gpu_us: int
    idle_micro_usd: int


class Submission(View):
    """What a client sends to have a job queued; the id is the client's, so that sending it again changes nothing."""

    job_id: str
    spec: dict[str, Any]
    unprotected: bool = False


class VictimView(View):
    """A job that would be preempted, the reason, and its expected loss."""

    job_id: str
    owner: str
    reason: str
    expected_loss_micro_usd: int


class RehearsalView(View):
    """The consequences of submitting a job now; nothing was submitted.

    Attributes:
        starts_now: whether it would be placed at once.
        reason, text, blocking, until_us: as of `WhyView`.
        nodes: where it would be placed: for certain if it starts now, else as in the median draw; empty: not known.
        racks: how many domains these nodes lie in; null where nodes name none.
        victims: the jobs that it would preempt at once.
        micro_usd_per_hour: on those nodes, else on the dearest GPUs that it may get.
        micro_usd_to_limit: if it runs until its limits of time or cost; null without any.
        micro_usd_to_estimate: if it runs as long as its owner expects; null if that was not said.
        estimate: the plan's answer for its model; null if it names none.
        notes: what was assumed.
    """

    gpus: int
    gpu_name: str | None
    tier: str
    queue: str
    starts_now: bool
    reason: str
    text: str
    blocking: list[str]
    until_us: int | None
    nodes: dict[str, list[int]]
    racks: int | None
    victims: list[VictimView]
    micro_usd_per_hour: int
    micro_usd_to_limit: int | None
    micro_usd_to_estimate: int | None
    estimate: Estimate | None
    notes: list[str]
    forecast: ForecastView | None


class Submitted(View):
    """The job was queued. `notes` say what was assumed; the price is that of the dearest GPUs that it may get."""

    job: JobView
    notes: list[str]
    micro_usd_per_hour: int


class ErrorFacts(View):
    """What is wrong: the name of a class in `cordee.errors`, its message, and what to do."""

    kind: str
    message: str
    hint: str | None


class ErrorView(View):
    """What the API answers when it refuses or fails."""

    error: ErrorFacts
