"""When an elastic job that runs on fewer GPUs than it asked for starts again on more."""

from cordee.events import Lease, NoticeReason
from cordee.schedule.lifecycle import notice
from cordee.schedule.placement.place import place
from cordee.schedule.placement.view import Pool
from cordee.schedule.policy import Policy
from cordee.schedule.records import Attempt, JobRecord
from cordee.schedule.state import State

PAYS = 4
"""The time that growing saves must be so many times what the save and the restart take."""


def worth_us(attempt: Attempt, record: JobRecord, policy: Policy) -> int:
    """From when on growing to full size pays.

    A job is taken to run on as long as it has run (without an estimate nothing better is known of run times whose
    spread is so wide): on all its GPUs that takes held/asked of the time, and the rest is saved.
    """
    job, gpus = attempt.job, attempt.gpus
    costs_us = PAYS * (job.save_us + job.restart_us)
    ran_us = costs_us * job.gpus // (job.gpus - gpus)
    started_us = attempt.placed_us if attempt.started_us is None else attempt.started_us
    return max(started_us + ran_us - record.used_us, attempt.placed_us + policy.time_slice_us)


def grown(state: State, attempt: Attempt, candidates: tuple[Pool, ...], now_us: int) -> tuple[Lease, ...] | None:
    """Where it lies when it has left and starts again, on as many GPUs as there are for it then."""
    job = attempt.job
    mark = state.mark()
    state.apply(notice(attempt, NoticeReason.RESIZE, now_us))
    leases = None
    for size in (job.gpus, *job.sizes):
        if size <= attempt.gpus:
            break
        if state.quotas.queues and state.quotas.admits(job, now_us, size - attempt.gpus) is not None:
            continue
        leases = place(state.soon, job, candidates, gpus=size, packing=state.policy.packing)
        if leases is not None:
            break
    state.take_back(mark)
    return leases
