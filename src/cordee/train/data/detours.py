"""Changes to the order of global batches after a rollback: some are left out, or come later in their epoch. Pure.

Each change holds for the sequence that the ones before it have made, from a place that the run has not passed yet. So a
number of batches trained on is all that a checkpoint needs to hold besides the changes themselves.
"""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Detour(NamedTuple):
    """Global batches from number `first` on that are left out; or come just before number `until`, if there is one."""

    first: int
    batches: int
    until: int | None

    def before(self, number: int) -> int:
        """Return the number of a batch in the sequence without this detour.

        >>> [Detour(2, 2, None).before(n) for n in range(4)], [Detour(1, 2, 5).before(n) for n in range(6)]
        ([0, 1, 4, 5], [0, 3, 4, 1, 2, 5])
        """
        if number < self.first or (self.until is not None and number >= self.until):
            return number
        if self.until is None or number < self.until - self.batches:
            return number + self.batches
        return number - (self.until - self.batches) + self.first


class Detours:
    """The detours of a run, in the order in which they were taken."""

    def __init__(self, found: Iterable[Sequence[int | None]] = ()) -> None:
        self._found: list[Detour] = []
        self._left_out: list[int] = []  # original numbers, ascending
        for first, count, until in found:
            assert first is not None and count is not None, "`saved` wrote them"
            self._add(Detour(first, count, until))

    def __len__(self) -> int:
        """Return the number of detours."""
        return len(self._found)

    def saved(self) -> list[list[int | None]]:
        """Return what the constructor takes."""
        return [list(each) for each in self._found]

    def original(self, number: int) -> int:
        """Return the number that a batch has in the order without detours."""
        for each in reversed(self._found):
            number = each.before(number)
        return number

    def end(self, original: int) -> int:
        """Return how many batches come that are below this number in the order without detours."""
        return original - bisect_left(self._left_out, original)

    def leave_out(self, first: int, count: int) -> None:
        """Leave out the batches from this number on."""
        self._add(Detour(first, count, None))

    def put_off(self, first: int, count: int, end: int) -> bool:
        """Put the batches from this number on behind all others before `end`; return whether that changes anything."""
        if first + count >= end:
            return False
        self._add(Detour(first, count, end))
        return True

    def _add(self, detour: Detour) -> None:
        if detour.until is None:
            gone = (self.original(number) for number in range(detour.first, detour.first + detour.batches))
            self._left_out = sorted([*self._left_out, *gone])
        self._found.append(detour)
