"""The undo journal: every index of the state writes through it, so that a what-if can be taken back."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import TypeVar

_Undo = tuple[Callable[..., object], tuple[object, ...]]

K = TypeVar("K")
V = TypeVar("V")
Item = TypeVar("Item", bound=int | tuple[int, object] | tuple[int, int, object])


class Journal:
    """Changes inside a what-if, and how each is undone; outside of one it keeps nothing."""

    def __init__(self) -> None:
        self._undo: list[_Undo] | None = None
        self._depth = 0

    @property
    def keeps(self) -> bool:
        """Whether a what-if is open."""
        return self._undo is not None

    @contextmanager
    def what_if(self) -> Iterator[None]:
        """Take back, at the end, everything that was written inside. What-ifs can be nested."""
        outermost = self._undo is None
        if self._undo is None:
            self._undo = []
        mark = len(self._undo)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            self.take_back(mark)
            if outermost:
                self._undo = None

    def keep(self) -> None:
        """Keep what was written inside the what-if and not taken back yet; not inside a nested one."""
        assert self._depth == 1, "what a what-if around it only imagines cannot be kept"
        assert self._undo is not None
        self._undo.clear()

    def mark(self) -> int:
        """Return the point to which `take_back` can return; inside a what-if only."""
        assert self._undo is not None, "changes can be taken back inside a what-if only"
        return len(self._undo)

    def take_back(self, mark: int) -> None:
        """Undo what was written since the mark."""
        assert self._undo is not None, "changes can be taken back inside a what-if only"
        while len(self._undo) > mark:
            undo, args = self._undo.pop()
            undo(*args)

    def note(self, undo: Callable[..., object], *args: object) -> None:
        """Note the call that takes back what was just done."""
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
        """Take a key out, if it is there."""
        if key in mapping:
            self.note(mapping.__setitem__, key, mapping.pop(key))

    def insert(self, ascending: list[Item], item: Item) -> None:
        """Insert an item into a sorted list."""
        insort(ascending, item)
        self.note(remove_from, ascending, item)

    def remove(self, ascending: list[Item], item: Item) -> None:
        """Take an item out of a sorted list that holds it."""
        remove_from(ascending, item)
        self.note(insort, ascending, item)


def remove_from(ascending: list[Item], item: Item) -> None:
    """Take an item out of a sorted list that holds it."""
    at = bisect_left(ascending, item)
    assert ascending[at] == item, f"{item} is not in the list"
    del ascending[at]
