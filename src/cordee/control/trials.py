"""The fold of sweeps: what is declared, and the trials of each with their metrics. Pure."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple

from cordee.events import (
    AttemptEnded,
    AttemptPlaced,
    CheckpointCommitted,
    Event,
    JobEnded,
    JobPaused,
    JobResumed,
    JobSubmitted,
    MetricsLogged,
    RankLeft,
    SweepDeclared,
    SweepEnded,
    SweepHeld,
)
from cordee.ids import JobId
from cordee.workload.spec import JobSpec
from cordee.workload.sweep import TRIAL_ENV, SweepSpec, Value


class TrialState(StrEnum):
    """The state of a trial's job."""

    QUEUED = "queued"
    RUNNING = "running"
    PAUSED = "paused"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(slots=True)
class Trial:
    """One job of a sweep.

    Attributes:
        number: counted from 1.
        values: of its parameters.
        step: steps that are known to be done: of its newest checkpoint, or when its metric was logged.
        metric: the newest value of the sweep's metric; None: there is none, or it is not finite.
        metric_step: when it was logged; None: never.
        rungs: the metric at each rung that it has reached, the first one first.
        promoted: rungs that it has been promoted from.
        why: the end of its job.
    """

    number: int
    job_id: JobId
    values: dict[str, Value]
    state: TrialState = TrialState.QUEUED
    epoch: int = 0
    step: int = 0
    metric: float | None = None
    metric_step: int | None = None
    rungs: list[float | None] = field(default_factory=list)
    promoted: int = 0
    why: str = ""

    @property
    def is_live(self) -> bool:
        """Return whether it runs or waits for GPUs."""
        return self.state in (TrialState.QUEUED, TrialState.RUNNING)

    @property
    def has_ended(self) -> bool:
        """Return whether it will not run again."""
        return self.state in (TrialState.DONE, TrialState.FAILED, TrialState.STOPPED)

    @property
    def is_at_rung(self) -> bool:
        """Return whether it waits at a rung for its promotion."""
        return self.state is TrialState.PAUSED and len(self.rungs) > self.promoted


@dataclass(slots=True)
class Sweep:
    """A declared sweep.

    Attributes:
        sweep_id: a name with a random part, as of a job.
        spec: its JobSpec as JSON.
        ended_us: when its end was decided; None: it goes on.
        why: the reason for its end.
        logged: names of all metrics that a trial has logged.
        held_by: the user that paused it; "": it goes on.
        trials: by number.
    """

    sweep_id: str
    owner: str
    spec: str
    declared_us: int
    ended_us: int | None = None
    why: str = ""
    logged: list[str] = field(default_factory=list)
    trials: dict[int, Trial] = field(default_factory=dict)
    held_by: str = ""

    @property
    def section(self) -> SweepSpec:
        """Return the section `sweep` of its spec."""
        section = declared_spec(self.spec).sweep
        assert section is not None, "only a spec with this section is declared"
        return section

    @property
    def is_over(self) -> bool:
        """Return whether it has ended, and so have its trials."""
        return self.ended_us is not None and all(each.has_ended for each in self.trials.values())

    @property
    def done(self) -> bool:
        """Return whether at least one trial is done."""
        return any(each.state is TrialState.DONE for each in self.trials.values())

    @property
    def best(self) -> Trial | None:
        """Return the trial with the best newest value of the metric, of those that have come to the highest rung.

        A value of few steps is no rival of one of many: it may be the luck of one batch.
        """
        found = [each for each in self.trials.values() if each.metric is not None]
        furthest = max((len(each.rungs) for each in found), default=0)
        return self.best_of([each for each in found if len(each.rungs) == furthest])

    def best_of(self, trials: Iterable[Trial]) -> Trial | None:
        """Return the one of these trials with the best newest value of the metric; None: none has logged it."""
        sign = 1 if self.section.goal == "min" else -1
        found = [(sign * each.metric, each.number) for each in trials if each.metric is not None]
        return self.trials[min(found)[1]] if found else None


@lru_cache(maxsize=64)
def declared_spec(text: str) -> JobSpec:
    """Return the spec of a sweep from its JSON."""
    return JobSpec.model_validate_json(text)


class SavedSweeps(NamedTuple):
    """The saved form of all sweeps."""

    version: int
    sweeps: dict[str, Sweep]


