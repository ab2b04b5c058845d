"""The ways in which a nominated job gets GPUs: it starts, is assumed, preempts, starts smaller, or restarts.

*Start* places a job on free GPUs now. *Restart* does so for a job that left for no other job's turn: it was resized or
moved, or lost its node. While it still leaves, its next place is assumed.
"""

from typing import NamedTuple

from cordee.events import AttemptPlaced, Job
from cordee.ids import JobId
from cordee.schedule.cycle.claims import Leases, assume, find_place, holdings_changed, lift_earmarks, vacated_place
from cordee.schedule.cycle.draft import Draft, emit
from cordee.schedule.cycle.heads import shrinks_for
from cordee.schedule.placement.place import pools
from cordee.schedule.placement.view import Pool
from cordee.schedule.quota.bounds import Refusal
from cordee.schedule.state.records import JobRecord
from cordee.schedule.state.state import State
from cordee.schedule.state.waiting import LineKey


class Nominee(NamedTuple):
    """A waiting job whose turn it is."""

    record: JobRecord
    line: LineKey
    pools: tuple[Pool, ...]  # where it may start
    queued_recently: bool  # too recently to preempt jobs of its own tier, or to move any (`preempt_after_us`)


def passes_over(state: State, draft: Draft, job_id: JobId, line: LineKey) -> bool:
    """Return whether a cycle passes a job over: another job of its line, queued recently as well, found nothing."""
    if line not in draft.tried.lines or job_id in draft.earmarked or job_id in state.agenda.restarting:
        return False
    return _queued_recently(state, draft, state.jobs[job_id])


def _queued_recently(state: State, draft: Draft, record: JobRecord) -> bool:
    return draft.now_us < record.waits_since_us + state.policy.preempt_after_us


def nominate(state: State, draft: Draft, job_id: JobId) -> Nominee | None:
    """Return a waiting job with the pools open to it; None if it is passed over."""
    record, line = state.jobs[job_id], state.waiting.key(job_id)
    draft.turns.considered.add(job_id)
    recently = _queued_recently(state, draft, record)
    if recently and passes_over(state, draft, job_id, line):
        return None
    candidates = pools(record.job, draft.kinds)
    if draft.closed:  # No job passes the first one that waits, on any of the pools that are open to that one.
        candidates = tuple(pool for pool in candidates if draft.closed.isdisjoint(pool))
    return Nominee(record, line, candidates, recently)


def refusal_of(state: State, draft: Draft, record: JobRecord, gpus: int | None = None) -> Refusal | None:
    """Return the reason why a job's queue refuses it on `gpus` GPUs (None: all that it asks for), if it does."""
    if not state.quotas.refuses:
        return None
    refusal = state.quotas.admits(record.job, draft.now_us, gpus)
    if refusal is not None:
        draft.wake_by(refusal.until_us)
    return refusal


def start_or_assume(state: State, draft: Draft, nominee: Nominee, refusal: Refusal | None) -> bool:
    """Start a job on free GPUs, or assume it on a place that is being vacated; return whether one was found."""
    record, shape = nominee.record, nominee.line[-1]
    if refusal is None:
        if shape not in draft.tried.free:
            if _place(state, draft, record, nominee.pools, None):
                return True
            draft.tried.free.add(shape)
        if not state.nodes.vacating:
            return False
    elif refusal.short_milli is None or refusal.short_milli > 0:
        return False
    # The queue will admit the job once the attempts with notice have left; its place is kept until then.
    leases = vacated_place(state, draft, record, shape, nominee.pools)
    if leases is not None:
        assume(state, draft, record.job, leases)
    return leases is not None


def start(state: State, draft: Draft, record: JobRecord, candidates: tuple[Pool, ...], gpus: int | None = None) -> bool:
    """Start a job on free GPUs if its queue admits it; return whether it started."""
    return refusal_of(state, draft, record, gpus) is None and _place(state, draft, record, candidates, gpus)


