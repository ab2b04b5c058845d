"""The scheduling cycle: from a state to the events that follow now. Read the steps of `Cycle.run` aloud.

It works on the state itself under `what_if`, so that each step sees what the steps before it did. `decide` leaves the
state as it found it, for who only asks; `enact` lets its caller write the events down, and what they changed stays.
"""

import heapq
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from operator import itemgetter

from cordee.events import AttemptPlaced, Event, Job, Lease, NoticeReason
from cordee.ids import JobId
from cordee.schedule.bounds import Refusal
from cordee.schedule.entry import Kind, mask_of
from cordee.schedule.free import FreeIndex
from cordee.schedule.grow import grown, worth_us
from cordee.schedule.held import Held, held_by
from cordee.schedule.lifecycle import notice, settle, wake_us
from cordee.schedule.overdue import gpus_left, overdue
from cordee.schedule.place import need_of, place, pools
from cordee.schedule.policy import Policy
from cordee.schedule.preempt import insists_us
from cordee.schedule.push import Pushing, Room
from cordee.schedule.records import JobRecord, Phase
from cordee.schedule.reserve import Reservation, reserve
from cordee.schedule.row import is_spent
from cordee.schedule.running import NEVER
from cordee.schedule.share import level
from cordee.schedule.state import State
from cordee.schedule.turns import next_turn_us
from cordee.schedule.vain import Vain
from cordee.schedule.view import Pool
from cordee.schedule.waiting import Alike, Line, Shape, shape_of


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
        as_decided = all(one is other for one, other in zip(written, cycle.events, strict=False))
        if written and as_decided:
            cycle.let_go()
            state.journal.keep()
    if not as_decided:  # the clock went back while it was decided
        for event in written:
            state.apply(event)
    if not imagined:  # what holds inside somebody's `what_if` says nothing of what is
        state.rest = None if cycle.errors else rest
        state.vain = cycle.vain
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


