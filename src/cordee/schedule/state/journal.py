"""The undo journal: every index of the state writes through it, so that a what-if can be taken back."""

from bisect import bisect_left, insort
from collections.abc import Callable, MutableMapping
from typing import TypeVar

_Undo = tuple[Callable[..., object], tuple[object, ...]]

K = TypeVar("K")
V = TypeVar("V")
Item = TypeVar(
    "Item",
    bound=int | tuple[int, object] | tuple[int, object, int] | tuple[int, int, object] | tuple[int, int, int, object],
)


class Journal:
    """The changes inside a what-if with the call that undoes each; outside of a what-if it is empty."""

    def __init__(self) -> None:
        self._undo: list[_Undo] | None = None
        self._depth = 0

    @property
    def keeps(self) -> bool:
        """Return whether a what-if is open."""
        return self._undo is not None

    def what_if(self) -> "WhatIf":
        """Return a context in which everything that is written is taken back at its end. What-ifs can be nested."""
        return WhatIf(self)

    def open(self) -> int:
        """Begin a what-if; return the point to which `close` takes changes back."""
        if self._undo is None:
            self._undo = []
        self._depth += 1
        return len(self._undo)

    def close(self, mark: int) -> None:
        """End a what-if, and take back what was written since the mark."""
        self._depth -= 1
        self.take_back(mark)
        if not self._depth:
            self._undo = None

    def keep(self) -> None:
        """Keep the changes inside the what-if that were not taken back; not inside a nested one."""
        assert self._depth == 1, "changes inside a nested what-if cannot be kept"
        assert self._undo is not None
        self._undo.clear()

    def mark(self) -> int:
        """Return the point to which `take_back` can return; inside a what-if only."""
        assert self._undo is not None, "changes can be taken back inside a what-if only"
        return len(self._undo)

    def take_back(self, mark: int) -> None:
        """Undo the changes since the mark."""
        changes = self._undo
        assert changes is not None, "changes can be taken back inside a what-if only"
        while len(changes) > mark:
            undo, args = changes.pop()
            undo(*args)

    def note(self, undo: Callable[..., object], *args: object) -> None:
        """Add the call that undoes the last change."""
        if self._undo is not None:
            self._undo.append((undo, args))

    def put(self, mapping: MutableMapping[K, V], key: K, value: V) -> None:
        """Set a key."""
        if self._undo is not None:
            if key in mapping:
                self._undo.append((mapping.__setitem__, (key, mapping[key])))
            else:
                self._undo.append((mapping.__delitem__, (key,)))
        mapping[key] = value

    def drop(self, mapping: MutableMapping[K, V], key: K) -> None:
        """Remove a key, if it is there."""
        if key in mapping:
            self.note(mapping.__setitem__, key, mapping.pop(key))

    def insert(self, ascending: list[Item], item: Item) -> None:
        """Insert an item into a sorted list."""
        insort(ascending, item)
        self.note(remove_from, ascending, item)

    def remove(self, ascending: list[Item], item: Item) -> None:
        """Remove an item from a sorted list that holds it."""
        remove_from(ascending, item)
        self.note(insort, ascending, item)


class WhatIf:
    """A what-if as a context."""

    __slots__ = ("_journal", "_mark")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal

    def __enter__(self) -> None:
        self._mark = self._journal.open()

    def __exit__(self, *_: object) -> None:
        self._journal.close(self._mark)


def remove_from(ascending: list[Item], item: Item) -> None:
    """Remove an item from a sorted list that holds it."""
    at = bisect_left(ascending, item)
    assert ascending[at] == item, f"{item} is not in the list"
    del ascending[at]
