"""Metrics and cost of single jobs, and what all of them do now: the operations, and their HTTP face."""

import math
from collections.abc import Mapping

from cordee.account import curves as names
from cordee.account.curves import JobCurves
from cordee.account.epochs import epoch_costs
from cordee.account.ledger import Ledger
from cordee.account.sums import sum_rows
from cordee.answers.jobs import JobView
from cordee.answers.metrics import (
    CurveView,
    EpochCostView,
    JobCostView,
    LiveJobView,
    LiveNodeView,
    LiveView,
    MetricsView,
)
from cordee.control.access import Access
from cordee.control.api_route import user_router
from cordee.control.dependencies import Asked, By
from cordee.control.electricity import electricity_of
from cordee.control.operations import Operations
from cordee.control.row_views import cost_row_view
from cordee.control.snapshot import decoded_curves, decoded_jobs
from cordee.events import GpusSampled
from cordee.ids import JobId
from cordee.schedule.state.records import micro_usd_per_hour
from cordee.schedule.state.state import State

router = user_router("/v1")


@router.get("/jobs/{ref}/metrics")
def read_metrics(ref: str, operations: Asked, by: By) -> MetricsView:
    """Return the curves of a job: what it logs, and what is measured of it."""
    return metrics(operations, by.job(ref))


@router.get("/jobs/{ref}/cost")
def read_cost(ref: str, operations: Asked, by: By) -> JobCostView:
    """Return what a job has cost, by epoch of its data and of a million tokens."""
    return by.view(job_cost(operations, by.job(ref)))


@router.get("/live")
def read_live(operations: Asked, by: By) -> LiveView:
    """Return what the jobs and GPUs do now."""
    return live(operations, by)


def metrics(operations: Operations, ref: str) -> MetricsView:
    """Return the curves of a job."""
    job_id = JobId(operations.job_id(ref))
    with operations.control.changed:
        found = operations.control.fold.curves.of(job_id)
        if found is not None:
            return _metrics_view(job_id, found)
    return _metrics_view(job_id, _retired(operations, job_id))


def _retired(operations: Operations, job_id: JobId) -> JobCurves:
    body = operations.store.archive.curves(job_id)
    return JobCurves() if body is None else decoded_curves(body)


def _metrics_view(job_id: JobId, found: JobCurves) -> MetricsView:
    views = []
    for name, curve in sorted(found.curves.items()):
        points = list(curve.points())
        views.append(
            CurveView(
                name=name,
                steps=[point.step for point in points],
                at_us=[point.at_us for point in points],
                values=[point.value if math.isfinite(point.value) else None for point in points],
            )
        )
    return MetricsView(job_id=job_id, step=found.step, curves=views, energy_j=_energy_j(found))


def _energy_j(found: JobCurves) -> float | None:
    return found.energy_mj / 1000 if found.energy_mj else None


def job_cost(operations: Operations, ref: str) -> JobCostView:
    """Return the cost of one job."""
    job_id = JobId(operations.job_id(ref))
    now_us = operations.clock.now_us()
    with operations.control.changed:
        found = operations.control.fold.curves.of(job_id)
        points = [] if found is None else _epoch_points(found)
        energy_j = None if found is None else _energy_j(found)
        rows = [row for row in operations.control.ledger.rows(now_us) if row.job_id == job_id]
    if found is None:
        retired = _retired(operations, job_id)
        points, energy_j = _epoch_points(retired), _energy_j(retired)
        rows = [row for job in decoded_jobs(operations.store.archive.retired(job_id).values()) for row in job.accounts]
    return JobCostView(
        job_id=job_id,
        at_us=now_us,
        row=cost_row_view(sum_rows(job_id, rows, ())),
        epochs=[EpochCostView.of(each) for each in epoch_costs(points, rows, now_us)],
        energy_j=energy_j,
        electricity=electricity_of(operations.home),
    )


def _epoch_points(found: JobCurves) -> list[names.CurvePoint]:
    curve = found.curves.get("epoch")
    return [] if curve is None else list(curve.points())


