"""One tick of the control plane: take reports in, decide, commit, and hand the commands out.

The server and the simulator run the same class, which reaches the world through its three ports only.
An event goes to the store first and then to the state: an event that the store refused has not happened.
"""

import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from cordee.control.fold import Fold
from cordee.control.ports import Clock, Executor, Pending, Report, Store
from cordee.control.precedence import Precedence
from cordee.errors import StoreError
from cordee.events import (
    ArtifactPushed,
    ArtifactRemoved,
    ArtifactStaged,
    ArtifactTagged,
    ArtifactUsed,
    AttemptPlaced,
    BudgetRemoved,
    BudgetSet,
    Event,
    HoldReleased,
    Job,
    JobHeld,
    JobPrioritized,
    JobResumed,
    JobSubmitted,
    KeyCreated,
    KeyRevoked,
    MaintenanceBooked,
    MaintenanceCancelled,
    ModelOrdered,
    NodeCordoned,
    NodeUncordoned,
    NoticeGiven,
    Queue,
    QueuesSet,
    RankEvent,
    RehearsalEnded,
    ReportsRefused,
    RequeueRequested,
    ReservationCancelled,
    ReservationMade,
    ServerShuttingDown,
    ServerUp,
    ServiceDeclared,
    ServiceEnded,
    ServiceScaled,
    StopRequested,
    SweepDeclared,
    SweepEnded,
    SweepHeld,
    TenantSet,
)
from cordee.ids import JobId
from cordee.points import point
from cordee.reports import RANK_REPORTS, ReportError, check_report, parse_stream, scope_of
from cordee.schedule import enact
from cordee.schedule.policy import Policy
from cordee.schedule.quota.queues import check

Asked = (
    JobHeld
    | HoldReleased
    | RequeueRequested
    | JobPrioritized
    | SweepHeld
    | MaintenanceBooked
    | MaintenanceCancelled
    | ReservationMade
    | ReservationCancelled
    | BudgetSet
    | BudgetRemoved
)
OfArtifact = ArtifactPushed | ArtifactTagged | ArtifactStaged | ArtifactUsed | ArtifactRemoved


class _Fresh(NamedTuple):
    """Reports that the store has not seen, and the highest seq of each stream: of these reports, and of all reports."""

    reports: list[Report]
    marks: dict[str, int]
    seen: dict[str, int]


