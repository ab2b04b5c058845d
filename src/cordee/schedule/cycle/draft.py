"""The draft of a decision: what a cycle has decided so far, and the searches that failed.

GPUs are kept from other jobs in three ways. All end with the cycle, and the next one makes them anew:

    earmark      GPUs that victims are vacating for a job; jobs of an earlier turn get them only if nothing else does
    assume       the place of a job that cannot start yet, because victims hold a part of it; its queue counts the GPUs
    reserve      GPUs for the first gang that found no victims (by default: that is overdue); jobs are backfilled there

Assumed and reserved GPUs are *claimed* from the nodes (`Nodes.claim`): no index of free GPUs shows them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from cordee.events import Event, Job, Lease
from cordee.ids import JobId
from cordee.schedule.cycle.reservation import Reservation
from cordee.schedule.placement.entry import Kind
from cordee.schedule.preemption.preempt import Preemption
from cordee.schedule.quota.held import Held
from cordee.schedule.quota.quotas import Vacated
from cordee.schedule.state.failed_searches import FailedSearches
from cordee.schedule.state.overdue import overdue
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import apply
from cordee.schedule.state.waiting import LineKey, Shape

AssumedQuota = tuple[Job, Held, Vacated]
"""An assumed job, the amounts that it will hold, and the part of them that leaving jobs still hold, by queue."""


@dataclass(slots=True)
class Turns:
    """The turns of jobs within one cycle.

    Attributes:
        overdue: jobs that have waited too long; they go first in their tier.
        overdue_of: the same by their lines; those that have waited longest first.
        considered: jobs that were tried.
        fair_shares: of queues, computed when they are first needed.
        shrunk_for: for a job, the jobs that were shrunk for it; they restart right after it was tried.
        version: grows with each change after which another job may be the head of a line, or have another turn.
    """

    overdue: frozenset[JobId] = frozenset()
    overdue_of: dict[LineKey, list[JobId]] = field(default_factory=dict)
    considered: set[JobId] = field(default_factory=set)
    fair_shares: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shrunk_for: dict[JobId, list[JobId]] = field(default_factory=dict)
    version: int = 0


@dataclass(slots=True)
class Tried:
    """Searches that failed and need not be repeated within this cycle.

    Attributes:
        free: shapes without a place among free GPUs.
        vacated: shapes without a place among GPUs that are being vacated.
        lines: lines in which a job that was queued recently found nothing: other such jobs find nothing either.
    """

    free: set[Shape] = field(default_factory=set)
    vacated: set[Shape] = field(default_factory=set)
    lines: set[LineKey] = field(default_factory=set)


@dataclass(slots=True)
class Draft:
    """The decision of one cycle while it is made.

    Attributes:
        now_us: the time of the cycle.
        turns: the turns of jobs.
        preemption: the search for victims at this time.
        kinds: kinds of GPUs in the cluster.
        events: applied to the state already, in this order.
        errors: jobs on which a step failed.
        wake_at_us: the time at which the decision changes without an event.
        earmarked: leases of leaving attempts, by the job for which they leave.
        assumed: places of jobs that cannot start yet, because victims hold a part of them.
        assumed_quota: the same places as the queues count them.
        reservations: for each kind of GPU, the reservation of one gang that waits for it.
        closed: kinds of GPUs on which nothing more starts, under policies in which no job may pass another.
        tried: searches that need not be repeated in this cycle.
        failed_searches: searches that need not be repeated in the next cycles either; the state keeps them.
    """

    now_us: int
    turns: Turns
    preemption: Preemption
    kinds: frozenset[Kind] = frozenset()
    events: list[Event] = field(default_factory=list)
    errors: list[tuple[JobId, Exception]] = field(default_factory=list)
    wake_at_us: int | None = None
    earmarked: dict[JobId, list[Lease]] = field(default_factory=dict)
    assumed: dict[JobId, tuple[Lease, ...]] = field(default_factory=dict)
    assumed_quota: list[AssumedQuota] = field(default_factory=list)
    reservations: dict[Kind, Reservation] = field(default_factory=dict)
    closed: set[Kind] = field(default_factory=set)
    tried: Tried = field(default_factory=Tried)
    failed_searches: FailedSearches = field(default_factory=FailedSearches)

    def wake_by(self, at_us: int | None) -> None:
        """Wake the scheduler at this time at the latest; None changes nothing."""
        if at_us is not None and (self.wake_at_us is None or at_us < self.wake_at_us):
            self.wake_at_us = at_us


Step = Callable[[State, Draft, JobId], bool]
"""A step for one job. Where the job stands in a line, the step returns whether the jobs behind it are tried."""


def new_draft(state: State, now_us: int) -> Draft:
    """Return a draft in which nothing is decided yet."""
    return Draft(now_us, Turns(), Preemption(state, now_us))


def find_overdue(state: State, draft: Draft) -> None:
    """Find the overdue jobs: after all jobs are settled, since each that ends changes the patience."""
    if state.policy.guards:
        found = draft.turns.overdue_of = overdue(state.waiting, state.allowances(), draft.now_us)
        draft.turns.overdue = frozenset(job_id for of_line in found.values() for job_id in of_line)
        draft.preemption.overdue = draft.turns.overdue


def emit(state: State, draft: Draft, event: Event) -> None:
    """Decide on an event and apply it, so that later steps see it."""
    apply(state, event)
    draft.events.append(event)


def guarded(state: State, draft: Draft, job_id: JobId, step: Step) -> bool:
    """Run one step for one job; an error in it leaves no trace of the step and does not stop the cycle."""
    mark, events, assumed = state.journal.mark(), len(draft.events), len(draft.assumed_quota)
    try:
        return step(state, draft, job_id)
    except Exception as error:
        state.journal.take_back(mark)
        del draft.events[events:], draft.assumed_quota[assumed:]
        draft.turns.version += 1
        draft.assumed.pop(job_id, None)
        draft.errors.append((job_id, error))
        return True
