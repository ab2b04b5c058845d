"""Maintenance and reservations: attempts leave booked nodes in time, and other jobs reserved ones.

Nodes that are booked for maintenance are cordoned before, reserved ones are kept for the jobs of their queue or user;
afterwards all is as before.
"""

from collections.abc import Collection

from cordee.events import (
    MaintenanceBooked,
    MaintenanceCancelled,
    NodeCordoned,
    NodeUncordoned,
    ReservationBegan,
    ReservationCancelled,
    ReservationMade,
)
from cordee.schedule.cycle.draft import Draft, emit
from cordee.schedule.quota.day import DAY_US
from cordee.schedule.state.records import Attempt
from cordee.schedule.state.reservations import barring
from cordee.schedule.state.state import State
from cordee.units import US_PER_S
from cordee.workload.times import in_utc

LEAD_US = 600 * US_PER_S
"""The time before a maintenance, or a reservation for others, from which nothing starts on the node; the longest grace
period of what runs there, if that is longer, but at most a day."""


def maintain(state: State, draft: Draft) -> None:
    """Cordon nodes whose maintenance is near, and put those back into use whose maintenance is over."""
    near = set[str]()  # Nodes with a booking that is not over: the next one of the same node waits for its end.
    for booking in sorted(state.agenda.bookings.values(), key=lambda each: (each.from_us, each.booking)):
        if booking.node not in near:
            _maintain(state, draft, booking)
        if draft.now_us < booking.until_us:
            near.add(booking.node)


def _maintain(state: State, draft: Draft, booking: MaintenanceBooked) -> None:
    now_us, record = draft.now_us, state.nodes.records.get(booking.node)
    cordon_us = booking.from_us - lead_us(state, (booking.node,))
    why = cordon_why(booking)
    if now_us >= booking.until_us:
        if record is not None and (record.cordoned_by, record.cordon_why) == (booking.by, why):
            over = NodeUncordoned(at_us=now_us, node=booking.node, by=booking.by, why="maintenance is over")
            emit(state, draft, over)
        emit(state, draft, MaintenanceCancelled(at_us=now_us, booking=booking.booking, by="its end"))
        return
    draft.wake_by(cordon_us if now_us < cordon_us else booking.until_us)
    if now_us >= cordon_us and record is not None and record.leave_us != booking.from_us:
        by, why = (booking.by, why) if record.cordoned_by is None else (record.cordoned_by, record.cordon_why)
        cordon = NodeCordoned(
            at_us=now_us, node=booking.node, by=by, why=why, drain=record.drains, leave_us=booking.from_us
        )
        emit(state, draft, cordon)


def cordon_why(booking: MaintenanceBooked) -> str:
    """Return the reason that a node is cordoned for, if it is so for this booking alone."""
    return f"maintenance {in_utc(booking.from_us)} to {in_utc(booking.until_us)}: {booking.why}"


def reserve_nodes(state: State, draft: Draft) -> None:
    """Keep nodes for the jobs of reservations that are near or under way, and end those that are over."""
    for each in sorted(state.agenda.reservations.values(), key=lambda each: (each.from_us, each.reservation)):
        _reserve(state, draft, each)


def _reserve(state: State, draft: Draft, reservation: ReservationMade) -> None:
    now_us, name = draft.now_us, reservation.reservation
    kept_us = reservation.from_us - lead_us(state, reservation.nodes)
    if now_us >= reservation.until_us:
        emit(state, draft, ReservationCancelled(at_us=now_us, reservation=name, by="its end"))
        return
    draft.wake_by(kept_us if now_us < kept_us else reservation.until_us)
    for node in reservation.nodes if now_us >= kept_us else ():
        record = state.nodes.records.get(node)
        if record is not None and reservation not in record.reservations:
            emit(state, draft, ReservationBegan(at_us=now_us, reservation=name, node=node))


def lead_us(state: State, nodes: Collection[str]) -> int:
    """Return how long before a maintenance, or a reservation for others, nothing starts on these nodes."""
    live = (each for each in state.attempts.values() if any(lease.node in nodes for lease in each.held))
    return min(DAY_US, max((LEAD_US, *(each.job.grace_us for each in live))))


def leave_us(state: State, attempt: Attempt) -> int | None:
    """Return when an attempt has to have left the first of its nodes; None: at no known time."""
    times = (state.nodes.records[lease.node].leave_us for lease in attempt.held)
    return min((at_us for at_us in times if at_us is not None), default=None)


def reserved_us(state: State, attempt: Attempt) -> int | None:
    """Return from when the first of its nodes is reserved for other jobs; None: none is, or not soon."""
    records = (state.nodes.records[lease.node] for lease in attempt.held)
    return min((each.from_us for record in records for each in barring(record, attempt.job)), default=None)


def notice_us(state: State, attempt: Attempt) -> int | None:
    """Return when an attempt gets notice, for a maintenance or for the jobs for which one of its nodes is reserved."""
    times = (leave_us(state, attempt), reserved_us(state, attempt))
    gone_us = min((at_us for at_us in times if at_us is not None), default=None)
    return None if gone_us is None else gone_us - attempt.job.grace_us
