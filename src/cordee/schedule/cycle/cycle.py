"""The scheduling cycle: settle, order, try, reserve, grow, wake.

Each step is a function over the state and the draft of the decision. A step applies its events to the state at once,
inside the caller's what-if, so the steps after it see them.

Waiting jobs stand in lines, one for each tier, priority, queue and shape, and the head of a line is tried for all of
it. For a reader who knows Kueue: these are the heads of its cluster queues; `nominate` looks up where a head may start;
`assume` counts a job as placed while its victims leave. As in Slurm, the first gang that finds nothing gets a
reservation, and other jobs are backfilled around it.
"""

import heapq

from cordee.ids import JobId
from cordee.schedule.cycle.backfill import backfill, reserve
from cordee.schedule.cycle.claims import earmark
from cordee.schedule.cycle.draft import Draft, Step, guarded, new_draft
from cordee.schedule.cycle.grow import grow
from cordee.schedule.cycle.heads import Head, Turn, head_of, order
from cordee.schedule.cycle.nominate import make_room, nominate, refusal_of, restart, start_or_assume, start_smaller
from cordee.schedule.cycle.settle import settle, wake
from cordee.schedule.cycle.turns import next_turn_us
from cordee.schedule.state.state import State
from cordee.schedule.state.waiting import LineKey


def run(state: State, now_us: int) -> Draft:
    """Run one cycle: change the state by what follows now, and return what was decided."""
    draft = new_draft(state, now_us)
    state.nodes.end_quarantines(now_us)
    settle(state, draft)
    if not state.shutting_down:
        draft.kinds = frozenset(state.nodes.free.kinds)
        draft.failed_searches = state.failed_searches.at(state.changes.gains, now_us)
        draft.tried.free.update(draft.failed_searches.placements)
        if state.waiting.count or state.agenda.returning:
            earmark(state, draft)
            _try_in_order(state, draft)
            _keep_failed_searches(state, draft)
        grow(state, draft)
    wake(state, draft)
    return draft


def _try_in_order(state: State, draft: Draft) -> None:
    """Try the heads of the lines, the best turn first; backfill from a line whose head found nothing."""
    heads = order(state, draft)
    while heads:
        turn, line, version = heads[0]
        if line is None:  # A job that takes back its queue's quota, or one that was resized or moved.
            heapq.heappop(heads)
            _take_turn(state, draft, turn.job_id, _try_job if turn.takes_back else restart)
            draft.turns.version += 1
            continue
        next_turn: Turn | None = turn
        if version != draft.turns.version:  # Another job may be the head now, or its turn may come later.
            next_turn = _head_of_line(state, draft, line)
        if next_turn == turn:
            goes_on = _take_turn(state, draft, turn.job_id, _try_job)
            next_turn = _head_of_line(state, draft, line) if goes_on else None
        if next_turn is not None:
            heapq.heapreplace(heads, Head(next_turn, line, draft.turns.version))
            continue
        heapq.heappop(heads)
        if line in state.waiting.lines:
            backfill(state, draft, state.waiting.lines[line])


def _head_of_line(state: State, draft: Draft, key: LineKey) -> Turn | None:
    """Return the turn of the next job of a line; None if each of its jobs had its turn, or none is left."""
    line = state.waiting.lines.get(key)
    return None if line is None else head_of(state, draft, line)


def _take_turn(state: State, draft: Draft, job_id: JobId, step: Step) -> bool:
    """Give a job its turn: run the step, then restart the jobs that were shrunk for it, in their order of placement.

    Returns the result of the step.
    """
    goes_on = guarded(state, draft, job_id, step)
    for shrunk in draft.turns.followers.pop(job_id, ()):
        guarded(state, draft, shrunk, restart)
        draft.turns.version += 1
    return goes_on


def _try_job(state: State, draft: Draft, job_id: JobId) -> bool:
    """Try to get GPUs for a waiting job, from the cheapest way to the dearest; return whether its line goes on.

    1. Start it on free GPUs, or assume it on GPUs that are being vacated.
    2. Preempt or move other jobs, and assume it on their GPUs.
    3. Start it on fewer GPUs, if it is elastic.
    4. Reserve GPUs for it, if it is the first gang that found none.

    The line ends when a job finds nothing, because the jobs behind it have its shape; but a job behind a new one may
    have waited long enough to preempt.
    """
    job = nominate(state, draft, job_id)
    if job is None:
        return True
    if not job.pools:
        return False
    # A resized job starts at its new size, even if it is overdue.
    if job.record.size is not None and job_id in state.agenda.returning and restart(state, draft, job_id):
        return True
    refusal = refusal_of(state, draft, job.record)
    if (
        start_or_assume(state, draft, job, refusal)
        or make_room(state, draft, job, refusal)
        or start_smaller(state, draft, job)
    ):
        return True
    if refusal is None:
        reserve(state, draft, job)
        if job.is_new:
            draft.tried.lines.add(job.line)
    return job.is_new


def _keep_failed_searches(state: State, draft: Draft) -> None:
    """Keep the searches that failed for the next cycle, and wake when the next change of turns makes them void.

    A shape without a place is kept only if no GPU was kept from it by a claim, a closed pool or spare nodes.
    """
    searches = draft.failed_searches
    has_claims = draft.assumed or draft.reservations or draft.closed or state.policy.spares
    searches.placements = frozenset() if has_claims else frozenset(draft.tried.free)
    searches.until_us = next_turn_us(state, draft.now_us)
    draft.wake_by(searches.until_us)
