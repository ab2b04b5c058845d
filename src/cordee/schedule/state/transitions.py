"""Transitions: the changes that each event makes in the state, all of them journaled.

`apply` ignores late and repeated reports: a job submitted twice; anything about a job that is not known or has ended;
anything about an attempt that is not the job's live one (an older epoch, or one that ended); a second RanksEnded of a
node; a NodeUp or NodeDown of an epoch below the node's newest; Restored, RankLeft and all but the first step Reported,
which are the ledger's.
A placement that leases a GPU twice is a programming error and is asserted.
"""

from collections.abc import Callable, Mapping
from typing import Never

from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Behind,
    BudgetReached,
    BudgetRemoved,
    BudgetSet,
    CheckpointCommitted,
    Event,
    HoldReleased,
    JobDeferred,
    JobEnded,
    JobHeld,
    JobPaused,
    JobPrioritized,
    JobReleased,
    JobResumed,
    JobSubmitted,
    KillOrdered,
    MaintenanceBooked,
    MaintenanceCancelled,
    NodeCordoned,
    NodeDown,
    NodeReachable,
    NodeReclaimed,
    NodeUncordoned,
    NodeUnreachable,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    Outcome,
    QueuesSet,
    RankBehind,
    RanksEnded,
    RanksStarted,
    Reported,
    RequeueRequested,
    ReservationBegan,
    ReservationCancelled,
    ReservationMade,
    ServerShuttingDown,
    ServerUp,
    StopRequested,
    SweepDeclared,
    SweepEnded,
)
from cordee.ids import JobId
from cordee.schedule.quota.budgets import Reached
from cordee.schedule.quota.day import DAY_US
from cordee.schedule.quota.held import held_by
from cordee.schedule.quota.limits import notice_at_us
from cordee.schedule.quota.quotas import Quotas
from cordee.schedule.state import chains, reservations, retries
from cordee.schedule.state.order import level
from cordee.schedule.state.records import NEVER, Attempt, JobRecord, Phase
from cordee.schedule.state.running import is_exempt, min_run_ends_us, min_run_us
from cordee.schedule.state.state import State
from cordee.schedule.state.windows import closes_us

_PREEMPTED = (NoticeReason.PREEMPT, NoticeReason.TIME_SLICE, NoticeReason.QUOTA)
_RESTARTS = (NoticeReason.RESIZE, NoticeReason.MOVE, NoticeReason.RECLAIM, NoticeReason.DRAIN, NoticeReason.DOWN)
"""A job that left for one of these lost its place to no other job's turn: it starts again before others of its tier."""


def apply(state: State, event: Event) -> None:
    """Apply one event to the state; a stale one changes nothing."""
    handler = _HANDLERS.get(type(event))
    if handler is not None:
        if state.nodes.quarantines:
            state.nodes.end_quarantines(event.at_us)
        before = state.changes.total
        handler(state, event)  # type: ignore[arg-type]  # The table pairs types of events with their handlers.
        if state.changes.total != before:
            state.changes.name(event)


# -- the server, nodes and queues ----------------------------------------------------------------------------


def _shut_down(state: State, shutting_down: bool) -> None:
    state.journal.note(setattr, state, "shutting_down", state.shutting_down)
    state.shutting_down = shutting_down
    state.changes.count()


def _node_down(state: State, event: NodeDown) -> None:
    state.nodes.down(event, expected=event.left or state.shutting_down)


def _node_reclaimed(state: State, event: NodeReclaimed) -> None:
    if state.nodes.reclaimed(event):
        _unsettle(state, event.node)


def _node_cordoned(state: State, event: NodeCordoned) -> None:
    if state.nodes.cordoned(event):
        _unsettle(state, event.node)


