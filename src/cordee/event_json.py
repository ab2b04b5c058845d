"""Events to JSON and back, including events that earlier versions wrote.

Old names are listed in `_OLD_KINDS`, `_OLD_FIELDS` and `_OLD_VALUES` only.
"""

import dataclasses
import types
from collections.abc import Callable, Mapping
from enum import StrEnum
from functools import cache
from typing import Any, get_args, get_origin, get_type_hints

from cordee.events import AttemptPlaced, Event, NoticeReason

_BY_KIND: dict[str, type[Any]] = {cls.__name__: cls for cls in get_args(Event)}


def encode(event: Event) -> dict[str, Any]:
    """Return the event as JSON-ready data; `kind` is its class name.

    >>> from cordee.events import ServerUp
    >>> encode(ServerUp(at_us=5))
    {'kind': 'ServerUp', 'at_us': 5, 'patience': None}
    """
    data = {"kind": type(event).__name__, **dataclasses.asdict(event)}
    if isinstance(event, AttemptPlaced):
        for lease in data["leases"]:
            if lease["instance"] is None:  # agents of earlier versions know no MIG
                del lease["instance"]
    return data


def decode(data: dict[str, Any]) -> Event:
    """Return the event that `encode` turned into this data.

    >>> decode({"kind": "ServerUp", "at_us": 5})
    ServerUp(at_us=5, patience=None)

    Raises:
        ValueError: the kind is unknown, or fields are missing or unknown.
    """
    kind = data.get("kind")
    fields = _renamed(data) if isinstance(kind, str) else {"kind": ""}
    cls = _BY_KIND.get(fields.pop("kind"))
    if cls is None:
        raise ValueError(f"unknown kind of event: {kind!r}")
    event: Event = _build(cls, fields)
    return event


def _cordon(fields: dict[str, Any]) -> dict[str, Any]:
    """Turn the fields of an old `NodeDraining` into a cordon or an uncordon."""
    over, drain = fields.pop("over", False), fields.pop("evict", False)
    return {**fields, "kind": "NodeUncordoned"} if over else {**fields, "kind": "NodeCordoned", "drain": drain}


_OLD_KINDS: Mapping[str, str | Callable[[dict[str, Any]], dict[str, Any]]] = {
    "ShareEnded": "RanksEnded",
    "ServerDraining": "ServerShuttingDown",
    "NodeDraining": _cordon,
}
_OLD_FIELDS = {"CheckpointCommitted": {"drain_us": "upload_us"}}
_OLD_VALUES: Mapping[tuple[type[StrEnum], Any], str] = {(NoticeReason, "share"): NoticeReason.TIME_SLICE.value}


def _renamed(data: dict[str, Any]) -> dict[str, Any]:
    kind = data["kind"]
    new = _OLD_KINDS.get(kind)
    if callable(new):
        return new(dict(data))
    fields = {**data, "kind": new or kind}
    for old, name in _OLD_FIELDS.get(fields["kind"], {}).items():
        if old in fields:
            fields[name] = fields.pop(old)
    return fields


def _build(cls: Any, fields: dict[str, Any]) -> Any:
    if not isinstance(fields, dict):
        raise ValueError(f"{cls.__name__} is not an object")
    hints = _hints(cls)
    unknown = fields.keys() - hints.keys()
    if unknown:
        raise ValueError(f"{cls.__name__} has no field {sorted(unknown)[0]!r}")
    try:
        return cls(**{name: _value(hints[name], value) for name, value in fields.items()})
    except TypeError as error:
        raise ValueError(f"{cls.__name__}: {error}") from error


def _value(hint: Any, value: Any) -> Any:
    if value is None:
        return None
    if isinstance(hint, types.UnionType):
        hint = next(arg for arg in get_args(hint) if arg is not types.NoneType)
    if get_origin(hint) is tuple:
        item = get_args(hint)[0]
        return tuple(_value(item, each) for each in value)
    if dataclasses.is_dataclass(hint):
        assert isinstance(hint, type)
        return _build(hint, value)
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return hint(_OLD_VALUES.get((hint, value), value))
    return value


@cache
def _hints(cls: Any) -> dict[str, Any]:
    return get_type_hints(cls)
