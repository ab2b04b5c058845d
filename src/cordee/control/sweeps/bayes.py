"""Values of a trial by optuna's TPE sampler, from the results of the trials before it.

Each proposal makes a study anew and asks it once, with a seed that follows from the sweep and the trial: the same
results give the same values, also in a server that has just started.
"""

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cordee.control.trials import Sweep, Trial, TrialState
from cordee.errors import SpecError
from cordee.workload.sweep import Parameter, SweepSpec, Value

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial


def check_optuna() -> None:
    """Check that optuna is installed.

    Raises:
        SpecError: it is not.
    """
    try:
        import optuna  # noqa: F401
    except ImportError:
        raise SpecError(
            "search: bayes needs optuna, which the server's Python does not have",
            hint="pip install 'cordee[sweep]' there, or use search: random",
        ) from None


def propose(sweep: Sweep, number: int) -> dict[str, Value]:
    """Return the values of the trial of this number.

    Raises:
        SpecError: optuna is not installed.
    """
    check_optuna()
    import optuna

    section = sweep.section
    space = {name: _distribution(each) for name, each in section.values.items()}
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=section.seed * 1_000_003 + number, constant_liar=True)
        study = optuna.create_study(sampler=sampler, direction="minimize" if section.goal == "min" else "maximize")
        study.add_trials(_known(section, sweep.trials.values(), space))
        asked = study.ask(space)
    return {name: _plain(section.values[name], asked.params[name]) for name in space}


def _distribution(parameter: Parameter) -> "BaseDistribution":
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if parameter.choices or parameter.points is not None:
        return CategoricalDistribution(parameter.grid() or ())
    if parameter.is_whole:
        return IntDistribution(int(parameter.low), int(parameter.high), log=parameter.log)
    return FloatDistribution(parameter.low, parameter.high, log=parameter.log)


def _plain(parameter: Parameter, value: Any) -> Value:
    """Return a drawn value with six digits, within its range."""
    if not isinstance(value, float) or parameter.choices:
        found: Value = value
        return found
    return min(float(parameter.high), max(float(parameter.low), float(f"{value:.6g}")))


def _known(
    section: SweepSpec, trials: Iterable[Trial], space: "dict[str, BaseDistribution]"
) -> "Iterable[FrozenTrial]":
    """Yield the trials as optuna knows them: one that waits at a rung, or was stopped there, counts as pruned."""
    from optuna.trial import TrialState as Known
    from optuna.trial import create_trial

    for trial in trials:
        common: dict[str, Any] = {"params": dict(trial.values), "distributions": space}
        if trial.is_live:
            yield create_trial(state=Known.RUNNING, **common)
        elif trial.metric is None or trial.state is TrialState.FAILED:
            yield create_trial(state=Known.FAIL, **common)
        elif trial.state is TrialState.DONE:
            yield create_trial(state=Known.COMPLETE, value=trial.metric, **common)
        else:
            steps = section.rung_steps
            rungs = {steps[at]: value for at, value in enumerate(trial.rungs) if value is not None}
            found = rungs or {trial.step: trial.metric}
            yield create_trial(state=Known.PRUNED, intermediate_values=found, **common)
