"""The model of a gang: the times at which it trains, saves and leaves, and the reports of rank 0. Arithmetic only.

    placed ── restart ── steps │ stall │ steps │ stall │ ... │ last steps │ last save ── leaves
                               └ captured, durable `upload_us` later: training goes on meanwhile

The steps before a checkpoint and its stall are a period. Nothing is stored for a period, so a gang that trains for a
month costs as much as one that trains for an hour. Forecasts, the simulation and tests use it.
"""

from dataclasses import dataclass

from cordee.events import CheckpointCommitted, Event, Outcome, RankLeft, Reported, Restored, SpanClass
from cordee.ids import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A training script as the cluster sees it.

    Attributes:
        start_us: from start to the first new step: imports, process groups, loading the checkpoint.
        first_start_us: the same for a job's first attempt; None: as for any other. A trace's run time includes it.
        every_us: training time between two checkpoints; None if the script writes none.
        stall_us: the time for which a checkpoint stops the ranks.
        upload_us: from there until it is durable; training continues meanwhile.
        saves_at_end: after its last step it writes a checkpoint and waits for it; a trace's run time includes this.
        handles_notice: on SIGTERM it stops after the step in progress, saves and leaves; else it runs until killed.
        leaves_during_start: on SIGTERM before its first step it leaves at once; else it completes its start first.
        fails_after_steps: an attempt fails after this many steps of its own; None: it does not fail.
        reports: it reports its spans; a plain script does not.
        gpus: the number of GPUs on which a step takes `step_us`; on others in proportion. None: always `step_us`.
    """

    steps: int
    step_us: int
    start_us: int = 60_000_000
    first_start_us: int | None = None
    every_us: int | None = 1_800_000_000
    stall_us: int = 1_000_000
    upload_us: int = 0
    saves_at_end: bool = True
    checkpoint_bytes: int = 0
    tokens_per_step: int = 0
    handles_notice: bool = True
    leaves_during_start: bool = False
    fails_after_steps: int | None = None
    reports: bool = True
    gpus: int | None = None

    def __post_init__(self) -> None:
        assert self.steps > 0 and self.step_us > 0, "a job has at least one step, and a step takes time"
        assert self.start_us >= 0 and self.stall_us >= 0 and self.upload_us >= 0, "durations are not negative"

    @property
    def durable(self) -> bool:
        """Return whether it can write a checkpoint, so that a later attempt continues from it."""
        return self.every_us is not None or self.handles_notice

    def step_us_on(self, gpus: int) -> int:
        """Return the time of a step on this number of GPUs."""
        return self.step_us if not self.gpus else max(1, self.step_us * self.gpus // gpus)


@dataclass(slots=True)
class Gang:
    """The future of one attempt unless it is interrupted; a notice shortens it.

    Attributes:
        interval_steps: from one checkpoint to the next.
        first_step: its first step.
        train_us: the time at which that step starts.
        periods: whole periods before the last steps.
        last_us: the end of the last steps.
        last_step: the number of steps that are done then.
        leave_us: the time at which it leaves: `last_us`, or the end of the last save.
        outcome: the outcome of its ranks if they leave by themselves.
    """

    work: Work
    step_us: int
    interval_steps: int
    period_us: int
    first_step: int
    train_us: int
    periods: int
    last_us: int
    last_step: int
    leave_us: int
    saves: bool
    outcome: Outcome

    @classmethod
    def start(cls, work: Work, placed_us: int, gpus: int, *, epoch: int, step: int) -> "Gang":
        """Start an attempt from the newest checkpoint, which holds `step` steps."""
        step_us, every_us, stall_us = work.step_us_on(gpus), work.every_us, work.stall_us
        first_us = work.first_start_us if epoch == 1 else None
        train_us = placed_us + (work.start_us if first_us is None else first_us)
        fails_after = work.fails_after_steps
        last_step = work.steps if fails_after is None else min(work.steps, step + fails_after)
        interval = work.steps if every_us is None else max(1, round(every_us / step_us))
        period_us, left = interval * step_us + stall_us, last_step - step
        periods = max(0, left - 1) // interval
        last_us = train_us + periods * period_us + (left - periods * interval) * step_us
        saves = fails_after is None and work.saves_at_end and work.durable
        leave_us = last_us + stall_us + work.upload_us if saves else last_us
        outcome = Outcome.FINISHED if fails_after is None else Outcome.FAILED
        return cls(
            work, step_us, interval, period_us, step, train_us, periods, last_us, last_step, leave_us, saves, outcome
        )

    def notice(self, now_us: int) -> bool:
        """Stop after the step in progress and save; return whether that changes anything."""
        work = self.work
        if not work.handles_notice:
            return False
        if now_us < self.train_us:
            self.periods, self.last_step, self.saves = 0, self.first_step, False
            self.last_us = self.leave_us = now_us if work.leaves_during_start else self.train_us
        elif now_us >= self.last_us:
            return False
        else:
            period = min((now_us - self.train_us) // self.period_us, self.periods)
            began_us = self.train_us + period * self.period_us
            # During a stall all steps of the period are done.
            steps = min(self.interval_steps, -(-(now_us - began_us) // self.step_us))
            self.periods, self.last_us = period, began_us + steps * self.step_us
            self.last_step = min(self.last_step, self.first_step + period * self.interval_steps + steps)
            self.saves = work.saves_at_end or self.last_step < work.steps
            self.leave_us = self.last_us + work.stall_us + work.upload_us if self.saves else self.last_us
        finishes = self.last_step == work.steps and self.leave_us >= self.train_us
        self.outcome = Outcome.FINISHED if finishes else Outcome.CHECKPOINTED
        return True

    def done_periods(self, now_us: int) -> int:
        """Return the number of periods that are over."""
        return max(0, min((now_us - self.train_us) // self.period_us, self.periods))

    def durable_periods(self, now_us: int) -> int:
        """Return the number of periods with a durable capture."""
        return max(0, min((now_us - self.work.upload_us - self.train_us) // self.period_us, self.periods))

    def next_us(self, now_us: int) -> int | None:
        """Return the time of the next end of a span or durable capture before it leaves; None if nothing is left."""
        if now_us < self.train_us:
            return self.train_us
        period, periods = self.done_periods(now_us), self.periods
        if period < periods:
            end_us = self.train_us + (period + 1) * self.period_us
            steps_us = end_us - self.work.stall_us
            next_us = steps_us if now_us < steps_us else end_us
        else:
            next_us = self.last_us if now_us < self.last_us else self.leave_us
        durable = self.durable_periods(now_us)
        if durable < periods:
            next_us = min(next_us, self.train_us + (durable + 1) * self.period_us + self.work.upload_us)
        return next_us if next_us < self.leave_us else None


@dataclass(slots=True)
class Reporter:
    """Rank 0 of a gang: it makes each report once, with its own time, however rarely `report` is called.

    Attributes:
        generation: that of the newest checkpoint when the attempt starts; 0 if there is none.
        step: the steps below it are reported, until `steps_us`.
        periods: number of periods reported.
        commits: number of commits reported.
    """

    gang: Gang
    job_id: JobId
    epoch: int
    placed_us: int
    generation: int
    step: int
    steps_us: int
    restored: bool = False
    periods: int = 0
    commits: int = 0

    @classmethod
    def of(cls, gang: Gang, job_id: JobId, epoch: int, placed_us: int, generation: int) -> "Reporter":
        """Create the reporter of a gang that starts."""
        return cls(gang, job_id, epoch, placed_us, generation, gang.first_step, gang.train_us)

    def report(self, now_us: int) -> list[Event]:
        """Return every span that is over and the newest checkpoint, unless they were reported."""
        gang = self.gang
        found: list[Event] = []
        if now_us < gang.train_us:
            return found
        if not self.restored:
            self._restore(found)
        done = gang.done_periods(now_us)
        if gang.work.stall_us:
            while self.periods < done:
                self._period(found)
        elif done > self.periods and now_us < gang.last_us:  # else all steps are one span, below
            self.periods = done
            end_us = gang.train_us + done * gang.period_us
            self._steps(found, end_us, gang.first_step + done * gang.interval_steps)
        if now_us >= gang.last_us and done >= gang.periods:
            self._steps(found, gang.last_us, gang.last_step)
        elif done < gang.periods:
            end_us = gang.train_us + done * gang.period_us + gang.interval_steps * gang.step_us
            if end_us <= now_us:
                self._steps(found, end_us, gang.first_step + (done + 1) * gang.interval_steps)
        durable = gang.durable_periods(now_us)
        if durable > self.commits:
            at_us = gang.train_us + durable * gang.period_us + gang.work.upload_us
            self._commit(found, gang.first_step + durable * gang.interval_steps, durable, at_us)
        return found

    def interrupt(self, now_us: int) -> list[Event]:
        """Return the missing reports of a gang that is killed now, or hangs: every whole step that it did."""
        gang, found = self.gang, self.report(now_us)
        period = gang.done_periods(now_us)
        began_us = gang.train_us + period * gang.period_us
        if now_us > began_us:
            before = gang.first_step + period * gang.interval_steps
            most = gang.interval_steps if period < gang.periods else gang.last_step - before
            steps = min(most, (now_us - began_us) // gang.step_us)
            self._steps(found, began_us + steps * gang.step_us, before + steps)
        return found

    def leave(self, now_us: int) -> list[Event]:
        """Return the last reports of a gang that leaves by itself."""
        gang, found = self.gang, self.report(now_us)
        self._steps(found, gang.last_us, gang.last_step)
        if gang.saves:
            self._span(found, SpanClass.CHECKPOINT, gang.last_us, gang.leave_us)
            self._commit(found, gang.last_step, self.commits + 1, now_us)
        if gang.outcome is not Outcome.FAILED:
            how, step = str(gang.outcome), gang.last_step if self.restored else 0
            found.append(RankLeft(at_us=now_us, job_id=self.job_id, epoch=self.epoch, rank=0, how=how, step=step))
        return found

    def _restore(self, found: list[Event]) -> None:
        gang, self.restored = self.gang, True
        self._span(found, SpanClass.RESTART, self.placed_us, gang.train_us)
        found.append(
            Restored(
                at_us=gang.train_us,
                job_id=self.job_id,
                epoch=self.epoch,
                step=gang.first_step,
                generation=self.generation or None,
            )
        )

    def _period(self, found: list[Event]) -> None:
        gang = self.gang
        self.periods += 1
        end_us = gang.train_us + self.periods * gang.period_us
        steps_us = end_us - gang.work.stall_us
        self._steps(found, steps_us, gang.first_step + self.periods * gang.interval_steps)
        self._span(found, SpanClass.CHECKPOINT, steps_us, end_us)
        self.steps_us = end_us

    def _steps(self, found: list[Event], end_us: int, step: int) -> None:
        """Report the steps below `step`, which are done at `end_us`."""
        steps = step - self.step
        if steps > 0:
            self._span(found, SpanClass.USEFUL, self.steps_us, end_us, steps)
            self.step, self.steps_us = step, end_us

    def _span(self, found: list[Event], span: SpanClass, from_us: int, end_us: int, steps: int = 0) -> None:
        if end_us > from_us:
            found.append(
                Reported(
                    at_us=end_us,
                    job_id=self.job_id,
                    epoch=self.epoch,
                    span=span,
                    from_us=from_us,
                    first_step=self.step if steps else 0,
                    steps=steps,
                    tokens=steps * self.gang.work.tokens_per_step,
                )
            )

    def _commit(self, found: list[Event], step: int, commits: int, at_us: int) -> None:
        """Report that the attempt's checkpoint of this number is durable."""
        work, self.commits = self.gang.work, commits
        found.append(
            CheckpointCommitted(
                at_us=at_us,
                job_id=self.job_id,
                epoch=self.epoch,
                step=step,
                generation=self.generation + commits,
                size_bytes=work.checkpoint_bytes,
                stall_us=work.stall_us,
                upload_us=work.upload_us,
            )
        )
