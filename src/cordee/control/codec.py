"""Typed values as plain JSON data and back: records, enums, tuples, lists and dictionaries, by their type hints.

A record is written as the list of its fields in order, so a reader needs the same version of the class; `snapshot.py`
checks that. Records are dataclasses, named tuples, and classes that declare their attributes in the class body.
"""

import dataclasses
import types
from collections.abc import Callable
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, Union, get_args, get_origin, get_type_hints

Convert = Callable[[Any], Any]

_PLAIN = frozenset((int, float, str, bool, object, None, types.NoneType))


class Codec(NamedTuple):
    """The two directions of one type."""

    encode: Convert
    decode: Convert


@cache
def codec(hint: Any) -> Codec:
    """Return the codec of a type.

    >>> times = codec(dict[tuple[str, int], list[float]])
    >>> times.decode(times.encode({("a", 1): [0.5]}))
    {('a', 1): [0.5]}
    """
    hint = getattr(hint, "__supertype__", hint)
    origin, args = get_origin(hint), get_args(hint)
    if hint in _PLAIN:
        return _SAME
    if origin in (types.UnionType, Union):
        return _optional(args)
    if origin is tuple:
        return _tuple(args)
    if origin is list:
        item = codec(args[0])
        return _SAME if item is _SAME else Codec(*(_each(convert) for convert in item))
    if origin is dict:
        return _dict(*args)
    if isinstance(hint, type) and issubclass(hint, Enum):
        return Codec(attrgetter("value"), hint)
    return _record(hint)


def _same(value: Any) -> Any:
    return value


_SAME = Codec(_same, _same)


def _each(convert: Convert) -> Convert:
    return lambda values: [convert(value) for value in values]


def _optional(args: tuple[Any, ...]) -> Codec:
    kinds = [each for each in args if each is not types.NoneType]
    if all(codec(kind) is _SAME for kind in kinds):
        return _SAME
    assert len(kinds) == 1, f"a union of records cannot be read back: {args}"
    encode, decode = codec(kinds[0])
    return Codec(
        lambda value: None if value is None else encode(value), lambda value: None if value is None else decode(value)
    )


def _tuple(args: tuple[Any, ...]) -> Codec:
    if len(args) == 2 and args[1] is Ellipsis:
        item = codec(args[0])
        encode, decode = _each(item.encode), _each(item.decode)
    else:
        items = [codec(arg) for arg in args]
        encode, decode = _row([item.encode for item in items]), _row([item.decode for item in items])
    return Codec(encode, lambda values: tuple(decode(values)))


def _dict(key: Any, value: Any) -> Codec:
    """Encode keys that are texts as an object, others as a list of pairs."""
    keys, values = codec(key), codec(value)
    if getattr(key, "__supertype__", key) is str:
        return Codec(
            lambda found: {key: values.encode(value) for key, value in found.items()},
            lambda found: {key: values.decode(value) for key, value in found.items()},
        )
    return Codec(
        lambda found: [[keys.encode(key), values.encode(value)] for key, value in found.items()],
        lambda found: {keys.decode(key): values.decode(value) for key, value in found},
    )


def _row(converts: list[Convert]) -> Convert:
    """Return the function that converts a row of values; most of them stay as they are."""
    changed = [(at, convert) for at, convert in enumerate(converts) if convert is not _same]

    def converted(values: Any) -> list[Any]:
        found = list(values)
        for at, convert in changed:
            found[at] = convert(found[at])
        return found

    return converted


def _record(cls: Any) -> Codec:
    fields = {name: codec(hint) for name, hint in get_type_hints(cls).items()}
    assert fields, f"{cls} declares no attributes"
    names = list(fields)
    read, encode = attrgetter(*names), _row([each.encode for each in fields.values()])
    decode = _row([each.decode for each in fields.values()])

    def made(values: Any) -> Any:
        new = cls.__new__(cls)
        for name, value in zip(names, decode(values), strict=True):
            setattr(new, name, value)
        return new

    def from_fields(values: Any) -> Any:
        return cls(**dict(zip(names, decode(values), strict=True)))

    build = from_fields if dataclasses.is_dataclass(cls) or issubclass(cls, tuple) else made
    if len(names) == 1:
        return Codec(lambda value: encode((read(value),)), build)
    return Codec(lambda value: encode(read(value)), build)
