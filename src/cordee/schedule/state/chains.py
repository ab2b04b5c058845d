"""Chains: the reasons why a job may not start yet, and the changes that requests of people make.

A job that may not start is *deferred*: it is in no line and costs a cycle nothing. It is looked at again when one of
its reasons has changed: a request of a person, the end of a job that it waits for, a time.
"""

from cordee.events import (
    After,
    AfterEnd,
    AttemptEnded,
    HoldReleased,
    JobDeferred,
    JobHeld,
    JobPrioritized,
    JobReleased,
    MaintenanceBooked,
    MaintenanceCancelled,
    RequeueRequested,
    SweepDeclared,
    SweepEnded,
)
from cordee.ids import JobId, attempt_name
from cordee.schedule.state.agenda import SweepCount
from cordee.schedule.state.records import Gate, JobRecord, Order, Phase
from cordee.schedule.state.retries import ANY, again_at_us, cause_of, counted_as
from cordee.schedule.state.state import State
from cordee.schedule.state.windows import closes_us, opens_us
from cordee.workload.times import in_utc

_ENDS = {AfterEnd.OK: "ended well", AfterEnd.ANY: "ended", AfterEnd.FAILED: "failed"}
_NAMED = 3

# -- what the state says ---------------------------------------------------------------------------------------


def never(state: State, record: JobRecord) -> str | None:
    """Return why a job will never start: one that it waits for has ended otherwise; None if it may."""
    for after in _after(record):
        ended_well = _ended_well(state, after.of)
        if ended_well is None or after.end is AfterEnd.ANY or not _is_known(state, after.of):
            continue
        if ended_well != (after.end is AfterEnd.OK):
            how = "ended well" if ended_well else _how_it_failed(state, after.of)
            return f"{after.of} {how}, and this one was to start after it {_ENDS[after.end]}"
    return None


def deferral(state: State, record: JobRecord, now_us: int) -> JobDeferred | None:
    """Return the decision that a job may not start now, with all reasons; None if it may."""
    phase, reasons = Phase.WAITING, list[str]()
    held = record.gate.held
    if held is not None:
        phase = Phase.PAUSED if held.leave else Phase.HELD
        reasons.append(f"{phase.value} by {held.by}")
    waits = [each for each in _after(record) if _ended_well(state, each.of) is None]
    for end, done in _ENDS.items():
        names = [each.of for each in waits if each.end is end]
        if names:
            reasons.append(f"waits until {_and(names)} {'has' if len(names) == 1 else 'have'} {done}")
    times = [(at_us, text) for at_us, text in _times(record, now_us) if at_us > now_us]
    reasons += [text for _, text in times]
    until_us = max((at_us for at_us, _ in times), default=None)
    if not reasons:
        return None
    why = "; ".join(reasons)
    return JobDeferred(at_us=now_us, job_id=record.job.job_id, state=phase.value, why=why, until_us=until_us)


def _times(record: JobRecord, now_us: int) -> list[tuple[int, str]]:
    """Return the times before which a job does not start, with the reason for each."""
    job, found = record.job, list[tuple[int, str]]()
    if job.not_before_us is not None:
        found.append((job.not_before_us, f"starts at {in_utc(job.not_before_us)} at the earliest"))
    opens = opens_us(job, now_us)
    if opens is not None:
        found.append((opens, f"starts in its window only, which opens at {in_utc(opens)}"))
    again_us = again_at_us(job, record.failures, record.last)
    if again_us is not None and record.last is not None:
        found.append((again_us, _between_tries(record, record.last)))
    return found


def _between_tries(record: JobRecord, last: AttemptEnded) -> str:
    cause = cause_of(record.job, last) or ANY
    tries, most = dict(record.failures).get(cause, 0), dict(record.job.retries).get(cause)
    of = f"{tries} in a row without a checkpoint" if most is None else f"{tries} of {most} retries"
    name = attempt_name(record.job.job_id, last.epoch)
    return f"pauses before its next try: {name} counts as {counted_as(record.job, last)} ({of})"


def waits_for(state: State, record: JobRecord) -> tuple[JobId, ...]:
    """Return the jobs and sweeps that a job waits for."""
    return tuple(JobId(each.of) for each in _after(record) if _ended_well(state, each.of) is None)


def _after(record: JobRecord) -> tuple[After, ...]:
    """Return for which ends a job waits: for none once it has run, whatever becomes of those others."""
    return () if record.epoch else record.job.after


def _ended_well(state: State, of: str) -> bool | None:
    """Return whether a job or sweep has ended well; None: it has not ended.

    One that is not known any more ended long ago; jobs that wait keep the others known (`Fold.ended_jobs`).
    """
    sweep = state.agenda.sweeps.get(of)
    if sweep is not None:
        return sweep.done > 0 if sweep.ended and not sweep.live else None
    record = state.jobs.get(JobId(of))
    if record is None:
        return True
    return record.phase is Phase.DONE if record.phase.ended else None


def _is_known(state: State, of: str) -> bool:
    return of in state.jobs or of in state.agenda.sweeps