def _submitted(state: State, event: JobSubmitted) -> None:
    job = event.job
    if job.job_id not in state.jobs:
        chains.queue(state, JobRecord(job=job, submitted_us=event.at_us, waits_since_us=event.at_us))
        if job.sweep is not None:
            chains.trial_submitted(state, job.sweep)
        state.journal.note(state.nodes.free.mix.unseen, state.nodes.free.mix.seen(job, event.at_us))


def _stop_requested(state: State, event: StopRequested) -> None:
    record = state.jobs.get(event.job_id)
    if record is None or record.phase.ended or (record.stop and (record.stop.now or not event.now)):
        return
    state.journal.put(state.jobs, event.job_id, record._replace(gate=record.gate._replace(stop=event)))
    state.journal.put(state.agenda.unsettled, event.job_id, None)
    state.changes.count()


def _job_ended(state: State, event: JobEnded) -> None:
    record = state.jobs.get(event.job_id)
    if record is None or record.phase.ended or event.job_id in state.attempts:
        return
    record = chains.leave_lines(state, record)
    state.journal.drop(state.agenda.unsettled, event.job_id)
    state.journal.drop(state.agenda.restarting, event.job_id)
    if event.state != Phase.STOPPED and record.used_us:
        state.journal.note(state.history.forget, state.history.add(record.job, record.used_us, record.served_gpu_us))
    state.journal.drop(state.agenda.entitled, event.job_id)
    state.journal.put(state.jobs, event.job_id, record._replace(phase=Phase(event.state), ended=event))
    if record.job.sweep is not None:
        chains.trial_ended(state, record.job.sweep, done=event.state == Phase.DONE)
    chains.ended(state, event.job_id)
    if state.history.learns:
        state.learn(event.at_us)
    state.changes.count()


def _job_paused(state: State, event: JobPaused) -> None:
    record = state.jobs.get(event.job_id)
    if record is not None and record.phase is Phase.QUEUED:
        record = chains.leave_lines(state, record)
        state.journal.drop(state.agenda.restarting, event.job_id)
        state.journal.drop(state.agenda.entitled, event.job_id)
        paused = record._replace(phase=Phase.PAUSED, waits_since_us=event.at_us)
        state.journal.put(state.jobs, event.job_id, paused)
        state.changes.count()


def _job_resumed(state: State, event: JobResumed) -> None:
    record = state.jobs.get(event.job_id)
    if record is not None and record.phase is Phase.PAUSED and record.gate.deferred is None:
        paused_us = record.paused_us + event.at_us - record.waits_since_us
        queued = record._replace(phase=Phase.QUEUED, waits_since_us=event.at_us, paused_us=paused_us)
        chains.enter(state, queued, event.at_us)
        if record.gate.held is not None:
            state.journal.put(state.agenda.unsettled, event.job_id, None)


def _queues_set(state: State, event: QueuesSet) -> None:
    _use_quotas(state, state.quotas.regrouped(event.queues, event.at_us))


def _budget_set(state: State, event: BudgetSet) -> None:
    _use_quotas(state, state.quotas.budgeted(event.budget.key, event.budget, event.at_us))


def _budget_removed(state: State, event: BudgetRemoved) -> None:
    _use_quotas(state, state.quotas.budgeted((event.queue, event.user, event.per), None, event.at_us))


def _budget_reached(state: State, event: BudgetReached) -> None:
    kept = state.quotas.budgets.kept.get(event.budget.key)
    if kept is not None:
        state.journal.note(setattr, kept, "reached", kept.reached)
        kept.reached = Reached(event.from_us, event.percent)
        state.changes.count(gain=False)


def _use_quotas(state: State, quotas: Quotas) -> None:
    state.journal.note(setattr, state, "quotas", state.quotas)
    state.quotas = quotas
    for job_id in sorted(state.waiting.job_ids()):  # Each user has lines of its own where users have limits.
        record = state.jobs[job_id]
        state.waiting.remove(record)
        state.enqueue(record)
    state.changes.count()


