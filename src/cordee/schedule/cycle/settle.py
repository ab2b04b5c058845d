"""The life of jobs and attempts: the consequences of reports, drawn before anything is placed.

A job:

    JobSubmitted ─▶ queued ──AttemptPlaced──▶ running ──NoticeGiven, KillOrdered──▶ stopping
                     ▲  │                        │                                    │
                     │  │                        └─────────────┬──────────────────────┘
                     │  │                                every RanksEnded
                     │  │                                      ▼
                     ├──│───────────── again ◀───────── AttemptEnded ──JobEnded──▶ done | failed | stopped
                        ├──StopRequested, JobEnded──▶ stopped
                        ├──JobPaused──▶ paused ──JobResumed──▶ queued
                        └──JobDeferred──▶ paused | held | waiting ──JobReleased──▶ queued

An attempt ends with the worst outcome of its rank groups, when none of its leases is held any more:

    outcome        of the rank groups                                the job then
    lost           one was lost: node, agent, a rank killed outside  again; failed after 3 in a row without a commit
    failed         one failed by itself, before any notice           again; failed after 3 in a row without a commit
    killed         one was killed, or failed after a notice          again; counted as failed, if its queue's day ended
                                                                     it and it used most of that without a commit
    checkpointed   one left at the agreed step                       again; paused if it pauses and had no notice
    finished       all finished                                      done

A job may give numbers of its own for lost, failed and exit codes (`Job.retries`), which then count by themselves;
and "again" is stopped after a StopRequested, after a notice for the job's own limit, or after a preemption of a job
that asked not to be requeued. When a rank group ends badly the rest of the gang is killed (KillOrdered), and so it is
at the deadline of a notice. The leases of a node that is down stay held until its ranks are reported ended: the server
reports that when the lease of the node's agent has run out.
"""

from bisect import bisect_right
from dataclasses import replace
from operator import itemgetter

from cordee.events import (
    AttemptEnded,
    Job,
    JobEnded,
    JobPaused,
    JobReleased,
    KillOrdered,
    NoticeReason,
    Outcome,
    RanksEnded,
)
from cordee.ids import JobId, attempt_name
from cordee.schedule.cycle.draft import Draft, emit, guarded
from cordee.schedule.cycle.maintain import leave_us, maintain, notice_us, reserve_nodes
from cordee.schedule.preemption.notice import notice
from cordee.schedule.quota.limits import is_used_up
from cordee.schedule.state.chains import deferral, never
from cordee.schedule.state.records import Attempt, JobRecord, Phase
from cordee.schedule.state.retries import ANY, cause_of, counted_as, exceeded, own_fault
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import used_up_day
from cordee.schedule.state.windows import closes_us
from cordee.units import US_PER_HOUR, US_PER_S, format_duration, format_micro_usd

ATTEMPTS_WITHOUT_COMMIT = 3
"""The number of failed or lost attempts in a row without a committed checkpoint that ends a job."""

_WORST_FIRST = (Outcome.LOST, Outcome.FAILED, Outcome.KILLED, Outcome.CHECKPOINTED, Outcome.FINISHED)
_BAD = (Outcome.LOST, Outcome.FAILED, Outcome.KILLED)


def settle(state: State, draft: Draft) -> None:
    """Settle all jobs that need a decision: ranks ended, deadlines, limits, stops, the server's shutdown."""
    _keep_nodes(state, draft)
    for reached in state.quotas.budgets.due(draft.now_us):
        emit(state, draft, reached)
    for job_id in sorted(_due(state, draft.now_us)):
        guarded(state, draft, job_id, settle_job)
    # The end of a job is the start, or the end, of those that wait for it.
    decided = -1
    while decided < len(draft.events) and state.agenda.unsettled:
        decided = len(draft.events)
        for job_id in sorted(each for each in state.agenda.unsettled if each not in state.attempts):
            guarded(state, draft, job_id, settle_job)


