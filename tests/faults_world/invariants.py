"""The invariants of every log, counted anew with none of the scheduler's own code.

`Invariants` applies each event as it is committed, and asserts. It knows no policy and needs no state; `check_state`
and `check_ledger` compare those of the control plane with it.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from cordee.account.ledger import Ledger
from cordee.events import (
    AfterEnd,
    AttemptEnded,
    AttemptPlaced,
    Capacity,
    CheckpointCommitted,
    Event,
    HoldReleased,
    Job,
    JobEnded,
    JobHeld,
    JobSubmitted,
    KillOrdered,
    Lease,
    Node,
    NodeCordoned,
    NodeDown,
    NodeReclaimed,
    NodeUncordoned,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    Queue,
    QueuesSet,
    RankLeft,
    RanksEnded,
    RanksStarted,
    Reported,
    RequeueRequested,
    Restored,
    ServerShuttingDown,
    ServerUp,
    Tier,
)
from cordee.ids import JobId
from cordee.schedule.state.state import State
from faults_world.ranks import Key, Ranks

_TIERS = tuple(Tier)
_RANK_REPORTS = (Restored, Reported, CheckpointCommitted, RankLeft)
_FOR_OTHERS = (NoticeReason.PREEMPT, NoticeReason.TIME_SLICE)


@dataclass(slots=True)
class _Node:
    node: Node
    up: bool = True
    reclaimed: bool = False
    cordoned: bool = False


@dataclass(slots=True)
class _Live:
    """An attempt between AttemptPlaced and AttemptEnded."""

    placed: AttemptPlaced
    held: dict[str, Lease]
    started_us: int | None = None
    commands: set[type[Any]] = field(default_factory=set)
    leaves_for: JobId | None = None
    leaves_since_us: int | None = None


class Invariants:
    """A fold over the log that asserts.

    Attributes:
        jobs: submitted, in their order.
        ended: of them.
        at_us: the log's time; None before its first event.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.jobs: dict[JobId, Job] = {}
        self.ended: dict[JobId, JobEnded] = {}
        self.live: dict[JobId, _Live] = {}
        self.nodes: dict[str, _Node] = {}
        self.queues: dict[str, Queue] = {"default": Queue(name="default")}
        self.noticed: dict[NoticeReason, int] = {}
        self._ranks = ranks
        self._unique: set[Event] = set()  # events that can occur only once
        self._epochs: dict[JobId, int] = {}
        self._preemptions: dict[JobId, int] = {}
        self._leased: dict[tuple[str, int], int] = {}  # thousandths of each GPU
        self._held: dict[Key, int] = {}  # thousandths of a GPU x time, of attempts that ended
        self._paused: dict[JobId, JobHeld] = {}
        self._first_ends: dict[JobId, set[str]] = {}
        self._shutting_down = False
        self.at_us: int | None = None
        self._idle_milli_us = 0
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            ServerUp: lambda event: self._shut_down(False),
            ServerShuttingDown: lambda event: self._shut_down(True),
            JobSubmitted: self._submitted,
            JobEnded: self._job_ended,
            JobHeld: self._held_by,
            HoldReleased: lambda event: self._paused.pop(event.job_id, None),
            RequeueRequested: self._requeued,
            NodeUp: self._node_up,
            NodeDown: self._node_down,
            NodeReclaimed: self._node_reclaimed,
            NodeCordoned: self._node_cordoned,
            NodeUncordoned: self._node_uncordoned,
            QueuesSet: self._queues_set,
            AttemptPlaced: self._placed,
            NoticeGiven: self._noticed,
            KillOrdered: self._killed,
            RanksStarted: self._ranks_started,
            RanksEnded: self._ranks_ended,
            AttemptEnded: self._attempt_ended,
        }

    def apply(self, event: Event) -> None:
        """Check one more committed event."""
        if isinstance(event, RanksStarted | CheckpointCommitted | RankLeft):
            assert event not in self._unique, f"the log has it twice: {event}"
            self._unique.add(event)
        if isinstance(event, CheckpointCommitted):
            live = self.live.get(event.job_id)
            if live is not None and live.placed.epoch == event.epoch:
                self._ranks.commit_reported(event.job_id, event.step)
        if isinstance(event, _RANK_REPORTS):
            return  # they have clocks of their own
        since_us = event.at_us if self.at_us is None else self.at_us
        assert event.at_us >= since_us, f"the log's time goes back to {event.at_us}"
        self._idle_milli_us += self._idle_milli() * (event.at_us - since_us)
        self.at_us = event.at_us
        handler = self._handlers.get(type(event))
        if handler is not None:
            handler(event)

    # -- jobs and nodes --------------------------------------------------------------------------------------

    def _shut_down(self, shutting_down: bool) -> None:
        self._shutting_down = shutting_down

    def _submitted(self, event: JobSubmitted) -> None:
        assert event.job.job_id not in self.jobs, f"{event.job.job_id} was submitted twice"
        self.jobs[event.job.job_id] = event.job

    def _job_ended(self, event: JobEnded) -> None:
        job_id = event.job_id
        assert job_id in self.jobs and job_id not in self.ended, f"{job_id} ended twice, or never was"
        assert job_id not in self.live, f"{job_id} ended while {self._epochs[job_id]} lives"
        self.ended[job_id] = event
        self._first_ends.setdefault(job_id, set()).add(event.state)

    def _requeued(self, event: RequeueRequested) -> None:
        if self.ended.pop(event.job_id, None) is not None:
            self._paused.pop(event.job_id, None)  # it runs again, whoever held it before it ended

    def _held_by(self, event: JobHeld) -> None:
        if event.job_id not in self.ended:
            self._paused.setdefault(event.job_id, event)

    def _check_may_start(self, name: str, job: Job) -> None:
        """Check that nobody holds the job, and that those that it starts after have ended so, or run again."""
        assert job.job_id not in self._paused, f"{name} was placed, and {self._paused[job.job_id]} holds it"
        for after in job.after:
            end = self._first_ends.get(JobId(after.of))
            assert end is not None, f"{name} was placed before {after.of} had ended"
            done = "done" in end
            right = after.end is AfterEnd.ANY or (done if after.end is AfterEnd.OK else len(end - {"done"}) > 0)
            assert right, f"{name} was placed, and {after.of} has ended {end}"

    def _node_up(self, event: NodeUp) -> None:
        known = self.nodes.get(event.node.name)
        if known is None:
            self.nodes[event.node.name] = _Node(event.node)
        elif event.node.epoch >= known.node.epoch:
            reclaimed = known.reclaimed and event.node.epoch == known.node.epoch
            self.nodes[event.node.name] = _Node(event.node, True, reclaimed, known.cordoned)

    def _node_down(self, event: NodeDown) -> None:
        known = self.nodes.get(event.node)
        if known is not None and event.epoch >= known.node.epoch:
            known.up = False

    def _node_reclaimed(self, event: NodeReclaimed) -> None:
        known = self.nodes.get(event.node)
        if known is not None and event.epoch == known.node.epoch:
            known.reclaimed = True

    def _node_cordoned(self, event: NodeCordoned) -> None:
        if event.node in self.nodes:
            self.nodes[event.node].cordoned = True

    def _node_uncordoned(self, event: NodeUncordoned) -> None:
        if event.node in self.nodes:
            self.nodes[event.node].cordoned = False

    def _queues_set(self, event: QueuesSet) -> None:
        self.queues = {"default": Queue(name="default")} | {queue.name: queue for queue in event.queues}

    # -- attempts --------------------------------------------------------------------------------------------

    def _placed(self, event: AttemptPlaced) -> None:
        job_id, job = event.job_id, self.jobs[event.job_id]
        name = f"{job_id}.{event.epoch}"
        assert not self._shutting_down, f"{name} was placed while the server shuts down"
        assert job_id not in self.live, f"{name} was placed while {self._epochs[job_id]} lives"
        assert job_id not in self.ended, f"{name} was placed, and the job has ended"
        assert event.epoch == self._epochs.get(job_id, 0) + 1, f"{name} follows {self._epochs.get(job_id, 0)}"
        self._check_may_start(name, job)
        self._check_gang(name, job, event.leases)
        for lease in event.leases:
            node = self.nodes[lease.node]
            assert node.up and not node.reclaimed and not node.cordoned, f"{name} was placed on {node}"
            assert len(set(lease.gpus)) == len(lease.gpus) and all(gpu < node.node.gpus for gpu in lease.gpus), lease
            assert not set(lease.gpus) & set(node.node.unavailable), f"{name}: {lease} is in use by others"
            for gpu in lease.gpus:
                used = self._leased.get((lease.node, gpu), 0) + lease.milli
                assert used <= 1000, f"{name}: {lease.node}:{gpu} is leased to {used}/1000"
                self._leased[lease.node, gpu] = used
        before = self._claims()
        self.live[job_id] = _Live(event, {lease.node: lease for lease in event.leases})
        self._epochs[job_id] = event.epoch
        self._check_quota(name, job, before)

    def _check_gang(self, name: str, job: Job, leases: tuple[Lease, ...]) -> None:
        """Check that the gang has all its GPUs, in its shape, of the kind that it needs."""
        gpus = sum(len(lease.gpus) for lease in leases)
        assert gpus in (job.gpus, *job.sizes), f"{name} has {gpus} GPUs of {job.gpus}"
        assert len({lease.node for lease in leases}) == len(leases), f"{name} has two leases of a node"
        assert {lease.milli for lease in leases} == {job.gpu_milli}, f"{name} has {leases} of {job.gpu_milli}/1000"
        nodes = [self.nodes[lease.node].node for lease in leases]
        assert len({node.gpu_name for node in nodes}) == 1, f"{name} has GPUs of two kinds"
        for node in nodes:
            assert job.gpu_name in (None, node.gpu_name) and job.capacity in (Capacity.ANY, node.capacity), f"{name}"
        if job.unit_gpus is not None:
            whole = 0
            for lease, node in zip(leases, nodes, strict=True):
                island = node.island_gpus if node.island_gpus >= job.unit_gpus else node.gpus
                counts: dict[int, int] = {}
                for gpu in lease.gpus:
                    counts[gpu // island] = counts.get(gpu // island, 0) + 1
                whole += sum(count // job.unit_gpus for count in counts.values())
            units = gpus // min(job.unit_gpus, gpus) if gpus >= job.unit_gpus else 0
            assert whole >= units, f"{name}: {leases} is not made of units of {job.unit_gpus}"
        elif len(leases) > 1:
            sizes = [len(lease.gpus) for lease in leases]
            shaped = any(sum(size % unit > 0 for size in sizes) <= 1 for unit in sizes)
            assert shaped, f"{name}: {sizes} is not a row of units and one rest"
        if job.within == "node":
            assert len(leases) == 1, f"{name} is on {len(leases)} nodes"
        elif job.within == "rack":
            assert len({node.domain for node in nodes}) == 1, f"{name} is in several racks"

    def _noticed(self, event: NoticeGiven) -> None:
        if event.reason in (*_FOR_OTHERS, NoticeReason.QUOTA) and event.for_job is not None:
            self._check_entitled(event, self.jobs[event.for_job])
        live = self._once(event)
        live.leaves_for, live.leaves_since_us = event.for_job, event.at_us
        self.noticed[event.reason] = self.noticed.get(event.reason, 0) + 1
        job = self.jobs[event.job_id]
        if event.reason is NoticeReason.PREEMPT and event.for_job is not None:
            upper = self.jobs[event.for_job]
            name = f"{event.job_id} for {event.for_job}"
            assert _TIERS.index(job.tier) > _TIERS.index(upper.tier), f"{name} is not of a lower tier"
            ran_us = -1 if live.started_us is None else event.at_us - live.started_us
            assert event.epoch == 1 or job.min_run_us <= max(0, ran_us), f"{name} ran {ran_us} us of {job.min_run_us}"
        if event.reason in _FOR_OTHERS:
            count = self._preemptions.get(event.job_id, 0)
            assert job.preemptions_max is None or count < job.preemptions_max, f"{event.job_id}: {count} preemptions"
        if event.reason in (*_FOR_OTHERS, NoticeReason.QUOTA):
            self._preemptions[event.job_id] = self._preemptions.get(event.job_id, 0) + 1

    def _killed(self, event: KillOrdered) -> None:
        self._once(event)

    def _once(self, event: NoticeGiven | KillOrdered) -> _Live:
        live = self.live[event.job_id]
        assert live.placed.epoch == event.epoch and type(event) not in live.commands, f"again: {event}"
        live.commands.add(type(event))
        return live

    def _ranks_started(self, event: RanksStarted) -> None:
        live = self.live.get(event.job_id)
        if live is not None and live.placed.epoch == event.epoch and live.started_us is None:
            live.started_us = event.at_us

    def _ranks_ended(self, event: RanksEnded) -> None:
        self._ranks.end_reported(event.job_id, event.epoch, event.node)
        live = self.live.get(event.job_id)
        lease = live.held.pop(event.node, None) if live is not None and live.placed.epoch == event.epoch else None
        if live is None or lease is None:
            return
        for gpu in lease.gpus:
            self._leased[event.node, gpu] -= lease.milli
        key = (event.job_id, event.epoch)
        self._held[key] = self._held.get(key, 0) + lease.gpu_milli * (event.at_us - live.placed.at_us)

    def _attempt_ended(self, event: AttemptEnded) -> None:
        live = self.live.pop(event.job_id)
        assert live.placed.epoch == event.epoch and not live.held, f"{event} before {list(live.held)} ended"

    # -- queues ----------------------------------------------------------------------------------------------

    def _path(self, queue: str) -> list[Queue]:
        found = [self.queues.get(queue, self.queues["default"])]
        while found[-1].parent is not None:
            found.append(self.queues[found[-1].parent])
        return found

    def _holds(self, name: str, owner: str | None = None) -> int:
        """Thousandths of GPUs of all in and below a queue."""
        return sum(
            lease.gpu_milli
            for job_id, live in self.live.items()
            if owner in (None, self.jobs[job_id].owner)
            and any(queue.name == name for queue in self._path(self.jobs[job_id].queue))
            for lease in live.held.values()
        )

    def _claims(self) -> int:
        """Return what is held, with what queues that do not lend keep beside it."""

        def claim(name: str | None) -> int:
            inside = [queue for queue in self.queues.values() if queue.parent == name]
            own = sum(
                lease.gpu_milli
                for job_id, live in self.live.items()
                if name is not None and self._path(self.jobs[job_id].queue)[0].name == name
                for lease in live.held.values()
            )
            inner = own + sum(claim(queue.name) for queue in inside)
            return inner if name is None or self.queues[name].lend else max(inner, 1000 * self.queues[name].quota_gpus)

        return claim(None)

    def _check_quota(self, name: str, job: Job, claimed_before: int) -> None:
        """Check that no queue or user is over a limit, and that all beyond a quota is lent."""
        for queue in self._path(job.queue):
            for what, most, holds in (
                ("limit", queue.limit_gpus, self._holds(queue.name)),
                ("limit of a user", queue.user_gpus, self._holds(queue.name, job.owner)),
            ):
                assert most is None or holds <= 1000 * most, f"{name}: {queue.name} holds {holds}, its {what} is {most}"
        held = sum(lease.gpu_milli for live in self.live.values() for lease in live.held.values())
        offered = sum(1000 * _gives(each.node) for each in self.nodes.values() if each.up)
        claims = self._claims()
        if claims > claimed_before and claims > held:
            assert claims <= offered, f"{name}: {claims - held} are kept by queues that do not lend, of {offered}"

    def _check_entitled(self, event: NoticeGiven, upper: Job) -> None:
        """Check that a queue takes back from another one only what that one has borrowed.

        A job inside its quota is preempted only for a job inside its own. Within a cycle a job that claims what others
        vacate counts as holding it, and the log has no claims: while any job leaves, every waiting job may claim.
        """
        theirs, ours = self._counts_in(self.jobs[event.job_id]), self._counts_in(upper)
        meets = next(number for number, each in enumerate(theirs) if each in ours)
        quota = event.reason is NoticeReason.QUOTA
        name = f"{event.job_id} for {event.for_job} ({event.reason})"
        if meets == 0:
            assert not quota, f"{name}: both are of {theirs[0][0]}"
            return
        together = (event.for_job, event.at_us)
        others = any(
            live.commands and (live.leaves_for, live.leaves_since_us) != together for live in self.live.values()
        )
        waits = self.jobs.keys() - self.live.keys() - self.ended.keys() - {upper.job_id}
        claim = [self.jobs[job_id] for job_id in waits] if others else []
        over = all(
            self._held_after_notices(each, claim) + self._larger(event, each[0]) > self._quota(each)
            for each in theirs[:meets]
        )
        mine = ours[ours.index(theirs[meets]) - 1]
        smallest = replace(upper, gpus=min((upper.gpus, *upper.sizes)))
        inside = self._held_after_notices(mine, [smallest]) <= self._quota(mine)
        allowed = (inside and over) if quota else (inside or over)
        assert allowed, f"{name}: {mine[0]} is inside its quota: {inside}; {theirs[:meets]} are over theirs: {over}"

    def _larger(self, event: NoticeGiven, name: str | None) -> int:
        """Return by how much the largest victim in this queue for the same job is larger: it may have been the last.

        Each preemption finds the queue above its quota in one order of the victims, not in every order.
        """
        own, largest = self._gpu_milli(self.live[event.job_id]), 0
        for job_id, live in self.live.items():
            together = live.leaves_for == event.for_job and live.leaves_since_us == event.at_us
            if together and any(queue.name == name for queue in self._path(self.jobs[job_id].queue)):
                largest = max(largest, self._gpu_milli(live))
        return max(0, largest - own)

    def _gpu_milli(self, live: _Live) -> int:
        return sum(lease.gpu_milli for lease in live.held.values())

    def _counts_in(self, job: Job) -> list[tuple[str | None, bool]]:
        """Return the queues of a job, the innermost first; True: only jobs of the queue itself."""
        path: list[tuple[str | None, bool]] = [(queue.name, False) for queue in self._path(job.queue)]
        own = [(path[0][0], True)] if any(queue.parent == path[0][0] for queue in self.queues.values()) else []
        return [*own, *path, (None, False)]

    def _quota(self, counted: tuple[str | None, bool]) -> int:
        name, own = counted
        assert name is not None, "the cluster has none"
        inside = sum(queue.quota_gpus for queue in self.queues.values() if own and queue.parent == name)
        return 1000 * (self.queues[name].quota_gpus - inside)

    def _held_after_notices(self, counted: tuple[str | None, bool], more: Iterable[Job]) -> int:
        """Return what a queue holds without the attempts that have notice, with more jobs, and with kept quotas."""
        name, own = counted
        amount = sum(
            lease.gpu_milli
            for job_id, live in self.live.items()
            if not live.commands and self._path(self.jobs[job_id].queue)[0].name == name
            for lease in live.held.values()
        )
        amount += sum(job.gpus * job.gpu_milli for job in more if self._path(job.queue)[0].name == name)
        for queue in self.queues.values():
            if queue.parent == name and not own:
                inner = self._held_after_notices((queue.name, False), more)
                amount += inner if queue.lend else max(inner, 1000 * queue.quota_gpus)
        return amount

    # -- what the control plane holds ------------------------------------------------------------------------

    def check_state(self, state: State) -> None:
        """Check that every job is in one place, and that the leases are those of the log."""
        waiting = set(state.waiting.job_ids())
        assert state.jobs.keys() == self.jobs.keys(), "a job is lost"
        for job_id, record in state.jobs.items():
            places = (job_id in waiting) + (job_id in state.attempts) + record.phase.ended + record.phase.deferred
            assert places == 1, f"{job_id} ({record.phase}) is in {places} places"
            assert record.phase.ended == (job_id in self.ended), f"{job_id} is {record.phase}"
        known = {name: (record.node.epoch, record.up) for name, record in state.nodes.records.items()}
        assert known == {name: (each.node.epoch, each.up) for name, each in self.nodes.items()}, f"nodes are {known}"
        held = {job_id: {lease.node: lease for lease in one.held} for job_id, one in state.attempts.items()}
        assert held == {job_id: live.held for job_id, live in self.live.items()}, (
            "the state holds what the log does not"
        )

    def check_ledger(self, ledger: Ledger, now_us: int) -> None:
        """Check that every microsecond of every attempt is in one class, and the rest idle."""
        now_us = max(now_us, self.at_us or 0)
        total = 0
        for row in ledger.rows(now_us):
            key = (row.job_id, row.epoch)
            milli_us = self._held.get(key, 0)
            live = self.live.get(row.job_id)
            if live is not None and live.placed.epoch == row.epoch:
                milli_us += sum(lease.gpu_milli for lease in live.held.values()) * (now_us - live.placed.at_us)
            assert row.gpu_us.held == milli_us // 1000, (
                f"{key} held {milli_us // 1000} us, the ledger says {row.gpu_us}"
            )
            assert all(amount >= 0 for amount in _amounts(row.gpu_us)), f"{key}: {row.gpu_us}"
            total += row.gpu_us.held
        assert len(ledger.rows(now_us)) == sum(self._epochs.values()), "an attempt is not in the ledger"
        totals = ledger.totals(now_us)
        idle = self._idle_milli_us + self._idle_milli() * (now_us - (self.at_us or now_us))
        assert (totals.gpu_us.held, totals.idle_gpu_us) == (total, idle // 1000), (
            f"{totals} of {total} and {idle // 1000}"
        )

    def _idle_milli(self) -> int:
        """Return the thousandths of GPUs that are free on nodes that are up."""
        return sum(
            max(0, 1000 - self._leased.get((name, gpu), 0))
            for name, each in self.nodes.items()
            if each.up
            for gpu in range(each.node.gpus)
            if gpu not in each.node.unavailable
        )


def _gives(node: Node) -> int:
    return node.gpus - len(node.unavailable)


def _amounts(split: object) -> Iterable[int]:
    return [getattr(split, name) for name in ("useful", "checkpoint", "restart", "stall", "lost", "unreported")]
