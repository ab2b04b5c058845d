"""The scheduling cycle: from a state to the events that follow now. Read the steps of `Cycle.run` aloud.

`decide` works on the state itself under `what_if`, so that each step sees what the steps before it did, and leaves the
state as it found it. Whoever calls it commits the events and applies them.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from cordee.events import AttemptPlaced, Event, KillOrdered, Lease, NoticeReason
from cordee.ids import JobId
from cordee.schedule.entry import Kind
from cordee.schedule.lifecycle import notice, settle, wake_us
from cordee.schedule.place import fits, need_of, place, pools
from cordee.schedule.policy import Policy
from cordee.schedule.preempt import insists_us
from cordee.schedule.records import JobRecord
from cordee.schedule.reserve import Reservation, reserve
from cordee.schedule.running import NEVER
from cordee.schedule.share import level
from cordee.schedule.state import State
from cordee.schedule.victims import Power, Victims
from cordee.schedule.view import Pool
from cordee.schedule.waiting import Line, Shape, shape_of
from cordee.units import US_PER_S

TURNS_EVERY_US = 60 * US_PER_S
"""Turns within a tier change by time alone at whole multiples of this, so that they cost few cycles."""


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


def decide(state: State, now_us: int, policy: Policy | None = None) -> Decision:
    """Everything that follows now; the state is left as it was. Without a policy, by the rules the state has."""
    if policy is not None:
        state.use(policy)
    if state.rest is not None and state.rest.holds(state.news, now_us):
        return Decision(events=(), wake_at_us=state.rest.wake_at_us)
    with state.what_if():
        cycle = Cycle(state, now_us)
        cycle.run()
        news = state.news
    if not cycle.errors:
        state.rest = Rest(news, now_us, cycle.wake_at_us)
    return Decision(events=tuple(cycle.events), wake_at_us=cycle.wake_at_us, errors=tuple(cycle.errors))


@dataclass(frozen=True, slots=True)
class Rest:
    """There is nothing to decide at this count of news, from one time to another."""

    news: int
    from_us: int
    wake_at_us: int | None

    def holds(self, news: int, now_us: int) -> bool:
        """Whether nothing that matters has happened since."""
        return news == self.news and self.from_us <= now_us < (NEVER if self.wake_at_us is None else self.wake_at_us)


Turn = tuple[int, int, int, int, int, int, str]
"""Tier; 0 waited too long, 1 starts again resized, 2 all others; priority, share, standing, submission, job."""


@dataclass(slots=True)
class Cycle:
    """One run of the cycle and what it has set aside so far."""

    state: State
    now_us: int
    events: list[Event] = field(default_factory=list)
    errors: list[tuple[JobId, Exception]] = field(default_factory=list)
    wake_at_us: int | None = None
    claims: dict[JobId, tuple[Lease, ...]] = field(default_factory=dict)  # of gangs whose GPUs are being vacated
    reserved: dict[Kind, Reservation] = field(default_factory=dict)
    _kinds: tuple[Kind, ...] = ()
    _victims: Victims = field(init=False)
    _pools: dict[tuple[object, ...], tuple[Pool, ...]] = field(default_factory=dict)
    _full: set[Shape] = field(default_factory=set)  # there is no place for these
    _no_room: set[Shape] = field(default_factory=set)  # nor where GPUs are being vacated
    _in_vain: dict[Shape, list[Power]] = field(default_factory=dict)  # nor by pushing
    _passed: set[JobId] = field(default_factory=set)  # considered

    def run(self) -> None:
        """The whole cycle."""
        self.state.release(self.now_us)
        # 1. Settle: attempts whose shares ended, deadlines, limits, stops, the server going down.
        for job_id in sorted(self._due()):
            self._guarded(job_id, self._settle)
        if not self.state.draining and self.state.waiting.count:
            self._kinds = tuple(sorted(self.state.index.kinds))
            self._victims = Victims(self.state, self.now_us)
            # 2. Take the heads of the lines in the order of tiers, shares and standing.
            # 3. For each: place the whole gang, or claim what is being vacated, or find the victims that make room, or
            # 4. reserve for the first that waits; those after it are backfilled around it.
            self._take_turns()
            self._wake_for_turns()
        # 5. Say when time alone will change the answer.
        failed = {job_id for job_id, _ in self.errors}  # what failed now fails again at once; it waits for news
        for job_id in self.state.attention.keys() & self.state.attempts.keys() - failed:
            self._wake(wake_us(self.state.attempts[job_id]))
        seen = self.state.attention.keys() | failed
        self._wake(next((at_us for at_us, job_id in self.state.limits if job_id not in seen), None))
        self._wake(next((until_us for until_us, _ in self.state.quarantines), None))

    def _due(self) -> set[JobId]:
        due = set(self.state.attempts) if self.state.draining else set()
        over = bisect_right(self.state.limits, self.now_us, key=itemgetter(0))
        due.update(job_id for _, job_id in self.state.limits[:over])
        return due | self.state.attention.keys()

    def _emit(self, event: Event) -> None:
        self.state.apply(event)
        self.events.append(event)

    def _wake(self, at_us: int | None) -> None:
        if at_us is not None and (self.wake_at_us is None or at_us < self.wake_at_us):
            self.wake_at_us = at_us

    def _guarded(self, job_id: JobId, step: Callable[[JobId], bool]) -> bool:
        """An error on one job leaves no trace of the step and does not stop the cycle."""
        mark, emitted = self.state.mark(), len(self.events)
        try:
            return step(job_id)
        except Exception as error:
            self.state.take_back(mark)
            del self.events[emitted:]
            self.claims.pop(job_id, None)
            self.errors.append((job_id, error))
            return True

    def _settle(self, job_id: JobId) -> bool:
        settle(self.state, job_id, self.now_us, self._emit)
        return True

    # -- turns -----------------------------------------------------------------------------------------------

    def _take_turns(self) -> None:
        """One line after the other by its head; a line whose head finds nothing is done, but for backfilling."""
        heap = [(*turn, alike) for alike, line in self.state.waiting.lines.items() if (turn := self._head(line))]
        heapq.heapify(heap)
        while heap:
            job_id, alike = JobId(heap[0][-2]), heap[0][-1]
            line = self.state.waiting.lines[alike]
            if self._guarded(job_id, self._consider):
                line = self.state.waiting.lines.get(alike, line)
                turn = self._head(line)
            else:
                self._backfill(line)
                turn = None
            if turn is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (*turn, alike))

    def _head(self, line: Line) -> Turn | None:
        """The turn of the first of a line that was not considered: who has waited too long, then the others."""
        for due_us, job_id in line.ages:
            if due_us > self.now_us:
                break
            if job_id not in self._passed:
                return (line.tier, 0, due_us, 0, 0, 0, job_id)
        place = next((each for each in line.places if each[-1] not in self._passed), None)
        return None if place is None else (line.tier, 2, -line.priority, 0, *place)

    def turn(self, record: JobRecord) -> Turn:
        """Where a waiting job stands in the order of all."""
        waiting, job_id = self.state.waiting, record.job.job_id
        line = waiting.line(job_id)
        if waiting.has_aged(job_id, self.now_us):
            return (line.tier, 0, waiting.ages_us(job_id), 0, 0, 0, job_id)
        return (line.tier, 2, -line.priority, 0, waiting.standing(job_id), record.submitted_us, job_id)

    def turns(self) -> Iterator[Turn]:
        """Of everybody who waits, in no order."""
        return (self.turn(self.state.jobs[job_id]) for job_id in self.state.waiting.job_ids())

    def _consider(self, job_id: JobId) -> bool:
        """Whether the job has, or will have, what it needs; if not, those behind it in its line do not either."""
        record = self.state.jobs[job_id]
        self._passed.add(job_id)
        shape = shape_of(record.job)
        candidates = self._candidates(record)
        if self.state.policy.backfill == "none":  # nobody passes whoever waits first, wherever that may start
            candidates = tuple(pool for pool in candidates if not any(kind in self.reserved for kind in pool))
        if not candidates:
            return False
        if shape not in self._full:
            if self._start(record, candidates):
                return True
            self._full.add(shape)
        if self.state.vacating and shape not in self._no_room:
            if self._claim(record, candidates):
                return True
            self._no_room.add(shape)
        if self._push(record, shape, candidates):
            return True
        self._reserve(record, candidates)
        return False

    def _candidates(self, record: JobRecord) -> tuple[Pool, ...]:
        key = (record.job.gpu_name, record.job.capacity)
        if key not in self._pools:
            self._pools[key] = pools(record.job, self._kinds)
        return self._pools[key]

    def _start(self, record: JobRecord, candidates: tuple[Pool, ...]) -> bool:
        leases = place(self.state.index, record.job, candidates, packing=self.state.policy.packing)
        if leases is None:
            return False
        job_id, epoch = record.job.job_id, record.epoch + 1
        self._emit(AttemptPlaced(at_us=self.now_us, job_id=job_id, epoch=epoch, leases=leases))
        return True

    def _claim(self, record: JobRecord, candidates: tuple[Pool, ...]) -> bool:
        """Keep GPUs for it of which some are still being vacated."""
        leases = place(self.state.soon, record.job, candidates, packing=self.state.policy.packing)
        if leases is None:
            return False
        self.state.claim(leases)
        self.claims[record.job.job_id] = leases
        return True

    # -- preemption ------------------------------------------------------------------------------------------

    def power(self, record: JobRecord) -> Power:
        """Whom a waiting job may push."""
        job, waiting = record.job, self.state.waiting
        standing = None
        if self.state.policy.takes_turns:
            standing = -1 if waiting.has_aged(job.job_id, self.now_us) else waiting.standing(job.job_id)
        return Power(level(job.tier), job.priority, standing)

    def _push(self, record: JobRecord, shape: Shape, candidates: tuple[Pool, ...]) -> bool:
        """Give notice to those whose leaving makes room, and keep the room for the gang."""
        if self.state.policy.victims == "none" or record.job.gpu_milli < 1000:
            return False
        power = self.power(record)
        if any(vain.reaches(power) for vain in self._in_vain.get(shape, ())):
            return False
        for pool in candidates:
            chosen = self._choose(record, power, pool)
            if chosen is not None:
                for victim in chosen:
                    self._notify(victim, record)
                self._no_room.clear()
                claimed = self._claim(record, (pool,))
                assert claimed, f"{record.job.job_id} does not fit where its victims leave"
                return True
        self._in_vain.setdefault(shape, []).append(power)
        return False

    def _choose(self, record: JobRecord, power: Power, pool: Pool) -> tuple[JobId, ...] | None:
        """The victims in a pool; where leaving GPUs are not enough of a place (CPU, islands), the search goes on."""
        need = need_of(self.state.index, record.job, pool)
        if need is None:
            return None
        closed: set[str] = set()
        for _ in range(8):
            chosen = self._victims.find(need, pool, power, closed)
            if chosen is None:
                return None
            mark, emitted = self.state.mark(), len(self.events)
            for victim in chosen:
                self._notify(victim, record)
            enough = fits(self.state.soon, record.job, pool)
            self.state.take_back(mark)
            del self.events[emitted:]
            if enough:
                return chosen
            closed.update(lease.node for victim in chosen for lease in self.state.attempts[victim].held)
        return None

    def _notify(self, victim: JobId, record: JobRecord) -> None:
        attempt, job = self.state.attempts[victim], record.job
        same = attempt.job.tier is job.tier
        reason = NoticeReason.SHARE if same else NoticeReason.PREEMPT
        warned = self.state.policy.notice
        self._emit(notice(attempt, reason, self.now_us, for_job=job.job_id, gone_us=None if warned else self.now_us))
        if not warned:
            why = f"preempted without notice for {job.job_id}"
            self._emit(KillOrdered(at_us=self.now_us, job_id=victim, epoch=attempt.epoch, why=why))

    # -- reservation and backfill ----------------------------------------------------------------------------

    def _reserve(self, record: JobRecord, candidates: tuple[Pool, ...]) -> None:
        """Keep what the gang will have first, if it is the first that waits there and can ever fit."""
        if self.state.policy.backfill == "fit":
            return
        best: Reservation | None = None
        for pool in candidates:
            if any(kind in self.reserved for kind in pool):
                continue
            need = need_of(self.state.index, record.job, pool)
            found = None if need is None else reserve(self.state, record.job, pool, need, self.now_us)
            if found is not None and (best is None or _sooner(found, best)):
                best = found
        if best is not None:
            self.state.claim(best.kept)
            for kind in best.pool:
                self.reserved[kind] = best

    def _backfill(self, line: Line) -> None:
        """Those of a line that may start where GPUs are kept: they are out of the way in time."""
        if self.state.policy.backfill != "easy":
            return
        for reservation in {id(each): each for each in self.reserved.values()}.values():
            if reservation.kept:
                self._around(reservation, line)

    def _around(self, reservation: Reservation, line: Line) -> None:
        if not self._may_be_harmless(reservation, line):
            return
        place_ = line.places[0] if line.places else None
        while place_ is not None:
            record = self.state.jobs[place_[-1]]
            after = line.behind(place_)
            if record.job.job_id not in self.claims and self._harmless(reservation, record):
                if not self._guarded(record.job.job_id, lambda job_id: self._start_on_kept(reservation, job_id)):
                    return
            place_ = after

    def _start_on_kept(self, reservation: Reservation, job_id: JobId) -> bool:
        record = self.state.jobs[job_id]
        candidates = tuple(pool for pool in self._candidates(record) if set(pool) <= set(reservation.pool))
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
        if below and insists_us(job, record.epoch + 1) == 0 and not self._is_spent(record):
            return True
        until_us = reservation.starts_by_us
        return until_us is not None and self.now_us + self.state.waiting.length_us(job.job_id) <= until_us

    def _is_spent(self, record: JobRecord) -> bool:
        return record.job.preemptions_max is not None and record.pushes >= record.job.preemptions_max

    # -- time ------------------------------------------------------------------------------------------------

    def _wake_for_turns(self) -> None:
        """When somebody who waits may push somebody whom it may not push now."""
        state, now_us = self.state, self.now_us
        if not state.waiting.count or state.policy.victims == "none":
            return
        for line in state.waiting.lines.values():
            later = bisect_right(line.ages, now_us, key=itemgetter(0))
            if later < len(line.ages) and line.ages[later][0] < NEVER:
                self._wake(line.ages[later][0])
        rows = state.running.rows
        rests = rows["rests_until_us"][rows["live"]]
        rests = rests[(rests > now_us) & (rests < NEVER)]
        if rests.size:
            self._wake(int(rests.min()))
        if state.policy.takes_turns:
            shares = rows["shares_from_us"][rows["live"]]
            shares = shares[(shares > now_us) & (shares < NEVER)]
            times = [int(shares.min())] if shares.size else []
            if state.policy.order in ("service", "las"):
                crosses_us = state.running.crosses_us(now_us, state.policy.levels_gpu_us)
                times += [] if crosses_us is None else [crosses_us]
            if times:
                self._wake(-(-min(times) // TURNS_EVERY_US) * TURNS_EVERY_US)


def _sooner(one: Reservation, other: Reservation) -> bool:
    return (NEVER if one.starts_by_us is None else one.starts_by_us) < (
        NEVER if other.starts_by_us is None else other.starts_by_us
    )
