"""The section `sweep` of a job file, which makes a job many trials with different values; and how values are written.

lr=1e-4..1e-2:log      a range, drawn evenly in its logarithm; of whole numbers if both ends are
lr=1e-4..1e-2:log:5    five points of it, for a grid
opt=adam,sgd           choices
"""

import math
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from cordee.errors import UnitError
from cordee.workload.written import Where, mapping, quantity

TRIAL_ENV, RUNGS_ENV = "CORDEE_TRIAL", "CORDEE_RUNGS"
"""The environment variables in which a trial finds its values as JSON, and the steps of its rungs."""

TRIALS_MAX = 10_000
RANDOM_TRIALS = 20
RUNNING = 4
ETA = 3

Value = bool | int | float | str
Search = Literal["grid", "random", "bayes"]

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_EXAMPLE = "write lr=1e-4..1e-2:log, seed=1..5 or opt=adam,sgd"


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Parameter(_Part):
    """The values that one parameter may take: `choices`, or the range from `low` to `high`, both included.

    Attributes:
        log: drawn evenly in its logarithm.
        points: of a range, how many a grid has; None: all whole numbers.
    """

    choices: tuple[Value, ...] = ()
    low: int | float = 0
    high: int | float = 0
    log: bool = False
    points: Annotated[int, Field(ge=2, le=TRIALS_MAX)] | None = None

    @property
    def is_whole(self) -> bool:
        """Return whether it is a range of whole numbers."""
        return isinstance(self.low, int) and isinstance(self.high, int)

    def at(self, fraction: float) -> Value:
        """Return the value at a fraction of the way through, from 0 up to, not including, 1.

        >>> Parameter(low=1e-4, high=1e-2, log=True).at(0.5), Parameter(low=1, high=5).at(0.99)
        (0.001, 5)
        >>> Parameter(choices=("adam", "sgd")).at(0.5)
        'sgd'
        """
        if self.choices:
            return self.choices[int(fraction * len(self.choices))]
        low, high = (self.low - 0.5, self.high + 0.5) if self.is_whole else (self.low, self.high)
        if self.log:
            low, high = (max(low, self.low / 2), high) if self.is_whole else (low, high)
            found = math.exp(math.log(low) + fraction * (math.log(high) - math.log(low)))
        else:
            found = low + fraction * (high - low)
        return self._rounded(found)

    def grid(self) -> tuple[Value, ...] | None:
        """Return the values of a grid; None for a range of fractions without a number of points.

        >>> Parameter(low=1, high=5).grid(), Parameter(low=0.001, high=0.1, log=True, points=3).grid()
        ((1, 2, 3, 4, 5), (0.001, 0.01, 0.1))
        """
        if self.choices:
            return self.choices
        if self.points is None:
            return tuple(range(int(self.low), int(self.high) + 1)) if self.is_whole and not self._is_long else None
        low, high = (math.log(self.low), math.log(self.high)) if self.log else (self.low, self.high)
        steps = (low + (high - low) * at / (self.points - 1) for at in range(self.points))
        return tuple(dict.fromkeys(self._rounded(math.exp(each) if self.log else each) for each in steps))

    @property
    def _is_long(self) -> bool:
        return self.high - self.low >= TRIALS_MAX

    def _rounded(self, value: float) -> int | float:
        """Return a value of the range with six digits, or as a whole number."""
        found = round(value) if self.is_whole else float(f"{value:.6g}")
        return min(self.high, max(self.low, found))


class Rungs(_Part):
    """The steps at which trials are compared: `first`, `first` x `eta`, ... and `last`. One in `eta` goes on."""

    first: Annotated[int, Field(ge=1)]
    last: Annotated[int, Field(ge=2)]
    eta: Annotated[int, Field(ge=2, le=100)] = ETA

    @property
    def steps(self) -> tuple[int, ...]:
        """Return the steps, ascending.

        >>> Rungs(first=100, last=2700).steps, Rungs(first=10, last=50, eta=4).steps
        ((100, 300, 900, 2700), (10, 40, 50))
        """
        found = [self.first]
        while found[-1] * self.eta < self.last:
            found.append(found[-1] * self.eta)
        return (*found, self.last)

    def __str__(self) -> str:
        return f"{self.first}..{self.last}:{self.eta}"


