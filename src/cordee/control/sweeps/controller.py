"""The controller of sweeps: it submits, resumes and stops trials, as a user would do with jobs.

It keeps no truth of its own. What is declared and how the trials do, the log says (control/trials.py); what follows,
policy.py says. So a killed server or a standby goes on where the last one was.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import structlog

from cordee.control.admission import spec_for
from cordee.control.operations import Operations
from cordee.control.sweeps.bayes import propose
from cordee.control.sweeps.policy import decide
from cordee.control.sweeps.trial_spec import trial_id, trial_spec
from cordee.control.trials import Sweep, declared_spec
from cordee.errors import CordeeError, DependencyError, StoreError
from cordee.events import HoldReleased, JobHeld
from cordee.units import US_PER_S
from cordee.workload.sweep import Value

BY = "its sweep"
_REFUSED_US = 10 * US_PER_S


@dataclass(slots=True)
class SweepController:
    """The control loop of sweeps, one step at a time.

    Attributes:
        operations: those on jobs: admission, secrets, the log.
        problems: by sweep, the refusal of its next trial.
    """

    operations: Operations
    problems: dict[str, CordeeError] = field(default_factory=dict)
    _version: int = -1  # of the sweeps at the last step
    _refused_us: dict[str, int] = field(default_factory=dict)

    def step(self) -> int | None:
        """Start, promote and stop trials; return the time of the next step, None: only a change is a reason for one.

        Raises:
            StoreError: the log cannot be written; what was decided before is in it.
        """
        control = self.operations.control
        with control.changed:
            sweeps, now_us = control.fold.sweeps, self.operations.clock.now_us()
            if control.state.shutting_down:
                return None
            if sweeps.version != self._version or self._refused_us:
                for sweep in [each for each in sweeps.sweeps.values() if not each.is_over]:
                    self._step(sweep, now_us)
                self._version = sweeps.version
        return min(self._refused_us.values(), default=None)

    def _step(self, sweep: Sweep, now_us: int) -> None:
        control = self.operations.control
        before = control.number
        if sweep.ended_us is None:
            self._hold(sweep, now_us)
            if not sweep.held_by:
                self._follow(sweep, now_us)
        if sweep.ended_us is not None:
            for trial in sweep.trials.values():
                record = control.state.jobs.get(trial.job_id)
                if record is not None and not record.phase.ended and record.stop is None:
                    control.stop(trial.job_id, by=BY)
        if control.number != before:
            self.operations.wake()

    def _hold(self, sweep: Sweep, now_us: int) -> None:
        """Hold the trials of a paused sweep, and release those that it held before it was resumed."""
        control = self.operations.control
        for trial in sweep.trials.values():
            record = control.state.jobs.get(trial.job_id)
            if record is None or record.phase.ended:
                continue
            held = record.gate.held
            if sweep.held_by and held is None and trial.is_live:
                control.note(JobHeld(at_us=now_us, job_id=trial.job_id, by=BY, leave=True))
            elif not sweep.held_by and held is not None and held.by == BY:
                control.note(HoldReleased(at_us=now_us, job_id=trial.job_id, by=BY))

    def _follow(self, sweep: Sweep, now_us: int) -> None:
        """Do what the policy decides; after each change it is asked again at the next step."""
        control, found = self.operations.control, decide(sweep)
        for number in found.resume:
            control.resume(sweep.trials[number].job_id, by=BY, why="it left before a rung, and goes on")
        for number in found.promote:
            trial = sweep.trials[number]
            why = f"promoted at rung {len(trial.rungs)}, step {sweep.section.rung_steps[len(trial.rungs) - 1]}"
            control.resume(trial.job_id, by=BY, why=why)
        if found.start and now_us >= self._refused_us.get(sweep.sweep_id, 0):
            first = len(sweep.trials) + 1
            self._start(sweep, range(first, first + found.start), now_us)
        if found.end is not None:
            self.end(sweep, by=BY, why=found.end)

    def _start(self, sweep: Sweep, numbers: Sequence[int], now_us: int) -> None:
        """Submit trials; a refusal is tried again later, since it may fit then."""
        operations, sweep_id = self.operations, sweep.sweep_id
        spec = declared_spec(sweep.spec)
        try:
            for number in numbers:
                made = trial_spec(spec, number, values_of(sweep, number))
                job_id = trial_id(sweep_id, spec, number)
                job = operations.admitted(made, job_id, sweep.owner, unprotected=True).job
                operations.secrets.pass_on(secrets_of(sweep_id), job_id)
                trial = replace(job, sweep=sweep_id, trial=number, pauses=bool(sweep.section.rung_steps))
                operations.control.submit(trial, spec_for(trial, made))
        except StoreError:
            raise
        except DependencyError as error:  # what the sweep starts after has ended otherwise
            self.end(sweep, by=BY, why=error.message)
        except CordeeError as error:
            if str(self.problems.get(sweep_id)) != str(error):
                structlog.get_logger().warning("a trial was refused", sweep=sweep_id, error=str(error))
            self.problems[sweep_id] = error
            self._refused_us[sweep_id] = now_us + _REFUSED_US
        else:
            self.problems.pop(sweep_id, None)
            self._refused_us.pop(sweep_id, None)

    def end(self, sweep: Sweep, *, by: str, why: str) -> None:
        """End a sweep; the next step stops the trials that have not ended."""
        self.operations.control.end_sweep(sweep.sweep_id, by=by, why=why)
        self.operations.secrets.keep(secrets_of(sweep.sweep_id), {})
        self.problems.pop(sweep.sweep_id, None)
        self._refused_us.pop(sweep.sweep_id, None)


def values_of(sweep: Sweep, number: int) -> dict[str, Value]:
    """Return the values of the next trial; they follow from the sweep, the number and the results so far."""
    return propose(sweep, number) if sweep.section.way == "bayes" else sweep.section.point(number)


def secrets_of(sweep_id: str) -> str:
    """Return the name under which the secrets of a sweep are kept; no job has such a one.

    >>> secrets_of("lr-abcdef")
    'sweep/lr-abcdef'
    """
    return f"sweep/{sweep_id}"
