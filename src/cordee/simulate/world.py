"""SimCluster: an Executor whose nodes and ranks exist in virtual time only.

It plays what agents and ranks do with start, notify and kill, and reports the events they would report, in
streams of the same names. It decides nothing. Ranks tell at once, or late: what happened keeps its own time, so a
gang that tells late says all of it when it gets notice, when it ends, or when somebody asks.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

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
    RanksEnded,
    RanksStarted,
    Reported,
    Restored,
    SpanClass,
)
from cordee.ids import JobId, attempt_name
from cordee.simulate.course import Course
from cordee.simulate.engine import Engine
from cordee.simulate.work import Work


@dataclass(frozen=True, slots=True, kw_only=True)
class Reclaim:
    """The cloud takes nodes back, or they fail.

    Attributes:
        at_us: when the nodes are gone.
        notice_us: how long before that they are told; 0 is without any notice.
        back_us: how long after `at_us` a replacement of the same name comes up; None is never.
        why: what the agent's last word is.
    """

    at_us: int
    nodes: tuple[str, ...]
    notice_us: int = 0
    back_us: int | None = None
    why: str = "reclaimed by the cloud"

    @property
    def told_us(self) -> int:
        """When it begins to matter."""
        return self.at_us - self.notice_us


@dataclass(slots=True)
class _Durable:
    """The newest checkpoint of a job; it outlives the attempts."""

    step: int = 0
    generation: int = 0


@dataclass(slots=True)
class _Attempt:
    """One gang. `turn` grows whenever its future changes, so that what was planned before is dropped."""

    job_id: JobId
    epoch: int
    work: Work
    course: Course
    nodes: list[str]
    placed_us: int
    durable: _Durable
    generation: int  # before its own first commit
    stream: str
    late: bool
    turn: int = 0
    leaving: bool = False
    restored: bool = False
    told_cycles: int = 0
    told_steps_us: int = 0  # until when its useful time is told
    told_step: int = 0
    told_commits: int = 0
    seq: int = 0


class SimCluster:
    """The nodes, what runs on them, and what the cloud does to them.

    Attributes:
        works: what each job will do; whoever submits a job says so here first.
        late: jobs whose ranks tell late.
    """

    def __init__(self, engine: Engine, nodes: Iterable[Node], reclaims: Iterable[Reclaim] = ()) -> None:
        """`reclaims` may go on for ever if they are in the order of `told_us`."""
        self.works: dict[JobId, Work] = {}
        self.late: set[JobId] = set()
        self._engine = engine
        self._nodes = {node.name: node for node in nodes}
        self._down: set[str] = set()
        self._attempts: dict[tuple[JobId, int], _Attempt] = {}
        self._on: dict[str, dict[tuple[JobId, int], None]] = {name: {} for name in self._nodes}
        self._done: set[int] = set()
        self._durable: dict[JobId, _Durable] = {}
        self._told_by_ranks: dict[str, list[Report]] = {}
        self._told_by_nodes: dict[str, list[Report]] = {}
        self._node_seq: dict[str, Iterator[int]] = {}
        if isinstance(reclaims, Sequence):
            reclaims = sorted(reclaims, key=lambda each: each.told_us)
        self._reclaims = iter(reclaims)
        for name in self._nodes:
            self._node_up(name)
        self._plan_reclaim()

    @property
    def quiet(self) -> bool:
        """Nothing runs, and every node is there: what happens next is only that the cloud takes nodes."""
        return not self._attempts and not self._down

    @property
    def told(self) -> bool:
        """There are reports."""
        return bool(self._told_by_ranks or self._told_by_nodes)

    def ask(self) -> None:
        """Every rank tells what it has not told."""
        now_us = self._engine.now_us()
        for attempt in self._attempts.values():
            self._tell(attempt, now_us)

    # -- the port ------------------------------------------------------------------------------------------

    def reports(self) -> Sequence[Report]:
        """Everything not acknowledged, stream by stream; ranks before nodes, as agents forward them."""
        streams = (*self._told_by_ranks.values(), *self._told_by_nodes.values())
        return [report for waiting in streams for report in waiting]

    def acknowledge(self, source: str, seq: int) -> None:
        """Forget the stream's reports up to `seq`."""
        streams = self._told_by_ranks if source in self._told_by_ranks else self._told_by_nodes
        waiting = [report for report in streams.pop(source, ()) if report.seq > seq]
        if waiting:
            streams[source] = waiting

    def carry_out(self, pending: Pending) -> bool:
        """Hand a command over; agents in virtual time are always there."""
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

    def _plan_reclaim(self) -> None:
        """Only the next one: there may be no last one."""
        reclaim = next(self._reclaims, None)
        if reclaim is not None:
            self._engine.at(max(self._engine.now_us(), reclaim.told_us), self._reclaim, reclaim)

    def _reclaim(self, reclaim: Reclaim) -> None:
        for name in reclaim.nodes:
            if reclaim.notice_us:
                self._announce(name, reclaim.at_us)
            # After what ranks do at the same microsecond: a save that ends right then was in time.
            self._engine.at(reclaim.at_us, self._node_gone, name, reclaim.why, priority=1)
            if reclaim.back_us is not None:
                self._engine.at(reclaim.at_us + reclaim.back_us, self._node_back, name, priority=2)
        self._plan_reclaim()

    def _node_up(self, name: str) -> None:
        node = self._nodes[name]
        self._node_seq[name] = count(1)
        self._node_reports(name, NodeUp(at_us=self._engine.now_us(), node=node))

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
        self._node_reports(name, NodeReclaimed(at_us=now_us, node=name, epoch=epoch, deadline_us=deadline_us))

    def _node_gone(self, name: str, why: str) -> None:
        if name in self._down:
            return
        for key in list(self._on[name]):
            attempt = self._attempts[key]
            self._interrupt(attempt)  # the other ranks hang in a collective until they are killed
            self._ranks_ended(attempt, name, Outcome.LOST, why)
        self._down.add(name)
        now_us, epoch = self._engine.now_us(), self._nodes[name].epoch
        self._node_reports(name, NodeDown(at_us=now_us, node=name, epoch=epoch, why=why))

    # -- attempts ------------------------------------------------------------------------------------------

    def _start(self, placed: AttemptPlaced) -> None:
        now_us, job_id, epoch = self._engine.now_us(), placed.job_id, placed.epoch
        work = self.works[job_id]
        durable = self._durable.setdefault(job_id, _Durable())
        start_us = work.start_us
        if epoch == 1 and work.first_start_us is not None:
            start_us = work.first_start_us
        gpus = sum(len(lease.gpus) for lease in placed.leases)
        course = Course.of(work, durable.step, now_us, start_us, gpus)
        attempt = _Attempt(
            job_id=job_id,
            epoch=epoch,
            work=work,
            course=course,
            nodes=sorted(lease.node for lease in placed.leases),
            placed_us=now_us,
            durable=durable,
            generation=durable.generation,
            stream=f"{attempt_name(job_id, epoch)}/rank0",
            late=job_id in self.late,
            told_steps_us=course.train_us,
            told_step=durable.step,
        )
        key = (job_id, epoch)
        self._attempts[key] = attempt
        for name in attempt.nodes:
            self._on[name][key] = None
            self._node_reports(name, RanksStarted(at_us=now_us, job_id=job_id, epoch=epoch, node=name))
        self._plan(attempt)

    def _plan(self, attempt: _Attempt) -> None:
        """What comes next of the course as it now is."""
        attempt.turn += 1
        now_us = self._engine.now_us()
        self._engine.at(max(now_us, attempt.course.leave_us), self._leave, attempt, attempt.turn)
        if not attempt.late:
            self._tell_on(attempt, attempt.turn)

    def _tell_on(self, attempt: _Attempt, turn: int) -> None:
        """Tell what is new, again and again, of an attempt that tells at once."""
        if attempt.turn == turn:
            now_us = self._engine.now_us()
            self._tell(attempt, now_us)
            next_us = attempt.course.next_us(now_us)
            if next_us is not None:
                self._engine.at(next_us, self._tell_on, attempt, turn)

    def _notify(self, attempt: _Attempt) -> None:
        """SIGTERM: a script that handles it stops at the end of the step it is in."""
        if attempt.leaving or attempt.turn < 0 or not attempt.work.handles_notice:
            return
        attempt.leaving = True
        now_us = self._engine.now_us()
        self._tell(attempt, now_us)
        if attempt.course.notified(now_us):
            self._plan(attempt)

    def _leave(self, attempt: _Attempt, turn: int) -> None:
        """All that it was to do is done."""
        if attempt.turn != turn:
            return
        course, work, now_us = attempt.course, attempt.work, self._engine.now_us()
        self._tell(attempt, now_us)
        self._tell_steps(attempt, course.last_us, course.last_step)
        if course.saves:
            self._tell_span(attempt, SpanClass.CHECKPOINT, course.last_us, course.leave_us)
            self._keep(attempt, course.last_step, attempt.told_commits + 1, now_us)
        finished = course.last_step == work.steps
        left = RankLeft(
            at_us=now_us,
            job_id=attempt.job_id,
            epoch=attempt.epoch,
            rank=0,
            how="finished" if finished else "checkpointed",
            step=course.last_step,
        )
        self._rank_reports(attempt, left)
        self._end(attempt, Outcome.FINISHED if finished else Outcome.CHECKPOINTED, "")
        if finished:
            del self.works[attempt.job_id], self._durable[attempt.job_id]
            self.late.discard(attempt.job_id)

    def _interrupt(self, attempt: _Attempt) -> None:
        """Drop what was planned; ranks told of every whole step that they had done."""
        if attempt.turn < 0:
            return
        course, now_us = attempt.course, self._engine.now_us()
        self._tell(attempt, now_us)
        cycle = course.done_cycles(now_us)
        began_us = course.train_us + cycle * course.cycle_us
        if now_us > began_us:
            most = course.k if cycle < course.cycles else course.last_step - course.first_step - cycle * course.k
            steps = min(most, (now_us - began_us) // course.step_us)
            step = course.first_step + cycle * course.k + steps
            self._tell_steps(attempt, began_us + steps * course.step_us, step)
        attempt.turn = -1

    def _end(self, attempt: _Attempt, outcome: Outcome, why: str) -> None:
        attempt.turn = -1
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
        self._node_reports(name, ended)

    # -- what ranks tell -------------------------------------------------------------------------------------

    def _tell(self, attempt: _Attempt, now_us: int) -> None:
        """Every span that is over and the newest checkpoint, if they are not told yet."""
        course = attempt.course
        if attempt.turn < 0 or now_us < course.train_us:
            return
        if not attempt.restored:
            attempt.restored = True
            self._tell_span(attempt, SpanClass.RESTART, attempt.placed_us, course.train_us)
            restored = Restored(
                at_us=course.train_us,
                job_id=attempt.job_id,
                epoch=attempt.epoch,
                step=course.first_step,
                generation=attempt.generation or None,
            )
            self._rank_reports(attempt, restored)
        cycles = course.done_cycles(now_us)
        if attempt.work.stall_us:
            while attempt.told_cycles < cycles:
                self._tell_cycle(attempt, attempt.told_cycles)
        elif cycles > attempt.told_cycles and now_us < course.last_us:  # else it is all told as one, below
            attempt.told_cycles = cycles
            self._tell_steps(attempt, course.train_us + cycles * course.cycle_us, course.first_step + cycles * course.k)
        if cycles < course.cycles or now_us < course.last_us:
            steps_us = course.train_us + cycles * course.cycle_us + course.k * course.step_us
            if cycles < course.cycles and steps_us <= now_us:
                self._tell_steps(attempt, steps_us, course.first_step + (cycles + 1) * course.k)
        else:
            self._tell_steps(attempt, course.last_us, course.last_step)
        durable = course.durable_cycles(now_us)
        if durable > attempt.told_commits:
            at_us = course.train_us + durable * course.cycle_us + attempt.work.upload_us
            self._keep(attempt, course.first_step + durable * course.k, durable, at_us)

    def _tell_cycle(self, attempt: _Attempt, number: int) -> None:
        course = attempt.course
        end_us = course.train_us + (number + 1) * course.cycle_us
        steps_us = end_us - attempt.work.stall_us
        self._tell_steps(attempt, steps_us, course.first_step + (number + 1) * course.k)
        self._tell_span(attempt, SpanClass.CHECKPOINT, steps_us, end_us)
        attempt.told_cycles = number + 1
        attempt.told_steps_us = end_us

    def _tell_steps(self, attempt: _Attempt, end_us: int, step: int) -> None:
        """Useful time from where it was told until `end_us`, when steps below `step` are done."""
        steps = step - attempt.told_step
        if steps > 0:
            self._tell_span(attempt, SpanClass.USEFUL, attempt.told_steps_us, end_us, steps=steps)
            attempt.told_step, attempt.told_steps_us = step, end_us

    def _tell_span(self, attempt: _Attempt, span: SpanClass, from_us: int, end_us: int, *, steps: int = 0) -> None:
        """A span; its first step is the one that was told last."""
        if end_us > from_us:
            told = Reported(
                at_us=end_us,
                job_id=attempt.job_id,
                epoch=attempt.epoch,
                span=span,
                from_us=from_us,
                first_step=attempt.told_step if steps else 0,
                steps=steps,
                tokens=steps * attempt.work.tokens_per_step,
            )
            self._rank_reports(attempt, told)

    def _keep(self, attempt: _Attempt, step: int, commits: int, at_us: int) -> None:
        """A checkpoint is durable: the attempt's `commits`-th one."""
        durable, work = attempt.durable, attempt.work
        attempt.told_commits = commits
        durable.step, durable.generation = step, attempt.generation + commits
        committed = CheckpointCommitted(
            at_us=at_us,
            job_id=attempt.job_id,
            epoch=attempt.epoch,
            step=step,
            generation=durable.generation,
            size_bytes=work.checkpoint_bytes,
            stall_us=work.stall_us,
            upload_us=work.upload_us,
        )
        self._rank_reports(attempt, committed)

    # -- reports -------------------------------------------------------------------------------------------

    def _rank_reports(self, attempt: _Attempt, event: Event) -> None:
        if attempt.work.reports:
            attempt.seq += 1
            report = Report(source=attempt.stream, seq=attempt.seq, event=event)
            self._told_by_ranks.setdefault(attempt.stream, []).append(report)

    def _node_reports(self, name: str, event: Event) -> None:
        source = f"node/{name}/{self._nodes[name].epoch}"
        report = Report(source=source, seq=next(self._node_seq[name]), event=event)
        self._told_by_nodes.setdefault(source, []).append(report)
