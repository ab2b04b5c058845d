"""The order of a cycle: the turn of each waiting job, and the head of each line.

Turns compare by: tier; overdue jobs, then jobs that restart, then the others; priority; the fair share of
the queue; standing; time of submission; job id. A job that takes back its queue's quota comes before all others: if a
higher tier borrowed the quota again, other attempts would have to leave once more.
"""

import heapq
from collections.abc import Iterator
from typing import NamedTuple

from cordee.events import NoticeReason
from cordee.ids import JobId
from cordee.schedule.cycle.draft import Draft
from cordee.schedule.state.order import level
from cordee.schedule.state.records import JobRecord, Phase
from cordee.schedule.state.state import State
from cordee.schedule.state.waiting import Line, LineKey

_TAKES_BACK = -1
_OVERDUE, _RESTARTS, _OTHER = range(3)
_new = tuple.__new__


class Turn(NamedTuple):
    """The turn of a waiting job; turns compare field by field, and the smallest goes first.

    Attributes:
        level: of its tier; -1 if the job takes back its queue's quota.
        urgency: 0 if the job is overdue, 1 if it restarts, 2 for all others.
        precedence: minus its priority; of overdue jobs, the time since which they wait; of jobs that take back, their
            submission.
        fair_share: the key of its queue.
        rank: the one that people gave it, before and behind the others of its queue.
        standing: in its line.
    """

    level: int
    urgency: int
    precedence: int
    fair_share: tuple[int, ...]
    rank: int
    standing: int
    submitted_us: int
    job_id: JobId

    @property
    def takes_back(self) -> bool:
        """Return whether the job takes back its queue's quota."""
        return self.level == _TAKES_BACK


class Head(NamedTuple):
    """The best turn of a line.

    Attributes:
        line: its key; None for a job outside the lines.
        version: of the turns when this one was computed.
    """

    turn: Turn
    line: LineKey | None
    version: int


def order(state: State, draft: Draft) -> list[Head]:
    """Return a heap of the heads of all lines, of the jobs that restart, and of those that take back."""
    heads: list[Head] = []
    for key, line in state.waiting.lines.items():
        turn = head_of(state, draft, line)
        if turn is not None:
            heads.append(Head(turn, key, draft.turns.version))
    for job_id in state.agenda.restarting:
        turn = Turn(level(state.jobs[job_id].job.tier), _RESTARTS, 0, (), 0, 0, 0, job_id)
        heads.append(Head(turn, None, 0))
        preemptor = shrinks_for(state, job_id)
        if preemptor is not None:
            draft.turns.shrunk_for.setdefault(preemptor, []).append(job_id)
    heads += [Head(turn, None, 0) for job_id in state.agenda.entitled if (turn := _entitled(state, job_id)) is not None]
    heapq.heapify(heads)
    return heads


def head_of(state: State, draft: Draft, line: Line) -> Turn | None:
    """Return the turn of the first job of a line that was not considered: overdue jobs first, then the others."""
    overdue, considered = draft.turns.overdue_of, draft.turns.considered
    if overdue:
        for job_id in overdue.get(line.key, ()):
            if job_id not in considered and state.jobs[job_id].phase is Phase.QUEUED:
                return _turn_in_line(state, draft, job_id, line)
    for place in line.places:
        if place.job_id not in considered:
            return _turn_in_line(state, draft, place.job_id, line)
    return None


def turn_of(state: State, draft: Draft, record: JobRecord) -> Turn:
    """Return the turn of a waiting job."""
    job_id = record.job.job_id
    first = _entitled(state, job_id) if job_id in state.agenda.entitled else None
    return first or _turn_in_line(state, draft, job_id, state.waiting.line(job_id))


def turns(state: State, draft: Draft) -> Iterator[Turn]:
    """Yield the turns of all waiting jobs, in no order."""
    return (turn_of(state, draft, state.jobs[job_id]) for job_id in state.waiting.job_ids())


def leaves_for(state: State, victim: JobId) -> JobId | None:
    """Return the waiting job for which an attempt leaves its GPUs."""
    given = state.attempts[victim].notice
    job_id = None if given is None else given.for_job
    return job_id if job_id is not None and state.jobs[job_id].phase is Phase.QUEUED else None


def shrinks_for(state: State, job_id: JobId) -> JobId | None:
    """Return the waiting job for which an attempt leaves a part of its GPUs; it continues on the rest or elsewhere."""
    attempt = state.attempts.get(job_id)
    given = None if attempt is None else attempt.notice
    return leaves_for(state, job_id) if given is not None and given.reason is NoticeReason.RESIZE else None


def _entitled(state: State, job_id: JobId) -> Turn | None:
    record = state.jobs.get(job_id)
    if record is None or record.phase is not Phase.QUEUED or not state.quotas.entitled(record.job):
        return None
    return Turn(_TAKES_BACK, 0, record.submitted_us, (), 0, 0, 0, job_id)


def _turn_in_line(state: State, draft: Draft, job_id: JobId, line: Line) -> Turn:
    waiting = state.waiting
    if job_id in draft.turns.overdue:
        return Turn(line.tier, _OVERDUE, waiting.age(job_id), (), 0, 0, 0, job_id)
    fair_share = _fair_share(state, draft, line.queue) if state.quotas.queues else ()
    place = waiting.place(job_id)
    return _new(Turn, (line.tier, _OTHER, -line.priority, fair_share, *place))  # without the call of `Turn` itself


def _fair_share(state: State, draft: Draft, queue: str) -> tuple[int, ...]:
    """Return the key of a queue's fair share: the queue with the smallest goes first."""
    fair_shares = draft.turns.fair_shares
    if queue not in fair_shares:
        fair_shares[queue] = state.quotas.share(queue, draft.now_us)
    return fair_shares[queue]