def _placed(state: State, event: AttemptPlaced) -> None:
    record = state.jobs.get(event.job_id)
    if record is None or record.phase is not Phase.QUEUED or event.epoch <= record.epoch:
        return
    prices = tuple([state.nodes.records[lease.node].node.micro_usd_per_gpu_hour for lease in event.leases])
    held = held_by(record.job, event.leases, prices)
    limit_at_us = notice_at_us(
        record.job,
        placed_us=event.at_us,
        used_us=record.used_us,
        used_cost=record.used_cost,
        micro_usd_per_hour=held.nano_usd_per_hour // 1000,
    )
    closes = closes_us(record.job, event.at_us) if record.job.window_stops else None
    if closes is not None:
        limit_at_us = min(closes, NEVER if limit_at_us is None else limit_at_us)
    attempt = Attempt(
        job=record.job,
        epoch=event.epoch,
        placed_us=event.at_us,
        leases=event.leases,
        prices=prices,
        held=event.leases,
        limit_at_us=limit_at_us,
    )
    for lease in event.leases:
        state.nodes.lease(lease, record.job)
    state.quotas.put(record.job, held, event.at_us)
    state.journal.note(state.quotas.take, record.job, held, event.at_us)
    record = chains.leave_lines(state, record)
    state.journal.put(state.attempts, event.job_id, attempt)
    state.journal.drop(state.agenda.restarting, event.job_id)
    state.journal.drop(state.agenda.entitled, event.job_id)
    if attempt.gpus < record.job.gpus:
        state.journal.put(state.agenda.shrunk, event.job_id, None)
    gate = record.gate
    if gate.order is not None or gate.requeue is not None:
        gate = gate._replace(order=None, requeue=None)
    record = record._replace(phase=Phase.RUNNING, epoch=event.epoch, size=None, gate=gate)
    state.journal.put(state.jobs, event.job_id, record)
    if limit_at_us is not None:
        state.journal.insert(state.agenda.limits, (limit_at_us, event.job_id))
    state.run(record, attempt)
    state.changes.count(gain=False)


def _noticed(state: State, event: NoticeGiven) -> None:
    attempt = _live(state, event.job_id, event.epoch)
    if attempt is not None and not attempt.leaving:
        if event.reason in _RESTARTS:
            state.journal.put(state.agenda.restarting, event.job_id, None)
        if event.reason is NoticeReason.QUOTA and event.for_job is not None:
            state.journal.put(state.agenda.entitled, event.for_job, None)
        _stopping(state, attempt, attempt._replace(notice=event))


def _kill_ordered(state: State, event: KillOrdered) -> None:
    attempt = _live(state, event.job_id, event.epoch)
    if attempt is not None and attempt.kill is None:
        _stopping(state, attempt, attempt._replace(kill=event))


def _ranks_started(state: State, event: RanksStarted) -> None:
    attempt = _live(state, event.job_id, event.epoch)
    if attempt is None or attempt.started_us is not None:
        return
    attempt = attempt._replace(started_us=event.at_us)
    state.journal.put(state.attempts, event.job_id, attempt)
    state.running.set(event.job_id, work_from_us=event.at_us)
    if min_run_us(attempt.job, attempt.epoch) and event.job_id in state.running.row_of:
        if not is_exempt(state.jobs[event.job_id]):
            state.running.set(event.job_id, min_run_ends_us=min_run_ends_us(attempt))
        # Where victims leave, the cycle that gave them notice may have left something to decide.
        if state.nodes.vacating or state.heeds_min_runs(level(attempt.job.tier)):
            state.changes.count()


def _committed(state: State, event: CheckpointCommitted) -> None:
    attempt = _live(state, event.job_id, event.epoch)
    if attempt is not None and event.step > (attempt.committed_step or -1):
        # Steps that ran during the upload are not in the checkpoint.
        captured_us = event.at_us - event.upload_us
        committed = attempt._replace(captured_us=captured_us, committed_step=event.step)
        state.journal.put(state.attempts, event.job_id, committed)
        if attempt.started_us is not None:
            if state.running.is_kept(event.job_id, event.at_us, state.policy):
                state.changes.count()
            state.running.set(event.job_id, work_from_us=max(attempt.started_us, captured_us), silent=False)