class Control:
    """The one owner of the state. Every change goes through `_commit`, under one lock.

    Attributes:
        state: what the scheduler knows; hold `changed` while reading it.
        ledger: GPU time held, by class, and its cost; hold `changed` while reading it.
        measurements: measured values of attempts beside their estimates; hold `changed` while reading it.
        changed: the lock, and the condition that is notified after each commit.
        fold: all three, and the log's last number.
        errors: jobs on which the last decision or a report failed, with the exception; other jobs are not affected.
        precedence: of what it decides and writes; threads that compute for long give way to it.
        retiring: ended jobs that the snapshot in the making does without: they must not run again meanwhile.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        store: Store,
        executor: Executor,
        policy: Policy | None = None,
        patience: float | None = None,
        fold: Fold | None = None,
        precedence: Precedence | None = None,
    ) -> None:
        """Rebuild everything from the store's log, and from a fold of its beginning if there is one.

        Decide by `policy`, or by the default one; from `up` on with this patience, if there is one, and with precedence
        over the threads that give way to it.
        """
        self._lock = threading.RLock()
        self.changed = threading.Condition(self._lock)
        self._patience = patience
        self.fold = fold or Fold(policy or Policy())
        self.state, self.ledger, self.measurements = self.fold.state, self.fold.ledger, self.fold.measurements
        self.errors: tuple[tuple[str, Exception], ...] = ()
        self.retiring: frozenset[JobId] = frozenset()
        self._failed: list[tuple[str, Exception]] = []  # of reports, since the last tick
        self._clock, self._store, self._executor = clock, store, executor
        self.precedence = precedence or Precedence()
        self._behind = False  # a commit failed, and the database may have made it all the same
        with self._lock:
            self._apply(store.events(self.number))

    @property
    def number(self) -> int:
        """Return the log's last number."""
        return self.fold.number

    def retire(self, job_ids: Iterable[JobId]) -> None:
        """Forget jobs that ended; the archive has them."""
        with self.changed:
            self.fold.retire(job_ids)

    def up(self) -> None:
        """Accept jobs, also after a shutdown."""
        self._append(ServerUp(at_us=self._clock.now_us(), patience=self._patience))

    def shut_down(self) -> None:
        """Give every attempt notice, and start nothing until `up`."""
        self._append(ServerShuttingDown(at_us=self._clock.now_us()))

    def catch_up(self) -> None:
        """Apply what the log has beyond the state: another server's commits, or one whose answer was lost."""
        with self._lock:
            self._apply(self._store.events(self.number))
            self._behind = False

    def submit(self, job: Job, spec: str) -> None:
        """Queue an admitted job."""
        point("submit.before_commit")
        self._append(JobSubmitted(at_us=self._clock.now_us(), job=job, spec=spec))
        point("submit.after_commit")

    def resume(self, job_id: JobId, *, by: str, why: str) -> None:
        """Queue a paused job again."""
        self._append(JobResumed(at_us=self._clock.now_us(), job_id=job_id, by=by, why=why))

    def set_queues(self, queues: Sequence[Queue], budgets: Sequence[BudgetSet | BudgetRemoved] = ()) -> None:
        """Replace the tree of queues, and change these budgets with it.

        Raises:
            QueuesError: they break a rule, or do not fit this cluster; nothing has changed.
        """
        with self.changed:
            nodes = [record.node for record in self.state.nodes.records.values()]
            check(queues, sum(node.gpus for node in nodes) if nodes else None)
            self._append(QueuesSet(at_us=self._clock.now_us(), queues=tuple(queues)), *budgets)

    def declare(
        self, name: str, revision: int, *, by: str, spec: str, replicas: tuple[int, int], standby: int = 0
    ) -> None:
        """Create a service, or update it with this revision; `replicas` are the fewest and the most."""
        self._append(
            ServiceDeclared(
                at_us=self._clock.now_us(),
                service=name,
                revision=revision,
                by=by,
                spec=spec,
                min_replicas=replicas[0],
                max_replicas=replicas[1],
                standby=standby,
            )
        )

    def scale(self, name: str, replicas: int, why: str) -> None:
        """Set the number of replicas that a service wants."""
        self._append(ServiceScaled(at_us=self._clock.now_us(), service=name, replicas=replicas, why=why))

    def end_service(self, name: str, *, by: str, why: str) -> None:
        """End a service; its controller gives the replicas notice."""
        self._append(ServiceEnded(at_us=self._clock.now_us(), service=name, by=by, why=why))

    def declare_sweep(self, sweep: str, *, by: str, spec: str) -> None:
        """Create a sweep; its controller submits the trials."""
        self._append(SweepDeclared(at_us=self._clock.now_us(), sweep=sweep, by=by, spec=spec))

    def end_sweep(self, sweep: str, *, by: str, why: str) -> None:
        """End a sweep; its controller stops the trials that have not ended."""
        self._append(SweepEnded(at_us=self._clock.now_us(), sweep=sweep, by=by, why=why))

    def order_model(self, job_id: JobId, epoch: int, model: str, why: str) -> None:
        """Order a replica of several models to hold this one."""
        self._append(ModelOrdered(at_us=self._clock.now_us(), job_id=job_id, epoch=epoch, model=model, why=why))

    def note(
        self, event: TenantSet | KeyCreated | KeyRevoked | NoticeGiven | RehearsalEnded | Asked | OfArtifact
    ) -> None:
        """Note what the scheduler does not decide on: tenants, keys, artifacts, rehearsals, requests about jobs."""
        self._append(event)

    def take_in(self, source: str, seq: int, events: Sequence[Event]) -> int:
        """Commit what a stream reports, unless its mark shows that it is in the log; return the mark.

        Raises:
            StoreError: nothing was committed, and nothing may be acknowledged.
        """
        with self.changed, self.precedence:
            if self._behind:
                self.catch_up()
            mark = self._store.marks([source])[source]
            if seq <= mark or not events:
                return mark
            self._commit(events, {source: seq})
            return seq

    def stop(self, job_id: JobId, *, by: str, now: bool = False) -> None:
        """Request the end of a job; with `now` it does not wait for a checkpoint."""
        self._append(StopRequested(at_us=self._clock.now_us(), job_id=job_id, by=by, now=now))

    def cordon(self, node: str, *, by: str, why: str, drain: bool) -> None:
        """Take a node out of use; with `drain` its attempts get notice. Repeating it changes nothing."""
        with self.changed:
            record = self.state.nodes.records[node]
            before = (record.cordoned_by, record.cordon_why, record.drains, record.leave_us)
            if before != (by, why, drain, None):
                self._append(NodeCordoned(at_us=self._clock.now_us(), node=node, by=by, why=why, drain=drain))

    def uncordon(self, node: str, *, by: str, why: str) -> None:
        """Put a node back into use."""
        with self.changed:
            record, now_us = self.state.nodes.records[node], self._clock.now_us()
            for each in list(self.state.agenda.bookings.values()):
                if each.node == node and each.from_us == record.leave_us:  # or it would be cordoned again at once
                    self._append(MaintenanceCancelled(at_us=now_us, booking=each.booking, by=by))
            if record.cordoned_by is not None:
                self._append(NodeUncordoned(at_us=self._clock.now_us(), node=node, by=by, why=why))

    def tick(self) -> int | None:
        """Take reports in, decide, commit, and hand the commands out.

        Returns:
            The time at which the decision changes by itself; None if only an event can change it.

        Raises:
            StoreError: the commit that failed changed nothing; the next tick tries again.
        """
        # The condition's own lock, without the two calls by which the condition takes it.
        with self._lock, self.precedence:
            executor = self._executor
            if self._behind:
                self.catch_up()
            fresh = self._fresh(executor.reports())
            if fresh.marks:
                point("reports.before_commit")
                self._take_in(fresh)
                point("reports.after_commit")
            if missed := self.measurements.due():
                self._commit(missed, {})
            # Also records committed earlier: an agent repeats them because it has not received the acknowledgement.
            for source, seq in fresh.seen.items():
                executor.acknowledge(source, seq)
                point("reports.acknowledged")
            # A decision is based on committed reports only. After a crash between the two commits it is made again.
            now_us = max(self._clock.now_us(), self.fold.last_us)
            decision = enact(self.state, now_us, None, self._write_decision)
            if self.errors or self._failed or decision.errors:
                self.errors, self._failed = (*self._failed, *decision.errors), []
            if decision.events:
                self._follow(decision.events)
                point("decision.after_commit")
        # Without the lock, so that an agent that hangs blocks no client. Only ticks write and end commands.
        delivered = []
        for pending in self._store.pending():
            if pending.number > self.number:
                break  # of a server that has replaced this one while it was frozen, as its next write will say
            point("command.before_carry_out")
            if executor.carry_out(self._with_estimate(pending)):
                point("command.before_confirm")
                delivered.append(pending.number)
        if delivered:
            # In one transaction: after a crash before it they go out again, and agents have carried them out once.
            self._store.confirm(delivered)
            point("command.after_confirm")
        return decision.wake_at_us

    def _with_estimate(self, pending: Pending) -> Pending:
        """Add the estimate for the GPUs of an attempt that starts: its ranks get the layout."""
        command = pending.command
        if not isinstance(command, AttemptPlaced):
            return pending
        job = self.state.jobs[command.job_id].job
        if not job.estimates:
            return pending
        return replace(pending, estimate=job.estimate_on(sum(len(lease.gpus) for lease in command.leases)))

    def _fresh(self, reports: Sequence[Report]) -> _Fresh:
        """Return the reports above their stream's mark. A report of a job unknown to the log only moves the mark."""
        if not reports:
            return _Fresh([], {}, {})
        kept: list[Report] = []
        marks: dict[str, int] = {}
        seen = dict(self._store.marks(list(dict.fromkeys([report.source for report in reports]))))
        now_us, jobs = self._clock.now_us(), self.state.jobs
        for report in reports:
            source, seq, event, is_checked = report
            if seq <= seen[source]:
                continue
            seen[source] = marks[source] = seq
            job_id = getattr(event, "job_id", None)
            if job_id is None or job_id in jobs:
                needs_check = not is_checked and type(event) in RANK_REPORTS
                kept.append(self._checked(report, now_us) if needs_check else report)
        return _Fresh(kept, marks, seen)

    def _checked(self, report: Report, now_us: int) -> Report:
        """Return a rank's report, or a ReportsRefused in its place.

        The rank's agent has checked it too; an agent may be of another version, or its clock may be wrong.
        """
        event: RankEvent = report.event  # type: ignore[assignment]  # The caller has looked at its type.
        record = self.state.jobs[event.job_id]
        scope = scope_of(report.source, event.job_id, event.epoch, record.job.gpus, record.submitted_us)
        try:
            checked = check_report(event, scope, now_us)
        except ReportError as error:
            return report._replace(event=self._refused(report, error))
        return report if checked is event else report._replace(event=checked)

    def _refused(self, report: Report, error: Exception) -> ReportsRefused:
        job_id, epoch, rank = parse_stream(report.source) or (getattr(report.event, "job_id", ""), 0, 0)
        return ReportsRefused(
            at_us=self._clock.now_us(), job_id=JobId(job_id), epoch=epoch, rank=rank, count=1, why=str(error)
        )

    def _take_in(self, fresh: _Fresh) -> None:
        """Commit the reports; a report that the store cannot hold is refused alone."""
        try:
            written = self._write([report.event for report in fresh.reports], fresh.marks)
        except StoreError:
            raise
        except Exception:
            for report in fresh.reports:
                self._take_in_alone(report)
            self._commit([], fresh.marks)
        else:
            self._apply_next(written)

    def _take_in_alone(self, report: Report) -> None:
        mark = {report.source: report.seq}
        try:
            written = self._write([report.event], mark)
        except StoreError:
            raise
        except Exception as error:
            self._failed.append((report.source, error))
            is_rank = parse_stream(report.source) is not None
            written = self._write([self._refused(report, error)] if is_rank else [], mark)
        self._apply_next(written)

    def _append(self, *events: Event) -> None:
        with self.changed, self.precedence:
            if self._behind:
                self.catch_up()
            self._commit(events, {})

    def _commit(self, events: Sequence[Event], marks: dict[str, int]) -> None:
        self._apply_next(self._write(events, marks))

    def _write(self, events: Sequence[Event], marks: dict[str, int]) -> Sequence[Event]:
        """Commit the events with times that never go back and are never ahead of the clock, and return them.

        Reports of ranks keep their own time unless it is ahead: they may come late, for instance after a time
        without a server.
        """
        now_us, last_us = self._clock.now_us(), self.fold.last_us
        stamped: list[Event] = []
        for event in events:
            at_us, is_ranks = event.at_us, type(event) in RANK_REPORTS
            if at_us > now_us or (at_us < last_us and not is_ranks):
                at_us = min(at_us, now_us) if is_ranks else max(last_us, min(at_us, now_us))
            if not is_ranks:
                last_us = at_us
            stamped.append(event if event.at_us == at_us else replace(event, at_us=at_us))
        try:
            self._store.commit(stamped, seen=marks.items())
        except StoreError:
            self._behind = True
            raise
        return stamped

    def _write_decision(self, events: Sequence[Event]) -> Sequence[Event]:
        point("decision.before_commit")
        return self._write(events, {})

    def _follow(self, events: Sequence[Event]) -> None:
        """Count committed decisions, which the state holds already, in the ledger and the measurements."""
        self.fold.follow(events)
        self.changed.notify_all()

    def _apply_next(self, written: Sequence[Event]) -> None:
        self._apply(enumerate(written, start=self.number + 1))

    def _apply(self, numbered: Iterable[tuple[int, Event]]) -> None:
        self._failed += self.fold.apply(numbered)
        self.changed.notify_all()
