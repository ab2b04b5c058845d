"""The page *now*: who holds which GPU, who waits and why, and the dollars an hour that nobody uses."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from cordee.answers.metrics import LiveJobView
from cordee.control.access import Access
from cordee.control.forecast import Forecast
from cordee.control.job_metrics import live
from cordee.control.operations import Operations
from cordee.control.web.ahead import Forecasts
from cordee.control.web.parts import Parts
from cordee.errors import CordeeError
from cordee.events import Job, Node
from cordee.ids import JobId
from cordee.schedule.explain import explain
from cordee.schedule.state.records import Attempt, NodeRecord
from cordee.view.page import part

NODES_MAX = 160
"""Nodes of which each GPU is drawn; of a larger cluster each domain is one bar."""

DOMAINS_MAX = 400
ROWS_MAX = 100
"""Jobs of a table; the others are counted."""

EXPLAINED_MAX = 25
_HUES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as a cell: `state` is held, free, down, away (it cannot be leased) or cordoned."""

    state: str
    about: str
    job_id: str = ""
    hue: int = 0
    busy: float | None = None
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """A node and its GPUs."""

    name: str
    gpu_name: str
    gpus: list[Gpu]
    note: str
    island_gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Nodes of one domain: all of them if they are drawn, else their number and sums."""

    path: tuple[str, ...]
    nodes: list[NodeRow]
    count: int
    gpus: int
    held: int
    down: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A job that waits for GPUs."""

    place: int
    job: LiveJobView | None
    gpus: int
    queue: str
    tier: str
    since_us: int
    reason: str
    ahead: Forecast | None


@dataclass(frozen=True, slots=True)
class _Held:
    """Which attempts hold which GPUs."""

    jobs: Mapping[JobId, Job]
    on: Mapping[str, Mapping[int, tuple[JobId, ...]]]
    hues: Mapping[JobId, int]


def now_parts(operations: Operations, forecasts: Forecasts, viewer: Access) -> Parts:
    """Return the parts of the page."""
    control = operations.control
    found = live(operations, viewer)
    with control.changed:
        records = [control.state.nodes.records[name] for name in sorted(control.state.nodes.records)]
        attempts = list(control.state.attempts.values())
        totals = control.ledger.totals(found.at_us)
        queued = in_line(operations)
        jobs = {job_id: record.job for job_id, record in control.state.jobs.items() if not record.phase.ended}
        since = {job_id: control.state.jobs[job_id].submitted_us for job_id in queued}
    gone = operations.members.gone()
    records = [record for record in records if record.up or record.node.name not in gone]
    held = _held(attempts)
    seen = {job.job_id: job for job in found.jobs}
    domains = _domains(records, held, seen, found.jobs)
    idle_per_hour = _idle_per_hour(records, held)
    waiting = _waiting(operations, forecasts, queued, jobs, seen, since)
    running = [job for job in found.jobs if JobId(job.job_id) in held.jobs]
    up = sum(record.node.gpus - len(record.node.unavailable) for record in records if record.up)
    facts = {
        "gpus": up,
        "held": sum(len(gpus) for gpus in held.on.values()),
        "running": len(running),
        "waiting": len(queued),
        "waiting_gpus": sum(jobs[each].gpus for each in queued),
        "rate": found.micro_usd_per_hour,
        "idle_rate": idle_per_hour,
        "idle": totals.idle_micro_usd,
        "idle_gpu_us": totals.idle_gpu_us,
        "paid": totals.micro_usd.held,
        "useful": totals.micro_usd.useful + totals.micro_usd.serving,
        "at_us": found.at_us,
        "problem": operations.turns.problem or "",
    }
    shown = [job for job in running if job.job_id in seen]
    return {
        "facts": _part("facts", facts),
        "cluster": _part("cluster", domains, _holders(shown, held), len(running) - len(shown), facts),
        "queue": _part("queue", waiting, len(queued) - len(waiting), found.at_us),
        "running": _part("running", shown[:ROWS_MAX], len(shown) - ROWS_MAX, len(running) - len(shown)),
    }


def _part(macro: str, *values: object) -> str:
    return part(macro, *values, template="web/now.html.j2")


def in_line(operations: Operations) -> list[JobId]:
    """Return the waiting jobs in the order of their lines, the highest tier first."""
    with operations.control.changed:
        state = operations.control.state
        found = [(-state.jobs[each].priority, state.waiting.place(each), each) for each in state.waiting.job_ids()]
    return [job_id for *_, job_id in sorted(found)]


def _held(attempts: Iterable[Attempt]) -> _Held:
    jobs: dict[JobId, Job] = {}
    on: dict[str, dict[int, tuple[JobId, ...]]] = {}
    for attempt in attempts:
        job_id = attempt.job.job_id
        jobs[job_id] = attempt.job
        for lease in attempt.held:
            gpus = on.setdefault(lease.node, {})
            for gpu in lease.gpus:
                gpus[gpu] = (*gpus.get(gpu, ()), job_id)
    return _Held(jobs, on, _hues(sorted(jobs)))


def _hues(job_ids: Sequence[JobId]) -> dict[JobId, int]:
    """Return a hue for each job: always the same one, unless a job that comes first has it and others are free."""
    taken: dict[int, int] = dict.fromkeys(range(_HUES), 0)
    hues: dict[JobId, int] = {}
    for job_id in job_ids:
        first = zlib.crc32(job_id.encode()) % _HUES
        least = min(taken.values())
        hue = next(each % _HUES for each in range(first, first + _HUES) if taken[each % _HUES] == least)
        taken[hue] += 1
        hues[job_id] = hue
    return hues


