"""Claims: GPUs that a cycle keeps from other jobs, earmarked for a job or assumed as its place (see `draft.py`).

Without earmarks a job could take the GPUs that are vacated for another one, which would have to preempt again.
"""

from collections.abc import Iterator

from cordee.events import Job, Lease
from cordee.schedule.cycle.draft import AssumedQuota, Draft
from cordee.schedule.cycle.heads import leaves_for
from cordee.schedule.placement.data import load_seconds, shorter_loads
from cordee.schedule.placement.entry import mask_of
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.place import need_of, place
from cordee.schedule.placement.view import Pool
from cordee.schedule.quota.held import held_by
from cordee.schedule.state.records import JobRecord
from cordee.schedule.state.state import State
from cordee.schedule.state.waiting import Shape

Leases = tuple[Lease, ...]


def find_place(
    state: State, index: FreeIndex, job: Job, candidates: tuple[Pool, ...], gpus: int | None = None
) -> Leases | None:
    """Return a place for a gang in one of the indexes of the state, by the rules of the policy.

    Of two places that are equally compact, it is the one where less of the gang's data has to be loaded.
    """
    policy = state.policy
    spares = 0 if job.job_id in state.agenda.restarting else policy.spares
    avoid, packing = state.nodes.went_down, policy.packing
    found = place(index, job, candidates, gpus=gpus, avoid=avoid, spares=spares, packing=packing)
    if found is None or not job.data:
        return found
    load_s = load_seconds(job, [record.node for record in state.nodes.records.values()])
    whole = not any(lease.has_part or not lease.gpus for lease in found)  # such a gang needs free GPUs, and as many
    free = {name: each.free.bit_count() for name, each in index.entries.items() if each.free or not whole}
    wanted = sum(len(lease.gpus) for lease in found) if whole else 0
    for most_s in shorter_loads(load_s, [lease.node for lease in found]):
        if sum(count for name, count in free.items() if load_s[name] <= most_s) < wanted:
            continue
        with index.as_if({name: None for name in free if load_s[name] > most_s}):
            near = place(index, job, candidates, gpus=gpus, avoid=avoid, spares=spares, packing=packing)
        if near is not None and _spread(state, near) <= _spread(state, found):
            return near
    return found


def _spread(state: State, leases: Leases) -> tuple[int, int, int]:
    """Return what loading data is not weighed against: unsound nodes, nodes, and domains of a gang."""
    nodes = {lease.node for lease in leases}
    domains = {state.nodes.records[name].node.domain for name in nodes}
    return len(nodes & state.nodes.went_down.keys()), len(nodes), len(domains)


def earmark(state: State, draft: Draft) -> None:
    """Earmark GPUs that are being vacated for the waiting jobs for which they are vacated."""
    for name, leaving in state.nodes.vacating.items():
        mask = 0
        for lease, job in leaving:
            preemptor = leaves_for(state, job.job_id)
            if preemptor is not None and state.nodes.records[name].stays:
                mask |= mask_of(lease.gpus)
                draft.earmarked.setdefault(preemptor, []).append(lease)
        if mask:
            state.nodes.earmark(name, mask)


def vacated_place(
    state: State, draft: Draft, record: JobRecord, shape: Shape, candidates: tuple[Pool, ...]
) -> Leases | None:
    """Return a place where GPUs are being vacated: for this job, for no job, or else for the jobs behind it."""
    own = draft.earmarked.pop(record.job.job_id, [])
    lift_earmarks(state, own)
    if shape in draft.tried.vacated and not own:
        return None
    leases = find_place(state, state.nodes.soon, record.job, candidates)
    if leases is None and draft.earmarked and _could_hold(state, record.job, candidates):
        leases = find_place(state, state.nodes.vacated, record.job, candidates)
    if leases is None:
        draft.tried.vacated.add(shape)
    return leases


def lift_earmarks(state: State, leases: list[Lease]) -> None:
    """Lift the earmarks of leases, so that all jobs may get their GPUs."""
    for lease in leases:
        state.nodes.earmark(lease.node, state.nodes.earmarked[lease.node] & ~mask_of(lease.gpus))


def assume(state: State, draft: Draft, job: Job, leases: Leases) -> None:
    """Assume a job on GPUs that victims still hold in part: no other job gets them, and its queue counts them."""
    state.nodes.claim(leases)
    draft.assumed[job.job_id] = leases
    if state.quotas.refuses:
        prices = [state.nodes.records[lease.node].node.micro_usd_per_gpu_hour for lease in leases]
        assumed = (job, held_by(job, leases, prices), tuple(_still_held(state, leases)))
        _count(state, draft, assumed, +1)
        draft.assumed_quota.append(assumed)
        holdings_changed(state, draft)


def release_claims(state: State, draft: Draft) -> None:
    """Release everything that a cycle claimed or earmarked; its decisions stay."""
    state.nodes.open_all()
    for assumed in draft.assumed_quota:
        _count(state, draft, assumed, -1)


def holdings_changed(state: State, draft: Draft) -> None:
    """Forget everything that depends on the holdings of queues: fair shares, refusals and possible victims."""
    draft.turns.fair_shares.clear()
    draft.turns.version += 1
    if state.quotas.rules:
        draft.tried.lines.clear()


def _count(state: State, draft: Draft, assumed: AssumedQuota, sign: int) -> None:
    (job, held, vacated), quotas = assumed, state.quotas
    change, undo = (quotas.assume, quotas.withdraw) if sign > 0 else (quotas.withdraw, quotas.assume)
    change(job, held, draft.now_us, vacated)
    state.journal.note(undo, job, held, draft.now_us, vacated)


def _still_held(state: State, leases: Leases) -> Iterator[tuple[str, int]]:
    """Yield the queues of leaving jobs that still hold a part of these leases, with the thousandths of GPUs held."""
    for lease in leases:
        for gpu in lease.gpus:
            left = lease.milli
            for leaving, job in state.nodes.vacating.get(lease.node, ()):
                held = min(left, leaving.milli) if gpu in leaving.gpus else 0
                if held:
                    yield job.queue, held
                    left -= held


def _could_hold(state: State, job: Job, candidates: tuple[Pool, ...]) -> bool:
    """Return whether the nodes would be enough with all GPUs that are being vacated; a cheap first test."""
    if not job.gpus or job.mig is not None:
        return True
    columns = state.nodes.columns
    for pool in candidates:
        need = need_of(state.nodes.free, job, pool)
        if need is not None:
            free = columns.free[columns.of_pool(pool)]
            if int((free[free >= need.unit] // need.unit).sum()) >= need.units:
                return True
    return False
