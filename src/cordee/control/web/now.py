"""The page *now*: who holds which GPU, who waits and why, and the dollars an hour that nobody uses."""

import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

from cordee.answers.metrics import LiveJobView
from cordee.control.access import Access
from cordee.control.forecast import Forecast
from cordee.control.job_metrics import live
from cordee.control.months import Books
from cordee.control.operations import Operations
from cordee.control.web.ahead import Forecasts
from cordee.control.web.parts import Parts
from cordee.errors import CatalogueError, CordeeError
from cordee.events import GpusSampled, Job, Node
from cordee.ids import JobId
from cordee.schedule.explain import explain
from cordee.schedule.state.records import Attempt, NodeRecord
from cordee.units import format_bytes
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
    memory: float | None = None  # fraction of its memory that is in use
    parts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRow:
    """A node and its GPUs."""

    name: str
    gpu_name: str
    gpus: list[Gpu]
    note: str
    island_gpus: int
    use: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Nodes of one domain: all of them if they are drawn, else their number and sums."""

    path: tuple[str, ...]
    nodes: list[NodeRow]
    count: int
    gpus: int
    held: int
    down: int

    @property
    def block(self) -> str:
        """Return the outermost domain; "" if this one is not within another."""
        return self.path[0] if len(self.path) > 1 else ""

    @property
    def within(self) -> tuple[str, ...]:
        """Return the path within the block."""
        return self.path[1:] if self.block else self.path


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


class _Use(NamedTuple):
    """A GPU as the driver saw it last."""

    busy: float | None
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class _Held:
    """Which attempts hold which GPUs, and what these do."""

    jobs: Mapping[JobId, Job]
    on: Mapping[str, Mapping[int, tuple[JobId, ...]]]
    hues: Mapping[JobId, int]
    uses: Mapping[tuple[str, int], _Use]
    memory_bytes: Mapping[str, int]  # of one GPU, by its name


def now_parts(operations: Operations, books: Books, forecasts: Forecasts, viewer: Access) -> Parts:
    """Return the parts of the page."""
    control = operations.control
    found = live(operations, viewer)
    with control.changed:
        records = [control.state.nodes.records[name] for name in sorted(control.state.nodes.records)]
        attempts = list(control.state.attempts.values())
        accounts = control.ledger.at(found.at_us)
        queued = in_line(operations)
        jobs = {job_id: record.job for job_id, record in control.state.jobs.items() if not record.phase.ended}
        since = {job_id: control.state.jobs[job_id].submitted_us for job_id in queued}
        samples = [
            sample
            for attempt in attempts
            if (curves := control.fold.curves.of(attempt.job.job_id)) is not None
            for sample in curves.nodes.values()
            if sample.epoch == attempt.epoch
        ]
    totals, gone = accounts.totals(), operations.members.gone()
    records = [record for record in records if record.up or record.node.name not in gone]
    held = _held(operations, attempts, samples)
    seen = {job.job_id: job for job in found.jobs}
    domains = _domains(records, held, seen)
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
        "since_us": books.first_us(found.at_us),
        "idle_gpu_us": totals.idle_gpu_us,
        "paid": totals.micro_usd.held,
        "useful": totals.micro_usd.useful + totals.micro_usd.serving,
        "at_us": found.at_us,
        "problem": operations.ticks.problem or "",
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


def _held(operations: Operations, attempts: Iterable[Attempt], samples: Iterable[GpusSampled]) -> _Held:
    jobs: dict[JobId, Job] = {}
    on: dict[str, dict[int, tuple[JobId, ...]]] = {}
    sampled = {(each.job_id, each.node): each for each in samples}
    uses: dict[tuple[str, int], _Use] = {}
    for attempt in attempts:
        job_id = attempt.job.job_id
        jobs[job_id] = attempt.job
        for lease in attempt.held:
            gpus = on.setdefault(lease.node, {})
            for gpu in lease.gpus:
                gpus[gpu] = (*gpus.get(gpu, ()), job_id)
            if (sample := sampled.get((job_id, lease.node))) is not None:
                uses |= {(lease.node, gpu): use for gpu, use in zip(lease.gpus, _uses(sample), strict=False)}
    return _Held(jobs, on, _hues(sorted(jobs)), uses, _memory_bytes(operations))


def _uses(sample: GpusSampled) -> Iterable[_Use]:
    """Return the use of each GPU of a lease; of an agent that reports their mean only, each has that."""
    if sample.busy_each:
        return map(_Use, sample.busy_each, sample.memory_bytes_each)
    return repeat(_Use(sample.busy, sample.memory_bytes))


def _memory_bytes(operations: Operations) -> dict[str, int]:
    with operations.control.changed:
        names = {record.node.gpu_name for record in operations.control.state.nodes.records.values()}
    found = {}
    for name in names:
        with suppress(CatalogueError):
            found[name] = operations.catalogue.find_gpu(name).visible_bytes
    return found


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


def _domains(records: Sequence[NodeRecord], held: _Held, seen: Mapping[str, LiveJobView]) -> list[Domain]:
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
    return [
        Domain(
            path=path,
            nodes=[_node(record, held, seen) for record in group] if is_drawn else [],
            count=len(group),
            gpus=sum(record.node.gpus for record in group if record.up),
            held=sum(len(held.on.get(record.node.name, ())) for record in group),
            down=sum(not record.up for record in group),
        )
        for path, group in sorted(groups.items())
    ]


def _node(record: NodeRecord, held: _Held, seen: Mapping[str, LiveJobView]) -> NodeRow:
    node = record.node
    on = held.on.get(node.name, {})
    gpus = [_gpu(record, gpu, on.get(gpu, ()), held, seen) for gpu in range(node.gpus)]
    if not record.up:
        note = f"down: {record.why}" if record.why else "down"
    elif record.unreachable:
        note = "its agent is silent"
    elif record.cordoned_by is not None:
        note = f"{'drains' if record.drains else 'cordoned'} by {record.cordoned_by}"
        note += f": {record.cordon_why}" if record.cordon_why else ""
    else:
        note = ""
    return NodeRow(
        name=node.name,
        gpu_name=node.gpu_name,
        gpus=gpus,
        note=note,
        island_gpus=node.island_gpus,
        use=_node_use(node, held),
    )


def _node_use(node: Node, held: _Held) -> str:
    """Return how busy the GPUs of a node are that are held and sampled, and the memory of the fullest."""
    uses = [held.uses[node.name, gpu] for gpu in held.on.get(node.name, ()) if (node.name, gpu) in held.uses]
    busy = [use.busy for use in uses if use.busy is not None]
    memory = max((use.memory_bytes for use in uses if use.memory_bytes is not None), default=None)
    parts = [f"{sum(busy) / len(busy):.0%} busy"] if busy else []
    return ", ".join(parts + ([] if memory is None else [_memory_text(memory, held.memory_bytes.get(node.gpu_name))]))


def _memory_text(used: int, whole: int | None) -> str:
    return format_bytes(used) + ("" if whole is None else f" of {format_bytes(whole)}")


def _gpu(
    record: NodeRecord,
    gpu: int,
    holders: tuple[JobId, ...],
    held: _Held,
    seen: Mapping[str, LiveJobView],
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
    use = held.uses.get((record.node.name, gpu), _Use(None, None))
    whole = held.memory_bytes.get(record.node.gpu_name)
    used = "" if use.busy is None else f", {use.busy:.0%} busy"
    used += "" if use.memory_bytes is None else f", {_memory_text(use.memory_bytes, whole)}"
    memory = None if use.memory_bytes is None or whole is None else min(1.0, use.memory_bytes / whole)
    first = holders[0]
    job = seen.get(first)
    more = f" and {len(holders) - 1} more" if len(holders) > 1 else ""
    about = "held by another job" if job is None else f"{job.name}{more} of {job.owner}"
    return Gpu(
        state="held",
        about=f"GPU {gpu}: {about}{used}",
        job_id="" if job is None else first,
        hue=-1 if job is None else held.hues[first],
        busy=use.busy,
        memory=memory,
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
