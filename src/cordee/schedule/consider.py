"""What one job gets when it is its turn: a place, a claim on what is being vacated, room that is made, a reservation.

Not whose turn it is, nor what follows from what was reported: that is cycle.py's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

from cordee.events import AttemptPlaced, Event, Job, Lease, NoticeReason
from cordee.ids import JobId
from cordee.schedule.grow import grown, worth_us
from cordee.schedule.lifecycle import notice
from cordee.schedule.overdue import gpus_left, overdue
from cordee.schedule.placement.entry import Kind, mask_of
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.place import need_of, place, pools
from cordee.schedule.placement.reserve import Reservation, reserve
from cordee.schedule.placement.view import Pool
from cordee.schedule.preemption.failed_searches import Vain
from cordee.schedule.preemption.make_room import Pushing, Room
from cordee.schedule.preemption.running import NEVER
from cordee.schedule.quota.bounds import Refusal
from cordee.schedule.quota.held import Held, held_by
from cordee.schedule.quota.quotas import Vacated
from cordee.schedule.records import JobRecord, Phase
from cordee.schedule.state import State
from cordee.schedule.waiting import Alike, Shape, shape_of


@dataclass(slots=True)
class Considering:
    """One run of the cycle, as far as single jobs go, and what it has set aside so far."""

    state: State
    now_us: int
    events: list[Event] = field(default_factory=list)
    errors: list[tuple[JobId, Exception]] = field(default_factory=list)
    wake_at_us: int | None = None
    claims: dict[JobId, tuple[Lease, ...]] = field(default_factory=dict)  # of gangs whose GPUs are being vacated
    counted: list[tuple[Job, Held, Vacated]] = field(default_factory=list)  # of claims, to their queues
    reserved: dict[Kind, Reservation] = field(default_factory=dict)
    refusals: dict[JobId, Refusal] = field(default_factory=dict)  # of those whom their queue keeps from starting
    overdue: frozenset[JobId] = field(init=False)  # they waited too long, and go first
    pushing: Pushing = field(init=False)
    _kinds: tuple[Kind, ...] = ()
    _pools: dict[tuple[object, ...], tuple[Pool, ...]] = field(default_factory=dict)
    _full: set[object] = field(default_factory=set)  # there is no place for these
    _no_room: set[Shape] = field(default_factory=set)  # nor where GPUs are being vacated
    vain: Vain = field(default_factory=Vain)  # nor by making room
    _hopeless: set[Alike] = field(default_factory=set)  # lines whose young found nothing, and nothing has changed that
    _passed: set[JobId] = field(default_factory=set)  # considered
    _spoken: dict[JobId, list[Lease]] = field(default_factory=dict)  # what leaves for whom
    _shrink: dict[JobId, list[JobId]] = field(default_factory=dict)  # who was resized for whom, and leaves
    _shut: set[Kind] = field(default_factory=set)  # where nobody passes who waits, by the rule of strict order
    _shares: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of queues
    _moves: int = 0  # what may have changed whose turn it is, or who is the head of a line

    def __post_init__(self) -> None:
        left_gpus = partial(gpus_left, self.state.policy, self.state.running, self.state.quotas)
        self.overdue = overdue(self.state.waiting, self.state.jobs, left_gpus, self.now_us)

    def let_go(self) -> None:
        """Nobody keeps a GPU between cycles: what was claimed or spoken for is open again, what was decided stays."""
        self.state.open_all()
        for job, held, vacated in self.counted:
            self._count(job, held, vacated, -1)

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

    # -- one waiting job ---------------------------------------------------------------------------------------

    def _consider(self, job_id: JobId) -> bool:
        """Whether those behind it in its line could still find something."""
        record = self.state.jobs[job_id]
        self._passed.add(job_id)
        # Who has only just begun to wait has not tried everything yet; those behind it perhaps may.
        young = self.now_us < record.waits_since_us + self.state.policy.preempt_after_us
        alike = self.state.waiting.alike(job_id)
        if young and alike in self._hopeless and job_id not in self._spoken and job_id not in self.state.returning:
            return True
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
            if young:
                self._hopeless.add(alike)
        return young

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

    def _candidates(self, job: Job) -> tuple[Pool, ...]:
        key = (job.gpu_name, job.capacity)
        if key not in self._pools:
            self._pools[key] = pools(job, self._kinds)
        return self._pools[key]

    def _candidates_of(self, job: Job) -> tuple[Pool, ...]:
        self._kinds = self._kinds or tuple(sorted(self.state.index.kinds))
        return self._candidates(job)

    def _refusal(self, record: JobRecord, gpus: int | None = None) -> Refusal | None:
        """Why its queue keeps it from starting."""
        if not self.state.quotas.queues:
            return None
        refusal = self.state.quotas.admits(record.job, self.now_us, gpus)
        if refusal is not None:
            self._wake(refusal.until_us)
            if gpus is None:
                self.refusals[record.job.job_id] = refusal
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
        self._holds_more()
        return True

    def _start_smaller(self, record: JobRecord, candidates: tuple[Pool, ...]) -> bool:
        """An elastic job takes what there is; it grows later."""
        sizes = record.job.sizes if self.state.policy.resize else ()
        return bool(sizes) and any(self._start(record, candidates, size) for size in sizes if size < record.job.gpus)

    def _return(self, job_id: JobId) -> bool:
        """Who was resized or moved starts again, or what it needs for that is kept while it leaves."""
        record, attempt = self.state.jobs[job_id], self.state.attempts.get(job_id)
        candidates = self._candidates(record.job)
        if job_id in self.claims or (attempt is not None and not attempt.leaving):
            return True  # it came behind who gains, or it was owed as well, and has started
        if attempt is None:
            if self._start(record, candidates, record.size) or self._refusal(record, record.size) is not None:
                return True
            gpus = record.size
        else:
            gpus = attempt.notice.gpus if attempt.notice is not None and attempt.notice.gpus else attempt.gpus
        leases = self._beside(job_id, candidates, gpus)
        if leases is None:
            leases = self._place(self.state.soon, record.job, candidates, gpus)
        if leases is not None:
            self._passed.add(job_id)
            self._claim(record.job, leases)
        return True

    def _beside(self, job_id: JobId, candidates: tuple[Pool, ...], gpus: int | None) -> tuple[Lease, ...] | None:
        """The place of who was resized beside that of the job that gains, as both had when it got notice.

        It may go on on a part of what it leaves, and what it leaves is spoken for: else others would take the place.
        """
        state, for_job = self.state, self._shrinks_for(job_id)
        if for_job is None or for_job not in self._spoken:
            return None
        mark, other = state.mark(), state.jobs[for_job].job
        for lease in self._spoken[for_job]:
            state.speak_for(lease.node, state.spoken[lease.node] & ~mask_of(lease.gpus))
        leases, theirs = None, self._place(state.soon, other, self._candidates(other))
        if theirs is not None:
            state.claim(theirs)
            leases = self._place(state.soon, state.jobs[job_id].job, candidates, gpus)
        state.take_back(mark)
        return leases

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

    # -- what is being vacated ---------------------------------------------------------------------------------

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

    def _shrinks_for(self, job_id: JobId) -> JobId | None:
        """Who waits for a part of what an attempt leaves, to go on on the rest or elsewhere."""
        attempt = self.state.attempts.get(job_id)
        given = None if attempt is None else attempt.notice
        return self._leaves_for(job_id) if given is not None and given.reason is NoticeReason.RESIZE else None

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
                if int((free[free >= need.unit] // need.unit).sum()) >= need.units:
                    return True
        return False

    def _claim(self, job: Job, leases: tuple[Lease, ...]) -> None:
        """Keep GPUs for it of which some are still being vacated; to its queue they count as held already."""
        self.state.claim(leases)
        self.claims[job.job_id] = leases
        if self.state.quotas.queues:
            prices = [self.state.nodes[lease.node].node.micro_usd_per_gpu_hour for lease in leases]
            held, vacated = held_by(job, leases, prices), tuple(self._still_held(leases))
            self._count(job, held, vacated, +1)
            self.counted.append((job, held, vacated))
            self._holds_more()

    def _still_held(self, leases: tuple[Lease, ...]) -> Iterator[tuple[str, int]]:
        """By jobs that leave: their queues, and how much of these leases."""
        for lease in leases:
            for gpu in lease.gpus:
                left = lease.milli
                for leaving, job in self.state.vacating.get(lease.node, ()):
                    held = min(left, leaving.milli) if gpu in leaving.gpus else 0
                    if held:
                        yield job.queue, held
                        left -= held

    def _holds_more(self) -> None:
        """Of its queue: that changes shares, and may change who is refused and who may push whom."""
        self._shares.clear()
        self._moves += 1
        if self.state.quotas.rules:
            self._hopeless.clear()

    def _count(self, job: Job, held: Held, vacated: Vacated, sign: int) -> None:
        quotas = self.state.quotas
        change, undo = (quotas.promise, quotas.withdraw) if sign > 0 else (quotas.withdraw, quotas.promise)
        change(job, held, self.now_us, vacated)
        self.state.journal.note(undo, job, held, self.now_us, vacated)

    # -- room --------------------------------------------------------------------------------------------------

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
        self._hopeless.clear()

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


def _sooner(one: Reservation, other: Reservation) -> bool:
    return (NEVER if one.starts_by_us is None else one.starts_by_us) < (
        NEVER if other.starts_by_us is None else other.starts_by_us
    )
