"""SimCluster: an Executor whose nodes and ranks exist in virtual time only.

It plays what agents and ranks do with start, notify and kill, and reports the events they would report, in
streams of the same names. It decides nothing.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

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
    RankLeft,
    RanksStarted,
    Reported,
    Restored,
    ShareEnded,
    SpanClass,
)
from cordee.ids import JobId, attempt_name
from cordee.simulate.engine import Engine
from cordee.simulate.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """The cloud takes nodes back.

    Attributes:
        at_us: when the nodes are gone.
        notice_us: how long before that they are told; 0 is without any notice.
        back_us: how long after `at_us` a replacement of the same name comes up; None is never.
    """

    at_us: int
    nodes: tuple[str, ...]
    notice_us: int = 0
    back_us: int | None = None


@dataclass(slots=True)
class _Attempt:
    """One gang. `turn` grows whenever its future changes, so that what was planned before is dropped."""

    job_id: JobId
    epoch: int
    work: Work
    nodes: set[str]
    step: int
    turn: int = 0
    span: SpanClass = SpanClass.RESTART
    span_from_us: int = 0
    leaving: bool = False


@dataclass(slots=True)
class _Durable:
    """The newest checkpoint of a job; it outlives the attempts."""

    step: int = 0
    generation: int = 0


@dataclass(slots=True)
class _Stream:
    """Reports not yet acknowledged."""

    last_seq: int = 0
    waiting: list[Report] = field(default_factory=list)


class SimCluster:
    """The nodes, what runs on them, and what the cloud does to them."""

    def __init__(self, engine: Engine, nodes: Iterable[Node], reclaims: Iterable[Reclaim] = ()) -> None:
        self._engine = engine
        self._nodes = {node.name: node for node in nodes}
        self._attempts: dict[tuple[JobId, int], _Attempt] = {}
        self._done: set[int] = set()
        self._durable: dict[JobId, _Durable] = {}
        self._streams: dict[str, _Stream] = {}
        for name in self._nodes:
            self._node_up(name)
        for reclaim in reclaims:
            self._plan_reclaim(reclaim)

    # -- the port ------------------------------------------------------------------------------------------

    def reports(self) -> Sequence[Report]:
        """Everything not acknowledged, stream by stream; ranks before nodes, as agents forward them."""
        streams = sorted(self._streams.items(), key=lambda item: item[0].startswith("node/"))
        return [report for _, stream in streams for report in stream.waiting]

    def acknowledge(self, source: str, seq: int) -> None:
        """Forget the stream's reports up to `seq`."""
        stream = self._streams[source]
        stream.waiting = [report for report in stream.waiting if report.seq > seq]

    def carry_out(self, pending: Pending) -> bool:
        """Hand a command over; agents in virtual time are always there."""
        command = pending.command
        attempt = self._attempts.get((command.job_id, command.epoch))
        if pending.number in self._done:
            return True
        self._done.add(pending.number)
        if isinstance(command, AttemptPlaced):
            self._start(command, Work.from_json(pending.spec))
        elif attempt is not None and isinstance(command, NoticeGiven):
            self._notify(attempt)
        elif attempt is not None and isinstance(command, KillOrdered):
            self._end(attempt, Outcome.KILLED, command.why)
        return True

    # -- nodes ---------------------------------------------------------------------------------------------

    def _plan_reclaim(self, reclaim: Reclaim) -> None:
        told_us = max(self._engine.now_us(), reclaim.at_us - reclaim.notice_us)
        for name in reclaim.nodes:
            if reclaim.notice_us:
                self._engine.at(told_us, lambda name=name: self._announce(name, reclaim.at_us))  # type: ignore[misc]
            # After what ranks do at the same microsecond: a save that ends right then was in time.
            self._engine.at(reclaim.at_us, lambda name=name: self._node_gone(name), priority=1)  # type: ignore[misc]
            if reclaim.back_us is not None:
                back_us = reclaim.at_us + reclaim.back_us
                self._engine.at(back_us, lambda name=name: self._node_back(name), priority=2)  # type: ignore[misc]

    def _node_up(self, name: str) -> None:
        node = self._nodes[name]
        self._node_reports(name, NodeUp(at_us=self._engine.now_us(), node=node))

    def _node_back(self, name: str) -> None:
        self._nodes[name] = replace(self._nodes[name], epoch=self._nodes[name].epoch + 1)
        self._node_up(name)

    def _announce(self, name: str, deadline_us: int) -> None:
        now_us, epoch = self._engine.now_us(), self._nodes[name].epoch
        self._node_reports(name, NodeReclaimed(at_us=now_us, node=name, epoch=epoch, deadline_us=deadline_us))

    def _node_gone(self, name: str) -> None:
        why = "reclaimed by the cloud"
        for attempt in [each for each in self._attempts.values() if name in each.nodes]:
            self._interrupt(attempt)  # the other ranks hang in a collective until they are killed
            self._share_ended(attempt, name, Outcome.LOST, why)
        now_us, epoch = self._engine.now_us(), self._nodes[name].epoch
        self._node_reports(name, NodeDown(at_us=now_us, node=name, epoch=epoch, why=why))

    # -- attempts: start, train, checkpoint ----------------------------------------------------------------

    def _start(self, placed: AttemptPlaced, work: Work) -> None:
        now_us = self._engine.now_us()
        durable = self._durable.setdefault(placed.job_id, _Durable())
        attempt = _Attempt(
            job_id=placed.job_id,
            epoch=placed.epoch,
            work=work,
            nodes={lease.node for lease in placed.leases},
            step=durable.step,
            span_from_us=now_us,
        )
        self._attempts[placed.job_id, placed.epoch] = attempt
        for name in sorted(attempt.nodes):
            started = RanksStarted(at_us=now_us, job_id=placed.job_id, epoch=placed.epoch, node=name)
            self._node_reports(name, started)
        self._later(attempt, work.start_us, self._restored)

    def _restored(self, attempt: _Attempt) -> None:
        self._close_span(attempt)
        now_us = self._engine.now_us()
        durable = self._durable[attempt.job_id]
        self._rank_reports(
            attempt,
            Restored(
                at_us=now_us,
                job_id=attempt.job_id,
                epoch=attempt.epoch,
                step=attempt.step,
                generation=durable.generation or None,
            ),
        )
        if attempt.leaving:
            self._leave(attempt)
        else:
            self._train(attempt)

    def _train(self, attempt: _Attempt) -> None:
        attempt.span, attempt.span_from_us = SpanClass.USEFUL, self._engine.now_us()
        steps = min(attempt.work.steps_between, attempt.work.steps - attempt.step)
        self._later(attempt, steps * attempt.work.step_us, self._boundary)

    def _boundary(self, attempt: _Attempt) -> None:
        """A stretch of steps is over: the ranks save, or they have nothing to save to."""
        self._close_span(attempt)
        if attempt.work.durable:
            attempt.span, attempt.span_from_us = SpanClass.CHECKPOINT, self._engine.now_us()
            self._later(attempt, attempt.work.stall_us, self._captured)
        else:
            self._leave(attempt)

    def _captured(self, attempt: _Attempt) -> None:
        """The state is copied. Who leaves waits until it is durable; who goes on trains meanwhile."""
        if attempt.leaving or attempt.step == attempt.work.steps:
            self._later(attempt, attempt.work.drain_us, self._saved)
            return
        self._close_span(attempt)
        step, durable_us = attempt.step, self._engine.now_us() + attempt.work.drain_us
        self._engine.at(durable_us, lambda: self._drained(attempt, step))
        self._train(attempt)

    def _saved(self, attempt: _Attempt) -> None:
        self._close_span(attempt)
        self._commit(attempt, attempt.step)
        self._leave(attempt)

    def _drained(self, attempt: _Attempt, step: int) -> None:
        if attempt.nodes:
            self._commit(attempt, step)

    def _commit(self, attempt: _Attempt, step: int) -> None:
        durable = self._durable[attempt.job_id]
        durable.step, durable.generation = step, durable.generation + 1
        self._rank_reports(
            attempt,
            CheckpointCommitted(
                at_us=self._engine.now_us(),
                job_id=attempt.job_id,
                epoch=attempt.epoch,
                step=step,
                generation=durable.generation,
                size_bytes=attempt.work.checkpoint_bytes,
                stall_us=attempt.work.stall_us,
                drain_us=attempt.work.drain_us,
            ),
        )

    # -- attempts: the end ---------------------------------------------------------------------------------

    def _notify(self, attempt: _Attempt) -> None:
        """SIGTERM: a script that handles it stops at the end of the step it is in."""
        if attempt.leaving or not attempt.work.handles_notice:
            return
        attempt.leaving = True
        if attempt.span is SpanClass.USEFUL:
            step_us = attempt.work.step_us
            elapsed_us = self._engine.now_us() - attempt.span_from_us
            attempt.turn += 1
            self._later(attempt, -(-elapsed_us // step_us) * step_us - elapsed_us, self._boundary)

    def _leave(self, attempt: _Attempt) -> None:
        finished = attempt.step == attempt.work.steps
        now_us = self._engine.now_us()
        left = RankLeft(
            at_us=now_us,
            job_id=attempt.job_id,
            epoch=attempt.epoch,
            rank=0,
            how="finished" if finished else "checkpointed",
            step=attempt.step,
        )
        self._rank_reports(attempt, left)
        self._end(attempt, Outcome.FINISHED if finished else Outcome.CHECKPOINTED, "")

    def _end(self, attempt: _Attempt, outcome: Outcome, why: str) -> None:
        self._interrupt(attempt)
        for name in sorted(attempt.nodes):
            self._share_ended(attempt, name, outcome, why)

    def _interrupt(self, attempt: _Attempt) -> None:
        """Drop what was planned; ranks told of every whole step that they had done."""
        if attempt.span is SpanClass.USEFUL:
            self._close_span(attempt)
        attempt.span = SpanClass.STALL
        attempt.turn += 1

    def _share_ended(self, attempt: _Attempt, name: str, outcome: Outcome, why: str) -> None:
        attempt.nodes.discard(name)
        ended = ShareEnded(
            at_us=self._engine.now_us(),
            job_id=attempt.job_id,
            epoch=attempt.epoch,
            node=name,
            outcome=outcome,
            why=why,
        )
        self._node_reports(name, ended)

    # -- reports -------------------------------------------------------------------------------------------

    def _close_span(self, attempt: _Attempt) -> None:
        """Report the time since the span began; of useful time only whole steps."""
        end_us, steps = self._engine.now_us(), 0
        if attempt.span is SpanClass.USEFUL:
            steps = (end_us - attempt.span_from_us) // attempt.work.step_us
            end_us = attempt.span_from_us + steps * attempt.work.step_us
        if end_us == attempt.span_from_us:
            return
        self._rank_reports(
            attempt,
            Reported(
                at_us=end_us,
                job_id=attempt.job_id,
                epoch=attempt.epoch,
                span=attempt.span,
                from_us=attempt.span_from_us,
                first_step=attempt.step,
                steps=steps,
                tokens=steps * attempt.work.tokens_per_step,
            ),
        )
        attempt.step += steps
        attempt.span_from_us = end_us

    def _rank_reports(self, attempt: _Attempt, event: Event) -> None:
        if attempt.work.reports:
            self._report(f"{attempt_name(attempt.job_id, attempt.epoch)}/rank0", event)

    def _node_reports(self, name: str, event: Event) -> None:
        self._report(f"node/{name}/{self._nodes[name].epoch}", event)

    def _report(self, source: str, event: Event) -> None:
        stream = self._streams.setdefault(source, _Stream())
        stream.last_seq += 1
        stream.waiting.append(Report(source=source, seq=stream.last_seq, event=event))

    def _later(self, attempt: _Attempt, delay_us: int, action: Callable[[_Attempt], None]) -> None:
        """Do it unless the attempt's future changes before."""
        turn = attempt.turn

        def unless_changed() -> None:
            if attempt.turn == turn:
                action(attempt)

        self._engine.at(self._engine.now_us() + delay_us, unless_changed)