def _reported(state: State, event: Reported) -> None:
    attempt = _live(state, event.job_id, event.epoch) if event.steps else None
    if attempt is not None and not attempt.stepped:
        state.journal.put(state.attempts, event.job_id, attempt._replace(stepped=True))


def _behind(state: State, event: RankBehind) -> None:
    attempt = _live(state, event.job_id, event.epoch)
    if attempt is not None:
        over = event.how is Behind.OVER
        if not over or (attempt.behind is not None and attempt.behind.rank == event.rank):
            state.journal.put(state.attempts, event.job_id, attempt._replace(behind=None if over else event))


def _ranks_ended(state: State, event: RanksEnded) -> None:
    attempt = _live(state, event.job_id, event.epoch)
    lease = next((each for each in attempt.held if each.node == event.node), None) if attempt else None
    if attempt is None or lease is None:
        return
    held = tuple(each for each in attempt.held if each is not lease)
    ended = attempt._replace(held=held, ended=(*attempt.ended, event))
    state.journal.put(state.attempts, event.job_id, ended)
    state.running.drop(event.job_id)
    freed = attempt.holds((lease,))
    state.quotas.take(attempt.job, freed, event.at_us)
    state.journal.note(state.quotas.put, attempt.job, freed, event.at_us)
    if attempt.leaving:
        state.quotas.stay(attempt.job, freed.gpu_milli)
        state.journal.note(state.quotas.leave, attempt.job, freed.gpu_milli)
    state.nodes.free_lease(lease, attempt.job, was_leaving=attempt.leaving)
    record, held_us = state.jobs[event.job_id], event.at_us - attempt.placed_us
    used_cost = record.used_cost + freed.nano_usd_per_hour * held_us // 1000
    served_gpu_us = record.served_gpu_us + freed.gpu_milli * held_us // 1000
    state.journal.put(state.jobs, event.job_id, record._replace(used_cost=used_cost, served_gpu_us=served_gpu_us))
    state.journal.put(state.agenda.unsettled, event.job_id, None)
    state.changes.count()


def _attempt_ended(state: State, event: AttemptEnded) -> None:
    attempt = _live(state, event.job_id, event.epoch)
    if attempt is None or attempt.held:
        return
    record, notice = state.jobs[event.job_id], attempt.notice
    used_up = used_up_day(state, attempt, event.outcome, event.at_us)
    cause = retries.cause_of(record.job, event) if notice is None else None
    cause = retries.ANY if used_up is not None else cause
    restarts = event.outcome is Outcome.LOST if notice is None else notice.reason in _RESTARTS
    queued = record._replace(
        phase=Phase.QUEUED,
        waits_since_us=event.at_us,
        failures=retries.counted(record.failures, cause, committed=attempt.captured_us is not None),
        preemptions=record.preemptions + (notice is not None and notice.reason in _PREEMPTED),
        used_us=record.used_us + max(each.at_us for each in attempt.ended) - attempt.placed_us,
        size=notice.gpus if notice is not None and restarts else None,
        last=event,
        gate=record.gate if record.gate.requeue is None else record.gate._replace(requeue=None),
    )
    state.journal.drop(state.attempts, event.job_id)
    state.journal.drop(state.agenda.shrunk, event.job_id)
    if not state.journal.keeps:
        state.quotas.forget()
    if attempt.limit_at_us is not None:
        state.journal.remove(state.agenda.limits, (attempt.limit_at_us, event.job_id))
    state.journal.drop(state.agenda.unsettled, event.job_id)
    if restarts:
        state.journal.put(state.agenda.restarting, event.job_id, None)
    if event.outcome is Outcome.FINISHED:
        # The job ends in the same decision, so it need not stand in a line until then.
        state.journal.put(state.jobs, event.job_id, queued._replace(phase=record.phase))
    else:
        chains.enter(state, queued, event.at_us)


