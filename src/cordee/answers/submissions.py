"""Requests to queue a job, to say what it would do, and to rehearse it, with their answers."""

from typing import Annotated, Any

from pydantic import Field

from cordee.answers.jobs import ForecastView, JobView
from cordee.answers.view import View
from cordee.events import Estimate
from cordee.workload.rehearsal import LIMIT_S, REPLAYED, STEPS


class Submission(View):
    """A client's request to queue a job. The client makes the id, so that sending it again changes nothing.

    `secrets` are the values of the spec's secrets, which a client on another machine sends over TLS.
    """

    job_id: str
    spec: dict[str, Any]
    unprotected: bool = False
    secrets: dict[str, Annotated[str, Field(max_length=65_536)]] = Field(default_factory=dict, repr=False)


class VictimView(View):
    """A job that would be preempted, the reason, and its expected loss."""

    job_id: str
    owner: str
    reason: str
    expected_loss_micro_usd: int


class DryRunView(View):
    """The consequences of submitting a job now; nothing was submitted.

    Attributes:
        starts_now: whether it would be placed at once.
        reason, text, blocking, until_us: as in `WhyView`.
        nodes: the nodes on which it starts now, else those of the median draw; empty: not known.
        racks: number of domains in which these nodes lie; null if the nodes name none.
        victims: the jobs that it would preempt at once.
        micro_usd_per_hour: on those nodes, else on the most expensive GPUs that it may get.
        micro_usd_to_limit: the cost if it runs until its limit of time or cost; null without a limit.
        micro_usd_to_estimate: the cost if it runs as long as its owner expects; null if no time was given.
        estimate: the plan's answer for its model; null if it names none.
        notes: the assumptions made.
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


class RehearsalView(View):
    """The result of a rehearsal.

    Attributes:
        job_id: of the rehearsal.
        code: digest of the files and the command that it ran.
        ended_us: when it was over.
        why: one sentence with the numbers.
        gpus, gpu_name: on which it ran.
        steps: that it ran before its notice.
        peak_bytes, step_us, save_us, restart_us: measured; null: not measured.
        grace_s: the grace period that a job of this code gets by default; null if the rehearsal failed.
    """

    job_id: str
    code: str
    ended_us: int
    passed: bool
    why: str
    notes: list[str]
    gpus: int
    gpu_name: str
    steps: int
    peak_bytes: int | None
    step_us: int | None
    save_us: int | None
    restart_us: int | None
    grace_s: float | None


class Submitted(View):
    """A queued job. `notes` are the assumptions made; the price is that of the most expensive GPUs that it may get.

    `rehearsed` is the newest result for its code, on as many GPUs if there is one; null: it was not rehearsed.
    """

    job: JobView
    notes: list[str]
    micro_usd_per_hour: int
    rehearsed: RehearsalView | None = None


class RehearsalSubmission(Submission):
    """A job to rehearse; without `gpus` on the smallest number that the plan knows to hold its model."""

    gpus: Annotated[int, Field(ge=1)] | None = None
    steps: Annotated[int, Field(ge=1, le=10_000)] = STEPS
    replayed: Annotated[int, Field(ge=1, le=200)] = REPLAYED
    limit_s: Annotated[float, Field(gt=0, le=86_400)] = LIMIT_S


class RehearsalStarted(View):
    """A rehearsal that was queued. `why_gpus` says why it runs on so many GPUs; `notes` are the assumptions made."""

    job: JobView
    spec: dict[str, Any]
    why_gpus: str
    notes: list[str]
