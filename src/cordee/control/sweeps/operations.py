"""The API of sweeps without HTTP: one method for each request that a client can make."""

import re
from dataclasses import dataclass

from cordee.answers.sweeps import SweepDetailView, SweepSubmission, SweepView
from cordee.control.costs import cost
from cordee.control.operations import Operations
from cordee.control.specs import read_spec
from cordee.control.sweeps.bayes import check_optuna
from cordee.control.sweeps.controller import SweepController, secrets_of
from cordee.control.sweeps.trial_spec import trial_id, trial_spec, unused_parameters
from cordee.control.sweeps.views import Spent, sweep_detail, sweep_view
from cordee.control.trials import Sweep
from cordee.errors import InputError, NotFoundError, SpecError
from cordee.events import SweepHeld
from cordee.ids import ALPHABET, JobId
from cordee.near import meant
from cordee.workload.spec import JobSpec


@dataclass(slots=True)
class SweepOperations:
    """The requests about sweeps.

    Attributes:
        operations: those on jobs, which share log, secrets and files.
        controller: starts, promotes and stops trials.
    """

    operations: Operations
    controller: SweepController

    @classmethod
    def over(cls, operations: Operations) -> "SweepOperations":
        """Create the parts of sweeps over the operations on jobs."""
        return cls(operations, SweepController(operations))

    def declare(self, submission: SweepSubmission, owner: str) -> SweepView:
        """Create a sweep. Submitting it again changes nothing."""
        operations, spec = self.operations, _checked_spec(submission)
        sweep_id = submission.job_id
        operations.check_secrets(spec, submission.secrets)
        operations.files.check(spec, owner)
        assert spec.sweep is not None, "checked above"
        if spec.sweep.way == "bayes":
            check_optuna()
        first = trial_spec(spec, 1, spec.sweep.point(1))
        with operations.control.changed:
            job_id = trial_id(sweep_id, spec, 1)
            admitted = operations.admitted(first, job_id, owner, unprotected=submission.unprotected)
            sweeps = operations.control.fold.sweeps.sweeps
            if sweep_id not in sweeps:
                operations.secrets.keep(secrets_of(sweep_id), submission.secrets)
                operations.control.declare_sweep(sweep_id, by=owner, spec=spec.model_dump_json())
            notes = (*admitted.notes, *_notes(spec))
            view = sweep_view(sweeps[sweep_id], notes=notes)
        operations.wake()
        return view

    def sweeps(self) -> list[SweepView]:
        """Return all sweeps, the newest first."""
        with self.operations.control.changed:
            found = self.operations.control.fold.sweeps.sweeps.values()
            return [sweep_view(each, problem=self._problem(each)) for each in reversed(found)]

    def declared(self, ref: str) -> Sweep | None:
        """Return a sweep as it was declared, by its id, or the newest one of a name; None: there is none."""
        with self.operations.control.changed:
            return self.operations.control.fold.sweeps.find(ref)

    def sweep(self, ref: str) -> SweepDetailView:
        """Return one sweep with its trials, by its id, or the newest one of a name.

        Raises:
            NotFoundError: there is none.
        """
        rows = cost(self.operations, "job").rows
        spent = {JobId(row.key): Spent(row.gpu_us.held, row.micro_usd.held) for row in rows}
        with self.operations.control.changed:
            found = self._find(ref)
            return sweep_detail(found, spent, problem=self._problem(found))

    def end(self, ref: str, owner: str) -> SweepView:
        """End a sweep: its trials save and leave. One that has ended stays as it is."""
        with self.operations.control.changed:
            found = self._find(ref)
            if found.ended_us is None:
                self.controller.end(found, by=owner, why=f"stopped by {owner}")
            view = sweep_view(found)
        self.operations.wake()
        return view

    def hold(self, ref: str, owner: str, *, over: bool = False) -> SweepView:
        """Pause a sweep, or with `over` resume it: its trials save and leave; none starts or is promoted meanwhile.

        Raises:
            InputError: it has ended, or nobody has paused it.
        """
        with self.operations.control.changed:
            found = self._find(ref)
            if found.ended_us is not None:
                raise InputError(f"{found.sweep_id} has ended: {found.why}", hint="start it again: cordee run")
            if over and not found.held_by:
                raise InputError(f"{found.sweep_id} is not paused", hint=f"cordee sweep show {found.sweep_id}")
            if over or not found.held_by:
                now_us = self.operations.clock.now_us()
                self.operations.control.note(SweepHeld(at_us=now_us, sweep=found.sweep_id, by=owner, over=over))
            view = sweep_view(found)
        self.operations.wake()
        return view

    def _problem(self, sweep: Sweep) -> str:
        problem = self.controller.problems.get(sweep.sweep_id)
        return "" if problem is None else problem.message

    def _find(self, ref: str) -> Sweep:
        found = self.operations.control.fold.sweeps.find(ref)
        if found is not None:
            return found
        sweeps = self.operations.control.fold.sweeps.sweeps
        hint = meant(ref, (*sweeps, *map(_name_of, sweeps))) + "`cordee sweep list` shows them"
        raise NotFoundError(f"there is no sweep {ref!r}", hint=hint)


def _name_of(sweep_id: str) -> str:
    """Return the name in a sweep's id."""
    return sweep_id.rpartition("-")[0]


def _checked_spec(submission: SweepSubmission) -> JobSpec:
    spec = read_spec(submission.spec)
    if spec.sweep is None:
        raise SpecError(f"{spec.name} is a job: it has no section `sweep`", hint="send it to /v1/jobs")
    if not re.fullmatch(re.escape(spec.name) + f"-[{ALPHABET}]{{6}}", submission.job_id):
        raise SpecError(f"{submission.job_id!r} is not an id of a sweep named {spec.name!r}", hint="use cordee.client")
    return spec


def _notes(spec: JobSpec) -> list[str]:
    unused = unused_parameters(spec)
    if not unused:
        return []
    names = ", ".join(f"{{{name}}}" for name in unused)
    return [f"run does not contain {names}: the script has to read it from cordee.trial()"]
