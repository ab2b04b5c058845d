"""Columns: the numbers that searches read, as arrays over nodes, over running attempts and over their leases."""

from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cordee.hardware.arrays import Floats, Ints, Mask
from cordee.schedule.placement.entry import Kind
from cordee.schedule.placement.view import Pool
from cordee.schedule.state.journal import Journal

Column = Ints | Floats | Mask
Cell = int | float | bool

_Number = TypeVar("_Number", np.int64, np.float64, np.bool_)


class _Views(dict[str, NDArray[_Number]], Generic[_Number]):
    """The used parts of columns by name, made when they are first read."""

    def __init__(self, columns: "Columns", kind: type[_Number]) -> None:
        self._columns = columns
        self._kind: type[_Number] = kind

    def __missing__(self, name: str) -> NDArray[_Number]:
        column = self._columns.arrays[name][: self._columns.size]
        assert column.dtype == self._kind, f"{name} is a column of {column.dtype}"
        found: NDArray[_Number] = column.view(self._kind)
        self[name] = found
        return found


class Columns:
    """Arrays of equal length that grow, and a list of free rows, which hold zeros.

    Attributes:
        ints: the used parts of columns of whole numbers, by name; `floats` and `flags` likewise.
        size: number of rows, used and free.
        changes: grows with every change.
    """

    __slots__ = ("_free", "_journal", "arrays", "changes", "flags", "floats", "ints", "size")

    def __init__(
        self, journal: Journal, *, ints: tuple[str, ...], flags: tuple[str, ...] = (), floats: tuple[str, ...] = ()
    ) -> None:
        self._journal = journal
        self._free: list[int] = []
        self.arrays: dict[str, Column] = {name: np.zeros(64, np.int64) for name in ints}
        self.arrays |= {name: np.zeros(64, np.bool_) for name in flags}
        self.arrays |= {name: np.zeros(64, np.float64) for name in floats}
        self.size = self.changes = 0
        self.ints, self.flags = _Views(self, np.int64), _Views(self, np.bool_)
        self.floats = _Views(self, np.float64)

    def add(self, values: dict[str, Cell]) -> int:
        """Add a row with these values and return its number."""
        if self._free:
            row = self._free.pop()
        else:
            row = self.size
            self.size += 1
            if self.size > len(next(iter(self.arrays.values()))):
                self.arrays = {name: np.concatenate([old, np.zeros_like(old)]) for name, old in self.arrays.items()}
            for views in (self.ints, self.flags, self.floats):
                views.clear()
        for name, value in values.items():
            self.arrays[name][row] = value
        self.changes += 1
        self._journal.note(self._drop, row)
        return row

    def drop(self, row: int) -> None:
        """Free a row."""
        if self._journal.keeps:
            self._journal.note(self._restore, row, {name: column[row] for name, column in self.arrays.items()})
        self._drop(row)

    def set(self, name: str, row: int, value: Cell) -> None:
        """Change one cell."""
        self._journal.note(self._set, name, row, self.arrays[name][row])
        self._set(name, row, value)

    def _set(self, name: str, row: int, value: Cell) -> None:
        self.arrays[name][row] = value
        self.changes += 1

    def _drop(self, row: int) -> None:
        for column in self.arrays.values():
            column[row] = 0
        self._free.append(row)
        self.changes += 1

    def _restore(self, row: int, values: dict[str, Cell]) -> None:
        assert self._free.pop() == row, "changes are taken back in reverse order"
        self.changes += 1
        for name, value in values.items():
            self.arrays[name][row] = value


class NodeColumns:
    """GPUs of nodes by the numbers of the nodes, which never change. No answer may depend on a number.

    Attributes:
        numbers: numbers of nodes by name.
        names: names of nodes by number.
        changes: grows with every change of a node.
    """

    __slots__ = ("_free", "_kind", "_kinds", "_masks", "_ranks", "_usable", "changes", "names", "numbers")

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.names: list[str] = []
        self.changes = 0
        self._free, self._usable = np.zeros(64, np.int64), np.zeros(64, np.int64)
        self._kind: Ints = np.full(64, -1, np.int64)  # -1: nothing can be placed there
        self._kinds: dict[Kind, int] = {}
        self._masks: dict[Pool, Mask] = {}
        self._ranks: Ints = np.empty(0, np.int64)

    @property
    def free(self) -> Ints:
        """GPUs of each node that are free or being vacated, and claimed for no job."""
        return self._free[: len(self.names)]

    @property
    def usable(self) -> Ints:
        """GPUs of each node, free or leased."""
        return self._usable[: len(self.names)]

    def number(self, name: str) -> int:
        """Return the number of a node; a new node gets one."""
        number = self.numbers.get(name)
        if number is None:
            number = self.numbers[name] = len(self.names)
            self.names.append(name)
            self._masks.clear()
            if number >= len(self._free):
                self._free = np.concatenate([self._free, np.zeros_like(self._free)])
                self._usable = np.concatenate([self._usable, np.zeros_like(self._usable)])
                self._kind = np.concatenate([self._kind, np.full_like(self._kind, -1)])
        return number

    def ranks(self) -> Ints:
        """Return the rank of each node in the order of names."""
        if len(self._ranks) != len(self.names):
            self._ranks = np.empty(len(self.names), np.int64)
            self._ranks[np.argsort(np.array(self.names))] = np.arange(len(self.names))
        return self._ranks

    def of_pool(self, pool: Pool) -> Mask:
        """Return a mask of the nodes of these kinds, to be read only."""
        mask = self._masks.get(pool)
        if mask is None:
            numbers = [self._kinds.get(each, -2) for each in pool]
            mask = self._masks[pool] = np.isin(self._kind[: len(self.names)], numbers)
        return mask

    def set(self, name: str, kind: Kind | None, free: int, usable: int) -> None:
        """Set the GPUs of a node; kind None removes it. Not journaled: `Nodes` undoes it by setting old values."""
        number = self.number(name)
        kind_number = -1 if kind is None else self._kinds.setdefault(kind, len(self._kinds))
        if self._kind[number] != kind_number:
            self._kind[number] = kind_number
            self._masks.clear()
        elif self._free[number] == free and self._usable[number] == usable:
            return
        self._free[number], self._usable[number] = free, usable
        self.changes += 1

    def value(self) -> object:
        """Return a deep copy, to compare; it is independent of the numbers."""
        return {
            name: (int(self._free[number]), int(self._usable[number]))
            for name, number in self.numbers.items()
            if self._kind[number] >= 0
        }