def wake(state: State, draft: Draft) -> None:
    """Set the time at which the decision changes without an event."""
    _keep_nodes(state, draft)  # Again: an attempt that was placed in this cycle may have a longer grace period.
    failed = {job_id for job_id, _ in draft.errors}  # A step that failed would fail again, so it waits for a change.
    for job_id in state.agenda.unsettled:
        if job_id in state.attempts and job_id not in failed:
            draft.wake_by(_wake_us(state, state.attempts[job_id]))
    if state.agenda.limits:
        seen = state.agenda.unsettled.keys() | failed
        draft.wake_by(next((at_us for at_us, job_id in state.agenda.limits if job_id not in seen), None))
    if state.agenda.times:
        draft.wake_by(next((at_us for at_us, job_id in state.agenda.times if job_id not in failed), None))
    if state.nodes.quarantines:
        draft.wake_by(state.nodes.quarantines[0][0])
    if state.quotas.counts_time:
        draft.wake_by(state.quotas.wake_us(draft.now_us))


def _keep_nodes(state: State, draft: Draft) -> None:
    """Keep nodes that are booked for maintenance, or reserved, from other jobs."""
    if state.agenda.bookings:
        maintain(state, draft)
    if state.agenda.reservations:
        reserve_nodes(state, draft)


def _due(state: State, now_us: int) -> set[JobId]:
    """Return the jobs to look at."""
    due = set(state.attempts) if state.shutting_down else set()
    for times in (state.agenda.limits, state.agenda.times):
        if times and times[0][0] <= now_us:
            due.update(job_id for _, job_id in times[: bisect_right(times, now_us, key=itemgetter(0))])
    if state.quotas.counts_time:
        jobs = {_counted_as(each.job): each.job for each in state.attempts.values()}
        used_up = {key for key, job in jobs.items() if state.quotas.spent(job, now_us)}
        attempts = state.attempts.items() if used_up else ()
        due.update(job_id for job_id, each in attempts if _counted_as(each.job) in used_up)
    return due | state.agenda.unsettled.keys()


def _counted_as(job: Job) -> tuple[str, str, int]:
    return job.queue, job.owner, job.grace_us


def settle_job(state: State, draft: Draft, job_id: JobId) -> bool:
    """Decide on everything that follows for one job from its reports."""
    record, attempt, now_us = state.jobs[job_id], state.attempts.get(job_id), draft.now_us
    if attempt is None:
        _settle_waiting(state, draft, record)
        return True
    if not attempt.held:
        _end(state, draft, attempt)
        return True
    why_kill = _why_kill(record, attempt, now_us)
    if why_kill is not None:
        emit(state, draft, KillOrdered(at_us=now_us, job_id=job_id, epoch=attempt.epoch, why=why_kill))
        return True
    reason = _why_notice(state, record, attempt, now_us)
    if reason is not None:
        gone = [at_us for at_us in (_reclaimed_us(state, attempt), leave_us(state, attempt)) if at_us is not None]
        emit(state, draft, notice(attempt, reason, now_us, gone_us=min(gone, default=None)))
    return True


def _settle_waiting(state: State, draft: Draft, record: JobRecord) -> None:
    """Decide whether a job without an attempt ends, may start, or may not start now."""
    job_id, now_us = record.job.job_id, draft.now_us
    if record.phase.ended:
        return
    why = f"stopped by {record.stop.by}" if record.stop is not None else never(state, record)
    if why is not None:
        emit(state, draft, JobEnded(at_us=now_us, job_id=job_id, state="stopped", why=why))
        return
    found, known = deferral(state, record, now_us), record.gate.deferred
    if record.phase is Phase.PAUSED and known is None:
        return  # it waits at a rung, and its sweep resumes it
    if found is None:
        if record.phase.deferred:
            emit(state, draft, JobReleased(at_us=now_us, job_id=job_id, why="nothing keeps it from starting"))
    elif known is None or (found.state, found.why, found.until_us) != (known.state, known.why, known.until_us):
        emit(state, draft, found)


