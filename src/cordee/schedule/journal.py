"""Changes that can be taken back: every index of `State` writes through one journal."""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_Undo = tuple[Callable[..., object], tuple[Any, ...]]


class Journal:
    """Nothing is kept outside `what_if`."""

    def __init__(self) -> None:
        self._undo: list[_Undo] | None = None
        self._depth = 0

    @property
    def keeps(self) -> bool:
        """Whether it is inside `what_if`."""
        return self._undo is not None

    @contextmanager
    def what_if(self) -> Iterator[None]:
        """Take back, at the end, everything that was written inside. Can be nested."""
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
        """What was written inside `what_if`, and not taken back yet, stays; not inside another `what_if`."""
        assert self._depth == 1, "what was only imagined around it cannot be kept"
        assert self._undo is not None
        self._undo.clear()

    def mark(self) -> int:
        """Where `take_back` can return to; inside `what_if` only."""
        assert self._undo is not None, "changes can be taken back inside what_if only"
        return len(self._undo)

    def take_back(self, mark: int) -> None:
        """Undo what was written since the mark."""
        assert self._undo is not None, "changes can be taken back inside what_if only"
        while len(self._undo) > mark:
            undo, args = self._undo.pop()
            undo(*args)

    def note(self, undo: Callable[..., object], *args: Any) -> None:
        """This call takes back what was just done."""
        if self._undo is not None:
            self._undo.append((undo, args))

    def put(self, mapping: dict[Any, Any], key: Any, value: Any) -> None:
        """Set a key."""
        if self._undo is not None:
            if key in mapping:
                self._undo.append((mapping.__setitem__, (key, mapping[key])))
            else:
                self._undo.append((mapping.__delitem__, (key,)))
        mapping[key] = value

    def drop(self, mapping: dict[Any, Any], key: Any) -> None:
        """Take a key out, if it is there."""
        if key in mapping:
            self.note(mapping.__setitem__, key, mapping.pop(key))

    def insert(self, ascending: list[Any], item: Any) -> None:
        """Into a sorted list."""
        insort(ascending, item)
        self.note(remove_from, ascending, item)

    def remove(self, ascending: list[Any], item: Any) -> None:
        """Out of a sorted list that holds it."""
        remove_from(ascending, item)
        self.note(insort, ascending, item)


def remove_from(ascending: list[Any], item: Any) -> None:
    """Take an item out of a sorted list that holds it."""
    at = bisect_left(ascending, item)
    assert ascending[at] == item, f"{item} is not in the list"
    del ascending[at]
