"""Runs beside each other: in what they differ, and what became of each. Pure: of the API's answers."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cordee.answers.jobs import JobDetailView
from cordee.answers.metrics import CurveView, JobCostView, MetricsView
from cordee.tracing import VARIABLE

_LEFT_OUT = ("run", "files", "name", "cwd", "version")
_LABEL_MAX = 24


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One of the jobs that are compared."""

    job: JobDetailView
    metrics: MetricsView
    cost: JobCostView

    @property
    def run_us(self) -> int | None:
        """Return the time in which its attempts ran, until now for one that runs; None: none has begun."""
        ends = [(each.placed_us, each.ended_us or self.cost.at_us) for each in self.job.attempts]
        return sum(end - begin for begin, end in ends) if ends else None

    def curve(self, name: str) -> CurveView | None:
        """Return a curve by its name."""
        return next((each for each in self.metrics.curves if each.name == name), None)


@dataclass(frozen=True, slots=True)
class Difference:
    """A setting in which the runs differ, with its value in each; None: it is not set there."""

    name: str
    values: tuple[str | None, ...]


def settings_of(job: JobDetailView) -> dict[str, str]:
    """Return the settings of a job by name: keys of its file, flags of its command, environment, commit."""
    found: dict[str, str] = {}
    _flatten("", {key: value for key, value in job.spec.items() if key not in _LEFT_OUT}, found)
    found.pop(f"env.{VARIABLE}", None)  # of each submission its own
    found |= command_flags(job.spec.get("run") or ())
    if job.files is not None:
        changed = " with changes" if job.files.changed else ""
        found["commit"] = f"{(job.files.commit or 'none')[:12]}{changed}"
    return found


def _flatten(prefix: str, value: Any, found: dict[str, str]) -> None:
    if isinstance(value, Mapping):
        for key, each in value.items():
            _flatten(f"{prefix}.{key}" if prefix else str(key), each, found)
    elif value is not None and value not in ([], ""):
        found[prefix] = value if isinstance(value, str) else json.dumps(value)


def command_flags(run: str | Sequence[str]) -> dict[str, str]:
    """Return the flags of a command with their values, and its other words as `run`.

    >>> command_flags(["python", "train.py", "--lr", "0.1", "--amp", "--seed=3", "data"])
    {'--lr': '0.1', '--amp': 'yes', '--seed': '3', 'run': 'python train.py data'}
    """
    try:
        words = shlex.split(run) if isinstance(run, str) else [str(word) for word in run]
    except ValueError:
        return {"run": str(run)}
    flags, rest, at = dict[str, str](), list[str](), 0
    while at < len(words):
        name, is_given, value = words[at].partition("=")
        at += 1
        if not name.startswith("--") or name == "--":
            rest.append(words[at - 1])
        elif is_given:
            flags[name] = value
        elif at < len(words) and not words[at].startswith("--") and not words[at].endswith(".py"):
            flags[name], at = words[at], at + 1
        else:
            flags[name] = "yes"
    return {**flags, "run": " ".join(rest)}


def differences(runs: Sequence[ComparedRun]) -> list[Difference]:
    """Return the settings in which the runs differ, flags first, the environment last."""
    every = [settings_of(run.job) for run in runs]
    names = dict.fromkeys(name for settings in every for name in settings)
    found = [Difference(name, tuple(settings.get(name) for settings in every)) for name in names]
    order = {True: 0, False: 1}
    differing = [each for each in found if len(set(each.values)) > 1]
    return sorted(differing, key=lambda each: (each.name.startswith("env."), order[each.name.startswith("--")]))


def common_curves(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the names of the curves that at least two runs have: what scripts log first, then what is measured."""
    counts: dict[str, int] = {}
    for run in runs:
        for curve in run.metrics.curves:
            counts[curve.name] = counts.get(curve.name, 0) + 1
    names = [name for name, count in counts.items() if count > 1 or len(runs) == 1]
    return sorted(names, key=lambda name: (name.startswith(("measured/", "gpu/")), name != "loss", name))


def labels(runs: Sequence[ComparedRun]) -> list[str]:
    """Return a short name for each run: its job's name where no other has it, else its id."""
    names = [run.job.name for run in runs]
    return [name if names.count(name) == 1 else run.job.job_id for name, run in zip(names, runs, strict=True)]