class Sweeps:
    """All sweeps that were ever declared; hold the control's `changed` while reading them.

    Attributes:
        sweeps: by id, the oldest first.
        version: grows with each change of any of them.
        kinds: of events that may change something.
    """

    def __init__(self) -> None:
        self.sweeps: dict[str, Sweep] = {}
        self.version = 0
        self._trials: dict[JobId, tuple[Sweep, Trial]] = {}
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            SweepDeclared: self._declared,
            SweepEnded: self._ended,
            SweepHeld: self._held,
            JobSubmitted: self._submitted,
        }
        self._of_trials: dict[type[Any], Callable[[Sweep, Trial, Any], None]] = {
            AttemptPlaced: _placed,
            MetricsLogged: _logged,
            CheckpointCommitted: _committed,
            RankLeft: _rank_left,
            AttemptEnded: _attempt_ended,
            JobPaused: _paused,
            JobResumed: _resumed,
            JobEnded: _job_ended,
        }
        self.kinds = frozenset((*self._handlers, *self._of_trials))

    def saved(self) -> SavedSweeps:
        """Return the saved form; it shares this object's values."""
        return SavedSweeps(self.version, self.sweeps)

    @classmethod
    def restored(cls, saved: SavedSweeps) -> "Sweeps":
        """Return the sweeps that were saved."""
        new = cls()
        new.version, new.sweeps = saved
        for sweep in new.sweeps.values():
            new._trials.update({each.job_id: (sweep, each) for each in sweep.trials.values()})
        return new

    def find(self, ref: str) -> Sweep | None:
        """Return a sweep by its id, or the newest one of a name."""
        named = [each for name, each in self.sweeps.items() if name.rpartition("-")[0] == ref]
        return self.sweeps.get(ref) or (named[-1] if named else None)

    def of(self, job_id: JobId) -> tuple[Sweep, Trial] | None:
        """Return the sweep and the trial that a job is; None: it is none."""
        return self._trials.get(job_id)

    def apply(self, event: Event) -> None:
        """Fold an event of the log; most are of no sweep."""
        kind = type(event)
        if (handler := self._handlers.get(kind)) is not None:
            handler(event)
        elif self._trials and (change := self._of_trials.get(kind)) is not None:
            found = self._trials.get(event.job_id)  # type: ignore[union-attr]  # All of these kinds are of one job.
            if found is not None:
                change(*found, event)
                self.version += 1

    def _declared(self, event: SweepDeclared) -> None:
        made = Sweep(event.sweep, event.by, event.spec, event.at_us)
        if self.sweeps.setdefault(event.sweep, made) is made:
            self.version += 1

    def _ended(self, event: SweepEnded) -> None:
        sweep = self.sweeps.get(event.sweep)
        if sweep is not None and sweep.ended_us is None:
            sweep.ended_us, sweep.why = event.at_us, event.why
            self.version += 1

    def _held(self, event: SweepHeld) -> None:
        sweep = self.sweeps.get(event.sweep)
        if sweep is not None:
            sweep.held_by = "" if event.over else event.by
            self.version += 1

    def _submitted(self, event: JobSubmitted) -> None:
        job = event.job
        sweep = self.sweeps.get(job.sweep) if job.sweep is not None else None
        if sweep is not None and job.trial not in sweep.trials:
            values = json.loads(json.loads(event.spec)["env"][TRIAL_ENV])
            trial = sweep.trials[job.trial] = Trial(job.trial, job.job_id, values)
            self._trials[job.job_id] = (sweep, trial)
            self.version += 1


def _placed(sweep: Sweep, trial: Trial, event: AttemptPlaced) -> None:
    trial.state, trial.epoch = TrialState.RUNNING, event.epoch


def _logged(sweep: Sweep, trial: Trial, event: MetricsLogged) -> None:
    sweep.logged += [name for name in dict.fromkeys(event.names) if name not in sweep.logged]
    name = sweep.section.metric
    if event.epoch == trial.epoch and name in event.names:
        newest = len(event.names) - 1 - event.names[::-1].index(name)
        trial.metric, trial.metric_step = event.values[newest], event.step
        trial.step = max(trial.step, event.step)


def _committed(sweep: Sweep, trial: Trial, event: CheckpointCommitted) -> None:
    if event.epoch == trial.epoch:
        trial.step = max(trial.step, event.step)


def _rank_left(sweep: Sweep, trial: Trial, event: RankLeft) -> None:
    if event.epoch == trial.epoch and event.how in ("checkpointed", "finished"):
        trial.step = max(trial.step, event.step)


def _attempt_ended(sweep: Sweep, trial: Trial, event: AttemptEnded) -> None:
    if event.epoch == trial.epoch:
        trial.state, trial.why = TrialState.QUEUED, event.why


def _paused(sweep: Sweep, trial: Trial, event: JobPaused) -> None:
    trial.state, trial.why = TrialState.PAUSED, event.why
    _reach(sweep, trial)


def _resumed(sweep: Sweep, trial: Trial, event: JobResumed) -> None:
    trial.state, trial.why, trial.promoted = TrialState.QUEUED, event.why, len(trial.rungs)


def _job_ended(sweep: Sweep, trial: Trial, event: JobEnded) -> None:
    if event.state == "done":
        _reach(sweep, trial)
    trial.state, trial.why = TrialState(event.state), event.why


def _reach(sweep: Sweep, trial: Trial) -> None:
    """Note the metric at each rung that the trial has reached since the last one."""
    reached = sum(step <= trial.step for step in sweep.section.rung_steps)
    trial.rungs += [trial.metric] * (reached - len(trial.rungs))
