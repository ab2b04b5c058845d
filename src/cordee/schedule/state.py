"""What the scheduler knows: jobs, live attempts, nodes, and the indexes that make a cycle cheap.

`State` is the one mutable thing of this room. `apply(event)` is the only change, the events of the log in order give
the same state, and `what_if()` takes back whatever was applied inside it. Records are frozen and replaced.

What `apply` ignores, so that late and repeated reports do no harm: a job submitted twice; anything about a job that is
not known or has ended; anything about an attempt that is not the job's live one (an older epoch, or one that ended);
a second ShareEnded of a node; a NodeUp or NodeDown of an epoch below the node's newest; Reported, Restored and
RankLeft, which are the ledger's. A placement that leases a GPU twice is a programmer's error and is asserted.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    Job,
    JobEnded,
    JobSubmitted,
    KillOrdered,
    Lease,
    Node,
    NodeDown,
    NodeReclaimed,
    NodeUp,
    NoticeGiven,
    Outcome,
    QueuesSet,
    RanksStarted,
    ServerDraining,
    ServerUp,
    ShareEnded,
    StopRequested,
)
from cordee.ids import JobId
from cordee.schedule.entry import Used, entry_of
from cordee.schedule.free import FreeIndex
from cordee.schedule.held import NOTHING, Held, held_by, offered_by
from cordee.schedule.limits import notice_at_us
from cordee.schedule.quotas import HALF_LIFE_US, Quotas
from cordee.schedule.share import Rank, rank

_COUNTED = (Outcome.FAILED, Outcome.LOST)


class Phase(StrEnum):
    """Where a job is in its life."""

    QUEUED = "queued"
    RUNNING = "running"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"

    @property
    def ended(self) -> bool:
        """Whether the job will not run again."""
        return self in (Phase.DONE, Phase.FAILED, Phase.STOPPED)


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A job and its life so far."""

    job: Job
    submitted_us: int
    waits_since_us: int  # when it was queued for the last time
    phase: Phase = Phase.QUEUED
    epoch: int = 0  # of its newest attempt
    barren: int = 0  # attempts in a row that failed or were lost without a commit
    used_us: int = 0  # attempts that ended: placed until the last GPU was free
    used_cost: int = 0  # attempts' ended shares, in micro-dollars x microseconds per hour
    stop: StopRequested | None = None
    last: AttemptEnded | None = None
    ended: JobEnded | None = None

    @property
    def rank(self) -> Rank:
        """Its place in the order of all queues."""
        return rank(self.job, self.submitted_us)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The live attempt of a job: from AttemptPlaced until AttemptEnded."""

    job: Job
    epoch: int
    placed_us: int
    leases: tuple[Lease, ...]
    prices: tuple[int, ...]  # micro-dollars per GPU-hour of each lease's node when placed
    held: tuple[Lease, ...]  # leases whose share has not ended
    limit_at_us: int | None = None  # when it gets notice for its job's limits
    started_us: int | None = None  # first RanksStarted
    captured_us: int | None = None  # work before this is durable
    committed_step: int | None = None
    shares: tuple[ShareEnded, ...] = ()
    notice: NoticeGiven | None = None
    kill: KillOrdered | None = None

    @property
    def leaving(self) -> bool:
        """Whether its GPUs become free without a further decision."""
        return self.notice is not None or self.kill is not None

    @property
    def micro_usd_per_hour(self) -> int:
        """The price of the whole gang."""
        return _micro_usd_per_hour(self.leases, self.prices)

    def holds(self, leases: tuple[Lease, ...]) -> Held:
        """What it holds by some of its leases."""
        price_of = {lease.node: price for lease, price in zip(self.leases, self.prices, strict=True)}
        return held_by(self.job, leases, [price_of[lease.node] for lease in leases])


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """A node as its newest agent described it."""

    node: Node
    up: bool = True
    why: str = ""  # it is down
    reclaimed_us: int | None = None  # the cloud takes it back then

    @property
    def stays(self) -> bool:
        """Whether what becomes free on it can be used again."""
        return self.up and self.reclaimed_us is None


def _micro_usd_per_hour(leases: tuple[Lease, ...], prices: tuple[int, ...]) -> int:
    return sum(lease.gpu_milli * price for lease, price in zip(leases, prices, strict=True)) // 1000


_Undo = tuple[Callable[..., object], tuple[Any, ...]]


class State:
    """Single owner, changed by `apply` only."""

    def __init__(self, *, half_life_us: int = HALF_LIFE_US) -> None:
        """Nothing has happened yet; what queues borrowed speaks half as much against them after the half-life."""
        self.draining = False
        self.jobs: dict[JobId, JobRecord] = {}
        self.attempts: dict[JobId, Attempt] = {}
        self.nodes: dict[str, NodeRecord] = {}
        self.leased: dict[str, Used] = {}  # by node
        self.queue: list[Rank] = []  # of queued jobs, ascending
        self.attention: dict[JobId, None] = {}  # jobs that the lifecycle must look at: not plainly queued or running
        self.limits: list[tuple[int, JobId]] = []  # of live attempts, ascending
        self.index = FreeIndex()
        self.quotas = Quotas(half_life_us=half_life_us)
        self._journal: list[_Undo] | None = None
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            ServerUp: lambda event: self._drain(False),
            ServerDraining: lambda event: self._drain(True),
            JobSubmitted: self._submitted,
            StopRequested: self._stop_requested,
            JobEnded: self._job_ended,
            NodeUp: self._node_up,
            NodeDown: self._node_down,
            NodeReclaimed: self._node_reclaimed,
            QueuesSet: self._queues_set,
            AttemptPlaced: self._placed,
            NoticeGiven: self._noticed,
            KillOrdered: self._kill_ordered,
            RanksStarted: self._ranks_started,
            ShareEnded: self._share_ended,
            CheckpointCommitted: self._committed,
            AttemptEnded: self._attempt_ended,
        }

    def apply(self, event: Event) -> None:
        """Take note of one event; a stale one changes nothing."""
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    @contextmanager
    def what_if(self) -> Iterator[None]:
        """Take back, at the end, everything that was applied inside. Can be nested."""
        outermost = self._journal is None
        if self._journal is None:
            self._journal = []
        mark = len(self._journal)
        try:
            yield
        finally:
            self.take_back(mark)
            if outermost:
                self._journal = None

    def mark(self) -> int:
        """Where `take_back` can return to; inside `what_if` only."""
        assert self._journal is not None, "changes can be taken back inside what_if only"
        return len(self._journal)

    def take_back(self, mark: int) -> None:
        """Undo what was applied since the mark."""
        assert self._journal is not None, "changes can be taken back inside what_if only"
        while len(self._journal) > mark:
            undo, args = self._journal.pop()
            undo(*args)

    def snapshot(self) -> dict[str, object]:
        """A deep copy as plain values, to compare and to keep; indexes included."""
        return {
            "draining": self.draining,
            "jobs": dict(self.jobs),
            "attempts": dict(self.attempts),
            "nodes": dict(self.nodes),
            "leased": dict(self.leased),
            "queue": tuple(self.queue),
            "attention": frozenset(self.attention),
            "limits": tuple(self.limits),
            "index": self.index.value(),
            "quotas": self.quotas.value(),
        }

    def _drain(self, draining: bool) -> None:
        self._undo(setattr, self, "draining", self.draining)
        self.draining = draining

    # -- jobs ------------------------------------------------------------------------------------------------

    def _submitted(self, event: JobSubmitted) -> None:
        job = event.job
        if job.job_id not in self.jobs:
            record = JobRecord(job=job, submitted_us=event.at_us, waits_since_us=event.at_us)
            self._put(self.jobs, job.job_id, record)
            self._insert(self.queue, record.rank)

    def _stop_requested(self, event: StopRequested) -> None:
        record = self.jobs.get(event.job_id)
        if record is None or record.phase.ended or (record.stop and (record.stop.now or not event.now)):
            return
        self._put(self.jobs, event.job_id, replace(record, stop=event))
        self._put(self.attention, event.job_id, None)

    def _job_ended(self, event: JobEnded) -> None:
        record = self.jobs.get(event.job_id)
        if record is None or record.phase.ended or event.job_id in self.attempts:
            return
        self._remove(self.queue, record.rank)
        self._drop(self.attention, event.job_id)
        self._put(self.jobs, event.job_id, replace(record, phase=Phase(event.state), ended=event))

    # -- nodes -----------------------------------------------------------------------------------------------

    def _node_up(self, event: NodeUp) -> None:
        known = self.nodes.get(event.node.name)
        if known is None or event.node.epoch >= known.node.epoch:
            # The same agent again describes a change of its GPUs; what the cloud announced still holds.
            same = known is not None and event.node.epoch == known.node.epoch
            reclaimed_us = known.reclaimed_us if known is not None and same else None
            self._set_node(NodeRecord(node=event.node, reclaimed_us=reclaimed_us), event.at_us)

    def _node_down(self, event: NodeDown) -> None:
        known = self.nodes.get(event.node)
        if known is not None and event.epoch >= known.node.epoch:
            self._set_node(replace(known, up=False, why=event.why), event.at_us)

    def _node_reclaimed(self, event: NodeReclaimed) -> None:
        known = self.nodes.get(event.node)
        if known is None or event.epoch != known.node.epoch:
            return
        self._set_node(replace(known, reclaimed_us=event.deadline_us), event.at_us)
        for job_id, attempt in self.attempts.items():
            if any(lease.node == event.node for lease in attempt.held):
                self._put(self.attention, job_id, None)

    def _set_node(self, record: NodeRecord, at_us: int) -> None:
        name = record.node.name
        before, after = (
            offered_by(each.node) if each is not None and each.stays else NOTHING
            for each in (self.nodes.get(name), record)
        )
        self._put(self.nodes, name, record)
        self.quotas.resize(after.less(before), at_us)
        self._undo(self.quotas.resize, before.less(after), at_us)
        self._reindex(name)

    def _reindex(self, name: str) -> None:
        record = self.nodes[name]
        entry = entry_of(record.node, self.leased.get(name, Used())) if record.stays else None
        old = self.index.put(name, entry)
        self._undo(self.index.put, name, old)

    # -- queues ----------------------------------------------------------------------------------------------

    def _queues_set(self, event: QueuesSet) -> None:
        self._undo(setattr, self, "quotas", self.quotas)
        self.quotas = self.quotas.regrouped(event.queues, event.at_us)

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
            micro_usd_per_hour=_micro_usd_per_hour(event.leases, prices),
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
            self._put(self.leased, lease.node, self.leased.get(lease.node, Used()).plus(lease, record.job))
            self._reindex(lease.node)
        held = held_by(record.job, event.leases, prices)
        self.quotas.put(record.job, held, event.at_us)
        self._undo(self.quotas.take, record.job, held, event.at_us)
        self._remove(self.queue, record.rank)
        self._put(self.jobs, event.job_id, replace(record, phase=Phase.RUNNING, epoch=event.epoch))
        self._put(self.attempts, event.job_id, attempt)
        if limit_at_us is not None:
            self._insert(self.limits, (limit_at_us, event.job_id))

    def _live(self, job_id: JobId, epoch: int) -> Attempt | None:
        attempt = self.attempts.get(job_id)
        return attempt if attempt is not None and attempt.epoch == epoch else None

    def _noticed(self, event: NoticeGiven) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None and not attempt.leaving:
            self._stopping(attempt, replace(attempt, notice=event))

    def _kill_ordered(self, event: KillOrdered) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None and attempt.kill is None:
            self._stopping(attempt, replace(attempt, kill=event))

    def _stopping(self, before: Attempt, attempt: Attempt) -> None:
        job_id = attempt.job.job_id
        if not before.leaving:
            gpu_milli = before.holds(before.held).gpu_milli
            self.quotas.leave(attempt.job, gpu_milli)
            self._undo(self.quotas.stay, attempt.job, gpu_milli)
        self._put(self.attempts, job_id, attempt)
        self._put(self.jobs, job_id, replace(self.jobs[job_id], phase=Phase.STOPPING))
        self._put(self.attention, job_id, None)

    def _ranks_started(self, event: RanksStarted) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None and attempt.started_us is None:
            self._put(self.attempts, event.job_id, replace(attempt, started_us=event.at_us))

    def _committed(self, event: CheckpointCommitted) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is not None and event.step > (attempt.committed_step or -1):
            # What ran while the capture drained is not in it.
            captured_us = event.at_us - event.drain_us
            committed = replace(attempt, captured_us=captured_us, committed_step=event.step)
            self._put(self.attempts, event.job_id, committed)

    def _share_ended(self, event: ShareEnded) -> None:
        attempt = self._live(event.job_id, event.epoch)
        lease = next((each for each in attempt.held if each.node == event.node), None) if attempt else None
        if attempt is None or lease is None:
            return
        held = tuple(each for each in attempt.held if each is not lease)
        self._put(self.attempts, event.job_id, replace(attempt, held=held, shares=(*attempt.shares, event)))
        freed = attempt.holds(attempt.held).less(attempt.holds(held))
        self.quotas.take(attempt.job, freed, event.at_us)
        self._undo(self.quotas.put, attempt.job, freed, event.at_us)
        if attempt.leaving:
            self.quotas.stay(attempt.job, freed.gpu_milli)
            self._undo(self.quotas.leave, attempt.job, freed.gpu_milli)
        self._put(self.leased, event.node, self.leased[event.node].minus(lease, attempt.job))
        self._reindex(event.node)
        record = self.jobs[event.job_id]
        price = attempt.prices[attempt.leases.index(lease)]
        cost = lease.gpu_milli * price * (event.at_us - attempt.placed_us) // 1000
        self._put(self.jobs, event.job_id, replace(record, used_cost=record.used_cost + cost))
        self._put(self.attention, event.job_id, None)

    def _attempt_ended(self, event: AttemptEnded) -> None:
        attempt = self._live(event.job_id, event.epoch)
        if attempt is None or attempt.held:
            return
        record = self.jobs[event.job_id]
        counted = event.outcome in _COUNTED and attempt.notice is None
        barren = 0 if attempt.captured_us is not None else record.barren + counted
        used_us = record.used_us + max(share.at_us for share in attempt.shares) - attempt.placed_us
        queued = replace(
            record, phase=Phase.QUEUED, waits_since_us=event.at_us, barren=barren, used_us=used_us, last=event
        )
        self._drop(self.attempts, event.job_id)
        if self._journal is None:
            self.quotas.forget(event.at_us)
        if attempt.limit_at_us is not None:
            self._remove(self.limits, (attempt.limit_at_us, event.job_id))
        self._drop(self.attention, event.job_id)
        self._put(self.jobs, event.job_id, queued)
        self._insert(self.queue, record.rank)

    # -- the journal -----------------------------------------------------------------------------------------

    def _undo(self, undo: Callable[..., object], *args: Any) -> None:
        if self._journal is not None:
            self._journal.append((undo, args))

    def _put(self, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        if key in mapping:
            self._undo(mapping.__setitem__, key, mapping[key])
        else:
            self._undo(mapping.__delitem__, key)
        mapping[key] = value

    def _drop(self, mapping: dict[Any, Any], key: Any) -> None:
        if key in mapping:
            self._undo(mapping.__setitem__, key, mapping.pop(key))

    def _insert(self, ascending: list[Any], item: Any) -> None:
        insort(ascending, item)
        self._undo(ascending.remove, item)

    def _remove(self, ascending: list[Any], item: Any) -> None:
        del ascending[bisect_left(ascending, item)]
        self._undo(insort, ascending, item)