def _how_it_failed(state: State, of: str) -> str:
    record = state.jobs.get(JobId(of))
    if record is None:
        return "ended without a trial that is done"
    return "was stopped" if record.phase is Phase.STOPPED else "failed"


def _and(names: list[str]) -> str:
    """Return names as a list in a sentence.

    >>> _and(["a"]), _and(["a", "b"]), _and(["a", "b", "c", "d", "e"])
    ('a', 'a and b', 'a, b, c and 2 more')
    """
    if len(names) > _NAMED:
        names = [*names[:_NAMED], f"{len(names) - _NAMED} more"]
    return " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)


# -- the lines -------------------------------------------------------------------------------------------------


def queue(state: State, record: JobRecord) -> None:
    """Put a job that may have to wait into no line yet, and any other one into its line; `record` is new."""
    job_id = record.job.job_id
    if not (_after(record) or record.job.not_before_us or record.job.window):
        state.journal.put(state.jobs, job_id, record)
        state.enqueue(record)
        return
    state.journal.put(state.jobs, job_id, record._replace(phase=Phase.WAITING))
    _depend(state, record)
    _look_at(state, job_id)


def _depend(state: State, record: JobRecord) -> None:
    """Look at a job when those end for which it waits now; one that was requeued ends once more."""
    for of in waits_for(state, record):
        dependents = state.agenda.dependents.get(of, ())
        if record.job.job_id not in dependents:
            state.journal.put(state.agenda.dependents, of, (*dependents, record.job.job_id))


def ended(state: State, of: str) -> None:
    """Look at the jobs that wait for a job or sweep that has ended."""
    for job_id in state.agenda.dependents.get(of, ()):
        record = state.jobs.get(job_id)
        if record is not None and record.phase.deferred:
            _look_at(state, job_id)
    state.journal.drop(state.agenda.dependents, of)


def _look_at(state: State, job_id: JobId) -> None:
    state.journal.put(state.agenda.unsettled, job_id, None)
    state.changes.count()


def deferred(state: State, event: JobDeferred) -> None:
    """Take a job out of its line, or note why it still may not start."""
    record = state.jobs.get(event.job_id)
    if record is None or not (record.phase is Phase.QUEUED or _is_deferred(record)):
        return
    if record.phase is Phase.QUEUED:
        state.waiting.remove(record)
        state.journal.drop(state.agenda.restarting, event.job_id)
        state.journal.drop(state.agenda.entitled, event.job_id)
    after = record._replace(
        phase=Phase(event.state),
        waits_since_us=event.at_us,
        paused_us=record.paused_us + _deferred_us(record, event.at_us),
        gate=record.gate._replace(deferred=event),
    )
    _put(state, after, event.until_us)
    _depend(state, after)
    state.journal.drop(state.agenda.unsettled, event.job_id)
    state.changes.count()


def released(state: State, event: JobReleased) -> None:
    """Put a deferred job into its line."""
    record = state.jobs.get(event.job_id)
    if record is None or not _is_deferred(record):
        return
    after = record._replace(
        phase=Phase.QUEUED,
        waits_since_us=event.at_us,
        paused_us=record.paused_us + _deferred_us(record, event.at_us),
        gate=record.gate._replace(deferred=None),
    )
    state.journal.drop(state.agenda.unsettled, event.job_id)
    enter(state, after, event.at_us)


def enter(state: State, record: JobRecord, at_us: int) -> None:
    """Put a job into its line, and look at it again when its window closes; `record` is new."""
    state.enqueue(_put(state, record, closes_us(record.job, at_us)))


def leave_lines(state: State, record: JobRecord) -> JobRecord:
    """Take a job that ends or starts out of its line, and return its record without a time to look at it again.

    `record` is the one that is stored.
    """
    if record.phase is Phase.QUEUED:
        state.waiting.remove(record)
    return record if record.gate.look_us is None else _put(state, record, None)


def _put(state: State, record: JobRecord, look_us: int | None) -> JobRecord:
    """Store a record, and the time at which it is looked at again."""
    job_id, before = record.job.job_id, record.gate.look_us
    if before != look_us:
        if before is not None:
            state.journal.remove(state.agenda.times, (before, job_id))
        if look_us is not None:
            state.journal.insert(state.agenda.times, (look_us, job_id))
        record = record._replace(gate=record.gate._replace(look_us=look_us))
    state.journal.put(state.jobs, job_id, record)
    return record


def _is_deferred(record: JobRecord) -> bool:
    """Return whether the scheduler deferred a job; a trial that left at a rung is paused by itself."""
    return record.phase.deferred and (record.phase is not Phase.PAUSED or record.gate.deferred is not None)


def _deferred_us(record: JobRecord, at_us: int) -> int:
    return at_us - record.waits_since_us if record.phase.deferred else 0


# -- requests of people ----------------------------------------------------------------------------------------


