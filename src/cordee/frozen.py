"""Faster ways to create frozen dataclasses and to copy named tuples, of which every event makes several.

A frozen dataclass sets each field through `object.__setattr__`, which takes three times as long as a plain assignment.
A named tuple's `_replace` looks each field up by its name, also those that stay.
"""

from dataclasses import MISSING, fields
from typing import Any, TypeVar

T = TypeVar("T")


def quick_init(cls: type[T]) -> type[T]:
    """Let a frozen dataclass with slots be created by plain assignments; it is as frozen as before once it is created.

    Until its fields are set an instance is of a class with the same slots that is not frozen. For a class that is
    created often, and that no other class extends.

    >>> from dataclasses import dataclass
    >>> @quick_init
    ... @dataclass(frozen=True, slots=True, kw_only=True)
    ... class Point:
    ...     x: int
    ...     y: int = 0
    >>> point = Point(x=1)
    >>> point, hash(point) == hash((1, 0)), type(point) is Point
    (Point(x=1, y=0), True, True)
    >>> point.x = 2
    Traceback (most recent call last):
    dataclasses.FrozenInstanceError: cannot assign to field 'x'
    """
    known: Any = cls
    every = fields(known)
    assert known.__dataclass_params__.frozen and not hasattr(cls, "__post_init__"), f"{cls.__name__} has more to do"
    assert all(each.default_factory is MISSING for each in every), f"{cls.__name__} makes defaults anew"
    slots = {"__slots__": known.__slots__, "__setattr__": object.__setattr__}
    names: dict[str, object] = {
        "_set": object.__setattr__,
        "_cls": cls,
        "_open": type(cls.__name__, cls.__bases__, slots),
        **{f"_default_{each.name}": each.default for each in every},
    }
    asked = ["self"]
    for each in sorted(every, key=lambda each: bool(each.kw_only)):
        asked += ["*"] if each.kw_only and "*" not in asked else []
        asked.append(each.name if each.default is MISSING else f"{each.name}=_default_{each.name}")
    lines = [f"self.{each.name} = {each.name}" for each in every]
    body = "\n    ".join(["_set(self, '__class__', _open)", *lines, "self.__class__ = _cls"])
    exec(f"def __init__({', '.join(asked)}):\n    {body}\n", names)
    made: Any = names["__init__"]
    made.__annotations__, made.__qualname__ = known.__init__.__annotations__, known.__init__.__qualname__
    known.__init__ = made
    return cls


def quick_replace(cls: type[T]) -> type[T]:
    """Let a named tuple be copied with some changes by a look at those alone.

    >>> from typing import NamedTuple
    >>> @quick_replace
    ... class Point(NamedTuple):
    ...     x: int
    ...     y: int = 0
    >>> Point(1)._replace(y=2)
    Point(x=1, y=2)
    """
    known: Any = cls
    numbers, new = {name: number for number, name in enumerate(known._fields)}, tuple.__new__

    def _replace(self: Any, /, **changes: object) -> Any:
        values = list(self)
        for name, value in changes.items():
            values[numbers[name]] = value
        return new(cls, values)  # type: ignore[type-var]  # A named tuple is a tuple.

    known._replace = _replace
    return cls