def _domains(
    records: Sequence[NodeRecord], held: _Held, seen: Mapping[str, LiveJobView], jobs: Iterable[LiveJobView]
) -> list[Domain]:
    groups: dict[tuple[str, ...], list[NodeRecord]] = {}
    is_drawn = len(records) <= NODES_MAX
    for record in records:
        groups.setdefault(record.node.domain, []).append(record)
    for depth in (2, 1, 0):
        if len(groups) <= DOMAINS_MAX:
            break
        merged: dict[tuple[str, ...], list[NodeRecord]] = {}
        for path, each in groups.items():
            merged.setdefault(path[:depth], []).extend(each)
        groups = merged
    busy = {job.job_id: job.busy for job in jobs}
    return [
        Domain(
            path=path,
            nodes=[_node(record, held, seen, busy) for record in group] if is_drawn else [],
            count=len(group),
            gpus=sum(record.node.gpus for record in group if record.up),
            held=sum(len(held.on.get(record.node.name, ())) for record in group),
            down=sum(not record.up for record in group),
        )
        for path, group in sorted(groups.items())
    ]


def _node(
    record: NodeRecord, held: _Held, seen: Mapping[str, LiveJobView], busy: Mapping[str, float | None]
) -> NodeRow:
    node = record.node
    on = held.on.get(node.name, {})
    gpus = [_gpu(record, gpu, on.get(gpu, ()), held, seen, busy) for gpu in range(node.gpus)]
    if not record.up:
        note = f"down: {record.why}" if record.why else "down"
    elif record.unreachable:
        note = "its agent is silent"
    elif record.cordoned_by is not None:
        note = f"{'drains' if record.drains else 'cordoned'} by {record.cordoned_by}"
        note += f": {record.cordon_why}" if record.cordon_why else ""
    else:
        note = ""
    return NodeRow(name=node.name, gpu_name=node.gpu_name, gpus=gpus, note=note, island_gpus=node.island_gpus)


def _gpu(
    record: NodeRecord,
    gpu: int,
    holders: tuple[JobId, ...],
    held: _Held,
    seen: Mapping[str, LiveJobView],
    busy: Mapping[str, float | None],
) -> Gpu:
    if not holders:
        state, about = "free", "free"
        if not record.up:
            state = about = "down"
        elif gpu in record.node.unavailable:
            state, about = "away", _away(record.node, gpu)
        elif record.cordoned_by is not None:
            state, about = "cordoned", "free, and nothing new starts here"
        return Gpu(state=state, about=f"GPU {gpu}: {about}")
    first = holders[0]
    if first not in seen:
        return Gpu(state="held", about=f"GPU {gpu}: held by another job", hue=-1, parts=len(holders))
    job = seen[first]
    fraction = busy.get(first)
    used = "" if fraction is None else f", {100 * fraction:.0f} % busy"
    more = f" and {len(holders) - 1} more" if len(holders) > 1 else ""
    return Gpu(
        state="held",
        about=f"GPU {gpu}: {job.name}{more} of {job.owner}{used}",
        job_id=first,
        hue=held.hues[first],
        busy=fraction,
        parts=len(holders),
    )


def _away(node: Node, gpu: int) -> str:
    at = node.unavailable.index(gpu)
    return node.unavailable_why[at] if at < len(node.unavailable_why) else "it cannot be leased"


def _holders(shown: Sequence[LiveJobView], held: _Held) -> list[tuple[int, LiveJobView]]:
    return [(held.hues[JobId(job.job_id)], job) for job in shown[:24]]


def _idle_per_hour(records: Iterable[NodeRecord], held: _Held) -> int:
    """Return micro-dollars an hour of GPUs that are up, may be leased, and are held by nobody."""
    return sum(
        record.node.micro_usd_per_gpu_hour
        * max(0, record.node.gpus - len(set(record.node.unavailable) | set(held.on.get(record.node.name, ()))))
        for record in records
        if record.up
    )


def _waiting(
    operations: Operations,
    forecasts: Forecasts,
    queued: Sequence[JobId],
    jobs: Mapping[JobId, Job],
    seen: Mapping[str, LiveJobView],
    since: Mapping[JobId, int],
) -> list[Waiting]:
    ahead = forecasts.of(queued)
    rows = []
    for place, job_id in enumerate(queued[:ROWS_MAX], start=1):
        job, view = jobs[job_id], seen.get(job_id)
        reason = ""
        if view is not None and place <= EXPLAINED_MAX:
            reason = _reason(operations, job_id)
        rows.append(
            Waiting(
                place=place,
                job=view,
                gpus=job.gpus,
                queue=job.queue,
                tier=job.tier.value,
                since_us=since[job_id],
                reason=reason or ("" if view is None else view.why),
                ahead=ahead.get(job_id) if view is not None else None,
            )
        )
    return rows


def _reason(operations: Operations, job_id: JobId) -> str:
    """Return why a job waits; the lock is held for one job at a time, so that decisions come in between."""
    control = operations.control
    try:
        with control.changed:
            if job_id not in control.state.jobs:
                return ""
            return explain(control.state, job_id, operations.clock.now_us()).text
    except CordeeError as error:
        return str(error)
