"""Making room for a gang that waits: by pushing others aside, or by moving them to where they fit as well.

A push asks for the cheapest set of those below it: lower tiers, worse standings of its own, and who borrowed its
queue's quota. A move asks for less: a gang for which enough GPUs are free, but not in its shape, may move smaller ones
out of its way if each of them fits elsewhere at once. Both are tried on the state first, and taken back.
"""

from dataclasses import dataclass, field

from cordee.events import Event, Job, KillOrdered, Lease, NoticeReason
from cordee.ids import JobId
from cordee.schedule.failed_searches import Scope
from cordee.schedule.loss import Victim, charge, choose
from cordee.schedule.notice import notice
from cordee.schedule.order import compared_standing, is_below, level
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.place import need_of, place, pools
from cordee.schedule.placement.view import Pool
from cordee.schedule.preemption.victims import Victims
from cordee.schedule.quota.bounds import Bound, Refusal
from cordee.schedule.records import Attempt, JobRecord
from cordee.schedule.state import State

_TRIES = 8
"""So many sets are tried where leaving GPUs do not make the room that was counted (CPU, memory, islands, quotas)."""


_NOBODY = frozenset[str]()

Term = tuple[Attempt, NoticeReason, int | None]
"""Who gets notice, why, and on how many GPUs it starts again."""


@dataclass(frozen=True, slots=True)
class Room:
    """Who leaves, on which terms, and what is kept for whom."""

    events: tuple[Event, ...]
    leases: tuple[Lease, ...]
    others: tuple[tuple[Job, tuple[Lease, ...]], ...] = ()  # where those go who start again at once


