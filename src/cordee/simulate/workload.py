"""Turn the jobs of a trace into submissions, with stated assumptions for what a trace does not hold.

A checkpoint every 30 minutes does not stop training; a restart takes 60 s; the grace period is 30 s, and so is the save
on notice. A trace's run time includes the first start and the last save. The ledger counts the save on notice as
`checkpoint`, repeated work as `lost`, and the restart as `restart`. A trace's time limit was for another cluster: it
ends no job here, and is the owner's estimate of the run time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from cordee.events import Capacity, Job, Node, Tier
from cordee.ids import JobId
from cordee.schedule.gang import Work
from cordee.schedule.placement.place import most_gpus
from cordee.simulate.run import Submission
from cordee.simulate.traces.job import Tally, TraceJob
from cordee.units import US_PER_S

_STEP_US = 1_000
"""A trace does not have the length of steps. They are short; the one in progress at a notice is part of its save."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The costs of a preemption."""

    every_us: int = 1_800 * US_PER_S
    save_us: int = 30 * US_PER_S
    restart_us: int = 60 * US_PER_S
    grace_us: int = 30 * US_PER_S


def submissions(
    jobs: Iterable[TraceJob],
    nodes: Iterable[Node],
    tally: Tally,
    *,
    costs: Costs,
    estimates: bool = False,
    limit: int | None = None,
    window_us: tuple[int, int | None] = (0, None),
) -> Iterator[Submission]:
    """Yield the trace's jobs as they arrive at this cluster; count those that are too large for it.

    Args:
        jobs: in order.
        nodes: of the cluster.
        tally: counts those left out.
        costs: of a preemption.
        estimates: every job declares its true run time, for policies that rest on it.
        limit: the most jobs.
        window_us: begin and end of the submissions to take, in the trace's time.
    """
    found = fitting(jobs, nodes, tally, limit=limit, window_us=window_us)
    for number, (each, name) in enumerate(found, start=1):
        yield submission(each, name, costs, number, estimates=estimates)


def fitting(
    jobs: Iterable[TraceJob],
    nodes: Iterable[Node],
    tally: Tally,
    *,
    limit: int | None,
    window_us: tuple[int, int | None],
) -> Iterator[tuple[TraceJob, str | None]]:
    """Yield the jobs that the cluster can hold, each with the name of its GPU if the cluster has it."""
    nodes = list(nodes)
    names = (*{node.gpu_name: None for node in nodes}, None)
    most = {name: most_gpus(nodes, name, Capacity.ANY) for name in names}
    parts = _parts(nodes)
    of = "" if len(names) == 2 else " of one kind"
    from_us, to_us = window_us
    taken = 0
    for each in jobs:
        if each.submit_us < from_us:
            continue
        if (to_us is not None and each.submit_us >= to_us) or (limit is not None and taken >= limit):
            return
        name = each.gpu_name if each.gpu_name in most else None
        if each.mig and (name, each.mig) not in parts:
            tally.bad(f"asks for a MIG instance {each.mig}, which no GPU of the cluster can be cut into", each.line)
            continue
        if each.gpus > most[name]:
            tally.bad(f"larger than the cluster's {most[name]} GPUs{of}", each.line)
            continue
        if each.gpu_name is not None and name is None and of:
            tally.changed("asks for a GPU that the cluster does not have: runs on any", each.line)
        taken += 1
        yield replace(each, gpu_milli=parts[name, each.mig]) if each.mig else each, name


def _parts(nodes: Iterable[Node]) -> dict[tuple[str | None, str], int]:
    """Return the thousandths of a GPU that a MIG profile takes, by the kind of GPU; None: of the first that has it."""
    found: dict[tuple[str | None, str], int] = {}
    for node in nodes:
        cuts = node.mig
        if cuts is not None:
            for profile in cuts.profiles:
                found[node.gpu_name, profile.name] = cuts.milli(profile.size)
                found.setdefault((None, profile.name), cuts.milli(profile.size))
    return found


def submission(each: TraceJob, gpu_name: str | None, costs: Costs, number: int, *, estimates: bool) -> Submission:
    """Return one job's submission. Its number makes its id unique: some traces repeat theirs."""
    steps = max(1, each.duration_us // _STEP_US)
    step_us = each.duration_us // steps
    job = Job(
        job_id=JobId(f"{each.job_id}-{number}"),
        name=each.job_id,
        owner=each.user or each.vc or "somebody",
        gpus=each.gpus,
        queue=each.vc or "default",
        tier=Tier(each.tier) if each.tier in _TIERS else Tier.STANDARD,
        gpu_name=gpu_name,
        grace_us=costs.grace_us,
        protected=True,
        checkpoint_every_us=costs.every_us,
        save_us=costs.save_us,
        restart_us=costs.restart_us,
        min_run_us=costs.restart_us,
        gpu_milli=each.gpu_milli,
        cpu_milli=each.cpu_milli,
        memory_bytes=each.memory_bytes,
        estimate_us=each.duration_us if estimates else each.time_limit_us,
        mig=each.mig or None,
    )
    work = Work(
        steps=steps,
        step_us=step_us,
        start_us=costs.restart_us,
        first_start_us=0,
        every_us=costs.every_us,
        stall_us=0,
        upload_us=max(0, costs.save_us - step_us),
        saves_at_end=False,
        gpus=each.gpus,
    )
    return Submission(at_us=each.submit_us, job=job, work=work)


_TIERS = frozenset(tier.value for tier in Tier)