@dataclass(slots=True)
class Cycle:
    """One run of the cycle and what it has set aside so far."""

    state: State
    now_us: int
    events: list[Event] = field(default_factory=list)
    errors: list[tuple[JobId, Exception]] = field(default_factory=list)
    wake_at_us: int | None = None
    claims: dict[JobId, tuple[Lease, ...]] = field(default_factory=dict)  # of gangs whose GPUs are being vacated
    counted: list[tuple[Job, Held]] = field(default_factory=list)  # of claims, to their queues
    reserved: dict[Kind, Reservation] = field(default_factory=dict)
    refusals: dict[JobId, Refusal] = field(default_factory=dict)  # of those whom their queue keeps from starting
    overdue: frozenset[JobId] = field(init=False)  # they waited too long, and go first
    pushing: Pushing = field(init=False)
    _kinds: tuple[Kind, ...] = ()
    _pools: dict[tuple[object, ...], tuple[Pool, ...]] = field(default_factory=dict)
    _full: set[Shape] = field(default_factory=set)  # there is no place for these
    _no_room: set[Shape] = field(default_factory=set)  # nor where GPUs are being vacated
    vain: Vain = field(default_factory=Vain)  # nor by making room
    _passed: set[JobId] = field(default_factory=set)  # considered
    _spoken: dict[JobId, list[Lease]] = field(default_factory=dict)  # what leaves for whom
    _shut: set[Kind] = field(default_factory=set)  # where nobody passes who waits, by the rule of strict order
    _shares: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of queues
    _moves: int = 0  # what may have changed whose turn it is, or who is the head of a line

    def __post_init__(self) -> None:
        left_gpus = partial(gpus_left, self.state.policy, self.state.running, self.state.quotas)
        self.overdue = overdue(self.state.waiting, self.state.jobs, left_gpus, self.now_us)

    def run(self) -> None:
        """The whole cycle."""
        state = self.state
        state.release(self.now_us)
        # 1. Settle: attempts whose shares ended, deadlines, limits, stops, the server going down.
        for job_id in sorted(self._due()):
            self._guarded(job_id, self._settle)
        if not state.draining:
            self.pushing = Pushing(state, self.now_us, self.overdue)
            self.vain = state.vain.at(state.gains, self.now_us)
            if state.waiting.count or state.returning:
                # 2. Take the heads of the lines in the order of tiers, shares and standing.
                # 3. For each: place the whole gang, or claim what is being vacated, or make room for it, or
                # 4. reserve for the first that waits; those after it are backfilled around it.
                self._kinds = tuple(sorted(state.index.kinds))
                self._speak()
                self._take_turns()
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
        if state.quotas.queues:
            self._wake(state.quotas.wake_us(self.now_us))

    def _due(self) -> set[JobId]:
        state = self.state
        due = set(state.attempts) if state.draining else set()
        over = bisect_right(state.limits, self.now_us, key=itemgetter(0))
        due.update(job_id for _, job_id in state.limits[:over])
        if state.quotas.queues:
            spent = {(each.queue, each.grace_us): each for each in (one.job for one in state.attempts.values())}
            spent = {key: each for key, each in spent.items() if state.quotas.spent(each, self.now_us)}
            if spent:
                due.update(
                    job_id for job_id, one in state.attempts.items() if (one.job.queue, one.job.grace_us) in spent
                )
        return due | state.attention.keys()

    def _emit(self, event: Event) -> None:
        self.state.apply(event)
        self.events.append(event)

    def _wake(self, at_us: int | None) -> None:
        if at_us is not None and (self.wake_at_us is None or at_us < self.wake_at_us):
            self.wake_at_us = at_us

    def _guarded(self, job_id: JobId, step: Callable[[JobId], bool]) -> bool:
        """An error on one job leaves no trace of the step and does not stop the cycle."""
        mark, emitted, counted = self.state.mark(), len(self.events), len(self.counted)
        try:
            return step(job_id)
        except Exception as error:
            self.state.take_back(mark)
            del self.events[emitted:], self.counted[counted:]
            self._moves += 1
            self.claims.pop(job_id, None)
            self.errors.append((job_id, error))
            return True

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
        heap += [(turn, None, 0) for job_id in self.state.owed if (turn := self._owed(job_id)) is not None]
        heapq.heapify(heap)
        while heap:
            turn, alike, moves = heap[0]
            if alike is None:
                self._guarded(turn[-1], self._consider if turn[0] < 0 else self._return)
                self._moves += 1
                heapq.heappop(heap)
                continue
            line = lines.get(alike)
            again = turn if moves == self._moves else None if line is None else self._head(line)
            if line is not None and again == turn:
                goes_on = self._guarded(turn[-1], self._consider)
                line = lines.get(alike)
                again = self._head(line) if line is not None and goes_on else None
            if again is not None:
                heapq.heapreplace(heap, (again, alike, self._moves))
                continue
            heapq.heappop(heap)
            if line is not None:
                self._backfill(line)

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

    # -- one waiting job -------------------------------------------------------------------------------------

    def _consider(self, job_id: JobId) -> bool:
        """Whether those behind it in its line could still find something."""
        record = self.state.jobs[job_id]
        self._passed.add(job_id)
        candidates = self._candidates(record.job)
        if self._shut:  # nobody passes whoever waits first, wherever that may start
            candidates = tuple(pool for pool in candidates if self._shut.isdisjoint(pool))
        if not candidates:
            return False
        if record.size is not None and job_id in self.state.returning:  # at its size, also if it waited too long
            self._return(job_id)
            if job_id in self.state.attempts or job_id in self.claims:
                return True
        refusal = self._refusal(record)
        if refusal is None and self._find(record, candidates):
            return True
        if refusal is not None and refusal.short_milli is not None and refusal.short_milli <= 0:
            # Enough has notice for its queue to admit it: meanwhile its place is kept.
            leases = self._vacated(record, shape_of(record.job), candidates)
            if leases is not None:
                self._claim(record.job, leases)
                return True
        made = self._make_room(record, candidates, refusal)
        if made or self._start_smaller(record, candidates):
            return True
        if refusal is None:
            self._reserve(record, candidates)
        # Who has only just begun to wait has not tried everything yet; those behind it perhaps may.
        return self.now_us < record.waits_since_us + self.state.policy.push_after_us

    def _find(self, record: JobRecord, candidates: tuple[Pool, ...]) -> bool:
        """Whether there is a place for it, or one that is being vacated."""
        shape = shape_of(record.job)
        if shape not in self._full:
            if self._start(record, candidates):
                return True
            self._full.add(shape)
        leases = self._vacated(record, shape, candidates) if self.state.vacating else None
        if leases is not None:
            self._claim(record.job, leases)
        return leases is not None

    def _speak(self) -> None:
        """What leaves for somebody who waits is his, and others look at it only if nothing else will do.

        Else one could choose what leaves for another, who would have to look anew.
        """
        state = self.state
        for name, leaving in state.vacating.items():
            mask = 0
            for lease, job in leaving:
                for_job = self._leaves_for(job.job_id)
                if for_job is not None and state.nodes[name].stays:
                    mask |= mask_of(lease.gpus)
                    self._spoken.setdefault(for_job, []).append(lease)
            if mask:
                state.speak_for(name, mask)

    def _leaves_for(self, victim: JobId) -> JobId | None:
        """Who waits for a leaving attempt's GPUs."""
        given = self.state.attempts[victim].notice
        job_id = None if given is None else given.for_job
        return job_id if job_id is not None and self.state.jobs[job_id].phase is Phase.QUEUED else None

    def _vacated(self, record: JobRecord, shape: Shape, candidates: tuple[Pool, ...]) -> tuple[Lease, ...] | None:
        """Its place where GPUs are being vacated: for it, for nobody, or if need be for those behind it."""
        state, own = self.state, self._spoken.pop(record.job.job_id, [])
        for lease in own:
            state.speak_for(lease.node, state.spoken[lease.node] & ~mask_of(lease.gpus))
        if shape in self._no_room and not own:
            return None
        leases = self._place(state.soon, record.job, candidates)
        if leases is None and self._spoken and self._could_hold(record.job, candidates):
            leases = self._place(state.vacated, record.job, candidates)
        if leases is None:
            self._no_room.add(shape)
        return leases

    def _could_hold(self, job: Job, candidates: tuple[Pool, ...]) -> bool:
        """Whether there are nodes enough if everything that is being vacated is counted: a quick look."""
        running = self.state.running
        for pool in candidates:
            need = need_of(self.state.index, job, pool)
            if need is not None:
                free = running.node_free[: len(running.node_names)][running.of_pool(pool)]
                if int((free // need.unit).sum()) >= need.units:
                    return True
        return False

    def _candidates(self, job: Job) -> tuple[Pool, ...]:
        key = (job.gpu_name, job.capacity)
        if key not in self._pools:
            self._pools[key] = pools(job, self._kinds)
        return self._pools[key]

    def _refusal(self, record: JobRecord, gpus: int | None = None) -> Refusal | None:
        """Why its queue keeps it from starting."""
        if not self.state.quotas.queues:
            return None
        refusal = self.state.quotas.admits(record.job, self.now_us, gpus)
        if refusal is not None and gpus is None:
            self.refusals[record.job.job_id] = refusal
            self._wake(refusal.until_us)
        return refusal

    def _place(
        self, index: FreeIndex, job: Job, candidates: tuple[Pool, ...], gpus: int | None = None
    ) -> tuple[Lease, ...] | None:
        policy = self.state.policy
        return place(
            index,
            job,
            candidates,
            gpus=gpus,
            avoid=self.state.went_down,
            spares=0 if job.job_id in self.state.returning else policy.spares,
            packing=policy.packing,
        )

    def _start(self, record: JobRecord, candidates: tuple[Pool, ...], gpus: int | None = None) -> bool:
        # Whoever starts, in its turn, around a reservation or again after a loss: its queue has to admit it.
        leases = None
        if self._refusal(record, gpus) is None:
            leases = self._place(self.state.index, record.job, candidates, gpus)
        if leases is None:
            return False
        job_id, epoch = record.job.job_id, record.epoch + 1
        self._emit(AttemptPlaced(at_us=self.now_us, job_id=job_id, epoch=epoch, leases=leases))
        self._shares.clear()
        self._moves += 1
        return True

    def _start_smaller(self, record: JobRecord, candidates: tuple[Pool, ...]) -> bool:
        """An elastic job takes what there is; it grows later."""
        sizes = record.job.sizes if self.state.policy.resize else ()
        return bool(sizes) and any(self._start(record, candidates, size) for size in sizes if size < record.job.gpus)

    def _return(self, job_id: JobId) -> bool:
        """Who was resized or moved starts again, or what it needs for that is kept while it leaves."""
        record, attempt = self.state.jobs[job_id], self.state.attempts.get(job_id)
        candidates = self._candidates(record.job)
        if attempt is not None and not attempt.leaving:
            return True  # it was owed as well, and has started
        if attempt is None:
            if self._start(record, candidates, record.size) or self._refusal(record, record.size) is not None:
                return True
            gpus = record.size
        else:
            gpus = attempt.notice.gpus if attempt.notice is not None and attempt.notice.gpus else attempt.gpus
        leases = self._place(self.state.soon, record.job, candidates, gpus)
        if leases is not None:
            self._passed.add(job_id)
            self._claim(record.job, leases)
        return True

    def _claim(self, job: Job, leases: tuple[Lease, ...]) -> None:
        """Keep GPUs for it of which some are still being vacated; to its queue they count as held already."""
        self.state.claim(leases)
        self.claims[job.job_id] = leases
        if self.state.quotas.queues:
            prices = [self.state.nodes[lease.node].node.micro_usd_per_gpu_hour for lease in leases]
            held = held_by(job, leases, prices)
            self._count(job, held, +1)
            self.counted.append((job, held))
            self._shares.clear()
            self._moves += 1

    def _count(self, job: Job, held: Held, sign: int) -> None:
        change, undo = (self.state.quotas.promise, self.state.quotas.withdraw)[::sign]
        change(job, held, self.now_us)
        self.state.journal.note(undo, job, held, self.now_us)

    def let_go(self) -> None:
        """Nobody keeps a GPU between cycles: what was claimed or spoken for is open again, what was decided stays."""
        self.state.open_all()
        for job, held in self.counted:
            self._count(job, held, -1)

    def _make_room(self, record: JobRecord, candidates: tuple[Pool, ...], refusal: Refusal | None) -> bool:
        """Push others aside, or move them, and keep the room for the gang."""
        if self.state.policy.victims == "none" or record.job.gpu_milli < 1000:
            return False
        job, power = record.job, self.pushing.power(record)
        # Whom it may push depends on its queue as well, and on its owner where that one's limit holds it.
        of_queue = (job.queue, "" if refusal is None else job.owner) if self.state.quotas.queues else ("", "")
        shape = (shape_of(job), of_queue)
        if self.vain.reaches(shape, power):
            return False
        room = self.pushing.push(record, power, candidates, refusal)
        if room is None and refusal is None:
            room = self.pushing.move(record, candidates)
        if room is None:
            self.vain.add(shape, power)
            return False
        self._carry_out(record.job, room)
        return True

    def _carry_out(self, job: Job, room: Room) -> None:
        for event in room.events:
            self._emit(event)
        self._claim(job, room.leases)
        for other, leases in room.others:
            self._claim(other, leases)
        self._no_room.clear()

    def _grow(self, job_id: JobId) -> bool:
        attempt = self.state.attempts[job_id]
        if attempt.leaving or attempt.shares:
            return True
        worth = worth_us(attempt, self.state.jobs[job_id], self.state.policy)
        if self.now_us < worth:
            self._wake(worth)
            return True
        leases = grown(self.state, attempt, self._candidates_of(attempt.job), self.now_us)
        if leases is not None:
            gpus = sum(len(lease.gpus) for lease in leases)
            self._emit(notice(attempt, NoticeReason.RESIZE, self.now_us, gpus=gpus))
            self._claim(attempt.job, leases)
        return True

    def _candidates_of(self, job: Job) -> tuple[Pool, ...]:
        self._kinds = self._kinds or tuple(sorted(self.state.index.kinds))
        return self._candidates(job)

    # -- reservation and backfill ----------------------------------------------------------------------------

    def _reserve(self, record: JobRecord, candidates: tuple[Pool, ...]) -> None:
        """Keep what the gang will have first, if it is the first that waits there and can ever fit."""
        policy = self.state.policy
        if policy.backfill == "none":
            ever = (pool for pool in candidates if need_of(self.state.index, record.job, pool) is not None)
            self._shut.update(kind for pool in ever for kind in pool)
        if policy.backfill != "easy" or (policy.guards and record.job.job_id not in self.overdue):
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


def _sooner(one: Reservation, other: Reservation) -> bool:
    return (NEVER if one.starts_by_us is None else one.starts_by_us) < (
        NEVER if other.starts_by_us is None else other.starts_by_us
    )