def _wake_us(state: State, attempt: Attempt) -> int | None:
    """Return the time at which `settle` does something else for a live attempt without an event."""
    if not attempt.held or attempt.kill is not None:
        return None
    if attempt.notice is not None:
        return attempt.notice.deadline_us
    times = (attempt.limit_at_us, notice_us(state, attempt))
    return min((at_us for at_us in times if at_us is not None), default=None)


def _worst_end(attempt: Attempt) -> RanksEnded:
    """Return the end of ranks that decides the outcome of an attempt: the first one of the worst outcome."""
    if len(attempt.ended) == 1:
        return attempt.ended[0]
    return min(attempt.ended, key=lambda ended: _WORST_FIRST.index(_judged(attempt, ended)))


def _judged(attempt: Attempt, ended: RanksEnded) -> Outcome:
    # A script that does not handle SIGTERM exits with some code after a notice; that is no failure of its own.
    if ended.outcome is Outcome.FAILED and attempt.notice is not None:
        return Outcome.KILLED
    return ended.outcome


def _why_kill(record: JobRecord, attempt: Attempt, now_us: int) -> str | None:
    if attempt.kill is not None:
        return None
    bad = next((each for each in attempt.ended if each.outcome in _BAD), None)
    if bad is not None:
        return f"its ranks on {bad.node} ended as {bad.outcome.value}" + (f": {bad.why}" if bad.why else "")
    if record.stop is not None and record.stop.now:
        return f"stopped at once by {record.stop.by}"
    if attempt.notice is not None and now_us >= attempt.notice.deadline_us:
        grace = format_duration((attempt.notice.deadline_us - attempt.notice.at_us) / US_PER_S)
        return f"did not leave within {grace} of its notice ({attempt.notice.reason.value})"
    return None


def _why_notice(state: State, record: JobRecord, attempt: Attempt, now_us: int) -> NoticeReason | None:
    if attempt.leaving:
        return None
    if record.stop is not None:
        return NoticeReason.STOP
    if record.gate.held is not None and record.gate.held.leave:
        return NoticeReason.PAUSE
    if record.gate.requeue is not None:
        return NoticeReason.REQUEUE
    if state.shutting_down:
        return NoticeReason.DOWN
    if _reclaimed_us(state, attempt) is not None:
        return NoticeReason.RECLAIM
    if any(state.nodes.records[lease.node].drains for lease in attempt.held):
        return NoticeReason.DRAIN
    due_us = notice_us(state, attempt)
    if due_us is not None and now_us >= due_us:
        return NoticeReason.DRAIN
    closes = closes_us(attempt.job, attempt.placed_us) if attempt.job.window_stops else None
    if closes is not None and now_us >= closes:
        return NoticeReason.WINDOW
    if attempt.limit_at_us is not None and now_us >= attempt.limit_at_us:
        return NoticeReason.LIMIT
    return NoticeReason.QUOTA if state.quotas.spent(record.job, now_us) else None


def _reclaimed_us(state: State, attempt: Attempt) -> int | None:
    """Return the time at which the cloud takes the first of an attempt's nodes; None if it announced nothing."""
    times = (state.nodes.records[lease.node].reclaimed_us for lease in attempt.held)
    return min((at_us for at_us in times if at_us is not None), default=None)


