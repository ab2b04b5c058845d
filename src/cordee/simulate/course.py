"""The course of one gang: when it trains, saves and leaves, and what of that is true at a time. Arithmetic only.

    placed ── restart ── k steps │ stall │ k steps │ stall │ ... │ last steps │ last save ── leaves
                                 └ captured, durable `drain` later: training goes on meanwhile

k steps and a stall are a cycle. Nothing is stored for a cycle, so a gang that trains for a month costs as much as one
that trains for an hour, and what its ranks told can be worked out when somebody asks.
"""

from dataclasses import dataclass

from cordee.simulate.work import Work


@dataclass(slots=True)
class Course:
    """What will happen unless somebody interrupts; a notice shortens it.

    Attributes:
        first_step: the one it starts at.
        train_us: when it starts it.
        cycles: whole cycles before the last steps.
        last_us: when the last steps are over.
        last_step: how far it is then.
        leave_us: when it leaves: at `last_us`, or after the last save.
    """

    work: Work
    step_us: int
    k: int
    cycle_us: int
    first_step: int
    train_us: int
    cycles: int
    last_us: int
    last_step: int
    leave_us: int
    saves: bool

    @classmethod
    def of(cls, work: Work, first_step: int, placed_us: int, start_us: int, gpus: int) -> "Course":
        """From the first new step to the last one."""
        step_us = work.step_us if work.gpus is None else max(1, work.step_us * work.gpus // gpus)
        every_us, left = work.every_us, work.steps - first_step
        k = work.steps if every_us is None else max(1, round(every_us / step_us))
        train_us, cycle_us = placed_us + start_us, k * step_us + work.stall_us
        cycles = max(0, left - 1) // k
        last_us = train_us + cycles * cycle_us + (left - cycles * k) * step_us
        saves = work.saves_at_end and (every_us is not None or work.handles_notice)
        leave_us = last_us + work.stall_us + work.upload_us if saves else last_us
        return cls(
            work, step_us, k, cycle_us, first_step, train_us, cycles, last_us, work.steps, leave_us, saves
        )  # fmt: skip

    def notified(self, now_us: int) -> bool:
        """It stops at the end of the step in progress and saves; False if that changes nothing."""
        work = self.work
        if now_us < self.train_us:
            self.cycles, self.last_us, self.last_step = 0, self.train_us, self.first_step
            self.leave_us, self.saves = self.train_us, False
            return True
        cycle = min((now_us - self.train_us) // self.cycle_us, self.cycles)
        began_us = self.train_us + cycle * self.cycle_us
        if now_us >= self.last_us:
            return False
        in_steps = min(self.k, -(-(now_us - began_us) // self.step_us))  # during a stall it is all of the cycle's steps
        self.cycles = cycle
        self.last_us = began_us + in_steps * self.step_us
        self.last_step = min(self.last_step, self.first_step + cycle * self.k + in_steps)
        self.saves = work.saves_at_end or self.last_step < work.steps
        self.leave_us = self.last_us + work.stall_us + work.upload_us if self.saves else self.last_us
        return True

    def done_cycles(self, now_us: int) -> int:
        """Cycles that are over."""
        return max(0, min((now_us - self.train_us) // self.cycle_us, self.cycles))

    def durable_cycles(self, now_us: int) -> int:
        """Cycles whose capture is durable."""
        return max(0, min((now_us - self.work.upload_us - self.train_us) // self.cycle_us, self.cycles))

    def next_us(self, now_us: int) -> int | None:
        """When the next span ends or the next capture is durable, before it leaves; None if only that is left."""
        if now_us < self.train_us:
            return self.train_us
        cycle = self.done_cycles(now_us)
        began_us = self.train_us + cycle * self.cycle_us
        steps_us = began_us + self.k * self.step_us if cycle < self.cycles else self.last_us
        times = [steps_us, self.train_us + (self.durable_cycles(now_us) + 1) * self.cycle_us + self.work.upload_us]
        if cycle < self.cycles:
            times.append(began_us + self.cycle_us)
        if self.durable_cycles(now_us) >= self.cycles:
            del times[1]
        return min((at_us for at_us in times if now_us < at_us < self.leave_us), default=None)
