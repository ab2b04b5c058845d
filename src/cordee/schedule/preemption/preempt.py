"""Room for a waiting gang, made by preempting other attempts, or by moving them to other places where they fit.

A preemption takes the cheapest set of victims: lower tiers, worse standings of its own tier, and jobs that borrowed its
queue's quota. A move costs less: a gang for which enough GPUs are free, but not in its shape, may move smaller jobs
if each of them fits elsewhere at once. Both are tried on the state, and taken back unless they are the answer.
"""

from dataclasses import dataclass
from typing import NamedTuple

from cordee.events import Event, Job, KillOrdered, Lease, NoticeReason, Tier
from cordee.ids import JobId
from cordee.schedule.instances import cuts_of, place_of
from cordee.schedule.placement.defragment import fewest_moves
from cordee.schedule.placement.free import FreeIndex
from cordee.schedule.placement.place import need_of, place, pools
from cordee.schedule.placement.view import Pool
from cordee.schedule.preemption.knapsack import Victim, choose
from cordee.schedule.preemption.loss import charge
from cordee.schedule.preemption.notice import notice
from cordee.schedule.preemption.victims import VictimSearch
from cordee.schedule.quota.bounds import Bound, Refusal
from cordee.schedule.state.failed_searches import Scope
from cordee.schedule.state.order import compared_standing, is_below, level
from cordee.schedule.state.records import Attempt, JobRecord
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import apply

_TRIES = 8
"""The number of sets tried when one makes less room than was counted (because of CPU, memory, islands, quotas)."""

NextPlace = tuple[Job, tuple[Lease, ...]]
"""A job, and its place at the next start."""


class Terms(NamedTuple):
    """The terms on which an attempt leaves."""

    attempt: Attempt
    reason: NoticeReason
    gpus: int | None = None  # size on which it starts again at once


@dataclass(frozen=True, slots=True)
class Room:
    """The room that others make for a job: notices to give, its place, and the places of those that start again.

    With `given` the state has the notices already.
    """

    events: tuple[Event, ...]
    leases: tuple[Lease, ...]
    others: tuple[NextPlace, ...] = ()
    given: bool = False


