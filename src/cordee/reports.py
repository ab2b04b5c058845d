"""The reports that a rank may make, and their checks: at the agent of the rank, and again at the server.

The job writes its spool, which may hold anything. Each value must be in the range that the log, the database and the
ledger accept; a report with another value is refused alone, with the reason. Pure: the caller passes the time.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import lru_cache
from operator import attrgetter
from types import NoneType, UnionType
from typing import TypeGuard, get_args, get_type_hints

from cordee.event_json import decode
from cordee.events import (
    Event,
    Measured,
    MetricsLogged,
    RagChanged,
    RankEvent,
    RankLeft,
    ReplicaReady,
    ReplicaUnready,
    Reported,
    StepsRehearsed,
)
from cordee.ids import JobId
from cordee.units import US_PER_HOUR

COUNT_MAX = 2**53 - 1
"""The largest count that JSON readers with floating-point numbers only still read exactly."""

SKEW_US = 24 * US_PER_HOUR
"""The largest accepted difference between the clocks of two machines."""

TEXT_CHARS_MAX = 10_000
LIST_ITEMS_MAX = 256
RANKS_PER_GPU_MAX = 16
METRICS_MAX = 64
METRIC_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]{0,63}")

RANK_REPORTS = frozenset(get_args(RankEvent))

_OF_ITS_OWN_RANK = (RankLeft, Measured, MetricsLogged, StepsRehearsed, ReplicaReady, ReplicaUnready, RagChanged)
_ADDRESS = re.compile(r"http://([A-Za-z0-9.-]+|\[[0-9A-Fa-f:.]+\]):[1-9]\d{0,4}")

# A stream has one writer: a rank's uploader (`drain` in version 0.1.0) has one of its own, and so has a replica's
# knowledge base.
_STREAM = re.compile(r"(.+)\.([1-9]\d*)/rank(0|[1-9]\d*)(?:-(?:uploader|drain|rag))?")


class ReportError(ValueError):
    """A report that is refused; the message names the kind and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportScope:
    """The attempt that a stream reports on.

    Attributes:
        job_id: the attempt's job.
        epoch: the attempt's epoch.
        gpus: GPUs of the whole gang, which bound the rank numbers.
        since_us: the time at which the attempt was placed.
        rank: the rank of the stream; None: not known.
    """

    job_id: str
    epoch: int
    gpus: int
    since_us: int
    rank: int | None = None

    @property
    def ranks(self) -> int:
        """Upper bound of the gang's ranks: a launcher may start several per GPU.

        >>> ReportScope(job_id="gpt-abcdef", epoch=1, gpus=4, since_us=0).ranks
        64
        """
        return RANKS_PER_GPU_MAX * max(1, self.gpus)


@lru_cache(maxsize=4096)
def parse_stream(name: str) -> tuple[str, int, int] | None:
    """Return job, epoch and rank of a stream of a rank, its uploader or its knowledge base; None for any other one.

    >>> parse_stream("gpt-abcdef.2/rank0-uploader"), parse_stream("node/local/3")
    (('gpt-abcdef', 2, 0), None)
    """
    match = _STREAM.fullmatch(name)
    return (match[1], int(match[2]), int(match[3])) if match and len(name) < 1000 else None


@lru_cache(maxsize=4096)
def scope_of(source: str, job_id: JobId, epoch: int, gpus: int, since_us: int) -> ReportScope:
    """Return what a stream reports on; of a stream that is no rank's, the attempt that its event names."""
    stream = parse_stream(source) or (job_id, epoch, None)
    return ReportScope(job_id=stream[0], epoch=stream[1], gpus=gpus, since_us=since_us, rank=stream[2])


