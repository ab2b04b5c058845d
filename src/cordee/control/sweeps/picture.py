"""Sweeps in words and as a picture: the terminal and the pages show both."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from cordee.answers.sweeps import SweepDetailView, SweepView, TrialView
from cordee.control.sweeps.policy import at_rung
from cordee.control.trials import Sweep
from cordee.units import plural
from cordee.view.parallel import Coordinate, Polyline, parallel_html
from cordee.workload.sweep import Value


def best_text(sweep: SweepView, trial: TrialView) -> str:
    """Return a trial and its metric in words; where trials are compared at rungs, with its step."""
    at = f", step {trial.metric_step}" if sweep.rung_steps and trial.metric_step is not None else ""
    return f"{sweep.metric} {metric_text(trial.metric)} (trial {trial.number}{at})"


def metric_text(value: float | None) -> str:
    """Return the value of a metric.

    >>> metric_text(0.123456), metric_text(None)
    ('0.1235', '–')
    """
    return "–" if value is None else f"{value:.4g}"


def values_text(values: dict[str, Value]) -> str:
    """Return the values of a trial.

    >>> values_text({"lr": 0.001, "opt": "adam"})
    'lr=0.001 opt=adam'
    """
    return " ".join(f"{name}={value_text(value)}" for name, value in values.items())


def value_text(value: Value, digits: int = 6) -> str:
    """Return one value of a parameter, with so many digits.

    >>> value_text(0.00645749), value_text(0.00645749, 3), value_text(5)
    ('0.00645749', '0.00646', '5')
    """
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def rungs_text(sweep: SweepView) -> str:
    """Return the search of a sweep and its rungs in words."""
    order = "least" if sweep.goal == "min" else "most"
    text = f"{sweep.search} search for the {order} {sweep.metric}, {plural(sweep.total, 'trial')}"
    if not sweep.rung_steps:
        return text
    return f"{text}; one in {sweep.eta} goes on at steps {', '.join(map(str, sweep.rung_steps[:-1]))}"


def ranked(sweep: SweepDetailView) -> list[TrialView]:
    """Return the trials, those that came furthest first, and of these the best one first."""
    sign = 1 if sweep.goal == "min" else -1

    def order(trial: TrialView) -> tuple[int, float, int]:
        return -trial.rung, math.inf if trial.metric is None else sign * trial.metric, trial.number

    return sorted(sweep.trials, key=order)


class RungRow(NamedTuple):
    """A rung of a sweep: the trials that have reached it, and those that went on from it; `best` and `last` are the
    metrics of the best one and of the last one in the fraction that goes on, None while there is none.
    """

    step: int
    reached: int
    went_on: int
    waiting: int
    best: float | None
    last: float | None


def rung_rows(sweep: Sweep) -> list[RungRow]:
    """Return the rungs of a sweep, the first one first; hold the control's `changed`."""
    section, rows = sweep.section, []
    for rung, step in enumerate(section.rung_steps):
        ranked = at_rung(sweep.trials.values(), section, rung)
        values = [each.rungs[rung] for each in ranked]
        top = len(ranked) // section.rungs.eta if section.rungs is not None else 0
        rows.append(
            RungRow(
                step=step,
                reached=len(ranked),
                went_on=sum(each.promoted > rung for each in ranked),
                waiting=sum(each.is_at_rung and len(each.rungs) == rung + 1 for each in ranked),
                best=values[0] if values else None,
                last=values[top - 1] if top and rung + 1 < len(section.rung_steps) else None,
            )
        )
    return rows


def drawing(sweep: SweepDetailView, trials: Sequence[TrialView]) -> str:
    """Return trials that have logged the metric in parallel coordinates, the best one first."""
    names = list(sweep.trials[0].values)
    logs = {name for name, each in sweep.spec["sweep"]["values"].items() if each["log"]}
    columns: list[tuple[str, list[Value], bool]] = [
        (name, [each.values[name] for each in trials], name in logs) for name in names
    ]
    if sweep.rung_steps:  # a value of few steps is none of many
        columns.append(("step", [each.metric_step or 1 for each in trials], True))
    columns.append((sweep.metric, [each.metric or 0.0 for each in trials], False))
    axes, places = [], []
    for name, values, log in columns:
        ticks, fractions = _scaled(values, log)
        axes.append(Coordinate(name, ticks))
        places.append(fractions)
    lines = [
        Polyline(
            f"trial {each.number}: {values_text(each.values)}, {best_text(sweep, each)}", [row[at] for row in places]
        )
        for at, each in enumerate(trials)
    ]
    return parallel_html(axes, lines, f"{plural(len(trials), 'trial')} in parallel coordinates")


def _scaled(values: Sequence[Value], log: bool) -> tuple[list[tuple[float, str]], list[float]]:
    """Return the named places of an axis, and the place of each value, from 0 to 1."""
    numbers = [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
    if len(numbers) < len(values):
        choices = sorted(set(map(str, values)))
        place = {choice: (at + 0.5) / len(choices) for at, choice in enumerate(choices)}
        return [(at, choice) for choice, at in place.items()], [place[str(value)] for value in values]
    scale: Callable[[float], float] = math.log if log else float
    low, high = min(numbers), max(numbers)
    span = scale(high) - scale(low)
    fractions = [0.5 if not span else (scale(each) - scale(low)) / span for each in numbers]
    if not span:
        return [(0.5, f"{low:.4g}")], fractions
    middle = math.exp((math.log(low) + math.log(high)) / 2) if log else (low + high) / 2
    return [(0.0, f"{low:.4g}"), (0.5, f"{middle:.3g}"), (1.0, f"{high:.4g}")], fractions
