"""Reservations for the first gang that waits (by default: the first overdue one), and backfilling around them.

A job may start on reserved GPUs if they are free again in time: it can be preempted at once, or it has ended by then.
"""

from functools import partial

from cordee.events import Lease
from cordee.ids import JobId
from cordee.schedule.cycle.draft import Draft, guarded
from cordee.schedule.cycle.nominate import Nominee, refusal_of, start
from cordee.schedule.cycle.reservation import Reservation, soonest
from cordee.schedule.placement.place import lacks, need_of, pools
from cordee.schedule.state.order import level
from cordee.schedule.state.records import NEVER, JobRecord
from cordee.schedule.state.running import is_exempt, min_run_us
from cordee.schedule.state.state import State
from cordee.schedule.state.waiting import Line


def reserve(state: State, draft: Draft, nominee: Nominee) -> None:
    """Reserve the GPUs that a gang will get first, if it is the first one that waits for them and can ever fit.

    In the order `service`, the default, only an overdue gang reserves, so none without a patience. A job without GPUs
    or on a MIG instance reserves nothing: reservations are of whole GPUs.
    """
    policy, job = state.policy, nominee.record.job
    if not job.gpus:
        return
    if policy.backfill == "none":
        possible = (pool for pool in nominee.pools if lacks(state.nodes.free, job, pool) is not None)
        draft.closed.update(kind for pool in possible for kind in pool)
    waits_in_turn = policy.order == "service" and job.job_id not in draft.turns.overdue
    if job.mig is not None or policy.backfill != "easy" or waits_in_turn:
        return
    best: Reservation | None = None
    for pool in nominee.pools:
        if any(kind in draft.reservations for kind in pool):
            continue
        need = need_of(state.nodes.free, job, pool)
        found = None if need is None else soonest(state, job, pool, need, draft.now_us)
        if found is not None and (best is None or _starts_by_us(found) < _starts_by_us(best)):
            best = found
    if best is not None:
        state.nodes.claim(best.kept)
        for kind in best.pool:
            draft.reservations[kind] = best


def backfill(state: State, draft: Draft, line: Line) -> None:
    """Start jobs of a line on reserved GPUs if they leave them in time."""
    if not draft.reservations or state.policy.backfill != "easy":
        return
    for reservation in {id(each): each for each in draft.reservations.values()}.values():
        # All jobs of the line may have started around the previous reservation.
        if reservation.kept and line.places and _may_be_in_time(draft, reservation, line):
            _backfill_around(state, draft, reservation, line)


def _backfill_around(state: State, draft: Draft, reservation: Reservation, line: Line) -> None:
    step = partial(_start_on_reserved, reservation)
    place = line.places[0]
    while True:
        job_id, behind = place.job_id, line.behind(place)
        record = state.jobs[job_id]
        may_start = job_id not in draft.assumed and _is_in_time(state, draft, reservation, record)
        if may_start and not guarded(state, draft, job_id, step):
            return
        if behind is None:
            return
        place = behind


def _start_on_reserved(reservation: Reservation, state: State, draft: Draft, job_id: JobId) -> bool:
    """Start a job with the GPUs of a reservation opened to it; return whether the jobs behind it may still start."""
    record = state.jobs[job_id]
    candidates = tuple(pool for pool in pools(record.job, draft.kinds) if set(pool) <= set(reservation.pool))
    if refusal_of(state, draft, record) is not None:
        return False
    state.nodes.unclaim(reservation.kept)
    started = bool(candidates) and start(state, draft, record, candidates)
    kept = []
    for lease in reservation.kept:
        entry = state.nodes.free.entries.get(lease.node)
        free = tuple(gpu for gpu in lease.gpus if entry is not None and entry.free >> gpu & 1)
        kept.append(Lease(node=lease.node, gpus=free))
    state.nodes.claim(kept)
    return started


def _may_be_in_time(draft: Draft, reservation: Reservation, line: Line) -> bool:
    """Return whether any job of a line could leave in time; a cheap first test."""
    if line.tier > level(reservation.job.tier):
        return True
    return draft.now_us + line.lengths[0][0] <= _starts_by_us(reservation, unknown=-1)


def _is_in_time(state: State, draft: Draft, reservation: Reservation, record: JobRecord) -> bool:
    """Return whether a job leaves in time: it can be preempted at once, or it has ended by then."""
    job = record.job
    is_below = level(job.tier) > level(reservation.job.tier)
    if is_below and min_run_us(job, record.epoch + 1) == 0 and not is_exempt(record):
        return True
    return draft.now_us + state.waiting.length_us(job.job_id) <= _starts_by_us(reservation, unknown=-1)


def _starts_by_us(reservation: Reservation, unknown: int = NEVER) -> int:
    return unknown if reservation.starts_by_us is None else reservation.starts_by_us
