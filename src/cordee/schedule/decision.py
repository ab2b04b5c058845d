"""Decisions: `decide` for a caller that only asks, `enact` for one that writes the events down.

Both run the cycle on the state itself. `decide` leaves the state as it found it; `enact` keeps written changes.
"""

from collections.abc import Callable, Sequence
from operator import is_
from typing import NamedTuple

from cordee.events import Event
from cordee.ids import JobId
from cordee.schedule.cycle.claims import release_claims
from cordee.schedule.cycle.cycle import run
from cordee.schedule.policy import Policy
from cordee.schedule.state.state import Idle, State
from cordee.schedule.state.transitions import apply


class Decision(NamedTuple):
    """The events that follow from a state at a time.

    Attributes:
        events: to commit and to apply, in this order.
        wake_at_us: the time at which the decision changes without an event; None if only an event changes it.
        errors: jobs on which a step failed, with the error; the rest of the decision stands.
    """

    events: tuple[Event, ...]
    wake_at_us: int | None = None
    errors: tuple[tuple[JobId, Exception], ...] = ()


Write = Callable[[Sequence[Event]], Sequence[Event]]
"""A function that writes events down and returns them as it wrote them."""


def decide(state: State, now_us: int, policy: Policy | None = None) -> Decision:
    """Return the decision for now and leave the state as it was; None as policy stands for the state's own."""
    return _decided(state, now_us, policy, None)


def enact(state: State, now_us: int, policy: Policy | None, write: Write) -> Decision:
    """Decide, have the caller write the events down, and keep them applied; if `write` raises, nothing has happened.

    The events are applied once, while they are decided. Only if `write` returns other events, because it wrote them
    with other times, are the decided ones taken back and the written ones applied.
    """
    return _decided(state, now_us, policy, write)


def _decided(state: State, now_us: int, policy: Policy | None, write: Write | None) -> Decision:
    if policy is not None and policy is not state.policy:
        state.use(policy)
    if state.idle is not None and state.idle.holds(state.changes, now_us):
        return Decision(events=(), wake_at_us=state.idle.until_us)
    imagined = state.journal.keeps
    with state.journal.what_if():
        draft = run(state, now_us)
        idle = Idle(state.changes.total, state.changes.newest, now_us, draft.wake_at_us)
        written = write(draft.events) if write is not None and draft.events else []
        as_decided = all(map(is_, written, draft.events))
        if written and as_decided:
            release_claims(state, draft)
            state.journal.keep()
    if not as_decided:  # The clock was set back while the decision was made.
        for event in written:
            apply(state, event)
    if not imagined:  # Results inside a what-if say nothing about the state outside of it.
        state.idle = None if draft.errors else idle
        state.failed_searches = draft.failed_searches
        if draft.events and not written:
            # The GPUs of placements that were not written are free again.
            state.failed_searches.placements = frozenset()
    return Decision(events=tuple(written or draft.events), wake_at_us=draft.wake_at_us, errors=tuple(draft.errors))
