"""The scheduling cycle: settle, try the waiting jobs in order, grow, wake.

Each part is a function over the state and the draft of the decision. It applies its events to the state at once, inside
a transaction that the caller commits or rolls back, so later parts see them.

Waiting jobs stand in lines: one for each tier, priority, queue and shape, and for each owner where users have a limit.
If the head of a line cannot start, no job behind it can. Unlike a ClusterQueue of Kueue, a line gives one job after
another within a cycle. A job that has victims is assumed on its place while they leave, as kube-scheduler nominates a
node. Under the default policy only an overdue gang reserves GPUs; other jobs are backfilled around it.
"""

import heapq

from cordee.events import AttemptPlaced
from cordee.ids import JobId
from cordee.schedule.cycle.backfill import backfill, reserve
from cordee.schedule.cycle.claims import earmark
from cordee.schedule.cycle.draft import Draft, Step, find_overdue, guarded, new_draft
from cordee.schedule.cycle.grow import grow
from cordee.schedule.cycle.heads import Head, Turn, head_of, order
from cordee.schedule.cycle.nominate import (
    make_room,
    nominate,
    passes_over,
    refusal_of,
    restart,
    start_or_assume,
    start_smaller,
)
from cordee.schedule.cycle.settle import settle, wake
from cordee.schedule.cycle.turns import next_turn
from cordee.schedule.state.state import State
from cordee.schedule.state.waiting import LineKey


def run(state: State, now_us: int) -> Draft:
    """Run one cycle: apply what is decided now to the state, and return it."""
    draft = new_draft(state, now_us)
    state.nodes.end_quarantines(now_us)
    settle(state, draft)
    if not state.shutting_down:
        draft.kinds = frozenset(state.nodes.free.kinds)
        draft.failed_searches = state.failed_searches.valid(state.changes.gains, now_us)
        if state.waiting.count or state.agenda.restarting:
            find_overdue(state, draft)
            draft.tried.free.update(draft.failed_searches.placements)
            earmark(state, draft)
            _try_in_order(state, draft)
            _limit_failed_searches(state, draft)
            if draft.reservations and _takes_allowance(state, draft):
                draft.wake_by(now_us)
        grow(state, draft)
    wake(state, draft)
    return draft


def _try_in_order(state: State, draft: Draft) -> None:
    """Try the heads of the lines, the best turn first; backfill from each line whose jobs cannot start otherwise."""
    heads = order(state, draft)
    while heads:
        turn, line, version = heads[0]
        if line is None:  # A job outside the lines: it takes back its queue's quota, or restarts.
            heapq.heappop(heads)
            step = _try_job if turn.takes_back else restart
            _schedule_one(state, draft, turn.job_id, step)
            draft.turns.version += 1
            continue
        # The turn with which the line stays in the heap; without one it leaves.
        current: Turn | None = turn
        if version != draft.turns.version:  # Another job may be the head now, or its turn may come later.
            current = _head_of_line(state, draft, line)
        if current == turn:
            if passes_over(state, draft, turn.job_id, line) and turn.job_id not in draft.turns.shrunk_for:
                draft.turns.considered.add(turn.job_id)
                try_next = True
            else:
                try_next = _schedule_one(state, draft, turn.job_id, _try_job)
            current = _head_of_line(state, draft, line) if try_next else None
        if current is not None:
            heapq.heapreplace(heads, Head(current, line, draft.turns.version))
            continue
        heapq.heappop(heads)
        if line in state.waiting.lines:
            backfill(state, draft, state.waiting.lines[line])


def _head_of_line(state: State, draft: Draft, key: LineKey) -> Turn | None:
    """Return the turn of the next job of a line; None if each of its jobs was considered, or none is left."""
    line = state.waiting.lines.get(key)
    return None if line is None else head_of(state, draft, line)


def _schedule_one(state: State, draft: Draft, job_id: JobId, step: Step) -> bool:
    """Run the step for a job, then restart the jobs that were shrunk for it, in their order of placement.

    Returns the result of the step.
    """
    result = guarded(state, draft, job_id, step)
    for shrunk in draft.turns.shrunk_for.pop(job_id, ()):
        guarded(state, draft, shrunk, restart)
        draft.turns.version += 1
    return result


def _try_job(state: State, draft: Draft, job_id: JobId) -> bool:
    """Try to get GPUs for a waiting job; return whether the next job of its line is tried as well.

    The ways are tried in a fixed order; their costs are not compared:

    1. Restart it at its new size, if it was resized, even if it is overdue.
    2. Start it on free GPUs, or assume it on GPUs that are being vacated.
    3. Preempt or move other jobs, and assume it on their GPUs.
    4. Start it on fewer GPUs, if it is elastic.
    5. Reserve GPUs for it, if the policy reserves any for it.

    The line ends when a job finds nothing, because the jobs behind it have its shape. Only behind a job that was queued
    recently it goes on: a job that has waited longer may preempt more.
    """
    job = nominate(state, draft, job_id)
    if job is None:  # Another job of the line, queued recently as well, found nothing.
        return True
    if not job.pools:  # Each is closed, or has no GPU that the job may use.
        return False
    if job.record.size is not None and job_id in state.agenda.restarting and restart(state, draft, job_id):
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
        if job.queued_recently:
            draft.tried.lines.add(job.line)
    return job.queued_recently


def _takes_allowance(state: State, draft: Draft) -> bool:
    """Return whether a job that waited long was placed in its ordinary turn, where it counts as overdue all the same.

    It takes a part of the allowance then, so that a gang for which GPUs are reserved may be overdue no more. The next
    cycle, at the same moment, gives its GPUs to others.
    """
    running = state.running
    placed = (each.job_id for each in draft.events if isinstance(each, AttemptPlaced))
    rows = (running.row_of.get(job_id) for job_id in placed if job_id not in draft.turns.overdue)
    return any(row is not None and running.rows.flags["overdue"][row] for row in rows)


def _limit_failed_searches(state: State, draft: Draft) -> None:
    """Set how long the failed searches hold, and wake at the next change of turns, which invalidates those for victims.

    A shape without a place stays in them only if no GPU was withheld from it: none was assumed or reserved, no pool was
    closed, and no nodes are spare.
    """
    searches = draft.failed_searches
    gpus_withheld = draft.assumed or draft.reservations or draft.closed or state.policy.spares
    searches.placements = frozenset() if gpus_withheld else frozenset(draft.tried.free)
    turn = next_turn(state, draft.now_us)
    searches.until_us = turn.at_us
    searches.keep(lambda key, scope: turn.is_behind(key[0], scope))
    draft.wake_by(searches.until_us)