def _live(state: State, job_id: JobId, epoch: int) -> Attempt | None:
    attempt = state.attempts.get(job_id)
    return attempt if attempt is not None and attempt.epoch == epoch else None


def _unsettle(state: State, node: str) -> None:
    for job_id, attempt in state.attempts.items():
        if any(lease.node == node for lease in attempt.held):
            state.journal.put(state.agenda.unsettled, job_id, None)


def used_up_day(state: State, attempt: Attempt, outcome: Outcome, at_us: int) -> str | None:
    """Return the use of an attempt as text if it saved nothing and used `MOST_OF_DAY` of its queue's day; else None.

    The next attempt could use hardly more than that, so this one counts as failed. A script that saves without this
    package shows it by its outcome alone.
    """
    given = attempt.notice
    saved = attempt.captured_us is not None or outcome in (Outcome.FINISHED, Outcome.CHECKPOINTED)
    if saved or given is None or given.reason is not NoticeReason.QUOTA or given.for_job:
        return None
    return state.quotas.most_of_day(attempt.job, attempt.used_since(at_us - DAY_US))


def _stopping(state: State, before: Attempt, attempt: Attempt) -> None:
    job_id = attempt.job.job_id
    state.journal.put(state.attempts, job_id, attempt)
    state.journal.put(state.jobs, job_id, state.jobs[job_id]._replace(phase=Phase.STOPPING))
    state.journal.put(state.agenda.unsettled, job_id, None)
    state.running.drop(job_id)
    if not before.leaving:
        gpu_milli = sum(lease.gpu_milli for lease in attempt.held)
        state.quotas.leave(attempt.job, gpu_milli)
        state.journal.note(state.quotas.stay, attempt.job, gpu_milli)
        for lease in attempt.held:
            state.nodes.vacate(lease, attempt.job)
    state.changes.count()


_HANDLERS: Mapping[type, Callable[[State, Never], None]] = {
    ServerUp: lambda state, event: _shut_down(state, False),
    ServerShuttingDown: lambda state, event: _shut_down(state, True),
    JobSubmitted: _submitted,
    StopRequested: _stop_requested,
    JobEnded: _job_ended,
    JobPaused: _job_paused,
    JobResumed: _job_resumed,
    JobHeld: chains.held,
    HoldReleased: chains.hold_released,
    RequeueRequested: chains.requeue_requested,
    JobPrioritized: chains.prioritized,
    JobDeferred: chains.deferred,
    JobReleased: chains.released,
    MaintenanceBooked: chains.booked,
    MaintenanceCancelled: chains.cancelled,
    ReservationMade: reservations.made,
    ReservationBegan: reservations.began,
    ReservationCancelled: reservations.cancelled,
    SweepDeclared: chains.sweep_declared,
    SweepEnded: chains.sweep_ended,
    NodeUp: lambda state, event: state.nodes.up(event),
    NodeDown: _node_down,
    NodeUnreachable: lambda state, event: state.nodes.heard(event),
    NodeReachable: lambda state, event: state.nodes.heard(event),
    NodeReclaimed: _node_reclaimed,
    NodeCordoned: _node_cordoned,
    NodeUncordoned: lambda state, event: state.nodes.uncordoned(event),
    QueuesSet: _queues_set,
    BudgetSet: _budget_set,
    BudgetRemoved: _budget_removed,
    BudgetReached: _budget_reached,
    AttemptPlaced: _placed,
    NoticeGiven: _noticed,
    KillOrdered: _kill_ordered,
    RanksStarted: _ranks_started,
    RanksEnded: _ranks_ended,
    CheckpointCommitted: _committed,
    Reported: _reported,
    RankBehind: _behind,
    AttemptEnded: _attempt_ended,
}
"""Handlers by type of event; events of other types change nothing."""
