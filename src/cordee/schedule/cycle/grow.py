"""Growth of elastic jobs: one that runs on fewer GPUs than it asked for starts again on more, when that pays."""

from cordee.events import Lease, NoticeReason
from cordee.ids import JobId
from cordee.schedule.cycle.claims import assume
from cordee.schedule.cycle.draft import Draft, emit, guarded
from cordee.schedule.placement.place import place, pools
from cordee.schedule.policy import Policy
from cordee.schedule.preemption.notice import notice
from cordee.schedule.state.records import Attempt, JobRecord
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import apply

PAYS = 4
"""The least ratio of the time that growing saves to the time that the save and the restart take."""


def grow(state: State, draft: Draft) -> None:
    """Let elastic jobs grow into GPUs for which no job waits."""
    if state.agenda.shrunk and state.policy.resize and not state.waiting.count:
        for job_id in sorted(state.agenda.shrunk):
            guarded(state, draft, job_id, _grow_one)


def _grow_one(state: State, draft: Draft, job_id: JobId) -> bool:
    attempt = state.attempts[job_id]
    if attempt.leaving or attempt.ended:
        return True
    from_us = grows_from_us(attempt, state.jobs[job_id], state.policy)
    if draft.now_us < from_us:
        draft.wake_by(from_us)
        return True
    leases = _larger_place(state, draft, attempt)
    if leases is not None:
        gpus = sum(len(lease.gpus) for lease in leases)
        emit(state, draft, notice(attempt, NoticeReason.RESIZE, draft.now_us, gpus=gpus))
        assume(state, draft, attempt.job, leases)
    return True


def grows_from_us(attempt: Attempt, record: JobRecord, policy: Policy) -> int:
    """Return the time from which the job may grow: after the time that it names, else when growing to full size pays.

    The job is expected to run for as long again as it has run: without an estimate nothing better is known, because run
    times spread so widely. On all its GPUs that takes held/asked of the time, and growing saves the rest.
    """
    job, gpus = attempt.job, attempt.gpus
    started_us = attempt.placed_us if attempt.started_us is None else attempt.started_us
    if job.grow_after_us is not None:
        return started_us + job.grow_after_us
    costs_us = PAYS * (job.save_us + job.restart_us)
    ran_us = costs_us * job.gpus // (job.gpus - gpus)
    return max(started_us + ran_us - record.used_us, attempt.placed_us + policy.time_slice_us)


def _larger_place(state: State, draft: Draft, attempt: Attempt) -> tuple[Lease, ...] | None:
    """Return a place for an attempt on more GPUs, once it has left its present ones; None if there is none."""
    job, candidates = attempt.job, pools(attempt.job, draft.kinds)
    mark = state.journal.mark()
    apply(state, notice(attempt, NoticeReason.RESIZE, draft.now_us))
    leases = None
    for size in (job.gpus, *job.sizes):
        if size <= attempt.gpus:
            break
        if state.quotas.refuses and state.quotas.admits(job, draft.now_us, size - attempt.gpus) is not None:
            continue
        leases = place(state.nodes.soon, job, candidates, gpus=size, packing=state.policy.packing)
        if leases is not None:
            break
    state.journal.take_back(mark)
    return leases