def held(state: State, event: JobHeld) -> None:
    """Hold a job; a pause replaces a hold."""
    record = state.jobs.get(event.job_id)
    if record is None or record.phase.ended:
        return
    before = record.gate.held
    if before is None or (event.leave and not before.leave):
        _set_gate(state, record, record.gate._replace(held=event))
        if _is_deferred(record) or record.phase is Phase.QUEUED or (event.job_id in state.attempts and event.leave):
            _look_at(state, event.job_id)


def hold_released(state: State, event: HoldReleased) -> None:
    """Let a held job start again."""
    record = state.jobs.get(event.job_id)
    if record is None or record.gate.held is None or record.phase.ended:
        return
    _set_gate(state, record, record.gate._replace(held=None))
    if _is_deferred(record):
        _look_at(state, event.job_id)
    elif event.job_id not in state.attempts:
        state.journal.drop(state.agenda.unsettled, event.job_id)
    state.changes.count()


def requeue_requested(state: State, event: RequeueRequested) -> None:
    """Send a job to the end of its queue: at once, once it has left, or once more."""
    record = state.jobs.get(event.job_id)
    if record is None or (record.gate.stop is not None and not record.phase.ended):
        return
    order = Order(record.job.priority, rank=event.at_us)
    if record.phase.ended and record.ended is not None:
        gone_us = event.at_us - record.ended.at_us
        again = record._replace(
            phase=Phase.QUEUED,
            waits_since_us=event.at_us,
            paused_us=record.paused_us + gone_us,
            failures=(),
            size=None,
            ended=None,
            gate=Gate(order=order),
        )
        queue(state, again)
    elif event.job_id in state.attempts:
        _set_gate(state, record, record.gate._replace(requeue=event, order=order))
        _look_at(state, event.job_id)
    else:
        reorder(state, record, order)


def prioritized(state: State, event: JobPrioritized) -> None:
    """Send a waiting job to the top of its queue, or let it and another one exchange their places."""
    record, other = state.jobs.get(event.job_id), state.jobs.get(event.place_of or JobId(""))
    if record is None or record.phase is not Phase.QUEUED:
        return
    if event.place_of is None:
        job = record.job
        waiting = (state.jobs[each] for each in state.waiting.job_ids())
        rivals = [each.priority for each in waiting if (each.job.queue, each.job.tier) == (job.queue, job.tier)]
        reorder(state, record, Order(max(rivals), rank=-event.at_us))
    elif other is not None and other.phase is Phase.QUEUED:
        mine, theirs = _order_now(state, record), _order_now(state, other)
        reorder(state, record, theirs)
        reorder(state, other, mine)


def reorder(state: State, record: JobRecord, order: Order) -> None:
    """Give a job another place, in its line or once it is in one."""
    if record.phase is Phase.QUEUED:
        state.waiting.remove(record)
    _set_gate(state, record, record.gate._replace(order=order))
    if record.phase is Phase.QUEUED:
        state.enqueue(state.jobs[record.job.job_id])


def _order_now(state: State, record: JobRecord) -> Order:
    place = state.waiting.place(record.job.job_id)
    return Order(record.priority, place.rank, place.standing, place.submitted_us)


def _set_gate(state: State, record: JobRecord, gate: Gate) -> None:
    state.journal.put(state.jobs, record.job.job_id, record._replace(gate=gate))


# -- maintenance -----------------------------------------------------------------------------------------------


def booked(state: State, event: MaintenanceBooked) -> None:
    """Note a booking."""
    if event.booking not in state.agenda.bookings:
        state.journal.put(state.agenda.bookings, event.booking, event)
        state.changes.count()


def cancelled(state: State, event: MaintenanceCancelled) -> None:
    """Forget a booking."""
    if event.booking in state.agenda.bookings:
        state.journal.drop(state.agenda.bookings, event.booking)
        state.changes.count()


# -- sweeps ----------------------------------------------------------------------------------------------------


def sweep_declared(state: State, event: SweepDeclared) -> None:
    """Note a sweep for the jobs that will wait for it."""
    if event.sweep not in state.agenda.sweeps:
        state.journal.put(state.agenda.sweeps, event.sweep, SweepCount())


def sweep_ended(state: State, event: SweepEnded) -> None:
    """Note that no further trial starts."""
    sweep = state.agenda.sweeps.get(event.sweep)
    if sweep is not None:
        _count(state, event.sweep, sweep._replace(ended=True))


def trial_submitted(state: State, sweep: str) -> None:
    """Count a trial that has not ended."""
    count = state.agenda.sweeps.get(sweep, SweepCount())
    _count(state, sweep, count._replace(live=count.live + 1))


def trial_ended(state: State, sweep: str, done: bool) -> None:
    """Count a trial that has ended."""
    count = state.agenda.sweeps.get(sweep, SweepCount())
    _count(state, sweep, count._replace(live=count.live - 1, done=count.done + done))


def _count(state: State, sweep: str, count: SweepCount) -> None:
    state.journal.put(state.agenda.sweeps, sweep, count)
    if count.ended and not count.live:
        ended(state, sweep)
