"""The next trials of a sweep: those to start, to promote and to end it with. Pure.

Successive halving is asynchronous (ASHA: Li et al., A System for Massively Parallel Hyperparameter Tuning, MLSys 2020,
algorithm 2): whenever there is room, the best trial that is in the top 1/eta of its rung is promoted, at the highest
rung first; if there is none, a new trial starts. A rung is a checkpoint: a trial that waits at one holds no GPU.

One thing is added, since here the number of trials is limited: where nothing else is left to do, the best trial of the
highest rung is promoted, however few have reached it, until one has reached the last.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

from cordee.control.trials import Sweep, Trial, TrialState
from cordee.workload.sweep import SweepSpec


class Decision(NamedTuple):
    """The trials to promote or to resume, by number; the number of trials to start; and why the sweep ends, if so."""

    promote: tuple[int, ...] = ()
    resume: tuple[int, ...] = ()  # that left with a checkpoint before a rung
    start: int = 0
    end: str | None = None


def decide(sweep: Sweep) -> Decision:
    """Return what follows from the results of a sweep that has not ended."""
    section, trials = sweep.section, sweep.trials.values()
    reached = reached_target(sweep)
    if reached is not None:
        name = f"trial {reached.number}: {section.metric} {reached.metric:g}"
        return Decision(end=f"{name} reached the target {section.target:g}")
    resume = tuple(each.number for each in trials if each.state is TrialState.PAUSED and not each.is_at_rung)
    live = sum(each.is_live for each in trials) + len(resume)
    room = max(0, section.max_running - live)
    promote = tuple(each.number for each in promotable(trials, section)[:room])
    start = min(room - len(promote), section.total - len(sweep.trials))
    if not (live or promote or start):
        promote = tuple(each.number for each in _last_hope(trials, section))
    end = None
    if not (live or promote or start):
        end = f"all {section.total} trials are over"
    return Decision(promote, resume, start, end)


def reached_target(sweep: Sweep) -> Trial | None:
    """Return the best trial, wherever it is, if it has reached the sweep's target."""
    target, best = sweep.section.target, sweep.best_of(sweep.trials.values())
    if target is None or best is None or best.metric is None or sweep.section.is_better(target, best.metric):
        return None
    return best


def promotable(trials: Iterable[Trial], section: SweepSpec) -> list[Trial]:
    """Return the trials that wait at a rung and are in the top 1/eta of it, at the highest rung first."""
    trials, found = list(trials), list[Trial]()
    if section.rungs is not None:
        for rung in reversed(range(len(section.rung_steps) - 1)):
            ranked = at_rung(trials, section, rung)
            top = ranked[: len(ranked) // section.rungs.eta]
            found += [each for each in top if _waits_at(each, rung)]
    return found


def at_rung(trials: Iterable[Trial], section: SweepSpec, rung: int) -> list[Trial]:
    """Return all trials that have reached a rung, the best one first; those without a metric come last."""
    return sorted(
        (each for each in trials if len(each.rungs) > rung), key=lambda each: (_score(each, section, rung), each.number)
    )


def _score(trial: Trial, section: SweepSpec, rung: int) -> float:
    value = trial.rungs[rung]
    if value is None:
        return math.inf
    return value if section.goal == "min" else -value


def _waits_at(trial: Trial, rung: int) -> bool:
    return trial.is_at_rung and len(trial.rungs) == rung + 1 and trial.rungs[rung] is not None


def _last_hope(trials: Iterable[Trial], section: SweepSpec) -> list[Trial]:
    """Return the best trial of the highest rung that any waits at, unless a trial has reached the last rung."""
    trials = list(trials)
    for rung in reversed(range(len(section.rung_steps))):
        ranked = at_rung(trials, section, rung)
        if rung == len(section.rung_steps) - 1 and ranked:
            return []
        if waiting := [each for each in ranked if _waits_at(each, rung)]:
            return waiting[:1]
        if any(each.state is TrialState.DONE for each in ranked):
            return []
    return []
