"""Try a submission on a copy of the state: whether, where and when the job starts, and what it preempts.

The live state is not touched: the caller has made the copy and owns it.
"""

from collections.abc import Callable, Iterable, Mapping

from cordee.account.measured import StepsLeft
from cordee.answers.jobs import ForecastView
from cordee.answers.submissions import DryRunView, VictimView
from cordee.control.admission import Admitted
from cordee.control.forecast import Forecast, forecast
from cordee.events import AttemptPlaced, Job, JobSubmitted, Lease, NoticeGiven
from cordee.ids import JobId
from cordee.schedule import decide
from cordee.schedule.explain import Reason, explain
from cordee.schedule.forecast.snapshot import Snapshot
from cordee.schedule.state.records import Phase, micro_usd_per_hour
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import apply
from cordee.units import US_PER_HOUR


def dry_run(
    state: State,
    now_us: int,
    admitted: Admitted,
    draws: int,
    steps_left: Mapping[JobId, StepsLeft],
    cpu_s: Callable[[], float],
) -> DryRunView:
    """Submit the job to this copy of the state and return the consequences; with draws, also a forecast."""
    job = admitted.job
    apply(state, JobSubmitted(at_us=now_us, job=job, spec=""))
    events = decide(state, now_us).events
    explanation = explain(state, job.job_id, now_us)
    ahead = forecast_of(state, now_us, job.job_id, draws, steps_left, cpu_s)
    placed = next((each for each in events if isinstance(each, AttemptPlaced) and each.job_id == job.job_id), None)
    leases = placed.leases if placed is not None else ahead.leases if ahead is not None else ()
    rate = _rate(state, admitted.job, leases) if leases else admitted.micro_usd_per_hour
    return DryRunView.of(
        explanation,
        gpus=job.gpus,
        gpu_name=job.gpu_name,
        tier=job.tier.value,
        queue=job.queue,
        starts_now=explanation.reason is Reason.STARTS_NOW,
        nodes={lease.node: list(lease.gpus) for lease in leases},
        racks=_racks(state, leases),
        victims=[
            VictimView.of(event, owner=state.jobs[event.job_id].job.owner)
            for event in events
            if isinstance(event, NoticeGiven) and event.for_job == job.job_id
        ],
        micro_usd_per_hour=rate,
        micro_usd_to_limit=_to_limit(job, rate),
        micro_usd_to_estimate=None if job.estimate_us is None else rate * job.estimate_us // US_PER_HOUR,
        estimate=job.estimate_on(job.gpus),
        notes=list(admitted.notes),
        forecast=None if ahead is None else ForecastView.of(ahead),
    )


def forecast_of(
    state: State,
    now_us: int,
    job_id: JobId,
    draws: int,
    steps_left: Mapping[JobId, StepsLeft],
    cpu_s: Callable[[], float],
) -> Forecast | None:
    """Forecast a job; None without draws, for a job that has ended or is paused, and while the server shuts down."""
    record = state.jobs.get(job_id)
    if not draws or record is None or record.phase.ended or state.shutting_down:
        return None
    if record.phase in (Phase.PAUSED, Phase.HELD):  # for as long as a person or a sweep likes
        return None
    return forecast(Snapshot(state), now_us, [job_id], steps_left, draws=draws, clock=cpu_s)[job_id]


def _rate(state: State, job: Job, leases: tuple[Lease, ...]) -> int:
    nodes = state.nodes.records
    return micro_usd_per_hour(job, leases, tuple(nodes[lease.node].node.micro_usd_per_gpu_hour for lease in leases))


def _racks(state: State, leases: Iterable[Lease]) -> int | None:
    domains = {state.nodes.records[lease.node].node.domain for lease in leases}
    return len(domains) if domains and () not in domains else None


def _to_limit(job: Job, rate: int) -> int | None:
    limits = [] if job.cost_limit_micro_usd is None else [job.cost_limit_micro_usd]
    limits += [] if job.time_limit_us is None else [rate * job.time_limit_us // US_PER_HOUR]
    return min(limits, default=None)
