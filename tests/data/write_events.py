"""Write `events_0_1.jsonl`: one event of each kind of Cordee 0.1.0 with all fields filled, and a notice of each reason.

`NodeDraining` comes twice: with `evict`, and with `over`.
"""

import dataclasses
import json
import sys
import types
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from cordee.events import Event, NoticeReason, encode
from cordee.ids import JobId

NUMBERS = count(3)


def filled(hint: Any, name: str) -> Any:
    """Return a value of the type: numbers count up, a text is its field's name, tuples have two items."""
    if get_origin(hint) in (types.UnionType, Union):
        hint = next(arg for arg in get_args(hint) if arg is not types.NoneType)
    if get_origin(hint) is tuple:
        return tuple(filled(get_args(hint)[0], f"{name}-{number}") for number in range(2))
    if dataclasses.is_dataclass(hint):
        return hint(**{each: filled(kind, each) for each, kind in get_type_hints(hint).items()})
    if isinstance(hint, type) and issubclass(hint, StrEnum):
        return list(hint)[-1]
    if hint in (str, JobId):
        return name
    return True if hint is bool else next(NUMBERS) + (0.5 if hint is float else 0)


def events() -> list[Any]:
    """Return them in the order of the union."""
    found: list[Any] = []
    for kind in get_args(Event):
        event = filled(kind, kind.__name__)
        match kind.__name__:
            case "NoticeGiven":
                found += [dataclasses.replace(event, reason=reason) for reason in NoticeReason]
            case "NodeDraining":
                found += [dataclasses.replace(event, over=False), dataclasses.replace(event, evict=False)]
            case _:
                found.append(event)
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text("".join(json.dumps(encode(event)) + "\n" for event in events()))
