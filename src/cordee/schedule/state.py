"""What the scheduler knows: jobs, live attempts, nodes, and the indexes that make a cycle cheap.

`State` is the one mutable thing of this room. `apply(event)` is the only change, the events of the log in order give
the same state, and `what_if()` takes back whatever was applied inside it. Records are frozen and replaced (records.py).

What `apply` ignores, so that late and repeated reports do no harm: a job submitted twice; anything about a job that is
not known or has ended; anything about an attempt that is not the job's live one (an older epoch, or one that ended);
a second RanksEnded of a node; a NodeUp or NodeDown of an epoch below the node's newest; Reported, Restored and
RankLeft, which are the ledger's. A placement that leases a GPU twice is a programmer's error and is asserted.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    Behind,
    CheckpointCommitted,
    Event,
    JobEnded,
    JobSubmitted,
    KillOrdered,
    NodeCordoned,
    NodeDown,
    NodeReclaimed,
    NodeUncordoned,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    Outcome,
    QueuesSet,
    RankBehind,
    RanksEnded,
    RanksStarted,
    ServerShuttingDown,
    ServerUp,
    StopRequested,
)
from cordee.ids import JobId
from cordee.schedule.forecast.estimate import History
from cordee.schedule.nodes import UNUSED, Nodes
from cordee.schedule.order import counts_service, standing
from cordee.schedule.overdue import gpus_left, is_overdue
from cordee.schedule.policy import Policy
from cordee.schedule.preemption.failed_searches import FailedSearches
from cordee.schedule.preemption.loss import min_run_us
from cordee.schedule.preemption.row import columns_of, is_exempt, rests_until_us
from cordee.schedule.preemption.running import NEVER, Running
from cordee.schedule.quota.day import DAY_US
from cordee.schedule.quota.held import held_by
from cordee.schedule.quota.limits import notice_at_us
from cordee.schedule.quota.quotas import HALF_LIFE_US
from cordee.schedule.records import Attempt, JobRecord, Phase, micro_usd_per_hour
from cordee.schedule.waiting import Waiting

_COUNTED = (Outcome.FAILED, Outcome.LOST)
_PUSHED = (NoticeReason.PREEMPT, NoticeReason.TIME_SLICE, NoticeReason.QUOTA)
_RETURNS = (NoticeReason.RESIZE, NoticeReason.MOVE, NoticeReason.RECLAIM, NoticeReason.DRAIN, NoticeReason.DOWN)
"""Who left for one of these lost its place by no turn of others, and starts again before the others of its tier."""

SAFE_PERCENT = 90
"""So many in a hundred of those alike were shorter than what a job is taken to need that is backfilled."""


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing is left to decide once an event was the newest change, from one time until another."""

    changes: int
    newest: Event | None
    from_us: int
    until_us: int | None  # when to decide again; None: only after a change

    def holds(self, state: "State", now_us: int) -> bool:
        """Return whether nothing that matters has happened since."""
        if state.changes != self.changes or state.newest != self.newest:
            return False
        return self.from_us <= now_us < (NEVER if self.until_us is None else self.until_us)


