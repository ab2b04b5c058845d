"""Reservations of nodes: they keep nodes for the jobs of a queue or a user; the lines follow them.

A node whose reservation began has a kind of its own (`placement.entry.Kind`), which only the pools of those jobs hold.
Where nothing is reserved nothing is compared.
"""

from cordee.events import Job, ReservationBegan, ReservationCancelled, ReservationMade
from cordee.schedule.placement.place import is_for
from cordee.schedule.state.records import NodeRecord
from cordee.schedule.state.state import State


def made(state: State, event: ReservationMade) -> None:
    """Note a reservation."""
    if event.reservation not in state.agenda.reservations:
        state.journal.put(state.agenda.reservations, event.reservation, event)
        _queue_again(state, event)
        state.changes.count()


def began(state: State, event: ReservationBegan) -> None:
    """Keep a node for the jobs of a reservation, and look at the others that run there."""
    reservation = state.agenda.reservations.get(event.reservation)
    if reservation is None or not state.nodes.reserve(event.node, reservation, event.at_us):
        return
    for job_id, attempt in state.attempts.items():
        here = any(lease.node == event.node for lease in attempt.held)
        if here and not is_for(attempt.job, reservation.whom):
            state.journal.put(state.agenda.unsettled, job_id, None)


def cancelled(state: State, event: ReservationCancelled) -> None:
    """Forget a reservation, and open its nodes to all jobs again."""
    reservation = state.agenda.reservations.get(event.reservation)
    if reservation is not None:
        state.journal.drop(state.agenda.reservations, event.reservation)
        state.nodes.unreserve(reservation, event.at_us)
        _queue_again(state, reservation)
        state.changes.count()


def _queue_again(state: State, reservation: ReservationMade) -> None:
    """Put the waiting jobs of a reservation into their lines again: a line holds jobs with the same possible places."""
    for job_id in sorted(state.waiting.job_ids()):
        record = state.jobs[job_id]
        if is_for(record.job, reservation.whom):
            known = (state.waiting.standing(job_id), state.waiting.length_us(job_id))
            state.waiting.remove(record)
            state.enqueue(record, known)


def barring(record: NodeRecord, job: Job) -> tuple[ReservationMade, ...]:
    """Return the reservations, under way or about to be, that keep a node from a job."""
    if not record.reservations:
        return ()
    return tuple(each for each in record.reservations if not is_for(job, each.whom))
