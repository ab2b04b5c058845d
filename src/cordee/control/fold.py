"""The fold of the log: state, ledger, measurements, services, sweeps, artifacts; from its start or a saved form."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from cordee.account.attempt import AttemptRow
from cordee.account.curves import Curves, SavedJobCurves
from cordee.account.ledger import Ledger, SavedLedger
from cordee.account.measured import Measurement, Measurements, SavedMeasurements
from cordee.control.directory import Directory, SavedDirectory
from cordee.control.patience import policy_of
from cordee.control.rehearsed.fold import Rehearsals, SavedRehearsals
from cordee.control.trials import SavedSweeps, Sweeps
from cordee.control.versions import Artifacts, SavedArtifacts
from cordee.events import Event, ServerUp
from cordee.ids import JobId
from cordee.reports import RANK_REPORTS, is_rank_report
from cordee.schedule.policy import Policy
from cordee.schedule.state.records import JobRecord
from cordee.schedule.state.saved import SavedState, restored_state, saved_state
from cordee.schedule.state.state import State
from cordee.schedule.state.transitions import apply

Failed = list[tuple[str, Exception]]
"""Jobs whose reports could not be applied, with the exceptions."""


class SavedFold(NamedTuple):
    """The saved form of a fold. `last_us` is the newest time of the log, rank reports not counted."""

    number: int
    last_us: int
    state: SavedState
    ledger: SavedLedger
    measurements: SavedMeasurements
    directory: SavedDirectory
    sweeps: SavedSweeps
    curves: dict[JobId, SavedJobCurves]
    rehearsals: SavedRehearsals
    artifacts: SavedArtifacts
    patience: float | None


class EndedJob(NamedTuple):
    """All that is known of a job once it has ended; `missed` holds a sentence for each quantity off its estimate."""

    record: JobRecord
    accounts: list[AttemptRow]
    measurements: list[Measurement]
    missed: list[str]


class Fold:
    """The values that follow from the log up to `number`.

    Attributes:
        policy: the policy that it was made with; the state's has the patience of the newest start of the server.
        state: what the scheduler knows.
        ledger: GPU time held, by class, and its cost.
        measurements: measured values of attempts beside their estimates.
        directory: services and their replicas.
        sweeps: sweeps and their trials.
        curves: what jobs log, and what is measured of them, step by step.
        rehearsals: rehearsals and their results.
        artifacts: versions of models and data.
        number: the log's number up to which they are folded.
        last_us: the newest time of the log, rank reports not counted.
    """

    def __init__(self, policy: Policy, saved: SavedFold | None = None) -> None:
        """Start before the first event, or with what was saved under this policy."""
        self.policy = policy
        if saved is None:
            self.state, self.ledger, self.measurements = State(policy), Ledger(), Measurements()
            self.directory, self.sweeps, self.curves = Directory(), Sweeps(), Curves()
            self.rehearsals, self.artifacts = Rehearsals(), Artifacts()
            self.number = self.last_us = 0
        else:
            self.state = restored_state(saved.state, replace(policy, patience=saved.patience))
            self.ledger = Ledger.restored(saved.ledger)
            self.measurements = Measurements.restored(saved.measurements)
            self.directory = Directory.restored(saved.directory)
            self.sweeps, self.curves = Sweeps.restored(saved.sweeps), Curves.restored(saved.curves)
            self.rehearsals = Rehearsals.restored(saved.rehearsals)
            self.artifacts = Artifacts.restored(saved.artifacts)
            self.number, self.last_us = saved.number, saved.last_us
        self._folds: dict[type[Event], tuple[Callable[[Event], None], ...]] = {}

    def saved(self) -> SavedFold:
        """Return the saved form; it shares this fold's values, so encode it before the next change."""
        return SavedFold(
            self.number,
            self.last_us,
            saved_state(self.state),
            self.ledger.saved(),
            self.measurements.saved(),
            self.directory.saved(),
            self.sweeps.saved(),
            self.curves.saved(),
            self.rehearsals.saved(),
            self.artifacts.saved(),
            self.state.policy.patience,
        )

    def apply(self, numbered: Iterable[tuple[int, Event]]) -> Failed:
        """Apply events of the log; a rank's report that cannot be applied is skipped and returned."""
        state = self.state
        failed: Failed = []
        for number, event in numbered:
            kind = type(event)
            try:
                apply(state, event)
                if kind is ServerUp and isinstance(event, ServerUp):
                    state.use(policy_of(event, self.policy))
                self._count(number, event)
            except Exception as error:
                # A rank's report, now or in an old log, must not keep the server from running.
                if not is_rank_report(event):
                    raise
                failed.append((event.job_id, error))
            self.number = number
            if kind not in RANK_REPORTS:
                self.last_us = event.at_us
        return failed

    def follow(self, events: Sequence[Event]) -> None:
        """Count committed decisions, which the state holds already, in the ledger and the measurements."""
        for number, event in enumerate(events, start=self.number + 1):
            self._count(number, event)
        self.state.quotas.forget()
        self.number += len(events)
        self.last_us = events[-1].at_us

    def _count(self, number: int, event: Event) -> None:
        """Count an event in all values but the state."""
        kind = type(event)
        self.ledger.apply(event)
        if kind in self.directory.kinds:
            self.directory.apply(number, event)
        for fold in self._of(kind):
            fold(event)

    def _of(self, kind: type[Event]) -> tuple[Callable[[Event], None], ...]:
        """Return the folds of events of a kind beside the state, the ledger and the directory, which are few."""
        folds = self._folds.get(kind)
        if folds is None:
            handlers = [part.handlers[kind] for part in (self.measurements, self.curves) if kind in part.handlers]
            parts = (self.sweeps, self.rehearsals, self.artifacts)
            folds = self._folds[kind] = (*handlers, *(part.apply for part in parts if kind in part.kinds))
        return folds

    def ended_jobs(self) -> list[JobId]:
        """Return the jobs that have ended and that nothing refers to any more."""
        notices = (attempt.notice for attempt in self.state.attempts.values())
        needed = {event.job_id for event in self.measurements.due()} | self.rehearsals.going.keys()
        needed |= {notice.for_job for notice in notices if notice is not None and notice.for_job is not None}
        records = self.state.jobs.items()
        needed |= {JobId(each.of) for _, record in records if not record.phase.ended for each in record.job.after}
        ended = (job_id for job_id, record in records if record.phase.ended and job_id not in needed)
        return [job_id for job_id in ended if not self.ledger.settles(job_id)]

    def known(self, job_id: JobId) -> EndedJob:
        """Return what is known of a job of the state, without its accounts."""
        measured = self.measurements
        missed = list(measured.missed(job_id))
        return EndedJob(self.state.jobs[job_id], [], measured.attempts(job_id), missed)

    def saved_curves(self, job_ids: Iterable[JobId]) -> dict[JobId, SavedJobCurves]:
        """Return the curves of jobs that are about to be retired."""
        found = ((job_id, self.curves.of(job_id)) for job_id in job_ids)
        return {job_id: curves.saved() for job_id, curves in found if curves is not None and curves.curves}

    def retire(self, job_ids: Iterable[JobId]) -> dict[JobId, EndedJob]:
        """Forget those of the jobs that have ended, of which decisions need nothing but sums, and return them."""
        jobs = self.state.jobs
        job_ids = [job_id for job_id in job_ids if job_id in jobs and jobs[job_id].phase.ended]
        accounts = self.ledger.retire(job_ids)
        self.curves.retire(job_ids)
        return {
            job_id: EndedJob(jobs.pop(job_id), accounts[job_id], *self.measurements.retire(job_id))
            for job_id in job_ids
        }