class Preemption:
    """The preemptions of one cycle.

    Attributes:
        overdue: the overdue jobs, which may preempt any level of their tier.
    """

    def __init__(self, state: State, now_us: int) -> None:
        self._state, self._now_us = state, now_us
        self._made: VictimSearch | None = None  # Most cycles need none.
        self.overdue = frozenset[JobId]()

    @property
    def _search(self) -> VictimSearch:
        if self._made is None:
            self._made = VictimSearch(self._state, self._now_us)
        return self._made

    def scope(self, record: JobRecord) -> Scope:
        """Return the scope of a waiting job: the attempts that it may preempt."""
        job, quotas = record.job, self._state.quotas
        borrowers = frozenset(each.queue for each in quotas.borrowers(job)) if quotas.queues else frozenset[str]()
        return Scope(level(job.tier), job.priority, self._standing(record), borrowers)

    def preempt(
        self, record: JobRecord, scope: Scope, candidates: tuple[Pool, ...], refusal: Refusal | None
    ) -> Room | None:
        """Return the room in the first pool where victims make it; a refusal must be lifted by them as well."""
        if self._search.candidates.none_in(scope):
            return None
        if refusal is not None:
            return self._lift(record, scope, candidates, refusal)
        rooms = (self._preempt_in(record, scope, pool) for pool in candidates)
        return next((room for room in rooms if room is not None), None)

    def move(self, record: JobRecord, candidates: tuple[Pool, ...]) -> Room | None:
        """Return the room that results from moving smaller jobs elsewhere, if all of them fit there now."""
        state, job = self._state, record.job
        free, most = state.nodes.free, int(state.policy.move_fraction * job.gpus)
        if not most or self._now_us < record.waits_since_us + state.policy.preempt_after_us:
            return None
        for pool in candidates:
            if sum(free.free(kind) for kind in pool) < job.gpus:
                continue
            need = need_of(free, job, pool)
            if need is None:
                continue
            chosen = self._search.find(need, pool, Scope(level(job.tier), job.priority, None, moves=most))
            if chosen is None or sum(state.attempts[each].gpus for each in chosen) > most:
                continue
            room = self._room_by_moving(record, pool, chosen)
            if room is not None:
                return room
        return None

    def move_instances(self, record: JobRecord, candidates: tuple[Pool, ...]) -> Room | None:
        """Return the room for a MIG instance that results from the fewest moves of preemptible jobs' instances.

        Only for a job of a higher tier: it starts before those that move, so none returns to its old slice.
        """
        state, job, lowest = self._state, record.job, level(Tier.PREEMPTIBLE)
        waited = self._now_us >= record.waits_since_us + state.policy.preempt_after_us
        if job.mig is None or not waited or not state.policy.move_fraction or level(job.tier) >= lowest:
            return None
        attempts = self._search.candidates.attempts(Scope(lowest, job.priority, None, moves=1))
        movable = {place_of(lease): each for each in attempts for lease in each.held if lease.instance is not None}
        if not movable:
            return None
        for pool in candidates:
            found = fewest_moves(cuts_of(state.nodes.free.entries.values(), pool, movable), job.mig)
            if found is not None and found.moved:
                moving = [movable[*each.gpu, each.start] for each in found.moved]
                room = self._moved(record, pool, moving, state.nodes.soon)
                if room is not None:
                    return room
        return None

    # -- the victims -----------------------------------------------------------------------------------------

    def _preempt_in(self, record: JobRecord, scope: Scope, pool: Pool) -> Room | None:
        need = need_of(self._state.nodes.free, record.job, pool)
        if need is None:
            return None
        closed, shielded = set[str](), set[str]()
        for _ in range(_TRIES):
            chosen = self._search.find(need, pool, scope, closed=closed, shielded=shielded)
            if chosen is None:
                return None
            queues = self._shielding(record, chosen)
            if queues:
                shielded |= queues
                continue
            room = self._room(record, pool, chosen)
            if room is not None:
                return room
            closed.update(lease.node for victim in chosen for lease in self._state.attempts[victim].held)
        return None

    def _lift(self, record: JobRecord, scope: Scope, candidates: tuple[Pool, ...], refusal: Refusal) -> Room | None:
        """Preempt jobs of a queue until it admits the job, whatever GPUs are free."""
        if refusal.short_milli is None or (refusal.bound is Bound.KEPT and not scope.borrowers):
            return None
        victims = self._state.quotas.victims(record.job, refusal)
        charges = {each.job.job_id: charge(each, self._now_us) for each in self._search.candidates.attempts(scope)}
        found = []
        for job_id, cost in sorted(charges.items(), key=lambda each: (each[1], each[0])):
            attempt = self._state.attempts[job_id]
            milli = _milli(attempt)
            if victims.allows(attempt.job, milli, below=self._is_below(attempt, record)):
                found.append(Victim(job_id, milli, cost, level(attempt.job.tier)))
        chosen = choose(found, max(1, refusal.short_milli))
        if chosen is None:
            return None
        rooms = (self._room(record, pool, tuple(each.job_id for each in chosen)) for pool in candidates)
        return next((room for room in rooms if room is not None), None)

    def _shielding(self, record: JobRecord, chosen: tuple[JobId, ...]) -> set[str]:
        """Return the queues with a quota that shields one of these attempts from the job."""
        if not self._state.quotas.queues:
            return set()
        victims = self._state.quotas.victims(record.job)
        attempts = sorted((self._state.attempts[each] for each in chosen), key=lambda each: charge(each, self._now_us))
        return {
            attempt.job.queue
            for attempt in attempts
            if not victims.allows(attempt.job, _milli(attempt), below=self._is_below(attempt, record))
        }

    def _standing(self, record: JobRecord) -> int | None:
        """Return the standing beyond which a job preempts attempts of its own tier; None if it preempts none yet."""
        policy, job_id = self._state.policy, record.job.job_id
        if not policy.takes_turns or self._now_us < record.waits_since_us + policy.preempt_after_us:
            return None
        return -1 if job_id in self.overdue else compared_standing(policy, self._state.waiting.standing(job_id))

    def _is_below(self, attempt: Attempt, record: JobRecord) -> bool:
        """Return whether an attempt is of a lower tier, or its turn is over."""
        if is_below(attempt.job.tier, record.job.tier):
            return True
        standing, row = self._standing(record), self._state.running.row_of[attempt.job.job_id]
        if standing is None or attempt.job.tier is not record.job.tier:
            return False
        return bool(self._search.candidates.lost(standing)[row]) and attempt.job.priority <= record.job.priority

    # -- the room --------------------------------------------------------------------------------------------

    def _room(self, record: JobRecord, pool: Pool, chosen: tuple[JobId, ...]) -> Room | None:
        """Give notice to all victims; take it back without a place, or where elastic ones start smaller on the rest."""
        state = self._state
        mark = state.journal.mark()
        attempts = [state.attempts[each] for each in chosen]
        leaving = [Terms(attempt, self._reason(attempt, record)) for attempt in attempts]
        events = self._try(leaving, record)
        given = state.journal.mark()
        leases = self._vacated_place(record.job, pool) if self._is_admitted(record) else None
        if leases is None:
            state.journal.take_back(mark)
            return None
        if not (state.policy.resize and any(each.job.sizes for each in attempts)):
            return Room(events, leases, given=True)
        state.nodes.claim(leases)
        others: list[NextPlace] = []
        terms: list[Terms] = []
        for each in leaving:
            smaller = self._smaller_place(each.attempt)
            if smaller is None:
                terms.append(each)
                continue
            state.nodes.claim(smaller)
            others.append((each.attempt.job, smaller))
            terms.append(Terms(each.attempt, NoticeReason.RESIZE, sum(len(lease.gpus) for lease in smaller)))
        state.journal.take_back(mark if others else given)
        return Room(self._events(terms, record), leases, tuple(others)) if others else Room(events, leases, given=True)

    def _room_by_moving(self, record: JobRecord, pool: Pool, chosen: tuple[JobId, ...]) -> Room | None:
        state = self._state
        attempts = [state.attempts[each] for each in chosen]
        # A job without a place now has none after the gang is placed.
        if any(self._place(state.nodes.free, each.job, each.gpus) is None for each in attempts):
            return None
        return self._moved(record, pool, attempts, state.nodes.free)

    def _moved(self, record: JobRecord, pool: Pool, attempts: list[Attempt], elsewhere: FreeIndex) -> Room | None:
        """Give notice to attempts as a what-if; each of them needs its next place in an index."""
        state = self._state
        mark = state.journal.mark()
        terms = [Terms(attempt, NoticeReason.MOVE, attempt.gpus) for attempt in attempts]
        self._try(terms, record)
        leases = self._vacated_place(record.job, pool)
        others: list[NextPlace] = []
        if leases is not None:
            state.nodes.claim(leases)
            for attempt in sorted(attempts, key=lambda each: (-each.gpus, -each.job.gpu_milli, each.job.job_id)):
                there = self._place(elsewhere, attempt.job, attempt.gpus)
                if there is None:
                    break
                state.nodes.claim(there)
                others.append((attempt.job, there))
        state.journal.take_back(mark)
        if leases is None or len(others) < len(attempts):
            return None
        return Room(self._events(terms, record), leases, tuple(others))

    def _is_admitted(self, record: JobRecord) -> bool:
        """Return whether its queue admits a job after jobs with notice have left, when their quota is kept again."""
        quotas = self._state.quotas
        refusal = quotas.admits(record.job, self._now_us) if quotas.rules else None
        return refusal is None or (refusal.short_milli is not None and refusal.short_milli <= 0)

    def _smaller_place(self, attempt: Attempt) -> tuple[Lease, ...] | None:
        """Return a place for a victim on fewer GPUs after it has left; None if there is none."""
        sizes = (size for size in attempt.job.sizes if size < attempt.gpus)
        places = (self._place(self._state.nodes.soon, attempt.job, size) for size in sizes)
        return next((leases for leases in places if leases is not None), None)

    def _place(self, index: FreeIndex, job: Job, gpus: int) -> tuple[Lease, ...] | None:
        candidates = pools(job, self._state.nodes.free.kinds)
        return place(index, job, candidates, gpus=gpus, packing=self._state.policy.packing)

    def _vacated_place(self, job: Job, pool: Pool) -> tuple[Lease, ...] | None:
        """Return a place where GPUs are being vacated, or else are earmarked for jobs behind this one in the order."""
        nodes, packing = self._state.nodes, self._state.policy.packing
        leases = place(nodes.soon, job, (pool,), packing=packing)
        if leases is None and any(nodes.earmarked.values()):
            leases = place(nodes.vacated, job, (pool,), packing=packing)
        return leases

    def _reason(self, attempt: Attempt, record: JobRecord) -> NoticeReason:
        if not self._is_below(attempt, record):
            return NoticeReason.QUOTA
        return NoticeReason.PREEMPT if is_below(attempt.job.tier, record.job.tier) else NoticeReason.TIME_SLICE

    def _try(self, terms: list[Terms], record: JobRecord) -> tuple[Event, ...]:
        events = self._events(terms, record)
        for event in events:
            apply(self._state, event)
        return events

    def _events(self, terms: list[Terms], record: JobRecord) -> tuple[Event, ...]:
        return tuple(event for each in terms for event in self._notices(each, record.job.job_id))

    def _notices(self, terms: Terms, preemptor: JobId) -> tuple[Event, ...]:
        """Return the notice of a victim; under a policy without notice its deadline is now and a kill follows."""
        attempt, gives_notice = terms.attempt, self._state.policy.notice
        gone_us = None if gives_notice else self._now_us
        given = notice(attempt, terms.reason, self._now_us, for_job=preemptor, gpus=terms.gpus, gone_us=gone_us)
        if gives_notice:
            return (given,)
        why = f"preempted without notice for {preemptor}"
        return given, KillOrdered(at_us=self._now_us, job_id=attempt.job.job_id, epoch=attempt.epoch, why=why)


def _milli(attempt: Attempt) -> int:
    return sum(lease.gpu_milli for lease in attempt.held)