@dataclass(slots=True)
class Preemption:
    """Of one cycle."""

    state: State
    now_us: int
    overdue: frozenset[JobId]  # they waited too long, and it is their turn
    victims: Victims = field(init=False)
    _known: dict[tuple[object, ...], tuple[Pool, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.victims = Victims(self.state, self.now_us)

    def scope(self, record: JobRecord) -> Scope:
        """Whom a waiting job may push."""
        job, waiting, quotas = record.job, self.state.waiting, self.state.quotas
        standing = None
        if self.state.policy.takes_turns and self.now_us >= record.waits_since_us + self.state.policy.preempt_after_us:
            own = waiting.standing(job.job_id)
            standing = -1 if job.job_id in self.overdue else compared_standing(self.state.policy, own)
        borrowers = frozenset(each.queue for each in quotas.borrowers(job)) if quotas.queues else _NOBODY
        return Scope(level(job.tier), job.priority, standing, borrowers)

    def preempt(
        self, record: JobRecord, scope: Scope, candidates: tuple[Pool, ...], refusal: Refusal | None
    ) -> Room | None:
        """The room that a push makes, in the first pool where it can; with a refusal it has to lift that as well."""
        if self.victims.is_empty(scope):
            return None
        if refusal is not None:
            return self._lift(record, scope, candidates, refusal)
        for pool in candidates:
            need = need_of(self.state.nodes.free, record.job, pool)
            closed: set[str] = set()
            shielded: set[str] = set()
            for _ in range(_TRIES if need is not None else 0):
                assert need is not None
                chosen = self.victims.find(need, pool, scope, closed=closed, shielded=shielded)
                if chosen is None:
                    break
                refused = self._refused(record, chosen)
                if refused:
                    shielded |= refused
                    continue
                room = self._room(record, pool, chosen)
                if room is not None:
                    return room
                closed.update(lease.node for victim in chosen for lease in self.state.attempts[victim].held)
        return None

    def _lift(self, record: JobRecord, scope: Scope, candidates: tuple[Pool, ...], refusal: Refusal) -> Room | None:
        """So many have to leave a queue before the job may start, whatever is free."""
        if refusal.short_milli is None or (refusal.bound is Bound.KEPT and not scope.borrowers):
            return None
        by_quota = self.state.quotas.victims(record.job, refusal)
        found = []
        for attempt in sorted(
            self.victims.reached(scope), key=lambda each: (charge(each, self.now_us), each.job.job_id)
        ):
            below = self._is_below(attempt, record)
            if by_quota.allows(attempt.job, _milli(attempt), below=below):
                cost, tier = charge(attempt, self.now_us), level(attempt.job.tier)
                found.append(Victim(job_id=attempt.job.job_id, gpus=_milli(attempt), cost=cost, level=tier))
        chosen = choose(found, max(1, refusal.short_milli))
        if chosen is None:
            return None
        rooms = (self._room(record, pool, tuple(each.job_id for each in chosen)) for pool in candidates)
        return next((room for room in rooms if room is not None), None)

    def move(self, record: JobRecord, candidates: tuple[Pool, ...]) -> Room | None:
        """The room that comes of moving smaller ones elsewhere, if all of them fit there now."""
        policy, job = self.state.policy, record.job
        most = int(policy.move_fraction * job.gpus)
        if self.now_us < record.waits_since_us + policy.preempt_after_us:
            return None
        for pool in candidates:
            need = need_of(self.state.nodes.free, job, pool)
            if need is None or not most or sum(self.state.nodes.free.free(kind) for kind in pool) < job.gpus:
                continue
            chosen = self.victims.find(need, pool, Scope(level(job.tier), job.priority, None, moves=most))
            if chosen is None or sum(self.state.attempts[each].gpus for each in chosen) > most:
                continue
            room = self._moved(record, pool, chosen)
            if room is not None:
                return room
        return None

    # -- the terms -------------------------------------------------------------------------------------------

    def _refused(self, record: JobRecord, chosen: tuple[JobId, ...]) -> set[str]:
        """Queues whose quota shields one of these from the job."""
        if not self.state.quotas.queues:
            return set()
        by_quota = self.state.quotas.victims(record.job)
        attempts = sorted((self.state.attempts[each] for each in chosen), key=lambda each: charge(each, self.now_us))
        return {
            attempt.job.queue
            for attempt in attempts
            if not by_quota.allows(attempt.job, _milli(attempt), below=self._is_below(attempt, record))
        }

    def _is_below(self, attempt: Attempt, record: JobRecord) -> bool:
        """Whether it is of a lower tier, or its turn is over."""
        if is_below(attempt.job.tier, record.job.tier):
            return True
        scope, row = self.scope(record), self.state.running.row_of[attempt.job.job_id]
        if scope.standing is None or attempt.job.tier is not record.job.tier:
            return False
        worse = int(self.victims.standing()[row]) > scope.standing
        return (
            worse and bool(self.victims.turn_over(scope.standing)[row]) and attempt.job.priority <= record.job.priority
        )

    def _room(self, record: JobRecord, pool: Pool, chosen: tuple[JobId, ...]) -> Room | None:
        """Give notice to all of them and see what comes of it; elastic ones start smaller on what is left."""
        mark = self.state.journal.mark()
        attempts = [self.state.attempts[each] for each in chosen]
        plain: list[Term] = [(attempt, self._reason(attempt, record), None) for attempt in attempts]
        self._try(plain, record)
        leases = self._place_soon(record.job, (pool,)) if self._is_admitted(record) else None
        if leases is None:
            self.state.journal.take_back(mark)
            return None
        self.state.nodes.claim(leases)
        others: list[tuple[Job, tuple[Lease, ...]]] = []
        terms: list[Term] = []
        for attempt, reason, _ in plain:
            smaller = self._smaller(attempt) if self.state.policy.resize else None
            if smaller is None:
                terms.append((attempt, reason, None))
            else:
                self.state.nodes.claim(smaller)
                others.append((attempt.job, smaller))
                terms.append((attempt, NoticeReason.RESIZE, sum(len(lease.gpus) for lease in smaller)))
        self.state.journal.take_back(mark)
        events = tuple(event for term in terms for event in self._notices(*term, record))
        return Room(events, leases, tuple(others))

    def _is_admitted(self, record: JobRecord) -> bool:
        """Whether its queue admits it once those with notice have left: what they used is then kept again."""
        refusal = self.state.quotas.admits(record.job, self.now_us) if self.state.quotas.rules else None
        return refusal is None or (refusal.short_milli is not None and refusal.short_milli <= 0)

    def _moved(self, record: JobRecord, pool: Pool, chosen: tuple[JobId, ...]) -> Room | None:
        attempts = [self.state.attempts[each] for each in chosen]
        for attempt in attempts:  # who fits nowhere as it is will not once the gang has its place
            if self._place(self.state.nodes.free, attempt.job, self._pools(attempt.job), attempt.gpus) is None:
                return None
        mark = self.state.journal.mark()
        terms: list[Term] = [(attempt, NoticeReason.MOVE, attempt.gpus) for attempt in attempts]
        self._try(terms, record)
        leases = self._place_soon(record.job, (pool,))
        others: list[tuple[Job, tuple[Lease, ...]]] = []
        if leases is not None:
            self.state.nodes.claim(leases)
            for attempt in sorted(attempts, key=lambda each: (-each.gpus, each.job.job_id)):
                there = self._place(self.state.nodes.free, attempt.job, self._pools(attempt.job), attempt.gpus)
                if there is None:
                    break
                self.state.nodes.claim(there)
                others.append((attempt.job, there))
        self.state.journal.take_back(mark)
        if leases is None or len(others) < len(attempts):
            return None
        return Room(tuple(event for term in terms for event in self._notices(*term, record)), leases, tuple(others))

    def _smaller(self, attempt: Attempt) -> tuple[Lease, ...] | None:
        """Where a victim can start again smaller, once it has left."""
        for size in attempt.job.sizes:
            if size < attempt.gpus:
                leases = self._place(self.state.nodes.soon, attempt.job, self._pools(attempt.job), size)
                if leases is not None:
                    return leases
        return None

    def _pools(self, job: Job) -> tuple[Pool, ...]:
        key = (job.gpu_name, job.capacity)
        if key not in self._known:
            self._known[key] = pools(job, self.state.nodes.free.kinds)
        return self._known[key]

    def _place(
        self, index: FreeIndex, job: Job, candidates: tuple[Pool, ...], gpus: int | None = None
    ) -> tuple[Lease, ...] | None:
        return place(index, job, candidates, gpus=gpus, packing=self.state.policy.packing)

    def _place_soon(self, job: Job, candidates: tuple[Pool, ...]) -> tuple[Lease, ...] | None:
        """Where GPUs are being vacated; if need be those that leave for somebody behind it in the order."""
        leases = self._place(self.state.nodes.soon, job, candidates)
        if leases is None and any(self.state.nodes.earmarked.values()):
            leases = self._place(self.state.nodes.vacated, job, candidates)
        return leases

    def _try(self, terms: list[Term], record: JobRecord) -> None:
        for term in terms:
            for event in self._notices(*term, record):
                self.state.apply(event)

    def _reason(self, attempt: Attempt, record: JobRecord) -> NoticeReason:
        if not self._is_below(attempt, record):
            return NoticeReason.QUOTA
        return NoticeReason.PREEMPT if is_below(attempt.job.tier, record.job.tier) else NoticeReason.TIME_SLICE

    def _notices(
        self, attempt: Attempt, reason: NoticeReason, gpus: int | None, record: JobRecord
    ) -> tuple[Event, ...]:
        """A notice; under a policy without notice its deadline is now, and the kill comes with it."""
        warned = self.state.policy.notice
        given = notice(
            attempt,
            reason,
            self.now_us,
            for_job=record.job.job_id,
            gpus=gpus,
            gone_us=None if warned else self.now_us,
        )
        if warned:
            return (given,)
        why = f"preempted without notice for {record.job.job_id}"
        return given, KillOrdered(at_us=self.now_us, job_id=attempt.job.job_id, epoch=attempt.epoch, why=why)


def _milli(attempt: Attempt) -> int:
    return sum(lease.gpu_milli for lease in attempt.held)
