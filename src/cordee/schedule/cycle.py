"""The scheduling cycle: settle, order, try, reserve, grow, wake. Read `run` and `_try` aloud.

Each step is a function over the state and the draft of the decision. The steps work on the state itself, inside the
caller's what-if, so that each of them sees what those before it decided.
"""

import heapq

from cordee.ids import JobId
from cordee.schedule.backfill import backfill, reserve
from cordee.schedule.claims import earmark
from cordee.schedule.draft import Draft, Step, guarded, new_draft
from cordee.schedule.grow import grow
from cordee.schedule.heads import head_of, order
from cordee.schedule.lifecycle import settle, wake
from cordee.schedule.nominate import make_room, nominate, refusal_of, restart, resume, start_or_claim, start_smaller
from cordee.schedule.state import State
from cordee.schedule.turns import next_turn_us


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
    lines, turns, heads = state.waiting.lines, draft.turns, order(state, draft)
    while heads:
        turn, key, version = heads[0]
        if key is None:
            _in_turn(state, draft, turn[-1], _try if turn[0] < 0 else restart)
            turns.version += 1
            heapq.heappop(heads)
            continue
        line = lines.get(key)
        current = turn if version == turns.version else None if line is None else head_of(state, draft, line)
        if line is not None and current == turn:
            goes_on = _in_turn(state, draft, turn[-1], _try)
            line = lines.get(key)
            current = head_of(state, draft, line) if line is not None and goes_on else None
        if current is not None:
            heapq.heapreplace(heads, (current, key, turns.version))
            continue
        heapq.heappop(heads)
        if line is not None:
            backfill(state, draft, line)


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
    """Run a step for a job, then restart those that were shrunk for it: in the order in which they got their places."""
    goes_on = guarded(state, draft, job_id, step)
    for shrunk in draft.turns.followers.pop(job_id, ()):
        guarded(state, draft, shrunk, restart)
        draft.turns.version += 1
    return goes_on


def _recall(state: State, draft: Draft) -> None:
    """Take over from the last cycle the failed searches that nothing has changed since."""
    draft.kinds = frozenset(state.nodes.free.kinds)
    draft.failed.preemptions = state.failed_searches.at(state.changes.gains, draft.now_us)
    draft.failed.placements.update(draft.failed.preemptions.placements)


def _remember(state: State, draft: Draft) -> None:
    """Keep the failed searches for the next cycle; a shape may have found no place only because GPUs are kept."""
    searches = draft.failed.preemptions
    is_kept = draft.claims or draft.reservations or draft.closed or state.policy.spares
    searches.placements = frozenset() if is_kept else frozenset(draft.failed.placements)
    searches.until_us = next_turn_us(state, draft.now_us)
    draft.wake(searches.until_us)