def start_smaller(state: State, draft: Draft, nominee: Nominee) -> bool:
    """Start an elastic job on fewer GPUs than it asks for; it grows later. Return whether it started."""
    record = nominee.record
    if not record.job.sizes or not state.policy.resize:
        return False
    sizes = (size for size in record.job.sizes if size < record.job.gpus)
    return any(start(state, draft, record, nominee.pools, size) for size in sizes)


def make_room(state: State, draft: Draft, nominee: Nominee, refusal: Refusal | None) -> bool:
    """Preempt or move other jobs and assume the job on the room that they make; return whether they make any.

    A job that needs only a part of a GPU, or no GPU, waits for room: it preempts no job. For a MIG instance others may
    move.
    """
    job = nominee.record.job
    if state.policy.victims == "none" or (job.has_part and job.mig is None) or not job.gpus:
        return False
    scope = draft.preemption.scope(nominee.record)
    # The victims depend on the job's queue as well, and on its owner where the owner's limit refuses the job.
    of_queue = (job.queue, "" if refusal is None else job.owner) if state.quotas.refuses else ("", "")
    key = (nominee.line[-1], of_queue)
    searches = draft.failed_searches
    if searches.covers(key, scope):
        return False
    room, instance = None, job.mig is not None
    if not instance:
        room = draft.preemption.preempt(nominee.record, scope, nominee.pools, refusal)
    if room is None and refusal is None:
        move = draft.preemption.move_instances if instance else draft.preemption.move
        room = move(nominee.record, nominee.pools)
    if room is None:
        searches.add(key, scope)
        return False
    if room.given:
        draft.events += room.events
    else:
        for event in room.events:
            emit(state, draft, event)
    assume(state, draft, job, room.leases)
    for other, leases in room.others:
        assume(state, draft, other, leases)
    draft.tried.vacated.clear()
    draft.tried.lines.clear()
    return True


def restart(state: State, draft: Draft, job_id: JobId) -> bool:
    """Restart a job, or assume it on its next place; return whether it has one."""
    record, attempt = state.jobs[job_id], state.attempts.get(job_id)
    candidates = pools(record.job, draft.kinds)
    if job_id in draft.assumed or (attempt is not None and not attempt.leaving):
        return True  # It was considered already: after its preemptor, or to take back quota.
    if attempt is None:
        gpus = record.size
        if refusal_of(state, draft, record, gpus) is not None:
            return False
        if _place(state, draft, record, candidates, gpus):
            return True
    else:
        gpus = attempt.notice.gpus if attempt.notice is not None and attempt.notice.gpus else attempt.gpus
    leases = _beside_preemptor(state, draft, job_id, candidates, gpus)
    if leases is None:
        leases = find_place(state, state.nodes.soon, record.job, candidates, gpus)
    if leases is not None:
        draft.turns.considered.add(job_id)
        assume(state, draft, record.job, leases)
    return leases is not None


def _place(state: State, draft: Draft, record: JobRecord, candidates: tuple[Pool, ...], gpus: int | None) -> bool:
    leases = find_place(state, state.nodes.free, record.job, candidates, gpus)
    if leases is None:
        return False
    job_id, epoch = record.job.job_id, record.epoch + 1
    emit(state, draft, AttemptPlaced(at_us=draft.now_us, job_id=job_id, epoch=epoch, leases=leases))
    holdings_changed(state, draft)
    return True


def _beside_preemptor(
    state: State, draft: Draft, job_id: JobId, candidates: tuple[Pool, ...], gpus: int | None
) -> Leases | None:
    """Return a place for a shrunk job beside the preemptor's, as both were planned at the notice.

    It may continue on a part of the GPUs that it leaves. They are earmarked; without this, other jobs would get them.
    """
    preemptor = shrinks_for(state, job_id)
    if preemptor is None or preemptor not in draft.earmarked:
        return None
    mark = state.journal.mark()
    lift_earmarks(state, draft.earmarked[preemptor])
    other: Job = state.jobs[preemptor].job
    leases, theirs = None, find_place(state, state.nodes.soon, other, pools(other, draft.kinds))
    if theirs is not None:
        state.nodes.claim(theirs)
        leases = find_place(state, state.nodes.soon, state.jobs[job_id].job, candidates, gpus)
    state.journal.take_back(mark)
    return leases