def live(operations: Operations, by: Access) -> LiveView:
    """Return what the GPUs do now, and the jobs that may be seen."""
    control, now_us = operations.control, operations.clock.now_us()
    jobs = by.views(each for each in operations.jobs(live=True) if by.sees(each))
    with control.changed:
        rates = _rates(control.state)
        spent = _spent(control.ledger, now_us)
        found = [_live_job(each, control.fold.curves.of(JobId(each.job_id)), rates, spent) for each in jobs]
        nodes = _nodes(control.state, {job: control.fold.curves.of(job) for job in control.state.attempts})
    order = {"running": 0, "stopping": 0}
    found.sort(key=lambda each: order.get(each.state, 1))
    return LiveView(at_us=now_us, nodes=nodes, jobs=found, micro_usd_per_hour=sum(rates.values()))


def _rates(state: State) -> dict[str, int]:
    """Return the micro-dollars an hour of each job that runs, for what it still holds, at the prices that it got."""
    rates: dict[str, int] = {}
    for job_id, attempt in state.attempts.items():
        price_of = {lease.node: price for lease, price in zip(attempt.leases, attempt.prices, strict=True)}
        held = tuple(attempt.held)
        rates[job_id] = micro_usd_per_hour(attempt.job, held, tuple(price_of[lease.node] for lease in held))
    return rates


def _spent(ledger: Ledger, now_us: int) -> dict[str, int]:
    spent: dict[str, int] = {}
    for row in ledger.rows(now_us):
        spent[row.job_id] = spent.get(row.job_id, 0) + row.micro_usd.held
    return spent


def _live_job(
    job: JobView, curves: JobCurves | None, rates: Mapping[str, int], spent: Mapping[str, int]
) -> LiveJobView:
    runs = job.job_id in rates

    def newest(name: str) -> float | None:
        curve = None if curves is None else curves.curves.get(name)
        return None if curve is None or curve.last is None else curve.last.value

    def now(name: str) -> float | None:
        value = newest(name)
        return value if runs and value is not None and math.isfinite(value) else None

    loss, memory = newest("loss"), now(names.GPU_MEMORY)
    peak = now(names.PEAK_BYTES) if memory is None else memory
    return LiveJobView.of(
        job,
        loss=loss if loss is not None and math.isfinite(loss) else None,
        lost_loss=loss is not None and not math.isfinite(loss),
        tokens_per_s=now(names.TOKENS_PER_S),
        mfu=now(names.MFU),
        busy=now(names.GPU_BUSY),
        memory_bytes=None if peak is None else round(peak),
        power_w=now(names.GPU_POWER),
        micro_usd_per_hour=rates.get(job.job_id, 0),
        micro_usd=spent.get(job.job_id, 0),
    )


def _nodes(state: State, curves: Mapping[JobId, JobCurves | None]) -> list[LiveNodeView]:
    found = []
    held: dict[str, set[int]] = {}
    for attempt in state.attempts.values():
        for lease in attempt.held:
            held.setdefault(lease.node, set()).update(lease.gpus)
    sampled: dict[str, list[GpusSampled]] = {}
    for job_curves in curves.values():
        for name, sample in ({} if job_curves is None else job_curves.nodes).items():
            sampled.setdefault(name, []).append(sample)
    for name, record in sorted(state.nodes.records.items()):
        samples = sampled.get(name, [])
        gpus = sum(each.gpus for each in samples)
        found.append(
            LiveNodeView(
                name=name,
                up=record.up,
                gpu_name=record.node.gpu_name,
                gpus=record.node.gpus,
                held=len(held.get(name, ())),
                unavailable=len(record.node.unavailable),
                busy=sum(each.busy * each.gpus for each in samples) / gpus if gpus else None,
                memory_bytes=max((each.memory_bytes for each in samples), default=None),
                power_w=sum(each.power_mw for each in samples) / 1000 if samples else None,
            )
        )
    return found