class SweepSpec(_Part):
    """A sweep: trials of one job with different values.

    Attributes:
        values: the values of each parameter, by its name.
        metric: the name of what trials are compared by; `loss` is that of `job.log(loss=...)`.
        goal: whether less or more of it is better.
        search: grid: each combination; random; bayes: optuna's TPE sampler; auto: grid if all values can be listed.
        trials: how many; None: all of a grid, else 20.
        max_running: trials that run or wait for GPUs at a time.
        rungs: where trials are compared while they train; None: each trains to its end.
        target: the value of the metric that ends the sweep; None: it goes through all trials.
        seed: of the values that are drawn.
    """

    values: dict[str, Parameter]
    metric: Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_./-]{0,63}$")] = "loss"
    goal: Literal["min", "max"] = "min"
    search: Literal["auto", "grid", "random", "bayes"] = "auto"
    trials: Annotated[int, Field(ge=1, le=TRIALS_MAX)] | None = None
    max_running: Annotated[int, Field(ge=1, le=TRIALS_MAX)] = RUNNING
    rungs: Rungs | None = None
    target: float | None = None
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.values:
            raise ValueError(f"the sweep has no values: {_EXAMPLE}")
        size = self.grid_size
        if self.search == "grid" and size is None:
            name = next(name for name, each in self.values.items() if each.grid() is None)
            raise ValueError(
                f"{name} has no end of values for a grid: give a number of points, {name}=...:5, or search: random"
            )
        if self.way == "grid" and size is not None and size > TRIALS_MAX:
            raise ValueError(f"the grid has {size:,} trials, more than {TRIALS_MAX:,}: use search: random with trials")
        if self.way == "grid" and self.trials not in (None, size):
            raise ValueError(f"the grid has {size} trials, not {self.trials}: leave trials out, or use search: random")
        return self

    @property
    def grid_size(self) -> int | None:
        """Return the number of combinations; None if they cannot be listed."""
        sizes = [None if (found := each.grid()) is None else len(found) for each in self.values.values()]
        return None if None in sizes else math.prod(size for size in sizes if size is not None)

    @property
    def way(self) -> Search:
        """Return the search; never auto."""
        if self.search != "auto":
            return self.search
        return "grid" if self.trials is None and (self.grid_size or TRIALS_MAX + 1) <= TRIALS_MAX else "random"

    @property
    def total(self) -> int:
        """Return the number of trials."""
        return self.trials or ((self.grid_size or 0) if self.way == "grid" else RANDOM_TRIALS)

    @property
    def rung_steps(self) -> tuple[int, ...]:
        """Return the steps of the rungs, the end of training last; empty without rungs."""
        return () if self.rungs is None else self.rungs.steps

    def is_better(self, one: float, other: float) -> bool:
        """Return whether one value of the metric is strictly better than another."""
        return one < other if self.goal == "min" else one > other

    def point(self, number: int) -> dict[str, Value]:
        """Return the values of a trial, counted from 1, of a grid or a random search: the same at each call.

        >>> spec = SweepSpec(values={"lr": parse_parameter("0.1,0.2"), "seed": parse_parameter("1..3")})
        >>> spec.total, spec.point(1), spec.point(6)
        (6, {'lr': 0.1, 'seed': 1}, {'lr': 0.2, 'seed': 3})
        """
        if self.way != "grid":
            return {name: each.at(_fraction(self.seed, number, name)) for name, each in self.values.items()}
        found: dict[str, Value] = {}
        at = number - 1
        for name in reversed(self.values):
            points = self.values[name].grid()
            assert points, "a grid lists all values"
            at, which = divmod(at, len(points))
            found[name] = points[which]
        return {name: found[name] for name in self.values}