def is_storable(text: str) -> bool:
    """Return whether databases can store a text: a lone surrogate has no UTF-8 form, and PostgreSQL stores no NUL.

    >>> is_storable("Grüße"), is_storable("\\ud800"), is_storable("\\0")
    (True, False, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return "\0" not in text


def repair_text(data: object) -> object:
    """Return JSON data with storable texts: an agent's report may quote a file name that is not valid UTF-8.

    >>> repair_text({"why": ["\\ud800 is not there"]})
    {'why': ['? is not there']}
    """
    if isinstance(data, str):
        return data if is_storable(data) else data.encode(errors="replace").decode().replace("\0", "?")
    if isinstance(data, dict):
        return {repair_text(key): repair_text(value) for key, value in data.items()}
    return [repair_text(each) for each in data] if isinstance(data, list) else data


def is_rank_report(event: Event) -> TypeGuard[RankEvent]:
    """Return whether a rank may report it; cheaper than `isinstance` with a union."""
    return type(event) in RANK_REPORTS


def read_report(data: Mapping[str, object], scope: ReportScope, now_us: int) -> RankEvent:
    """Decode and check one record of a rank's stream.

    Raises:
        ReportError: the record is refused.
    """
    try:
        event = decode(dict(data))
    except ValueError as error:
        raise ReportError(str(error).encode("ascii", "backslashreplace").decode()[:300]) from error
    if not is_rank_report(event):
        raise ReportError(f"{type(event).__name__}: a rank may not report it")
    return check_report(event, scope, now_us)


def check_report(event: RankEvent, scope: ReportScope, now_us: int) -> RankEvent:
    """Return the event as it may be committed.

    A loss that is not finite is left out: the training has diverged, and its time still counts.

    Raises:
        ReportError: the event is refused.
    """
    kind = type(event)
    if event.job_id != scope.job_id or event.epoch != scope.epoch:
        raise ReportError(f"{kind.__name__}: it is about another attempt than {scope.job_id}.{scope.epoch}")
    fields = _FIELDS[kind]
    if fields.are_plain(event, scope, now_us):
        return event
    for name, check, optional in fields.all:
        value = getattr(event, name)
        if (value is None and optional) or (problem := check(value, scope, now_us)) is None:
            continue
        raise ReportError(f"{kind.__name__}: {name} {_short(value)} {problem}")
    if scope.rank is not None and isinstance(event, _OF_ITS_OWN_RANK) and scope.rank != event.rank:
        raise ReportError(f"{kind.__name__}: it is about another rank than {scope.rank}")
    if isinstance(event, MetricsLogged):
        _check_points(event)
    if isinstance(event, Reported) and event.loss is not None and not math.isfinite(event.loss):
        return replace(event, loss=None)
    return event


def _check_points(event: MetricsLogged) -> None:
    names, values, steps = len(event.names), len(event.values), len(event.steps)
    if names != values:
        raise ReportError(f"MetricsLogged: {names} names have {values} values")
    if steps not in (0, names):
        raise ReportError(f"MetricsLogged: {names} names have {steps} steps")
    if not steps and len(set(event.names)) < names:
        raise ReportError("MetricsLogged: a name stands twice, without steps")


_Check = Callable[[object, ReportScope, int], str | None]
"""Return the reason for which a value is refused, or None."""

_Field = tuple[str, _Check, bool]


def _time(value: object, scope: ReportScope, now_us: int) -> str | None:
    if type(value) is not int:
        return "is not a time"
    is_inside = value >= 0 and scope.since_us - SKEW_US <= value <= now_us + SKEW_US
    return None if is_inside else "is outside the attempt's time"


def _count(value: object, scope: ReportScope, now_us: int) -> str | None:
    if type(value) is not int:
        return "is not a whole number"
    return None if 0 <= value <= COUNT_MAX else "is out of range"


def _rank(value: object, scope: ReportScope, now_us: int) -> str | None:
    return None if type(value) is int and 0 <= value < scope.ranks else "is not a rank of this gang"


def _loss(value: object, scope: ReportScope, now_us: int) -> str | None:
    return None if type(value) is float or (type(value) is int and abs(value) <= COUNT_MAX) else "is not a number"


def _amount(value: object, scope: ReportScope, now_us: int) -> str | None:
    if type(value) is not int and not (type(value) is float and math.isfinite(value)):
        return "is not a finite number"
    return None if 0 <= value <= COUNT_MAX else "is out of range"


def _text(value: object, scope: ReportScope, now_us: int) -> str | None:
    if not isinstance(value, str):
        return "is not text"
    if len(value) > TEXT_CHARS_MAX:
        return f"is longer than {TEXT_CHARS_MAX} characters"
    return None if is_storable(value) else "holds a character that cannot be stored"


def _texts(value: object, scope: ReportScope, now_us: int) -> str | None:
    if not isinstance(value, tuple):
        return "is not a list"
    if len(value) > LIST_ITEMS_MAX:
        return f"has more than {LIST_ITEMS_MAX} items"
    return next((problem for each in value if (problem := _text(each, scope, now_us))), None)


def _signed(value: object, scope: ReportScope, now_us: int) -> str | None:
    return None if _number(value) else "is not a finite number"


def _names(value: object, scope: ReportScope, now_us: int) -> str | None:
    if not isinstance(value, tuple):
        return "is not a list"
    if len(value) > LIST_ITEMS_MAX or len(set(map(repr, value))) > METRICS_MAX:
        return f"has more than {METRICS_MAX} names, or {LIST_ITEMS_MAX} points"
    are_names = all(isinstance(each, str) and METRIC_NAME.fullmatch(each) for each in value)
    return None if are_names else "holds what is no name of a metric"


def _finite(value: object, scope: ReportScope, now_us: int) -> str | None:
    if not isinstance(value, tuple):
        return "is not a list"
    are_finite = all(each is None or _number(each) for each in value)
    return None if are_finite else "holds what is no finite number"


def _steps(value: object, scope: ReportScope, now_us: int) -> str | None:
    if not isinstance(value, tuple):
        return "is not a list"
    return next((problem for each in value if (problem := _count(each, scope, now_us))), None)


def _number(value: object) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) <= COUNT_MAX)


def _choice(value: object, scope: ReportScope, now_us: int) -> str | None:
    return None if isinstance(value, StrEnum) else "is not one of the values that it may have"


def _flag(value: object, scope: ReportScope, now_us: int) -> str | None:
    return None if isinstance(value, bool) else "is neither true nor false"


def _address(value: object, scope: ReportScope, now_us: int) -> str | None:
    is_one = isinstance(value, str) and len(value) <= TEXT_CHARS_MAX and _ADDRESS.fullmatch(value) is not None
    return None if is_one else "is not http://HOST:PORT"


_BY_NAME: Mapping[str, _Check] = {
    "rank": _rank,
    "loss": _loss,
    "value": _signed,
    "address": _address,
    "names": _names,
    "values": _finite,
    "losses": _finite,
    **dict.fromkeys(("at_us", "from_us", "since_us"), _time),
}
_BY_TYPE: Mapping[object, _Check] = {
    int: _count,
    float: _amount,
    str: _text,
    bool: _flag,
    tuple[str, ...]: _texts,
    tuple[int, ...]: _steps,
}


class _Fields:
    """The fields of a kind of report: name, check, and whether the field may be None.

    The job's id is not among them: every report's equals that of the scope.
    """

    def __init__(self, kind: type[RankEvent]) -> None:
        self.all = list[_Field]()
        types, numbers, times = list[object](), list[str](), list[str]()
        for name, hint in get_type_hints(kind).items():
            if name == "job_id":
                continue
            optional = isinstance(hint, UnionType)
            value_type = next(each for each in get_args(hint) if each is not NoneType) if optional else hint
            check = _BY_NAME.get(name) or _BY_TYPE.get(value_type, _choice)
            self.all.append((name, check, optional))
            types.append(NoneType if optional else value_type if check in (_count, _time, _choice) else None)
            numbers += [name] if types[-1] is int else []
            times += [name] if check is _time else []
        self._types = tuple(types)  # None: of no value, so no report of this kind is plain.
        self._values = attrgetter(*(name for name, _, _ in self.all))
        self._numbers = attrgetter(*numbers)
        self._times = attrgetter(times[0], *times)  # It returns a tuple, since there are two names or more.

    def are_plain(self, event: RankEvent, scope: ReportScope, now_us: int) -> bool:
        """Return whether all fields are numbers, times, choices or optional and empty, and would pass their checks.

        Most reports are plain, and to look at all fields at once costs much less than a check of each.
        """
        if tuple(map(type, self._values(event))) != self._types:
            return False
        numbers: tuple[int, ...] = self._numbers(event)
        times: tuple[int, ...] = self._times(event)
        return (
            min(numbers) >= 0
            and max(numbers) <= COUNT_MAX
            and min(times) >= scope.since_us - SKEW_US
            and max(times) <= now_us + SKEW_US
        )


_FIELDS = {kind: _Fields(kind) for kind in RANK_REPORTS}


def _short(value: object) -> str:
    """Return a value as a message may quote it.

    >>> _short(10**30), _short("a\\ud800"), _short([1])
    ('10^30', "'a\\\\ud800'", 'of type list')
    """
    if type(value) is int and abs(value) >= 10**18:
        power = round(math.log10(abs(value)))
        return f"{'' if abs(value) == 10**power else 'about '}{'-' if value < 0 else ''}10^{power}"
    if isinstance(value, str | int | float) or value is None:
        text = ascii(str(value) if isinstance(value, str) else value)
        return text if len(text) <= 60 else f"{text[:57]}..."
    return f"of type {type(value).__name__}"
