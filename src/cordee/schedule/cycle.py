"""The scheduling cycle: from a state to the events that follow now. Read the steps of `Cycle.run` aloud.

Here are the steps and whose turn it is; what one job gets when it is its turn is consider.py's.

It works on the state itself under `what_if`, so that each step sees what the steps before it did. `decide` leaves the
state as it found it, for who only asks; `enact` lets its caller write the events down, and what they changed stays.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import is_, itemgetter

from cordee.events import Event, Lease
from cordee.ids import JobId
from cordee.schedule.consider import Considering
from cordee.schedule.lifecycle import settle, wake_us
from cordee.schedule.order import level
from cordee.schedule.placement.reserve import Reservation
from cordee.schedule.policy import Policy
from cordee.schedule.preemption.loss import insists_us
from cordee.schedule.preemption.make_room import Pushing
from cordee.schedule.preemption.row import is_spent
from cordee.schedule.preemption.running import NEVER
from cordee.schedule.records import JobRecord, Phase
from cordee.schedule.state import State
from cordee.schedule.turns import next_turn_us
from cordee.schedule.waiting import Alike, Line


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows from a state at a time.

    Attributes:
        events: to commit and to apply, in this order.
        wake_at_us: when time alone will change the answer; None if only a new event can.
        errors: jobs on which a step failed, and how; the rest of the decision stands.
    """

    events: tuple[Event, ...]
    wake_at_us: int | None = None
    errors: tuple[tuple[JobId, Exception], ...] = ()


Write = Callable[[Sequence[Event]], Sequence[Event]]
"""Writes events down, and says which they were."""


def decide(state: State, now_us: int, policy: Policy | None = None) -> Decision:
    """Everything that follows now; the state is left as it was. Without a policy, by the rules the state has."""
    return _decided(state, now_us, policy, None)


def enact(state: State, now_us: int, policy: Policy | None, write: Write) -> Decision:
    """Everything that follows now, written down by the caller and applied; if `write` raises, nothing has happened.

    The events are applied once, as they are decided, and not taken back and applied again, unless `write` answers with
    others: then it wrote them down with other times, and those are applied.
    """
    return _decided(state, now_us, policy, write)


def _decided(state: State, now_us: int, policy: Policy | None, write: Write | None) -> Decision:
    if policy is not None:
        state.use(policy)
    if state.rest is not None and state.rest.holds(state, now_us):
        return Decision(events=(), wake_at_us=state.rest.wake_at_us)
    imagined = state.journal.keeps
    with state.what_if():
        cycle = Cycle(state, now_us)
        cycle.run()
        rest = Rest(state.news, state.newest, now_us, cycle.wake_at_us)
        written = write(cycle.events) if write is not None and cycle.events else []
        as_decided = all(map(is_, written, cycle.events))
        if written and as_decided:
            cycle.let_go()
            state.journal.keep()
    if not as_decided:  # the clock went back while it was decided
        for event in written:
            state.apply(event)
    if not imagined:  # what holds inside somebody's `what_if` says nothing of what is
        state.rest = None if cycle.errors else rest
        state.vain = cycle.vain
        if cycle.events and not written:
            state.vain.full = frozenset()  # What was placed is there again.
    return Decision(events=tuple(written or cycle.events), wake_at_us=cycle.wake_at_us, errors=tuple(cycle.errors))


@dataclass(frozen=True, slots=True)
class Rest:
    """There is nothing to decide once this event was the newest, as the so-manieth, from one time to another."""

    news: int
    newest: Event | None
    from_us: int
    wake_at_us: int | None

    def holds(self, state: State, now_us: int) -> bool:
        """Whether nothing that matters has happened since."""
        if state.news != self.news or state.newest != self.newest:
            return False
        return self.from_us <= now_us < (NEVER if self.wake_at_us is None else self.wake_at_us)


Turn = tuple[int, int, int, tuple[int, ...], int, int, JobId]
"""Tier (-1: is given back what was borrowed); 0 waited too long, 1 starts again at once, 2 all others; priority; share
of its queue; standing; submission; job."""