def _fraction(seed: int, number: int, name: str) -> float:
    """Return a number from 0 up to 1 that looks random, and follows from what it is for."""
    digest = blake2b(f"{seed}/{number}/{name}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest) >> 11) / 2**53


def parse_parameter(written: object) -> Parameter:
    """Return the values of one parameter: of a text, a number, or a list of choices.

    >>> parse_parameter("1e-4..1e-2:log").log, parse_parameter("1..5").grid(), parse_parameter("adam,sgd").choices
    (True, (1, 2, 3, 4, 5), ('adam', 'sgd'))

    Raises:
        UnitError: it is none of these, or has no values.
    """
    if isinstance(written, str) and ".." in written and re.match(r"\s*[+-]?\.?\w", written):
        return _range(written)
    choices = written.split(",") if isinstance(written, str) else written if isinstance(written, list) else [written]
    found = tuple(_value(each) for each in choices)
    if not found or "" in found:
        raise UnitError(f"{written!r} has no values", hint=_EXAMPLE)
    if len(set(map(str, found))) < len(found):
        raise UnitError(f"{written!r} has a value twice", hint="give each value once")
    return Parameter(choices=found)


def _range(text: str) -> Parameter:
    ends, *options = text.split(":")
    low, high = (_value(each) for each in ends.split("..", 1))
    if isinstance(low, str | bool) or isinstance(high, str | bool) or not low < high:
        raise UnitError(f"{text!r} is not a range of numbers, the smaller one first", hint=_EXAMPLE)
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UnitError(f"{text!r} has an end that is not finite", hint=_EXAMPLE)
    log, points = False, None
    for option in options:
        if option == "log":
            log = True
        elif option.isdecimal() and 2 <= int(option) <= TRIALS_MAX:
            points = int(option)
        else:
            hint = f"use log, or a number of points for a grid, from 2: {ends}:log:5"
            raise UnitError(f"{text!r}: {option!r} is not a known distribution", hint=hint)
    if log and low <= 0:
        raise UnitError(f"{text!r}: {low} has no logarithm", hint="begin above 0, or leave :log out")
    whole = isinstance(low, int) and isinstance(high, int)
    return Parameter(low=low if whole else float(low), high=high if whole else float(high), log=log, points=points)


def _value(written: object) -> Value:
    """Return a value as the type that it looks like."""
    if isinstance(written, bool | int | float):
        return written
    if not isinstance(written, str):
        raise UnitError(f"{written!r} is not a value", hint="write numbers and texts")
    text = written.strip()
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def parse_rungs(text: object) -> Rungs:
    """Return the rungs of `first..last` or `first..last:eta`, in steps; of `last`, from a ninth of it.

    Where early steps say little of late ones, a first rung that is too early throws the good trials away; a ninth of
    the whole costs little where they do (benchmarks/results/sweeps_202611.md).

    >>> parse_rungs("100..2700:3").steps, parse_rungs("2700").steps, parse_rungs(10).steps
    ((100, 300, 900, 2700), (300, 900, 2700), (1, 3, 9, 10))

    Raises:
        UnitError: it is not such a text.
    """
    found = re.fullmatch(r"(?:(\d{1,12})\.\.)?(\d{1,12})(?::(\d{1,3}))?", str(text).strip())
    hint = "write LAST or LAST:ETA, or FIRST..LAST:ETA: 2700, 100..2700:3"
    if found is None:
        raise UnitError(f"{text!r} is not a range of steps", hint=hint)
    last, eta = int(found[2]), int(found[3] or ETA)
    first = int(found[1]) if found[1] else max(1, last // eta**2)
    if not (1 <= first < last and 2 <= eta <= 100):
        raise UnitError(
            f"{text!r}: the first rung must be 1 step or more and before the last, and eta 2 to 100", hint=hint
        )
    return Rungs(first=first, last=last, eta=eta)


def named_values(texts: Sequence[str]) -> dict[str, str]:
    """Return the values of each parameter as written in `lr=1e-4..1e-2:log,seed=1..5`.

    >>> named_values(["lr=1e-4..1e-2:log,opt=adam,sgd"])
    {'lr': '1e-4..1e-2:log', 'opt': 'adam,sgd'}

    Raises:
        UnitError: a text is not NAME=VALUES, or a name stands twice.
    """
    found: dict[str, str] = {}
    for text in texts:
        for each in re.split(rf",(?={_NAME.pattern}=)", text):
            name, equals, values = each.partition("=")
            if not equals or not _NAME.fullmatch(name):
                raise UnitError(f"{each!r} is not NAME=VALUES", hint=_EXAMPLE)
            if name in found:
                raise UnitError(f"{name} has values twice", hint="give each name once")
            found[name] = values
    if not found:
        raise UnitError("the sweep has no values", hint=_EXAMPLE)
    return found


def read_sweep(written: dict[str, Any], where: Where) -> dict[str, Any]:
    """Return the fields of the section that people wrote, whose keys are known.

    Raises:
        SpecError: a parameter cannot be read.
    """
    values = {name: value for name, value in written.items() if value is not None}
    parameters: Mapping[Any, Any] = mapping(written, "values", where)
    values["values"] = {}
    for name, value in parameters.items():
        path = ("sweep", "values", name)
        if not _NAME.fullmatch(str(name)):
            raise where.error(path, f"{name!r} cannot name a parameter", "use letters, digits and _, a letter first")
        values["values"][name] = _read(parse_parameter, value, path, where)
    if "rungs" in values:
        values["rungs"] = quantity(parse_rungs, values["rungs"], ("sweep", "rungs"), where)
    return values


def _read(read: Any, value: object, path: tuple[str, ...], where: Where) -> Any:
    try:
        return read(value)
    except UnitError as error:
        raise where.error(path, f"{'.'.join(path)}: {error.message}", error.hint) from None
