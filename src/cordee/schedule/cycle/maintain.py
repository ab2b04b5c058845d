"""Maintenance: nodes that are booked are cordoned before, their attempts leave in time, and they come back after."""

from cordee.events import MaintenanceBooked, MaintenanceCancelled, NodeCordoned, NodeUncordoned
from cordee.schedule.cycle.draft import Draft, emit
from cordee.schedule.state.records import Attempt
from cordee.schedule.state.state import State
from cordee.units import US_PER_S
from cordee.workload.times import in_utc

LEAD_US = 600 * US_PER_S
"""The time before a maintenance from which nothing starts on the node; the longest grace period, if that is longer."""


def maintain(state: State, draft: Draft) -> None:
    """Cordon nodes whose maintenance is near, and put those back into use whose maintenance is over."""
    for booking in sorted(state.agenda.bookings.values(), key=lambda each: (each.from_us, each.booking)):
        _maintain(state, draft, booking)


def _maintain(state: State, draft: Draft, booking: MaintenanceBooked) -> None:
    now_us, record = draft.now_us, state.nodes.records.get(booking.node)
    cordon_us = booking.from_us - lead_us(state)
    why = f"maintenance {in_utc(booking.from_us)} to {in_utc(booking.until_us)}: {booking.why}"
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


def lead_us(state: State) -> int:
    """Return how long before a maintenance nothing starts on its node."""
    return max(LEAD_US, state.agenda.graces.get("longest", 0))


def leave_us(state: State, attempt: Attempt) -> int | None:
    """Return when an attempt has to have left the first of its nodes; None: at no known time."""
    times = (state.nodes.records[lease.node].leave_us for lease in attempt.held)
    return min((at_us for at_us in times if at_us is not None), default=None)
