"""`queues.yaml`: the tree of queues as people write it. The scheduler checks it against the cluster."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from cordee.errors import SpecError
from cordee.events import Budget, Queue
from cordee.units import US_PER_S, parse_duration_s, parse_micro_usd
from cordee.workload.written import Where, check_keys, explained, load_yaml, mapping, quantity

Count = Annotated[int, Field(ge=0)]
Units = Mapping[str, tuple[str, Callable[[str], Any]]]


class QueueSpec(BaseModel):
    """One queue. `quota` None: the sum over the queues inside it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    parent: str | None = None
    quota: Count | None = None
    limit: Count | None = None
    lend: bool = True
    weight: Annotated[int, Field(ge=1)] = 1
    user_limit: Annotated[int, Field(ge=1)] | None = None
    day_gpu_s: Annotated[float, Field(gt=0)] | None = None
    day_micro_usd: Annotated[int, Field(gt=0)] | None = None


class BudgetSpec(BaseModel):
    """One budget: of a queue, a user, a user in a queue, or of the cluster."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    queue: str | None = None
    user: str | None = None
    per: Literal["month", "total"] = "month"
    micro_usd: Annotated[int, Field(gt=0)] | None = None
    gpu_s: Annotated[float, Field(gt=0)] | None = None
    hard: bool = False
    stops: bool = False


_UNITS = {"day_gpu_time": ("day_gpu_s", parse_duration_s), "day_cost": ("day_micro_usd", parse_micro_usd)}
_WRITTEN_AS = {field: key for key, (field, _) in _UNITS.items()}
KEYS = tuple(_WRITTEN_AS.get(field, field) for field in QueueSpec.model_fields)
_BUDGET_UNITS = {"gpu_time": ("gpu_s", parse_duration_s), "cost": ("micro_usd", parse_micro_usd)}
_BUDGET_WRITTEN_AS = {field: key for key, (field, _) in _BUDGET_UNITS.items()}
BUDGET_KEYS = tuple(_BUDGET_WRITTEN_AS.get(field, field) for field in BudgetSpec.model_fields)
_TOP = ("version", "queues", "budgets")
_SHORTEST = "the shortest is: queues: {research: {quota: 8}}"


def parse_queues(text: str, *, source: str = "<queues>") -> tuple[Queue, ...]:
    """Return the queues that this YAML describes, in its order.

    Raises:
        SpecError: a mistake, with file, line and column, and the probable correction.
    """
    document, positions = load_yaml(text, source)
    where = Where(source, positions)
    if not isinstance(document, dict):
        raise where.error((), "queues are a mapping of keys to values", _SHORTEST)
    check_keys(document, _TOP, (), where)
    if document.get("version", 1) != 1:
        raise where.error(("version",), f"unknown version {document['version']!r}", "use 1")
    if "queues" not in document:
        raise where.error((), "there are no queues", _SHORTEST)
    if not isinstance(document["queues"] or {}, dict):
        raise where.error(("queues",), "queues must be a mapping of names", "write: queues: {research: {quota: 2}}")
    named = mapping(document, "queues", where)
    specs = {str(name): _read(name, written or {}, where) for name, written in named.items()}
    quotas = dict[str, int]()
    return tuple(_queue(name, spec, _quota(name, specs, quotas, ())) for name, spec in specs.items())


def parse_budgets(text: str, *, source: str = "<queues>") -> tuple[Budget, ...] | None:
    """Return the budgets of the same YAML; None: it says nothing of budgets.

    Raises:
        SpecError: a mistake, with file, line and column, and the probable correction.
    """
    document, positions = load_yaml(text, source)
    where = Where(source, positions)
    written = document.get("budgets") if isinstance(document, dict) else None
    if written is None:
        return None
    example = "budgets: [{queue: research, cost: $5000, hard: true}]"
    if not isinstance(written, list):
        raise where.error(("budgets",), f"budgets are a list, not {written!r}", example)
    found = {}
    for at, each in enumerate(written):
        inside = ("budgets", at)
        if not isinstance(each, dict):
            raise where.error(inside, f"a budget must be a mapping, not {each!r}", example)
        check_keys(each, BUDGET_KEYS, inside, where)
        values = _in_base_units(each, _BUDGET_UNITS, inside, where)
        try:
            spec = BudgetSpec.model_validate(values)
        except ValidationError as error:
            raise explained(error, inside, where, written_as=_BUDGET_WRITTEN_AS, hints={}) from None
        gpu_us = None if spec.gpu_s is None else round(spec.gpu_s * US_PER_S)
        budget = Budget(**spec.model_dump(exclude={"gpu_s"}), gpu_us=gpu_us)
        if budget.key in found:
            raise where.error(inside, f"{budget.whose} has two budgets per {budget.per}", "leave one of them out")
        found[budget.key] = budget
    return tuple(found.values())


def _read(name: Any, written: Any, where: Where) -> QueueSpec:
    inside = ("queues", name)
    if not isinstance(written, dict):
        raise where.error(inside, f"{name} must be a mapping, not {written!r}", f"{name}: {{quota: 8}}")
    check_keys(written, KEYS, inside, where)
    try:
        return QueueSpec.model_validate(_in_base_units(written, _UNITS, inside, where))
    except ValidationError as error:
        raise _said(error, inside, where) from None


def _in_base_units(
    written: dict[str, Any], units: Units, inside: tuple[str | int, ...], where: Where
) -> dict[str, Any]:
    values = {}
    for key, value in written.items():
        field, read = units.get(key, (key, None))
        if value is not None:
            values[field] = value if read is None else quantity(read, value, (*inside, key), where)
    return values


def _said(error: ValidationError, inside: tuple[str | int, ...], where: Where) -> SpecError:
    hints = {".".join(map(str, (*inside, key))): "write true or false" for key in ("lend",)}
    return explained(error, inside, where, written_as=_WRITTEN_AS, hints=hints)


def _quota(name: str, specs: dict[str, QueueSpec], known: dict[str, int], above: tuple[str, ...]) -> int:
    """Return the queue's own quota, or the sum of its children's; the check of the tree finds circles."""
    if name not in known:
        own = specs[name].quota
        inside = [each for each, spec in specs.items() if spec.parent == name and each not in (*above, name)]
        known[name] = sum(_quota(each, specs, known, (*above, name)) for each in inside) if own is None else own
    return known[name]


def _queue(name: str, spec: QueueSpec, quota_gpus: int) -> Queue:
    return Queue(
        name=name,
        parent=spec.parent,
        quota_gpus=quota_gpus,
        limit_gpus=spec.limit,
        lend=spec.lend,
        weight=spec.weight,
        user_gpus=spec.user_limit,
        gpu_us_per_day=None if spec.day_gpu_s is None else round(spec.day_gpu_s * US_PER_S),
        micro_usd_per_day=spec.day_micro_usd,
    )
