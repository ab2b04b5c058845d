"""The scheduler run forward: the same `decide` over run times that the caller passes in.

An event heap over `decide`, on a state restored from a snapshot. It plays the part of agents and ranks:
a job runs for its time, reports checkpoints where a decision depends on them, saves and leaves on notice, and loses
what no checkpoint holds. It invents no failures: nodes that are up stay up, and those that are down stay down.
"""

import heapq
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from cordee.events import (
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    Job,
    JobEnded,
    JobSubmitted,
    KillOrdered,
    Lease,
    NoticeGiven,
    Outcome,
    RanksEnded,
    RanksStarted,
)
from cordee.ids import JobId
from cordee.schedule.decision import decide
from cordee.schedule.forecast.snapshot import Snapshot
from cordee.schedule.gang import Gang, Work
from cordee.schedule.preemption.loss import late_us
from cordee.schedule.state.records import NEVER, Attempt
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import apply

_AGAIN_MAX = 1_000
"""The number of decisions at one moment that shows a fault of the scheduler."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A job that will be submitted, and its run time."""

    at_us: int
    job: Job
    left_us: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One sample of the unknown quantities.

    Attributes:
        left_us: the run time left to each job that has not ended, on all of its GPUs, without restarts.
        arrivals: future jobs in the order of time; they are read one by one and may be endless.
    """

    left_us: Mapping[JobId, int]
    arrivals: Iterable[Arrival] = ()


@dataclass(slots=True)
class Fate:
    """The future of one job, as far as the run reached.

    Attributes:
        start_us: the time of its next placement; for a running job, of its last one.
        leases: the leases of that placement.
        end_us: the time of its end.
        preemptions: the number of notices until then.
    """

    start_us: int | None = None
    leases: tuple[Lease, ...] = ()
    end_us: int | None = None
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Ahead:
    """One run forward: the fates of the watched jobs, the time that it reached, and whether the caller cut it."""

    fates: Mapping[JobId, Fate]
    until_us: int
    decisions: int
    cut: bool = False


def forward(
    snapshot: Snapshot,
    now_us: int,
    draw: Draw,
    watch: Iterable[JobId],
    *,
    until_us: int,
    grain: float = 0.0,
    go_on: Callable[[int], bool] = lambda decisions: True,
) -> Ahead:
    """Run forward until all watched jobs have ended, or until `until_us`, or until the caller stops it.

    Args:
        snapshot: the state to start from.
        now_us: the time of that state.
        draw: the sample of the unknown quantities.
        watch: the jobs to follow; arrivals may be among them.
        until_us: the latest time.
        grain: events within this fraction of the time ahead are decided together, so that a run takes few decisions,
            but GPUs never stay free longer than this fraction of the time that they were held. 0: each at its time.
        go_on: called before each decision with the number of decisions so far.
    """
    return _Run(snapshot.restore(), now_us, draw, {job_id: Fate() for job_id in watch}, grain).go(until_us, go_on)


@dataclass(slots=True)
class _Live:
    """One attempt: its gang does steps of a microsecond; it leaves at `leaves_us` with an outcome."""

    epoch: int
    placed_us: int
    gang: Gang
    from_us: int  # the time at which `left_us` starts
    left_us: int
    leaves_us: int
    durable_us: int = NEVER  # the time of its next reported checkpoint
    outcome: Outcome = Outcome.FINISHED


@dataclass(slots=True)
class _Run:
    state: State
    now_us: int
    draw: Draw
    fates: dict[JobId, Fate]
    grain: float
    _left_us: dict[JobId, int] = field(default_factory=dict)  # by job, if it differs from the draw's
    _left_at_us: dict[JobId, int] = field(default_factory=dict)
    _live: dict[JobId, _Live] = field(default_factory=dict)
    _heap: list[tuple[int, int, JobId]] = field(default_factory=list)
    _durable: list[tuple[int, JobId, int]] = field(default_factory=list)  # a heap: time, job, epoch
    _entries: int = 0
    _coming: Iterator[Arrival] = field(init=False)
    _next: Arrival | None = None
    _open: set[JobId] = field(default_factory=set)  # watched jobs that have not ended
    _at_once: bool = False  # something follows at the moment of a decision

    def go(self, until_us: int, go_on: Callable[[int], bool]) -> Ahead:
        state, begin_us, next_us, decisions = self.state, self.now_us, self.now_us, 0
        self._coming = iter(self.draw.arrivals)
        self._next = next(self._coming, None)
        for job_id in sorted(state.attempts):
            self._take_over(state.attempts[job_id])
        self._open = {each for each in self.fates if each not in state.jobs or not state.jobs[each].phase.ended}
        again = 0
        while self._open and go_on(decisions):
            by_us = min(until_us, next_us + int(self.grain * (next_us - begin_us)))
            self.now_us, self._at_once = self._happen(next_us, by_us), False
            self._report_checkpoints()
            decision = decide(state, self.now_us)
            decisions += 1
            for event in decision.events:
                apply(state, event)
            for event in decision.events:
                self._carry_out(event)
            again_now = self._at_once or decision.wake_at_us == self.now_us  # a kill without grace is due at once
            again = again + 1 if again_now else 0
            assert again < _AGAIN_MAX, "decisions of one moment come to no end"
            if again_now:
                next_us = self.now_us
                continue
            next_us = min(self._due_us(), self._next.at_us if self._next else NEVER, decision.wake_at_us or NEVER)
            next_us = self._awaited_us(next_us)
            if next_us > until_us:
                return Ahead(self.fates, until_us, decisions)
            next_us = max(self.now_us + 1, next_us)
        return Ahead(self.fates, self.now_us, decisions, bool(self._open))

    def _due_us(self) -> int:
        """Return when the next attempt leaves."""
        while self._heap and not self._leaves(*self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else NEVER

    def _leaves(self, at_us: int, _: int, job_id: JobId) -> bool:
        """Return whether an entry of the heap still holds."""
        live = self._live.get(job_id)
        return live is not None and live.leaves_us == at_us

    def _at(self, at_us: int, job_id: JobId) -> None:
        self._entries += 1
        heapq.heappush(self._heap, (at_us, self._entries, job_id))
        self._at_once |= at_us <= self.now_us

    def _happen(self, from_us: int, by_us: int) -> int:
        """Apply all events due by then, each at its time; return the time of the last one, `from_us` at least."""
        while True:
            at_us, coming = self._due_us(), self._next
            if coming is not None and coming.at_us <= min(at_us, by_us):
                self._left_us[coming.job.job_id] = coming.left_us
                apply(self.state, JobSubmitted(at_us=coming.at_us, job=coming.job, spec=""))
                self._next = next(self._coming, None)
                from_us = max(from_us, coming.at_us)
                continue
            if at_us > by_us:
                return from_us
            held_us = at_us - self._leave(heapq.heappop(self._heap)[2], at_us)
            from_us, by_us = max(from_us, at_us), min(by_us, at_us + int(self.grain * held_us))

    def _take_over(self, attempt: Attempt) -> None:
        """Continue an attempt that is live already."""
        job, now_us = attempt.job, self.now_us
        fate = self.fates.get(job.job_id)
        if fate is not None and not attempt.leaving:
            fate.start_us, fate.leases = attempt.placed_us, attempt.leases
        train_us = attempt.placed_us + (job.restart_us if attempt.epoch > 1 else 0)
        live = self._run(attempt, train_us, max(now_us, train_us))
        lost = any(not self.state.nodes.records[lease.node].up for lease in attempt.held)
        if lost or attempt.kill is not None or attempt.ended:
            outcome = Outcome.LOST if lost else Outcome.KILLED
            finished = attempt.kill is None and not lost
            self._end_at(job.job_id, live, now_us, Outcome.FINISHED if finished else outcome)
        elif attempt.notice is not None:
            self._leave_on_notice(attempt, live, attempt.notice)

    def _run(self, attempt: Attempt, train_us: int, from_us: int) -> _Live:
        job = attempt.job
        left_us = self._left_us.get(job.job_id)
        if left_us is None:
            left_us = self.draw.left_us[job.job_id]
        work = Work(
            steps=max(1, from_us - train_us + left_us * max(1, job.gpus) // max(1, attempt.gpus)),
            step_us=1,
            start_us=train_us - attempt.placed_us,
            every_us=job.checkpoint_every_us if job.protected and job.checkpoint_every_us > 0 else None,
            stall_us=0,
            upload_us=job.save_us,
            saves_at_end=False,
            handles_notice=job.protected and job.grace_us >= job.save_us,
        )
        gang = Gang.start(work, attempt.placed_us, attempt.gpus, epoch=attempt.epoch, step=0)
        live = _Live(attempt.epoch, attempt.placed_us, gang, from_us, left_us, gang.leave_us)
        self._live[job.job_id] = live
        self._at(live.leaves_us, job.job_id)
        self._reports_commits(attempt, live)
        return live

    # -- checkpoints -----------------------------------------------------------------------------------------

    def _reports_commits(self, attempt: Attempt, live: _Live) -> None:
        """Report checkpoints on the declared schedule, unless the attempt has been silent for too long.

        This matters only for a job that cannot save in its grace period; no decision depends on other checkpoints.
        """
        job, every_us = attempt.job, attempt.job.checkpoint_every_us
        if self.state.policy.victims != "dollars" or not job.protected or job.grace_us >= job.save_us or every_us <= 0:
            return
        from_us = attempt.placed_us if attempt.captured_us is None else attempt.captured_us
        if self.now_us < from_us + every_us + late_us(job):
            live.durable_us = max(live.gang.train_us, from_us) + every_us + job.save_us
            heapq.heappush(self._durable, (live.durable_us, job.job_id, live.epoch))

    def _report_checkpoints(self) -> None:
        """Report the newest checkpoint of each gang that is durable by now, on the schedule that its job declared."""
        while self._durable and self._durable[0][0] <= self.now_us:
            at_us, job_id, epoch = heapq.heappop(self._durable)
            live = self._live.get(job_id)
            if live is None or live.epoch != epoch or live.outcome is not Outcome.FINISHED:
                continue
            attempt = self.state.attempts[job_id]
            every_us, save_us = attempt.job.checkpoint_every_us, attempt.job.save_us
            at_us += (self.now_us - at_us) // every_us * every_us
            apply(
                self.state,
                CheckpointCommitted(
                    at_us=at_us, job_id=job_id, epoch=epoch, step=1 + (attempt.committed_step or 0), generation=0,
                    size_bytes=0, stall_us=0, upload_us=save_us,
                )
            )  # fmt: skip
            live.durable_us = at_us + every_us
            heapq.heappush(self._durable, (live.durable_us, job_id, epoch))

    def _awaited_us(self, by_us: int) -> int:
        """Return the time of the first durable checkpoint for which an attempt is kept; `by_us` if none is sooner."""
        if not self._durable or self._durable[0][0] >= by_us or not self.state.waiting.count:
            return by_us
        running = self.state.running
        kept_us = running.kept_until_us(self.now_us, self.state.policy)
        gangs = (self._live[running.jobs[int(row)]] for row in (kept_us > self.now_us).nonzero()[0])
        return min(by_us, *(gang.durable_us for gang in gangs), NEVER)

    # -- effects of a decision -------------------------------------------------------------------------------

    def _carry_out(self, event: Event) -> None:
        """Act on a decision as agents and ranks do."""
        if isinstance(event, AttemptPlaced):
            self._start(event)
        elif isinstance(event, NoticeGiven):
            fate = self.fates.get(event.job_id)
            if fate is not None:
                fate.preemptions += 1
            self._leave_on_notice(self.state.attempts[event.job_id], self._live[event.job_id], event)
        elif isinstance(event, KillOrdered):
            live = self._live[event.job_id]
            if live.outcome is Outcome.FINISHED:
                attempt = self.state.attempts[event.job_id]
                self._keep(attempt, live, self._kept_at_kill_us(attempt, live, event.at_us))
            self._end_at(event.job_id, live, event.at_us, Outcome.KILLED)
        elif isinstance(event, JobEnded):
            self._open.discard(event.job_id)
            if event.job_id in self.fates:
                self.fates[event.job_id].end_us = self._left_at_us.get(event.job_id, event.at_us)

    def _start(self, event: AttemptPlaced) -> None:
        attempt = self.state.attempts[event.job_id]
        fate = self.fates.get(event.job_id)
        if fate is not None and fate.start_us is None:
            fate.start_us, fate.leases = event.at_us, event.leases
        train_us = event.at_us + (attempt.job.restart_us if event.epoch > 1 else 0)
        self._run(attempt, train_us, train_us)
        for lease in event.leases:
            started = RanksStarted(at_us=event.at_us, job_id=event.job_id, epoch=event.epoch, node=lease.node)
            apply(self.state, started)
        self._at_once = True

    def _leave_on_notice(self, attempt: Attempt, live: _Live, notice: NoticeGiven) -> None:
        """Let a gang leave at its save if that is in time; any other gang works until it is killed at the deadline."""
        gang = live.gang
        if live.leaves_us > notice.at_us and gang.notice(notice.at_us) and gang.leave_us <= notice.deadline_us:
            if notice.at_us >= self.now_us:
                self._keep(attempt, live, gang.last_step)
            self._end_at(attempt.job.job_id, live, max(self.now_us, gang.leave_us), Outcome.CHECKPOINTED)

    def _kept_at_kill_us(self, attempt: Attempt, live: _Live, at_us: int) -> int:
        """Return the training time that a checkpoint holds: the newest reported one, or of its interval."""
        gang = live.gang
        reported_us = min(max(0, at_us - gang.train_us), max(0, (attempt.captured_us or 0) - gang.train_us))
        of_interval_us = gang.durable_periods(at_us) * gang.interval_steps if live.durable_us == NEVER else 0
        return max(reported_us, of_interval_us)

    def _keep(self, attempt: Attempt, live: _Live, trained_us: int) -> None:
        """Reduce what the job still has to do by the training time of this attempt that a checkpoint holds."""
        gained_us = trained_us - max(0, live.from_us - live.gang.train_us)
        left_us = live.left_us - gained_us * max(1, attempt.gpus) // max(1, attempt.job.gpus)
        self._left_us[attempt.job.job_id] = max(1, left_us)

    def _end_at(self, job_id: JobId, live: _Live, at_us: int, outcome: Outcome) -> None:
        live.leaves_us, live.outcome = at_us, outcome
        self._at(at_us, job_id)

    def _leave(self, job_id: JobId, at_us: int) -> int:
        """Free the GPUs of an attempt; return the time since which it held them."""
        live = self._live.pop(job_id)
        self._left_at_us[job_id] = at_us
        for lease in self.state.attempts[job_id].held:
            ended = RanksEnded(at_us=at_us, job_id=job_id, epoch=live.epoch, node=lease.node, outcome=live.outcome)
            apply(self.state, ended)
        return live.placed_us
