"""Columns: the numbers that searches read, as arrays over nodes, over running attempts and over their leases."""

from operator import itemgetter
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cordee.hardware.arrays import Floats, Ints, Mask
from cordee.schedule.placement.entry import Kind
from cordee.schedule.placement.view import Pool
from cordee.schedule.state.journal import Journal
from cordee.schedule.state.records import NEVER

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

    __slots__ = (
        "_blocks", "_cells_of", "_free", "_journal", "_names", "_number", "_numbers",
        "arrays", "changes", "flags", "floats", "ints", "size",
    )  # fmt: skip

    def __init__(
        self, journal: Journal, *, ints: tuple[str, ...], flags: tuple[str, ...] = (), floats: tuple[str, ...] = ()
    ) -> None:
        self._journal = journal
        self._free: list[int] = []
        # The columns of each type lie in one block, so that a row is set and cleared with one step each.
        self._names = (ints, flags, floats)
        self._cells_of = [itemgetter(*names) if names else None for names in self._names]
        kinds = (np.int64, np.bool_, np.float64)
        self._blocks: list[Column] = [np.zeros((len(n), 64), k) for n, k in zip(self._names, kinds, strict=True)]
        self._number = {name: number for number, name in enumerate(ints)}
        self._numbers: dict[tuple[str, ...], Ints] = {}  # of columns that were asked for together
        self.arrays: dict[str, Column] = {}
        self._name_rows()
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
            if self.size > self._blocks[0].shape[1]:
                self._blocks = [np.concatenate([old, np.zeros_like(old)], axis=1) for old in self._blocks]
                self._name_rows()
            for views in (self.ints, self.flags, self.floats):
                views.clear()
        for cells_of, block in zip(self._cells_of, self._blocks, strict=True):
            if cells_of is not None:
                block[:, row] = cells_of(values)
        self.changes += 1
        self._journal.note(self._drop, row)
        return row

    def drop(self, row: int) -> None:
        """Free a row."""
        if self._journal.keeps:
            self._journal.note(self._restore, row, [block[:, row].copy() for block in self._blocks])
        self._drop(row)

    def set(self, name: str, row: int, value: Cell) -> None:
        """Change one cell."""
        self._journal.note(self._set, name, row, self.arrays[name][row])
        self._set(name, row, value)

    def first_after(self, names: tuple[str, ...], least: int) -> int:
        """Return the least number in columns of whole numbers that is larger; NEVER if there is none."""
        at = self._numbers.get(names)
        if at is None:
            at = self._numbers[names] = np.array([self._number[name] for name in names])
        numbers = self._blocks[0][at, : self.size]
        return int(np.minimum.reduce(numbers, axis=None, where=numbers > least, initial=NEVER))

    def _set(self, name: str, row: int, value: Cell) -> None:
        self.arrays[name][row] = value
        self.changes += 1

    def _drop(self, row: int) -> None:
        for block in self._blocks:
            block[:, row] = 0
        self._free.append(row)
        self.changes += 1

    def _restore(self, row: int, cells: list[Column]) -> None:
        assert self._free.pop() == row, "changes are taken back in reverse order"
        self.changes += 1
        for block, each in zip(self._blocks, cells, strict=True):
            block[:, row] = each

    def _name_rows(self) -> None:
        for names, block in zip(self._names, self._blocks, strict=True):
            self.arrays.update(zip(names, block, strict=True))


class NodeColumns:
    """GPUs of nodes by the numbers of the nodes, which never change. No answer may depend on a number.

    Attributes:
        numbers: numbers of nodes by name.
        names: names of nodes by number.
        changes: grows with every change of a node.
    """

    __slots__ = ("_free", "_kind", "_kinds", "_known", "_masks", "_ranks", "_usable", "changes", "names", "numbers")

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        self.names: list[str] = []
        self.changes = 0
        self._free, self._usable = np.zeros(64, np.int64), np.zeros(64, np.int64)
        self._kind: Ints = np.full(64, -1, np.int64)  # -1: nothing can be placed there
        self._kinds: dict[Kind, int] = {}
        self._known: dict[str, tuple[Kind | None, int, int]] = {}  # kind, free and usable GPUs, by name
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
        known = self._known.get(name)
        if known == (kind, free, usable):
            return
        self._known[name] = (kind, free, usable)
        if known is None or known[0] != kind:
            self._kind[number] = -1 if kind is None else self._kinds.setdefault(kind, len(self._kinds))
            self._masks.clear()
        self._free[number], self._usable[number] = free, usable
        self.changes += 1

    def value(self) -> object:
        """Return a deep copy, to compare; it is independent of the numbers."""
        return {
            name: (int(self._free[number]), int(self._usable[number]))
            for name, number in self.numbers.items()
            if self._kind[number] >= 0
        }
