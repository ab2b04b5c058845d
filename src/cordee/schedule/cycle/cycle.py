"""The scheduling cycle: settle, order, try, reserve, grow, wake.

Each step is a function over the state and the draft of the decision. The steps work on the state itself, inside the
caller's what-if, so that each of them sees what those before it decided.
"""

import heapq

from cordee.ids import JobId
from cordee.schedule.cycle.backfill import backfill, reserve
from cordee.schedule.cycle.claims import earmark
from cordee.schedule.cycle.draft import Draft, Step, guarded, new_draft
from cordee.schedule.cycle.grow import grow
from cordee.schedule.cycle.heads import Head, Turn, head_of, order
from cordee.schedule.cycle.nominate import (
    make_room,
    nominate,
    refusal_of,
    restart,
    resume,
    start_or_claim,
    start_smaller,
)
from cordee.schedule.cycle.settle import settle, wake
from cordee.schedule.cycle.turns import next_turn_us
from cordee.schedule.state.state import State
from cordee.schedule.state.waiting import LineKey


def run(state: State, now_us: int) -> Draft:
    """Run one cycle: change the state by what follows now, and return what was decided."""
    draft = new_draft(state, now_us)
    state.nodes.release(now_us)
    settle(state, draft)
    if not state.shutting_down:
        _recall(state, draft)
        if state.waiting.count or state.agenda.returning:
            earmark(state, draft)
            _try_in_order(state, draft)
            _remember(state, draft)
        grow(state, draft)
    wake(state, draft)
    return draft


def _try_in_order(state: State, draft: Draft) -> None:
    """Try the heads of the lines, the best turn first; backfill from a line whose head found nothing."""
    heads = order(state, draft)
    while heads:
        head = heads[0]
        if head.line is None:
            _try_outside_lines(state, draft, head.turn)
            heapq.heappop(heads)
            continue
        turn = _current_turn(state, draft, head)
        if turn == head.turn:
            turn = _try_head(state, draft, head)
        if turn is not None:
            heapq.heapreplace(heads, Head(turn, head.line, draft.turns.version))
            continue
        heapq.heappop(heads)
        line = state.waiting.lines.get(head.line)
        if line is not None:
            backfill(state, draft, line)


def _try_outside_lines(state: State, draft: Draft, turn: Turn) -> None:
    """Find something for a job that takes back its queue's quota, or restart one that was resized or moved."""
    _in_turn(state, draft, turn.job_id, _try if turn.takes_back else restart)
    draft.turns.version += 1


def _current_turn(state: State, draft: Draft, head: Head) -> Turn | None:
    """Return the turn that the line of a head has now; None if no job of the line is left to try."""
    if head.version == draft.turns.version:
        return head.turn
    return _turn_of_line(state, draft, head.line)


def _try_head(state: State, draft: Draft, head: Head) -> Turn | None:
    """Find something for the head of a line; return the next turn of the line, None if the line has no more turns."""
    goes_on = _in_turn(state, draft, head.turn.job_id, _try)
    return _turn_of_line(state, draft, head.line) if goes_on else None


def _turn_of_line(state: State, draft: Draft, key: LineKey | None) -> Turn | None:
    line = None if key is None else state.waiting.lines.get(key)
    return None if line is None else head_of(state, draft, line)


def _try(state: State, draft: Draft, job_id: JobId) -> bool:
    """Find something for a waiting job; return whether the job behind it in its line could still find something."""
    job = nominate(state, draft, job_id)
    if job is None:
        return True
    if not job.pools:
        return False
    if resume(state, draft, job):
        return True
    refusal = refusal_of(state, draft, job.record)
    if (
        start_or_claim(state, draft, job, refusal)
        or make_room(state, draft, job, refusal)
        or start_smaller(state, draft, job)
    ):
        return True
    if refusal is None:
        reserve(state, draft, job)
        if job.is_new:
            draft.failed.lines.add(job.line)
    return job.is_new


def _in_turn(state: State, draft: Draft, job_id: JobId, step: Step) -> bool:
    """Run a step for a job, then restart the jobs that were shrunk for it, in the order in which they were placed."""
    goes_on = guarded(state, draft, job_id, step)
    for shrunk in draft.turns.followers.pop(job_id, ()):
        guarded(state, draft, shrunk, restart)
        draft.turns.version += 1
    return goes_on


def _recall(state: State, draft: Draft) -> None:
    """Take over the failed searches of the last cycle that still hold."""
    draft.kinds = frozenset(state.nodes.free.kinds)
    draft.failed.preemptions = state.failed_searches.at(state.changes.gains, draft.now_us)
    draft.failed.placements.update(draft.failed.preemptions.placements)


def _remember(state: State, draft: Draft) -> None:
    """Keep the failed searches for the next cycle, but no shape that found no place only because GPUs are kept."""
    searches = draft.failed.preemptions
    is_kept = draft.claims or draft.reservations or draft.closed or state.policy.spares
    searches.placements = frozenset() if is_kept else frozenset(draft.failed.placements)
    searches.until_us = next_turn_us(state, draft.now_us)
    draft.wake(searches.until_us)