def _end(state: State, draft: Draft, attempt: Attempt) -> None:
    job_id, now_us = attempt.job.job_id, draft.now_us
    worst = _worst_end(attempt)
    outcome = _judged(attempt, worst)
    failure = worst.failure or next((each.failure for each in attempt.ended if each.failure is not None), None)
    why = worst.why or _why_ended(attempt, outcome)
    used_up = used_up_day(state, attempt, outcome, now_us)
    if used_up is not None:
        why += f"; it used {used_up} within a day and made no checkpoint: it needs checkpoints, or a larger limit"
    ended = AttemptEnded(at_us=now_us, job_id=job_id, epoch=attempt.epoch, outcome=outcome, why=why, failure=failure)
    if any(each.node_fault for each in attempt.ended):
        ended = replace(ended, node_fault=True)
    counted = counted_as(attempt.job, ended) if attempt.notice is None else ""
    if counted:
        ended = replace(ended, counted=counted)
    emit(state, draft, ended)
    verdict = _verdict(state.jobs[job_id], attempt, ended)
    if verdict is not None:
        emit(state, draft, JobEnded(at_us=now_us, job_id=job_id, state=verdict[0].value, why=verdict[1]))
    elif attempt.job.pauses and outcome is Outcome.CHECKPOINTED and not attempt.leaving:
        emit(state, draft, JobPaused(at_us=now_us, job_id=job_id, why="it left with a checkpoint by itself"))
    else:
        _settle_waiting(state, draft, state.jobs[job_id])


def _why_ended(attempt: Attempt, outcome: Outcome) -> str:
    if attempt.kill is not None and outcome is Outcome.KILLED:
        return attempt.kill.why
    if attempt.notice is not None and outcome is not Outcome.FINISHED:
        gain = f" for {attempt.notice.for_job}" if attempt.notice.for_job else ""
        return f"{outcome.value} after notice ({attempt.notice.reason.value}{gain})"
    return outcome.value


def _verdict(record: JobRecord, attempt: Attempt, ended: AttemptEnded) -> tuple[Phase, str] | None:
    """Return the end of a job with this attempt and the reason; None if it is queued again. `record` is the new one."""
    if ended.outcome is Outcome.FINISHED:
        return Phase.DONE, "finished"
    if record.stop is not None:
        return Phase.STOPPED, f"stopped by {record.stop.by}"
    reason = attempt.notice.reason if attempt.notice else None
    if reason is NoticeReason.LIMIT or is_used_up(record.job, record.used_us, record.used_cost):
        return Phase.STOPPED, _limits(record)
    if reason in (NoticeReason.PREEMPT, NoticeReason.QUOTA) and not record.job.requeue:
        return Phase.STOPPED, "preempted, and the job asked not to be requeued"
    final = _final_failure(record.job, attempt, ended)
    if final is not None:
        return Phase.FAILED, final
    if limit := exceeded(record.job, record.failures):
        return Phase.FAILED, f"{attempt_name(record.job.job_id, attempt.epoch)} {ended.why} ({limit})"
    if record.attempts_without_commit >= ATTEMPTS_WITHOUT_COMMIT:
        name, failed = attempt_name(record.job.job_id, attempt.epoch), record.attempts_without_commit
        return Phase.FAILED, f"{failed} attempts in a row without a checkpoint; {name} {ended.why}"
    return None


def _final_failure(job: Job, attempt: Attempt, ended: AttemptEnded) -> str | None:
    """Return why a script would fail again in the same way; None if it may not, or if the job limits this cause."""
    fault = own_fault(ended.failure)
    if ended.outcome is not Outcome.FAILED or fault is None or attempt.stepped or attempt.captured_us is not None:
        return None
    if cause_of(job, ended) != ANY:
        return None
    return (
        f"{attempt_name(job.job_id, attempt.epoch)} {ended.why}: {fault} before its first step, which any further "
        "attempt would repeat (`retries: script=2` tries again all the same)"
    )


def _limits(record: JobRecord) -> str:
    time_us, cost = record.job.time_limit_us, record.job.cost_limit_micro_usd
    limits = [] if time_us is None else [f"time {format_duration(time_us / US_PER_S)}"]
    limits += [] if cost is None else [f"cost {format_micro_usd(cost)}"]
    used = f"{format_duration(record.used_us / US_PER_S)} and {format_micro_usd(record.used_cost // US_PER_HOUR)}"
    return f"its limit is reached ({', '.join(limits)}): it used {used}"
