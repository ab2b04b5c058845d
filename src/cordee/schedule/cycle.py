"""The scheduling cycle: from a state to the events that follow now. Read the steps of `Cycle.run` aloud.

`decide` works on the state itself under `what_if`, so that each step sees what the steps before it did, and leaves the
state as it found it. Whoever calls it commits the events and applies them.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

from cordee.events import AttemptPlaced, Event, Job, Lease, NoticeReason
from cordee.ids import JobId
from cordee.schedule.entry import Kind
from cordee.schedule.lifecycle import notice, settle, wake_us
from cordee.schedule.place import place, pools
from cordee.schedule.policy import Policy
from cordee.schedule.preempt import Cost, Victim, can_be_pushed, charge, choose, insists_us
from cordee.schedule.share import is_below, level
from cordee.schedule.state import Attempt, JobRecord, State
from cordee.schedule.view import Pool

_OURS = Policy()


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


def decide(state: State, now_us: int, policy: Policy = _OURS) -> Decision:
    """Everything that follows now under these rules; the state is left as it was."""
    with state.what_if():
        cycle = Cycle(state, now_us, policy)
        cycle.run()
    return Decision(events=tuple(cycle.events), wake_at_us=cycle.wake_at_us, errors=tuple(cycle.errors))


@dataclass(slots=True, kw_only=True)
class Reservation:
    """What becomes free of a pool is kept for the first gang that waits for it."""

    job: Job
    pool: Pool
    starts_by_us: int | None  # when running jobs' limits will have made room; None: nobody promised
    extra: int  # GPUs that will then be free beyond what the gang needs


@dataclass(slots=True)
class Cycle:
    """One run of the cycle and what it has set aside so far."""

    state: State
    now_us: int
    policy: Policy
    events: list[Event] = field(default_factory=list)
    errors: list[tuple[JobId, Exception]] = field(default_factory=list)
    wake_at_us: int | None = None
    waits: dict[JobId, Pool] = field(default_factory=dict)  # gangs whose GPUs are being vacated
    kept: dict[Kind, int] = field(default_factory=dict)  # free GPUs for those gangs
    vacating: dict[Kind, int] = field(default_factory=dict)  # GPUs on their way out that nobody has claimed
    reserved: dict[Kind, Reservation] = field(default_factory=dict)
    _kinds: tuple[Kind, ...] = ()
    _victims: dict[tuple[Pool, int], list[Victim]] = field(default_factory=dict)
    _in_vain: set[tuple[object, ...]] = field(default_factory=set)
    _lowest: int | None = None  # level of the lowest tier that runs; what this cycle places is not looked at again

    def run(self) -> None:
        """The whole cycle."""
        # 1. Settle: attempts whose shares ended, deadlines, limits, stops, the server going down.
        for job_id in sorted(self._due()):
            self._guarded(job_id, self._settle)
        # 2. Take the waiting jobs in the order of tier, priority and submission.
        if not self.state.draining:
            self._kinds = tuple(sorted(self.state.index.kinds))
            self._count_vacating()
            for *_, job_id in list(self.state.queue):
                if self._nothing_left(self.state.jobs[job_id].job):
                    break
                # 3. For each: place the whole gang, or find the victims that make room, or
                # 4. reserve for the first that waits; those after it are backfilled around it.
                self._guarded(job_id, self._consider)
        # 5. Say when time alone will change the answer.
        failed = {job_id for job_id, _ in self.errors}  # what failed now fails again at once; it waits for news
        for job_id in self.state.attention.keys() & self.state.attempts.keys() - failed:
            self._wake(wake_us(self.state.attempts[job_id]))
        seen = self.state.attention.keys() | failed
        self._wake(next((at_us for at_us, job_id in self.state.limits if job_id not in seen), None))

    def spare(self, pool: Pool) -> int:
        """Free GPUs of a pool that no gang with leaving victims has claimed."""
        return sum(self.state.index.free(kind) - self.kept.get(kind, 0) for kind in pool)

    def on_the_way(self, pool: Pool) -> int:
        """GPUs of a pool that are being vacated and that no gang has claimed."""
        return sum(self.vacating.get(kind, 0) for kind in pool)

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

    def _guarded(self, job_id: JobId, step: Callable[[JobId], None]) -> None:
        """An error on one job leaves no trace of the step and does not stop the cycle."""
        mark, emitted = self.state.mark(), len(self.events)
        try:
            step(job_id)
        except Exception as error:
            self.state.take_back(mark)
            del self.events[emitted:]
            self.errors.append((job_id, error))

    def _settle(self, job_id: JobId) -> None:
        settle(self.state, job_id, self.now_us, self._emit)

    # -- one waiting job -------------------------------------------------------------------------------------

    def _consider(self, job_id: JobId) -> None:
        record = self.state.jobs[job_id]
        job = record.job
        insists = insists_us(job, record.epoch + 1) > 0
        alike = (level(job.tier), job.gpu_name, job.capacity, job.gpus, self._ends_by_us(record), insists)
        if alike in self._in_vain:
            return
        candidates = pools(job, self._kinds)
        if self._start(record, candidates) or self._push(job, candidates):
            return
        self._reserve(job, candidates)
        # A job that asks the same later in the order finds no more than this one did.
        self._in_vain.add(alike)

    def _start(self, record: JobRecord, candidates: tuple[Pool, ...]) -> bool:
        job = record.job
        leases = place(self.state.index, job, tuple(pool for pool in candidates if self._open(pool, record)))
        if leases is None:
            return False
        reservation = self.reserved.get(self._kind(leases[0]))
        if reservation is not None and not self._harmless(reservation, record):
            reservation.extra -= job.gpus
        epoch = record.epoch + 1
        self._emit(AttemptPlaced(at_us=self.now_us, job_id=job.job_id, epoch=epoch, leases=leases))
        return True

    def _open(self, pool: Pool, record: JobRecord) -> bool:
        """Whether the gang may start in the pool now."""
        if self.spare(pool) < record.job.gpus:
            return False
        if len(pool) > 1:
            return not any(self.kept.get(kind) or kind in self.reserved for kind in pool)
        reservation = self.reserved.get(pool[0])
        return reservation is None or self._harmless(reservation, record) or reservation.extra >= record.job.gpus

    def _harmless(self, reservation: Reservation, record: JobRecord) -> bool:
        """Whether a backfilled job is out of the way in time: it can be pushed at once, or its limit ends it."""
        job = record.job
        if is_below(job.tier, reservation.job.tier) and insists_us(job, record.epoch + 1) == 0:
            return True
        ends_us = self._ends_by_us(record)
        return ends_us is not None and reservation.starts_by_us is not None and ends_us <= reservation.starts_by_us

    def _ends_by_us(self, record: JobRecord) -> int | None:
        limit, grace = record.job.time_limit_us, record.job.grace_us
        return None if limit is None else self.now_us + max(limit, limit // 2 + grace) - record.used_us

    # -- preemption ------------------------------------------------------------------------------------------

    def _push(self, job: Job, candidates: tuple[Pool, ...]) -> bool:
        """Claim what is being vacated, and give notice to as many more as that takes."""
        best: tuple[Cost, int, int, Pool, tuple[Victim, ...]] | None = None
        for number, pool in enumerate(candidates):
            if any(kind in self.reserved for kind in pool):
                continue
            need = job.gpus - self.spare(pool) - self.on_the_way(pool)
            if need <= 0:
                self._claim(job, pool)
                return True
            chosen = self._choose(pool, job, need)
            if chosen is not None:
                cost = Cost(sum(v.cost.micro_usd for v in chosen), sum(v.cost.gpu_us for v in chosen))
                best = min(best or (cost, len(chosen), number, pool, chosen), (cost, len(chosen), number, pool, chosen))
        if best is None:
            return False
        for victim in best[-1]:
            self._preempt(victim, job)
        self._claim(job, best[-2])
        return True

    def _choose(self, pool: Pool, job: Job, need: int) -> tuple[Victim, ...] | None:
        key = (pool, level(job.tier))
        if key not in self._victims:
            self._victims[key] = self._find_victims(pool, job)
        victims = self._victims[key]
        if sum(victim.gpus for victim in victims) < need:
            return None
        return choose(victims, need)

    def _find_victims(self, pool: Pool, job: Job) -> list[Victim]:
        found = []
        for job_id, attempt in self.state.attempts.items():
            if not is_below(attempt.job.tier, job.tier):
                continue
            if can_be_pushed(attempt, self.now_us):
                gpus, cost = self._gpus_in(pool, attempt), charge(attempt, self.now_us)
                found.append(Victim(job_id=job_id, gpus=gpus, cost=cost, level=level(attempt.job.tier)))
            elif not attempt.leaving and attempt.started_us is not None:
                self._wake(attempt.started_us + insists_us(attempt.job, attempt.epoch))
        return found

    def _preempt(self, victim: Victim, job: Job) -> None:
        attempt = self.state.attempts[victim.job_id]
        self._emit(notice(attempt, NoticeReason.PREEMPT, self.now_us, for_job=job.job_id))
        self._vacate(attempt)
        for victims in self._victims.values():
            victims[:] = [each for each in victims if each.job_id != victim.job_id]

    def _claim(self, job: Job, pool: Pool) -> None:
        """What is free first, so that the gang starts as soon as it can, then what is being vacated."""
        self.waits[job.job_id] = pool
        gpus = job.gpus
        for kind in pool:
            taken = min(gpus, self.spare((kind,)))
            self.kept[kind] = self.kept.get(kind, 0) + taken
            gpus -= taken
        for kind in pool:
            taken = min(gpus, self.vacating.get(kind, 0))
            self.vacating[kind] = self.vacating.get(kind, 0) - taken
            gpus -= taken

    def _count_vacating(self) -> None:
        for job_id in self.state.attention:
            attempt = self.state.attempts.get(job_id)
            if attempt is not None and attempt.leaving:
                self._vacate(attempt)

    def _vacate(self, attempt: Attempt) -> None:
        for lease in attempt.held:
            if self._up(lease):
                kind = self._kind(lease)
                self.vacating[kind] = self.vacating.get(kind, 0) + len(lease.gpus)

    # -- reservation -----------------------------------------------------------------------------------------

    def _reserve(self, job: Job, candidates: tuple[Pool, ...]) -> None:
        """Keep the pool that lacks least for this gang, if it is the first that waits there and can ever fit."""
        usable = [
            pool
            for pool in candidates
            if not any(kind in self.reserved for kind in pool)
            and sum(self.state.index.usable(kind) for kind in pool) >= job.gpus
        ]
        if not usable:
            return
        pool = min(usable, key=lambda each: job.gpus - self.spare(each) - self.on_the_way(each))
        starts_by_us, have = self._promised(pool, job.gpus)
        reservation = Reservation(job=job, pool=pool, starts_by_us=starts_by_us, extra=max(0, have - job.gpus))
        for kind in pool:
            self.reserved[kind] = reservation

    def _promised(self, pool: Pool, gpus: int) -> tuple[int | None, int]:
        """By when so many GPUs of a pool are free, by the limits of the jobs that hold them, and how many then are."""
        have, ends_us = self.spare(pool) + self.on_the_way(pool), self.now_us
        for at_us, job_id in self.state.limits:
            attempt = self.state.attempts[job_id]
            if not attempt.leaving:
                have += self._gpus_in(pool, attempt)
                ends_us = max(ends_us, at_us + attempt.job.grace_us)
            if have >= gpus:
                return ends_us, have
        return None, 0

    def _gpus_in(self, pool: Pool, attempt: Attempt) -> int:
        """What an attempt would free of a pool."""
        return sum(len(lease.gpus) for lease in attempt.held if self._kind(lease) in pool and self._up(lease))

    # -- what the cluster has --------------------------------------------------------------------------------

    def _nothing_left(self, job: Job) -> bool:
        """Whether neither this job nor one after it in the order can get a GPU in this cycle."""
        if self.spare(self._kinds) > 0:
            return False
        if self._lowest is None:
            self._lowest = max((level(attempt.job.tier) for attempt in self.state.attempts.values()), default=0)
        return self._lowest <= level(job.tier)

    def _kind(self, lease: Lease) -> Kind:
        node = self.state.nodes[lease.node].node
        return (node.gpu_name, node.capacity)

    def _up(self, lease: Lease) -> bool:
        return self.state.nodes[lease.node].stays