class Cycle(Considering):
    """One run of the cycle."""

    __slots__ = ()

    def run(self) -> None:
        """The whole cycle."""
        state = self.state
        state.release(self.now_us)
        # 1. Settle: attempts whose shares ended, deadlines, limits, stops, the server going down.
        for job_id in sorted(self._due()):
            self._guarded(job_id, self._settle)
        if not state.shutting_down:
            self.pushing = Pushing(state, self.now_us, self.overdue)
            self.vain = state.vain.at(state.gains, self.now_us)
            self._full.update(self.vain.full)
            if state.waiting.count or state.returning:
                # 2. Take the heads of the lines in the order of tiers, shares and standing.
                # 3. For each: place the whole gang, or claim what is being vacated, or make room for it, or
                # 4. reserve for the first that waits; those after it are backfilled around it.
                self._kinds = tuple(sorted(state.index.kinds))
                self._speak()
                self._take_turns()
                kept = self.claims or self.reserved or self._shut or state.policy.spares
                self.vain.full = frozenset() if kept else frozenset(self._full)
                self.vain.until_us = next_turn_us(state, self.now_us)
                self._wake(self.vain.until_us)
            # 5. Let elastic jobs grow into what nobody waits for.
            if state.elastic and state.policy.resize and not state.waiting.count:
                for job_id in sorted(state.elastic):
                    self._guarded(job_id, self._grow)
        # 6. Say when time alone will change the answer.
        failed = {job_id for job_id, _ in self.errors}  # what failed now fails again at once; it waits for news
        for job_id in state.attention:
            if job_id in state.attempts and job_id not in failed:
                self._wake(wake_us(state.attempts[job_id]))
        seen = state.attention.keys() | failed
        self._wake(next((at_us for at_us, job_id in state.limits if job_id not in seen), None))
        self._wake(next((until_us for until_us, _ in state.quarantines), None))
        if state.quotas.has_days:
            self._wake(state.quotas.wake_us(self.now_us))

    def _due(self) -> set[JobId]:
        state = self.state
        due = set(state.attempts) if state.shutting_down else set()
        over = bisect_right(state.limits, self.now_us, key=itemgetter(0))
        due.update(job_id for _, job_id in state.limits[:over])
        if state.quotas.has_days:
            spent = {(each.queue, each.grace_us): each for each in (one.job for one in state.attempts.values())}
            spent = {key: each for key, each in spent.items() if state.quotas.spent(each, self.now_us)}
            if spent:
                due.update(
                    job_id for job_id, one in state.attempts.items() if (one.job.queue, one.job.grace_us) in spent
                )
        return due | state.attention.keys()

    def _settle(self, job_id: JobId) -> bool:
        settle(self.state, job_id, self.now_us, self._emit)
        return True

    # -- turns -----------------------------------------------------------------------------------------------

    def _take_turns(self) -> None:
        """One line after the other by its head; a line whose head finds nothing is done, but for backfilling."""
        lines = self.state.waiting.lines
        heap: list[tuple[Turn, Alike | None, int]] = [
            (turn, alike, self._moves) for alike, line in lines.items() if (turn := self._head(line)) is not None
        ]
        for job_id in self.state.returning:
            heap.append(((level(self.state.jobs[job_id].job.tier), 1, 0, (), 0, 0, job_id), None, 0))
            for_job = self._shrinks_for(job_id)
            if for_job is not None:
                self._shrink.setdefault(for_job, []).append(job_id)
        heap += [(turn, None, 0) for job_id in self.state.owed if (turn := self._owed(job_id)) is not None]
        heapq.heapify(heap)
        while heap:
            turn, alike, moves = heap[0]
            if alike is None:
                self._in_turn(turn[-1], self._consider if turn[0] < 0 else self._return)
                self._moves += 1
                heapq.heappop(heap)
                continue
            line = lines.get(alike)
            again = turn if moves == self._moves else None if line is None else self._head(line)
            if line is not None and again == turn:
                goes_on = self._in_turn(turn[-1], self._consider)
                line = lines.get(alike)
                again = self._head(line) if line is not None and goes_on else None
            if again is not None:
                heapq.heapreplace(heap, (again, alike, self._moves))
                continue
            heapq.heappop(heap)
            if line is not None:
                self._backfill(line)

    def _in_turn(self, job_id: JobId, step: Callable[[JobId], bool]) -> bool:
        """Behind a job come those that were resized for it, if not before: as when they got notice."""
        goes_on = self._guarded(job_id, step)
        for resized in self._shrink.pop(job_id, ()):
            self._guarded(resized, self._return)
            self._moves += 1
        return goes_on

    def _owed(self, job_id: JobId) -> Turn | None:
        """Before everybody, so that what was pushed for it is not borrowed again by a higher tier, and pushed again."""
        record = self.state.jobs.get(job_id)
        if record is None or record.phase is not Phase.QUEUED or not self.state.quotas.entitled(record.job):
            return None
        return (-1, 0, record.submitted_us, (), 0, 0, job_id)

    def _head(self, line: Line) -> Turn | None:
        """The turn of the first of a line that was not considered: who has waited too long, then the others."""
        for due_us, job_id in line.ages:
            if due_us > self.now_us:
                break
            if job_id in self.overdue and job_id not in self._passed:
                return self._turn_in_line(job_id, line)
        for place_ in line.places:
            if place_[-1] not in self._passed:
                return self._turn_in_line(place_[-1], line)
        return None

    def _share(self, queue: str) -> tuple[int, ...]:
        if not self.state.quotas.queues:
            return ()
        if queue not in self._shares:
            self._shares[queue] = self.state.quotas.share(queue, self.now_us)
        return self._shares[queue]

    def turn(self, record: JobRecord) -> Turn:
        """Where a waiting job stands in the order of all."""
        job_id = record.job.job_id
        owed = self._owed(job_id) if job_id in self.state.owed else None
        return owed or self._turn_in_line(job_id, self.state.waiting.line(job_id))

    def _turn_in_line(self, job_id: JobId, line: Line) -> Turn:
        waiting = self.state.waiting
        if job_id in self.overdue:
            return (line.tier, 0, waiting.ages_us(job_id), (), 0, 0, job_id)
        place_ = (waiting.standing(job_id), self.state.jobs[job_id].submitted_us, job_id)
        return (line.tier, 2, -line.priority, self._share(line.queue), *place_)

    def turns(self) -> Iterator[Turn]:
        """Of everybody who waits, in no order."""
        return (self.turn(self.state.jobs[job_id]) for job_id in self.state.waiting.job_ids())

    # -- backfill -----------------------------------------------------------------------------------------

    def _backfill(self, line: Line) -> None:
        """Those of a line that may start where GPUs are kept: they are out of the way in time."""
        if self.state.policy.backfill != "easy":
            return
        for reservation in {id(each): each for each in self.reserved.values()}.values():
            if reservation.kept and line.places:  # around the one before, all of the line may have started
                self._around(reservation, line)

    def _around(self, reservation: Reservation, line: Line) -> None:
        if not self._may_be_harmless(reservation, line):
            return
        place_ = line.places[0] if line.places else None
        while place_ is not None:
            record = self.state.jobs[place_[-1]]
            after = line.behind(place_)
            job_id = record.job.job_id
            if job_id not in self.claims and self._harmless(reservation, record):
                started = self._guarded(job_id, lambda job_id: self._start_on_kept(reservation, job_id))
                if not started:
                    return
            place_ = after

    def _start_on_kept(self, reservation: Reservation, job_id: JobId) -> bool:
        record = self.state.jobs[job_id]
        candidates = tuple(pool for pool in self._candidates(record.job) if set(pool) <= set(reservation.pool))
        if self._refusal(record) is not None:
            return False
        self.state.disclaim(reservation.kept)
        started = bool(candidates) and self._start(record, candidates)
        kept = []
        for lease in reservation.kept:
            entry = self.state.index.entries.get(lease.node)
            free = tuple(gpu for gpu in lease.gpus if entry is not None and entry.free >> gpu & 1)
            kept.append(Lease(node=lease.node, gpus=free))
        self.state.claim(kept)
        return started

    def _may_be_harmless(self, reservation: Reservation, line: Line) -> bool:
        if line.tier > level(reservation.job.tier):
            return True
        until_us = reservation.starts_by_us
        return until_us is not None and self.now_us + line.lengths[0][0] <= until_us

    def _harmless(self, reservation: Reservation, record: JobRecord) -> bool:
        """Whether a backfilled job is out of the way in time: it can be pushed at once, or it has ended."""
        job = record.job
        below = level(job.tier) > level(reservation.job.tier)
        if below and insists_us(job, record.epoch + 1) == 0 and not is_spent(record):
            return True
        until_us = reservation.starts_by_us
        return until_us is not None and self.now_us + self.state.waiting.length_us(job.job_id) <= until_us
