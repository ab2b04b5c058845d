"""SimCluster: an Executor whose nodes and ranks exist in virtual time only.

It does what agents and ranks do with start, notify and kill, and reports the events that they would report, in streams
of the same names. It decides nothing. Ranks report at once, or deferred: an event keeps its own time, so a gang that
defers its reports makes all of them when it gets notice, when it ends, or on `flush`.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count

from cordee.control.ports import Pending, Report
from cordee.events import (
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    KillOrdered,
    Node,
    NodeDown,
    NodeReclaimed,
    NodeUp,
    NoticeGiven,
    Outcome,
    RanksEnded,
    RanksStarted,
)
from cordee.ids import JobId, attempt_name
from cordee.schedule.gang import Gang, Reporter, Work
from cordee.simulate.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Outage:
    """Nodes that go away: the cloud takes them back, or they fail.

    Attributes:
        at_us: when the nodes are gone.
        notice_us: how long before that they get notice; 0 is without any.
        back_us: how long after `at_us` a replacement of the same name comes up; None is never.
        why: the reason in the agent's last report.
    """

    at_us: int
    nodes: tuple[str, ...]
    notice_us: int = 0
    back_us: int | None = None
    why: str = "reclaimed by the cloud"

    @property
    def begin_us(self) -> int:
        """Return when the nodes get notice, or go without one."""
        return self.at_us - self.notice_us


@dataclass(slots=True)
class _Checkpoint:
    """The newest checkpoint of a job; it outlives the attempts."""

    step: int = 0
    generation: int = 0


@dataclass(slots=True)
class _Attempt:
    """A gang on its nodes. `plan` grows whenever its future changes: older actions are dropped. -1: it hangs."""

    job_id: JobId
    epoch: int
    gang: Gang
    reporter: Reporter
    nodes: list[str]
    checkpoint: _Checkpoint
    stream: str
    deferred: bool
    plan: int = 0
    seq: int = 0


class SimCluster:
    """The nodes, the gangs on them, and the outages.

    Attributes:
        works: what each job will do; set it before the job is submitted.
        deferred: jobs whose ranks defer their reports.
    """

    def __init__(self, engine: Engine, nodes: Iterable[Node], outages: Iterable[Outage] = ()) -> None:
        """Bring the nodes up. `outages` may be endless if they are in the order of `begin_us`."""
        self.works: dict[JobId, Work] = {}
        self.deferred: set[JobId] = set()
        self._engine = engine
        self._nodes = {node.name: node for node in nodes}
        self._down: set[str] = set()
        self._attempts: dict[tuple[JobId, int], _Attempt] = {}
        self._on: dict[str, dict[tuple[JobId, int], None]] = {name: {} for name in self._nodes}
        self._done: set[int] = set()
        self._checkpoints: dict[JobId, _Checkpoint] = {}
        self._rank_reports: dict[str, list[Report]] = {}
        self._node_reports: dict[str, list[Report]] = {}
        self._node_seq: dict[str, Iterator[int]] = {}
        if isinstance(outages, Sequence):
            outages = sorted(outages, key=lambda each: each.begin_us)
        self._outages = iter(outages)
        self._next: Outage | None = None
        for name in self._nodes:
            self._node_up(name)
        self._next_outage()

    @property
    def runs(self) -> bool:
        """Return whether a gang runs."""
        return bool(self._attempts)

    @property
    def idle(self) -> bool:
        """Return whether no gang runs, no node is about to go or to come back: only the next outage is to come."""
        return not self._attempts and self._engine.scheduled <= (self._next is not None)

    @property
    def has_reports(self) -> bool:
        """Return whether there are reports that were not acknowledged."""
        return bool(self._rank_reports or self._node_reports)

    def flush(self) -> None:
        """Make every report that ranks have deferred."""
        now_us = self._engine.now_us()
        for attempt in self._attempts.values():
            self._report(attempt, now_us)

    # -- the port ------------------------------------------------------------------------------------------

    def reports(self) -> Sequence[Report]:
        """Return what is not acknowledged, stream by stream; ranks before nodes, as agents forward it."""
        return list(chain(*self._rank_reports.values(), *self._node_reports.values()))

    def acknowledge(self, source: str, seq: int) -> None:
        """Forget the stream's reports up to `seq`."""
        streams = self._rank_reports if source in self._rank_reports else self._node_reports
        waiting = streams.pop(source, ())
        if waiting and waiting[-1].seq > seq:
            streams[source] = [report for report in waiting if report.seq > seq]

    def carry_out(self, pending: Pending) -> bool:
        """Carry a command out; agents in virtual time always answer."""
        if pending.number in self._done:
            return True
        self._done.add(pending.number)
        command = pending.command
        if isinstance(command, AttemptPlaced):
            self._start(command)
            return True
        attempt = self._attempts.get((command.job_id, command.epoch))
        if attempt is not None and isinstance(command, NoticeGiven):
            self._notify(attempt)
        elif attempt is not None and isinstance(command, KillOrdered):
            self._interrupt(attempt)
            self._end(attempt, Outcome.KILLED, command.why)
        return True

    # -- nodes ---------------------------------------------------------------------------------------------

    def _next_outage(self) -> None:
        """Schedule one at a time: there may be no last one."""
        self._next = outage = next(self._outages, None)
        if outage is not None:
            self._engine.at(max(self._engine.now_us(), outage.begin_us), self._begin, outage)

    def _begin(self, outage: Outage) -> None:
        for name in outage.nodes:
            if outage.notice_us:
                self._announce(name, outage.at_us)
            # After what ranks do at the same microsecond: a save that ends right then was in time.
            self._engine.at(outage.at_us, self._node_gone, name, outage.why, priority=1)
            if outage.back_us is not None:
                self._engine.at(outage.at_us + outage.back_us, self._node_back, name, priority=2)
        self._next_outage()

    def _node_up(self, name: str) -> None:
        node = self._nodes[name]
        self._node_seq[name] = count(1)
        self._report_node(name, NodeUp(at_us=self._engine.now_us(), node=node))

    def _node_back(self, name: str) -> None:
        if name not in self._down:
            return
        self._down.discard(name)
        self._nodes[name] = replace(self._nodes[name], epoch=self._nodes[name].epoch + 1)
        self._node_up(name)

    def _announce(self, name: str, deadline_us: int) -> None:
        if name in self._down:
            return
        now_us, epoch = self._engine.now_us(), self._nodes[name].epoch
        self._report_node(name, NodeReclaimed(at_us=now_us, node=name, epoch=epoch, deadline_us=deadline_us))

    def _node_gone(self, name: str, why: str) -> None:
        if name in self._down:
            return
        for key in list(self._on[name]):
            attempt = self._attempts[key]
            self._interrupt(attempt)  # the other ranks hang in a collective until they are killed
            self._ranks_ended(attempt, name, Outcome.LOST, why)
        self._down.add(name)
        now_us, epoch = self._engine.now_us(), self._nodes[name].epoch
        self._report_node(name, NodeDown(at_us=now_us, node=name, epoch=epoch, why=why))

    # -- attempts ------------------------------------------------------------------------------------------

    def _start(self, placed: AttemptPlaced) -> None:
        now_us, job_id, epoch = self._engine.now_us(), placed.job_id, placed.epoch
        checkpoint = self._checkpoints.setdefault(job_id, _Checkpoint())
        gpus = sum(len(lease.gpus) for lease in placed.leases)
        gang = Gang.start(self.works[job_id], now_us, gpus, epoch=epoch, step=checkpoint.step)
        attempt = _Attempt(
            job_id=job_id,
            epoch=epoch,
            gang=gang,
            reporter=Reporter.of(gang, job_id, epoch, now_us, checkpoint.generation),
            nodes=sorted(lease.node for lease in placed.leases),
            checkpoint=checkpoint,
            stream=f"{attempt_name(job_id, epoch)}/rank0",
            deferred=job_id in self.deferred,
        )
        key = (job_id, epoch)
        self._attempts[key] = attempt
        for name in attempt.nodes:
            self._on[name][key] = None
            self._report_node(name, RanksStarted(at_us=now_us, job_id=job_id, epoch=epoch, node=name))
        self._plan(attempt)

    def _plan(self, attempt: _Attempt) -> None:
        """Schedule the gang's future as it now is."""
        attempt.plan += 1
        now_us = self._engine.now_us()
        self._engine.at(max(now_us, attempt.gang.leave_us), self._leave, attempt, attempt.plan)
        if not attempt.deferred:
            self._go_on(attempt, attempt.plan)

    def _go_on(self, attempt: _Attempt, plan: int) -> None:
        """Report what is over, and come back when the next span or upload is."""
        if attempt.plan == plan:
            now_us = self._engine.now_us()
            self._report(attempt, now_us)
            next_us = attempt.gang.next_us(now_us)
            if next_us is not None:
                self._engine.at(next_us, self._go_on, attempt, plan)

    def _notify(self, attempt: _Attempt) -> None:
        now_us = self._engine.now_us()
        if attempt.plan >= 0 and attempt.gang.work.handles_notice:
            self._report(attempt, now_us)
            if attempt.gang.notice(now_us):
                self._plan(attempt)

    def _leave(self, attempt: _Attempt, plan: int) -> None:
        """End the attempt of a gang that leaves by itself."""
        if attempt.plan != plan:
            return
        self._take(attempt, attempt.reporter.leave(self._engine.now_us()))
        self._end(attempt, attempt.gang.outcome, "")
        if attempt.gang.outcome is Outcome.FINISHED:
            del self.works[attempt.job_id], self._checkpoints[attempt.job_id]
            self.deferred.discard(attempt.job_id)

    def _interrupt(self, attempt: _Attempt) -> None:
        """Drop the gang's future; its ranks have reported every whole step."""
        if attempt.plan >= 0:
            self._take(attempt, attempt.reporter.interrupt(self._engine.now_us()))
            attempt.plan = -1

    def _end(self, attempt: _Attempt, outcome: Outcome, why: str) -> None:
        attempt.plan = -1
        for name in list(attempt.nodes):
            self._ranks_ended(attempt, name, outcome, why)

    def _ranks_ended(self, attempt: _Attempt, name: str, outcome: Outcome, why: str) -> None:
        attempt.nodes.remove(name)
        key = (attempt.job_id, attempt.epoch)
        del self._on[name][key]
        if not attempt.nodes:
            del self._attempts[key]
        ended = RanksEnded(
            at_us=self._engine.now_us(), job_id=attempt.job_id, epoch=attempt.epoch, node=name, outcome=outcome, why=why
        )
        self._report_node(name, ended)

    # -- reports -------------------------------------------------------------------------------------------

    def _report(self, attempt: _Attempt, now_us: int) -> None:
        if attempt.plan >= 0:
            self._take(attempt, attempt.reporter.report(now_us))

    def _take(self, attempt: _Attempt, events: Iterable[Event]) -> None:
        """Keep what rank 0 reports, and the checkpoints even of ranks that report nothing."""
        stream, reports = attempt.stream, attempt.gang.work.reports
        for event in events:
            if type(event) is CheckpointCommitted:
                attempt.checkpoint.step, attempt.checkpoint.generation = event.step, event.generation
            if reports:
                attempt.seq += 1
                report = Report(stream, attempt.seq, event, True)
                self._rank_reports.setdefault(stream, []).append(report)

    def _report_node(self, name: str, event: Event) -> None:
        source = f"node/{name}/{self._nodes[name].epoch}"
        report = Report(source, next(self._node_seq[name]), event)
        self._node_reports.setdefault(source, []).append(report)
