"""The API of rehearsals without HTTP: one method for each request that a client can make."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from cordee.answers.jobs import JobView
from cordee.answers.submissions import RehearsalStarted, RehearsalSubmission, RehearsalView
from cordee.control.admission import Admitted, spec_for
from cordee.control.operations import Operations
from cordee.control.rehearsals.controller import RehearsalController
from cordee.control.rehearsed.measured import rehearsal_view
from cordee.control.specs import spec_of
from cordee.errors import AdmissionError, LayoutError, StoreError
from cordee.ids import JobId
from cordee.units import format_bytes, plural
from cordee.workload.rehearsal import RehearsedSteps, rehearsal_name, rehearsal_spec
from cordee.workload.spec import JobSpec


class _Gang(NamedTuple):
    """The job of a rehearsal, and why it has so many GPUs."""

    spec: JobSpec
    admitted: Admitted
    why: str


@dataclass(slots=True)
class RehearsalOperations:
    """The requests about rehearsals.

    Attributes:
        operations: those on jobs, which share log, secrets and files.
        controller: gives notice, and concludes.
    """

    operations: Operations
    controller: RehearsalController

    @classmethod
    def over(cls, operations: Operations) -> "RehearsalOperations":
        """Create the parts of rehearsals over the operations on jobs."""
        return cls(operations, RehearsalController(operations))

    def start(self, submission: RehearsalSubmission, owner: str) -> RehearsalStarted:
        """Queue the rehearsal of a job. Submitting it again changes nothing."""
        operations, spec = (
            self.operations,
            spec_of(submission, rehearsal_name(str(submission.spec.get("name") or "job"))),
        )
        operations.check_secrets(spec, submission.secrets)
        operations.files.check(spec, owner)
        job_id = JobId(submission.job_id)
        with operations.control.changed:
            gang = self._gang(spec, submission, job_id, owner)
            if job_id not in operations.control.state.jobs:
                job = replace(gang.admitted.job, rehearsed_steps=submission.steps)
                operations.secrets.keep(job_id, submission.secrets)
                try:
                    operations.control.submit(job, spec_for(job, gang.spec))
                except StoreError:
                    operations.secrets.keep(job_id, {})
                    raise
        operations.wake()
        seen = operations.job(job_id)
        return RehearsalStarted(
            job=JobView(**{name: getattr(seen, name) for name in JobView.model_fields}),
            spec=gang.spec.model_dump(mode="json"),
            why_gpus=gang.why,
            notes=list(gang.admitted.notes),
        )

    def rehearsals(self) -> list[RehearsalView]:
        """Return the newest result of each code and number of GPUs, the newest first."""
        with self.operations.control.changed:
            found = list(self.operations.control.fold.rehearsals.results.values())
        return [rehearsal_view(each) for each in reversed(found)]

    def _gang(self, spec: JobSpec, wanted: RehearsalSubmission, job_id: JobId, owner: str) -> _Gang:
        """Return the job on the GPUs that were asked for, else on the fewest that hold its model by the plan.

        Raises:
            AdmissionError: it fits on none of the numbers that the job may have.
        """
        steps = RehearsedSteps(wanted.steps, wanted.replayed)

        def on(gpus: int) -> tuple[JobSpec, Admitted]:
            made = rehearsal_spec(spec, gpus, steps, wanted.limit_s)
            return made, self.operations.admitted(made, job_id, owner, unprotected=True)

        if wanted.gpus is not None:
            return _Gang(*on(wanted.gpus), "as asked for")
        if spec.model is None:
            fewest = min((spec.gpus, *spec.sizes))
            why = "the fewest that the job may have: it names no model, whose plan would know" if spec.sizes else (
                "all of the job's: it names no model, whose plan would know of fewer"
            )  # fmt: skip
            return _Gang(*on(fewest), why)
        unit = spec.place.unit or 1
        for gpus in sorted({*(1 << power for power in range(spec.gpus.bit_length())), *spec.sizes, spec.gpus}):
            if gpus > spec.gpus or gpus % unit:
                continue
            try:
                made, admitted = on(gpus)
            except (AdmissionError, LayoutError):
                if gpus == spec.gpus:
                    raise
                continue
            plan = admitted.job.estimate_on(gpus)
            if plan is not None and plan.gpu_memory_bytes:
                peak = f"{format_bytes(plan.peak_bytes)} of {format_bytes(plan.gpu_memory_bytes)}"
                return _Gang(made, admitted, f"the fewest that hold the model: {peak}")
        return _Gang(*on(spec.gpus), f"all {plural(spec.gpus, 'GPU')}: no plan knows the memory of these")
