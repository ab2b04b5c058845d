"""The classes of held time, and one amount divided over them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import add, attrgetter

from cordee.frozen import quick_init

MILLI = 1000
"""GPUs are counted in thousandths, since a lease may be of a part of one."""


class Class(StrEnum):
    """A class of held GPU time; each microsecond is in exactly one. Four of them are of replicas only."""

    __hash__ = str.__hash__  # Enum's own is a Python function, and every account is a dict by class

    USEFUL = "useful"
    CHECKPOINT = "checkpoint"
    RESTART = "restart"
    STALL = "stall"
    LOADING = "loading"
    SERVING = "serving"
    IDLE_HELD = "idle_held"
    DRAINING = "draining"
    LOST = "lost"
    UNREPORTED = "unreported"


_CLASSES = tuple(Class)
_amounts = attrgetter(*_CLASSES)


@quick_init
@dataclass(frozen=True, slots=True)
class Split:
    """GPU-microseconds or micro-dollars by class."""

    useful: int = 0
    checkpoint: int = 0
    restart: int = 0
    stall: int = 0
    loading: int = 0
    serving: int = 0
    idle_held: int = 0
    draining: int = 0
    lost: int = 0
    unreported: int = 0

    @property
    def held(self) -> int:
        """Return the sum of the classes."""
        return sum(_amounts(self))

    def __add__(self, other: "Split") -> "Split":
        return Split(*map(add, _amounts(self), _amounts(other)))

    @staticmethod
    def sum(splits: Iterable["Split"]) -> "Split":
        """Return the sum.

        >>> Split.sum([Split(useful=1), Split(useful=2, lost=3)]) == Split(useful=3, lost=3)
        True
        """
        return Split(*map(sum, zip(*map(_amounts, splits), strict=True)))

    @staticmethod
    def of(amounts: Mapping[Class, int]) -> "Split":
        """Return the amounts by class; a class that is missing has none."""
        return Split(**amounts) if amounts else _NONE  # type: ignore[arg-type]  # A class is a string.


_NONE = Split()


def rounded(numerators: Mapping[Class, int], denominator: int) -> Split:
    """Return whole amounts of fractions, such that the parts sum to the whole.

    The whole is rounded down; the parts with the largest remainders take the rest, ties go to the class named first.

    >>> rounded({Class.USEFUL: 5, Class.LOST: 5}, 4) == Split(useful=1, lost=1)
    True
    >>> rounded({Class.USEFUL: 7, Class.LOST: 6}, 4).held, 13 // 4
    (3, 3)
    """
    parts = {cls: amount // denominator for cls, amount in numerators.items()}
    missing = sum(numerators.values()) // denominator - sum(parts.values())
    if missing:
        named = [cls for cls in _CLASSES if cls in numerators]
        by_remainder = sorted(named, key=lambda cls: -(numerators[cls] % denominator))
        for cls in by_remainder[:missing]:
            parts[cls] += 1
    return Split.of(parts)


def apportioned(amount: int, weights: Sequence[int]) -> list[int]:
    """Return an amount divided in proportion to weights, in whole parts that sum to it.

    The parts with the largest remainders take the rest, ties go to the first one. At least one weight is above 0.

    >>> apportioned(100, [1, 1, 1]), apportioned(2, [0, 5, 5])
    ([34, 33, 33], [0, 1, 1])
    """
    whole = sum(weights)
    parts = [amount * weight // whole for weight in weights]
    by_remainder = sorted(range(len(weights)), key=lambda at: -(amount * weights[at] % whole))
    for at in by_remainder[: amount - sum(parts)]:
        parts[at] += 1
    return parts
