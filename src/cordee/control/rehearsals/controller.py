"""The controller of rehearsals: it gives them notice, and draws the conclusion when they have ended.

It keeps no truth of its own: what a rehearsal has shown, the log says (fold.py); what follows, verdict.py says.
"""

from dataclasses import dataclass

from cordee.account.measured import Measurement
from cordee.control.operations import Operations
from cordee.control.rehearsed.fold import Rehearsing
from cordee.control.rehearsed.verdict import Verdict, early_verdict, verdict
from cordee.events import NoticeReason, RehearsalEnded
from cordee.schedule.preemption.notice import notice
from cordee.schedule.state.records import Attempt

BY = "its rehearsal"


@dataclass(slots=True)
class RehearsalController:
    """The control loop of rehearsals, one step at a time; `operations` are those on jobs."""

    operations: Operations

    def step(self) -> int | None:
        """Give notice, and conclude; only a change is a reason for the next step.

        Raises:
            StoreError: the log cannot be written; what was decided before is in it.
        """
        control = self.operations.control
        with control.changed:
            for found in list(control.fold.rehearsals.going.values()):
                before = control.number
                self._step(found)
                if control.number != before:
                    self.operations.wake()
        return None

    def _step(self, found: Rehearsing) -> None:
        control = self.operations.control
        if found.ended is not None:
            self._conclude(found, verdict(found))
            return
        if (early := early_verdict(found)) is not None:
            control.stop(found.job_id, by=BY, now=True)
            self._conclude(found, early)
            return
        attempt = control.state.attempts.get(found.job_id)
        if attempt is not None and found.noticed is None and not attempt.leaving and self._is_there(found, attempt):
            given = notice(attempt, NoticeReason.REHEARSAL, self.operations.clock.now_us())
            control.note(given)

    def _is_there(self, found: Rehearsing, attempt: Attempt) -> bool:
        """Return whether the first rank waits before the step at which the rehearsal gets its notice."""
        measured = self.operations.control.measurements.of(found.job_id, attempt.epoch)
        return measured is not None and measured.step_us is not None and measured.step >= found.steps

    def _conclude(self, found: Rehearsing, drawn: Verdict) -> None:
        control = self.operations.control
        attempts = control.measurements.attempts(found.job_id)
        record = control.state.nodes.records.get(found.node)
        saved_us = next((each.save_us for each in attempts if each.save_us is not None), None)
        resumed = _resumed(attempts)
        control.note(
            RehearsalEnded(
                at_us=self.operations.clock.now_us(),
                job_id=found.job_id,
                code=found.code,
                passed=drawn.passed,
                why=drawn.why,
                notes=drawn.notes,
                gpus=found.gpus,
                gpu_name="" if record is None else record.node.gpu_name,
                steps=found.steps,
                peak_bytes=max((each.peak_bytes for each in attempts if each.peak_bytes), default=None),
                step_us=next((each.step_us for each in attempts if each.step_us), None),
                save_us=saved_us,
                restart_us=None if resumed is None else resumed.restart_us,
            )
        )


def _resumed(attempts: list[Measurement]) -> Measurement | None:
    """Return the newest attempt that went on from a checkpoint; None: none did."""
    return next((each for each in reversed(attempts) if each.first_step), None)
