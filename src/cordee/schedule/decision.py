"""Decisions: `decide` for a caller that only asks, `enact` for one that writes the events down.

Both run the cycle on the state itself. `decide` leaves the state as it found it; `enact` keeps what was written.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import is_

from cordee.events import Event
from cordee.ids import JobId
from cordee.schedule.claims import release_claims
from cordee.schedule.cycle import run
from cordee.schedule.policy import Policy
from cordee.schedule.state import Idle, State


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The events that follow from a state at a time.

    Attributes:
        events: to commit and to apply, in this order.
        wake_at_us: when time alone will change the answer; None if only a new event can.
        errors: jobs on which a step failed, with the error; the rest of the decision stands.
    """

    events: tuple[Event, ...]
    wake_at_us: int | None = None
    errors: tuple[tuple[JobId, Exception], ...] = ()


Write = Callable[[Sequence[Event]], Sequence[Event]]
"""Writes events down and returns them as it wrote them."""


def decide(state: State, now_us: int, policy: Policy | None = None) -> Decision:
    """Return everything that follows now and leave the state as it was; without a policy, by the state's own."""
    return _decided(state, now_us, policy, None)


def enact(state: State, now_us: int, policy: Policy | None, write: Write) -> Decision:
    """Decide, have the caller write the events down, and keep them applied; if `write` raises, nothing has happened.

    The events are applied once, as they are decided, and not taken back and applied again, unless `write` returns
    others: then it wrote them with other times, and those are applied.
    """
    return _decided(state, now_us, policy, write)


def _decided(state: State, now_us: int, policy: Policy | None, write: Write | None) -> Decision:
    if policy is not None:
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
            state.apply(event)
    if not imagined:  # What holds inside a what-if says nothing about the state outside of it.
        state.idle = None if draft.errors else idle
        state.failed_searches = draft.failed.preemptions
        if draft.events and not written:
            state.failed_searches.placements = frozenset()  # The GPUs of what was only decided are free again.
    return Decision(events=tuple(written or draft.events), wake_at_us=draft.wake_at_us, errors=tuple(draft.errors))