class State(Nodes):
    """Single owner, changed by `apply` only: jobs and attempts here, and the nodes that they run on."""

    def __init__(self, policy: Policy | None = None, *, half_life_us: int = HALF_LIFE_US) -> None:
        """Nothing has happened yet.

        Args:
            policy: how waiting and running jobs are indexed; `decide` changes it when asked to use another.
            half_life_us: after so long, what a queue borrowed speaks half as much against it.
        """
        super().__init__(half_life_us)
        self.policy = policy or Policy()
        self.shutting_down = False
        self.jobs: dict[JobId, JobRecord] = {}
        self.entitled: dict[JobId, None] = {}  # jobs that wait for what borrowers give back
        self.returning: dict[JobId, None] = {}  # jobs that leave, or have left, to start again at once
        self.elastic: dict[JobId, None] = {}  # live attempts that run on fewer GPUs than their jobs asked for
        self.limits: list[tuple[int, JobId]] = []  # of live attempts, ascending
        self.waiting = Waiting(self.journal)
        self.history = History()  # of run times
        self.idle: Idle | None = None  # nothing to decide, as `decide` found
        self.newest: Event | None = None  # what that was the last time
        self.failed_searches = FailedSearches()  # of the last cycle
        self.what_if, self.mark, self.take_back = self.journal.what_if, self.journal.mark, self.journal.take_back
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            ServerUp: lambda event: self._shut_down(False),
            ServerShuttingDown: lambda event: self._shut_down(True),
            JobSubmitted: self._submitted,
            StopRequested: self._stop_requested,
            JobEnded: self._job_ended,
            NodeUp: self._node_up,
            NodeDown: self._node_down,
            NodeReclaimed: self._node_reclaimed,
            NodeCordoned: self._node_cordoned,
            NodeUncordoned: self._node_uncordoned,
            QueuesSet: self._queues_set,
            AttemptPlaced: self._placed,
            NoticeGiven: self._noticed,
            KillOrdered: self._kill_ordered,
            RanksStarted: self._ranks_started,
            RanksEnded: self._ranks_ended,
            CheckpointCommitted: self._committed,
            RankBehind: self._behind,
            AttemptEnded: self._attempt_ended,
        }

    def apply(self, event: Event) -> None:
        """Take note of one event; a stale one changes nothing."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            self.release(event.at_us)
            before = self.changes
            handler(event)
            if self.changes != before:
                self.journal.note(setattr, self, "newest", self.newest)
                self.newest = event

    def use(self, policy: Policy) -> None:
        """Index by the rules of another policy."""
        if policy is self.policy or policy == self.policy:
            return
        self.policy = policy
        self.waiting, self.running = Waiting(self.journal), Running(self.journal)
        for job_id, record in self.jobs.items():
            if record.phase is Phase.QUEUED:
                self._enqueue(record)
            elif job_id in self.attempts:
                self._run(record, self.attempts[job_id])
        for name in self.nodes:
            self._reindex(name)
        self._changed()

    def snapshot(self) -> dict[str, object]:
        """A deep copy as plain values, to compare and to keep; indexes included."""
        return {
            "shutting_down": self.shutting_down,
            "jobs": dict(self.jobs),
            "attempts": dict(self.attempts),
            "nodes": dict(self.nodes),
            "leased": dict(self.leased),
            "vacating": dict(self.vacating),
            "claimed": {name: mask for name, mask in self.claimed.items() if mask},
            "earmarked": {name: mask for name, mask in self.earmarked.items() if mask},
            "attention": frozenset(self.attention),
            "entitled": frozenset(self.entitled),
            "returning": frozenset(self.returning),
            "elastic": frozenset(self.elastic),
            "limits": tuple(self.limits),
            "quarantines": tuple(self.quarantines),
            "went_down": dict(self.went_down),
            "index": self.index.value(),
            "soon": self.soon.value(),
            "vacated": self.vacated.value(),
            "waiting": self.waiting.value(),
            "running": self.running.value(),
            "quotas": self.quotas.value(),
            "history": self.history.value(),
            "changes": self.changes,
        }

    def _shut_down(self, shutting_down: bool) -> None:
        self.journal.note(setattr, self, "shutting_down", self.shutting_down)
        self.shutting_down = shutting_down
        self._changed()

    # -- jobs ------------------------------------------------------------------------------------------------

    def _submitted(self, event: JobSubmitted) -> None:
        job = event.job
        if job.job_id not in self.jobs:
            record = JobRecord(job=job, submitted_us=event.at_us, waits_since_us=event.at_us)
            self.journal.put(self.jobs, job.job_id, record)
            self._enqueue(record)
            self.journal.note(self.index.mix.unseen, self.index.mix.seen(job, event.at_us))

    def _enqueue(self, record: JobRecord) -> None:
        patience_us = self.policy.patience_us if self.policy.guards else None
        leaf = self.quotas.leaf(record.job.queue)
        by_owner = any(holder.queue.user_gpus is not None for holder in leaf.path)
        self.waiting.add(
            record,
            standing=standing(self.policy, record, None if counts_service(self.policy) else self.left_us(record)),
            length_us=self._length_us(record),
            patience_us=patience_us,
            queue=leaf.queue.name,
            owner=record.job.owner if by_owner else "",
        )
        self._changed(gain=False)

    def left_us(self, record: JobRecord, percent: int = 50) -> int | None:
        """How much longer a job runs in all: by what somebody said, or else by those that ended before it."""
        job = record.job
        if job.estimate_us is not None:
            return max(0, job.estimate_us - record.used_us)
        return self.history.left_us(job, record.used_us, percent)

    def _length_us(self, record: JobRecord) -> int:
        """How long its next attempt runs at most: by its limit, or by an estimate on the safe side."""
        job, lengths = record.job, [NEVER]
        if job.time_limit_us is not None:
            lengths.append(max(job.time_limit_us, job.time_limit_us // 2 + job.grace_us) - record.used_us)
        left_us = self.left_us(record, SAFE_PERCENT)
        return min(lengths if left_us is None else (*lengths, left_us))

    def _stop_requested(self, event: StopRequested) -> None:
        record = self.jobs.get(event.job_id)
        if record is None or record.phase.ended or (record.stop and (record.stop.now or not event.now)):
            return
        self.journal.put(self.jobs, event.job_id, record._replace(stop=event))
        self.journal.put(self.attention, event.job_id, None)
        self._changed()

    def _job_ended(self, event: JobEnded) -> None:
        record = self.jobs.get(event.job_id)
        if record is None or record.phase.ended or event.job_id in self.attempts:
            return
        self.waiting.remove(record)
        self.journal.drop(self.attention, event.job_id)
        self.journal.drop(self.returning, event.job_id)
        if event.state != Phase.STOPPED and record.used_us:
            self.journal.note(self.history.forget, self.history.add(record.job, record.used_us))
        self.journal.drop(self.entitled, event.job_id)
        self.journal.put(self.jobs, event.job_id, record._replace(phase=Phase(event.state), ended=event))
        self._changed()

    # -- queues ----------------------------------------------------------------------------------------------

    def _queues_set(self, event: QueuesSet) -> None:
        self.journal.note(setattr, self, "quotas", self.quotas)
        self.quotas = self.quotas.regrouped(event.queues, event.at_us)
        for job_id in sorted(self.waiting.job_ids()):  # lines are those of a queue's users where users have limits
            record = self.jobs[job_id]
            self.waiting.remove(record)
            self._enqueue(record)
        self._changed()

    # -- attempts --------------------------------------------------------------------------------------------

    def _placed(self, event: AttemptPlaced) -> None:
        record = self.jobs.get(event.job_id)
        if record is None or record.phase is not Phase.QUEUED or event.epoch <= record.epoch:
            return
        prices = tuple(self.nodes[lease.node].node.micro_usd_per_gpu_hour for lease in event.leases)
        limit_at_us = notice_at_us(
            record.job,
            placed_us=event.at_us,
            used_us=record.used_us,
            used_cost=record.used_cost,
            micro_usd_per_hour=micro_usd_per_hour(event.leases, prices),
        )
        attempt = Attempt(
            job=record.job,
            epoch=event.epoch,
            placed_us=event.at_us,
            leases=event.leases,
            prices=prices,
            held=event.leases,
            limit_at_us=limit_at_us,
        )
        for lease in event.leases:
            used = self.leased.get(lease.node, UNUSED).plus(lease, record.job)
            self.journal.put(self.leased, lease.node, used)
            self._reindex(lease.node)
        held = held_by(record.job, event.leases, prices)
        self.quotas.put(record.job, held, event.at_us)
        self.journal.note(self.quotas.take, record.job, held, event.at_us)
        self.waiting.remove(record)
        self.journal.put(self.attempts, event.job_id, attempt)
        self.journal.drop(self.returning, event.job_id)
        self.journal.drop(self.entitled, event.job_id)
        if attempt.gpus < record.job.gpus:
            self.journal.put(self.elastic, event.job_id, None)
        record = record._replace(phase=Phase.RUNNING, epoch=event.epoch, size=None)
        self.journal.put(self.jobs, event.job_id, record)
        if limit_at_us is not None:
            self.journal.insert(self.limits, (limit_at_us, event.job_id))
        self._run(record, attempt)
        self._changed(gain=False)

    def _run(self, record: JobRecord, attempt: Attempt) -> None:
        """Enter an attempt among those that could be pushed, unless it leaves already."""
        if attempt.leaving or attempt.shares:
            return
        overdue = is_overdue(self.policy, record, attempt) and gpus_left(self.policy, self.running, self.quotas) > 0
        values = columns_of(self.policy, record, attempt, self.left_us(record), overdue=overdue)
        self.running.add(attempt.job.job_id, attempt.leases, values | {"queue": self.running.queue(attempt.job.queue)})

    def _live(self, job_id: JobId, epoch: int) -> Attempt | None:
        attempt = self.attempts.get(job_id)
        return attempt if attempt is not None and attempt.epoch == epoch else None

    def _noticed(self, event: NoticeGiven) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None and not attempt.leaving:
            if event.reason in _RETURNS:
                self.journal.put(self.returning, event.job_id, None)
            if event.reason is NoticeReason.QUOTA and event.for_job is not None:
                self.journal.put(self.entitled, event.for_job, None)
            self._stopping(attempt, attempt._replace(notice=event))

    def _kill_ordered(self, event: KillOrdered) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None and attempt.kill is None:
            self._stopping(attempt, attempt._replace(kill=event))

    def _stopping(self, before: Attempt, attempt: Attempt) -> None:
        job_id = attempt.job.job_id
        self.journal.put(self.attempts, job_id, attempt)
        self.journal.put(self.jobs, job_id, self.jobs[job_id]._replace(phase=Phase.STOPPING))
        self.journal.put(self.attention, job_id, None)
        self.running.drop(job_id)
        if not before.leaving:
            gpu_milli = sum(lease.gpu_milli for lease in attempt.held)
            self.quotas.leave(attempt.job, gpu_milli)
            self.journal.note(self.quotas.stay, attempt.job, gpu_milli)
            for lease in attempt.held:
                leaving = (*self.vacating.get(lease.node, ()), (lease, attempt.job))
                self.journal.put(self.vacating, lease.node, leaving)
                self._reindex(lease.node)
        self._changed()

    def _ranks_started(self, event: RanksStarted) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is None or attempt.started_us is not None:
            return
        attempt = attempt._replace(started_us=event.at_us)
        self.journal.put(self.attempts, event.job_id, attempt)
        self.running.set(event.job_id, work_from_us=event.at_us)
        if min_run_us(attempt.job, attempt.epoch) and event.job_id in self.running.row_of:
            if not is_exempt(self.jobs[event.job_id]):
                self.running.set(event.job_id, rests_until_us=rests_until_us(attempt))
            self._changed()

    def _committed(self, event: CheckpointCommitted) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None and event.step > (attempt.committed_step or -1):
            # What ran while the capture drained is not in it.
            captured_us = event.at_us - event.upload_us
            committed = attempt._replace(captured_us=captured_us, committed_step=event.step)
            self.journal.put(self.attempts, event.job_id, committed)
            if attempt.started_us is not None:
                if self.running.is_kept(event.job_id, event.at_us, self.policy):
                    self._changed()
                self.running.set(event.job_id, work_from_us=max(attempt.started_us, captured_us), silent=False)

    def eaten(self, attempt: Attempt, outcome: Outcome, at_us: int) -> str | None:
        """What an attempt used that saved nothing, if that is nearly all of its queue's day, whose end ended it.

        The next one has hardly more than that, so it counts as a failed one does. A script that saves by itself tells
        so by its outcome alone.
        """
        given = attempt.notice
        saved = attempt.captured_us is not None or outcome in (Outcome.FINISHED, Outcome.CHECKPOINTED)
        if saved or given is None or given.reason is not NoticeReason.QUOTA or given.for_job:
            return None
        return self.quotas.eaten(attempt.job, attempt.used_since(at_us - DAY_US))

    def _behind(self, event: RankBehind) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None:
            over = event.how is Behind.OVER
            if not over or (attempt.behind is not None and attempt.behind.rank == event.rank):
                self.journal.put(self.attempts, event.job_id, attempt._replace(behind=None if over else event))

    def _ranks_ended(self, event: RanksEnded) -> None:
        attempt = self._live(event.job_id, event.epoch)
        lease = next((each for each in attempt.held if each.node == event.node), None) if attempt else None
        if attempt is None or lease is None:
            return
        held = tuple(each for each in attempt.held if each is not lease)
        ended = attempt._replace(held=held, shares=(*attempt.shares, event))
        self.journal.put(self.attempts, event.job_id, ended)
        self.running.drop(event.job_id)
        freed = attempt.holds((lease,))
        self.quotas.take(attempt.job, freed, event.at_us)
        self.journal.note(self.quotas.put, attempt.job, freed, event.at_us)
        if attempt.leaving:
            self.quotas.stay(attempt.job, freed.gpu_milli)
            self.journal.note(self.quotas.leave, attempt.job, freed.gpu_milli)
        self.journal.put(self.leased, event.node, self.leased[event.node].minus(lease, attempt.job))
        leaving = self.vacating.get(event.node, ())
        if attempt.leaving:
            left = tuple(each for each in leaving if each[1].job_id != event.job_id)
            if left:
                self.journal.put(self.vacating, event.node, left)
            else:
                self.journal.drop(self.vacating, event.node)
        self._reindex(event.node)
        record = self.jobs[event.job_id]
        price = attempt.prices[attempt.leases.index(lease)]
        gpu_us = lease.gpu_milli * (event.at_us - attempt.placed_us) // 1000
        used_cost, served_gpu_us = record.used_cost + gpu_us * price, record.served_gpu_us + gpu_us
        self.journal.put(self.jobs, event.job_id, record._replace(used_cost=used_cost, served_gpu_us=served_gpu_us))
        self.journal.put(self.attention, event.job_id, None)
        self._changed()

    def _attempt_ended(self, event: AttemptEnded) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is None or attempt.held:
            return
        record, notice = self.jobs[event.job_id], attempt.notice
        eaten = self.eaten(attempt, event.outcome, event.at_us)
        counted = (event.outcome in _COUNTED and notice is None) or eaten is not None
        returns = event.outcome is Outcome.LOST if notice is None else notice.reason in _RETURNS
        queued = record._replace(
            phase=Phase.QUEUED,
            waits_since_us=event.at_us,
            barren=0 if attempt.captured_us is not None else record.barren + counted,
            pushes=record.pushes + (notice is not None and notice.reason in _PUSHED),
            used_us=record.used_us + max(share.at_us for share in attempt.shares) - attempt.placed_us,
            size=notice.gpus if notice is not None and returns else None,
            last=event,
        )
        self.journal.drop(self.attempts, event.job_id)
        self.journal.drop(self.elastic, event.job_id)
        if not self.journal.keeps:
            self.quotas.forget()
        if attempt.limit_at_us is not None:
            self.journal.remove(self.limits, (attempt.limit_at_us, event.job_id))
        self.journal.drop(self.attention, event.job_id)
        self.journal.put(self.jobs, event.job_id, queued)
        if returns:
            self.journal.put(self.returning, event.job_id, None)
        self._enqueue(queued)
