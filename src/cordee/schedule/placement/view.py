"""The nodes of a pool in their domain tree, counted by class, for one amount of CPU and memory per GPU.

The class of a node is all that placement must know of it: the number of its free GPUs that the job could take, the GPUs
of an island, and the free GPUs of each island. There are few classes, so a row of counts for each domain gives the
units of any size that the domain holds; one product of the matrix of counts with a vector of weights gives all.
"""

from bisect import bisect_left, insort
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from cordee.hardware.arrays import Floats, Ints
from cordee.schedule.placement.domains import DomainTree
from cordee.schedule.placement.entry import Entry, Kind
from cordee.schedule.placement.need import Arrangement, Need

Pool = tuple[Kind, ...]
"""Kinds that one gang may use together."""

Class = tuple[int, int, tuple[int, ...]]
"""GPUs that the job could take, GPUs of an island, free GPUs of each island (descending)."""


@lru_cache(maxsize=1 << 16)
def holds(cls: Class, unit: int, rest: int, in_island: bool) -> tuple[int, bool]:
    """Return the number of units that a node of a class holds, and whether a rest fits beside them.

    >>> holds((8, 8, (8,)), 3, 2, False), holds((7, 4, (4, 3)), 2, 1, True)
    ((2, True), (3, True))
    """
    most, island, free = cls
    if in_island and unit <= island:
        slots = sum(each // unit for each in free)
        units = min(slots, most // unit)
        room = slots > units or any(each % unit >= rest for each in free)
    else:
        units = min(most, sum(free)) // unit
        room = True
    return units, 0 < rest <= most - units * unit and room


class Feed:
    """Entries by name, and the names in the order in which they changed."""

    def __init__(self) -> None:
        self.entries: dict[str, Entry] = {}
        self.log: list[str] = []
        self.start = 0  # number of changes that the log no longer holds

    def put(self, name: str, entry: Entry | None) -> None:
        """Set an entry; None removes it."""
        if entry is None:
            self.entries.pop(name, None)
        else:
            self.entries[name] = entry
        self.log.append(name)
        if len(self.log) > 4096 + 2 * len(self.entries):
            self.start += len(self.log) // 2
            del self.log[: len(self.log) // 2]

    def since(self, seen: int) -> tuple[list[str] | None, int]:
        """Return the names changed since change number `seen` (None: start anew), and the present number of changes."""
        end = self.start + len(self.log)
        return (None if seen < self.start else self.log[seen - self.start :]), end


class Host(NamedTuple):
    """The kinds of nodes that a view counts, and the CPU and memory that each GPU of a job takes along."""

    kinds: frozenset[Kind]
    cpu_milli: int
    memory_bytes: int
    without_gpus: bool  # nodes without a free GPU count too, for jobs that need none


class View:
    """Counts of nodes by domain and class; public arrays are indexed by the rows of the tree.

    Attributes:
        tree: the domains of the nodes.
        classes: by column.
        total: nodes of each class in the whole pool.
        counts: nodes by row and column; whole numbers as floats, because products of floats are fast.
        free: GPUs that the job could take, by row.
        names: by (row, column), the names of the nodes directly in the domain, ascending.
        where: for each node its rows from the root down, and its column.
        found: results of searches, cleared when the counts change.
    """

    def __init__(self, pool: Pool, cpu_milli: int, memory_bytes: int, feed: Feed, hosts: bool) -> None:
        self._host = Host(frozenset(pool), cpu_milli, memory_bytes, hosts)
        self._feed, self._seen = feed, -1
        self.found: dict[Need, Arrangement | None] = {}
        self._clear()

    def _clear(self) -> None:
        self.tree = DomainTree()
        self.classes: list[Class] = []
        self.total: dict[Class, int] = {}
        self.counts: Floats = np.zeros((4, 8))
        self.free: Floats = np.zeros(4)
        self.names: dict[tuple[int, int], list[str]] = {}
        self.where: dict[str, tuple[tuple[int, ...], int]] = {}
        self._column: dict[Class, int] = {}
        self._leaves: Ints | None = None
        self._own: set[int] = set()  # rows with nodes directly in their domain
        self._weights: dict[tuple[int, int, bool], tuple[Floats, Floats]] = {}
        self.found.clear()

    # -- following the entries -------------------------------------------------------------------------------

    def follow(self) -> None:
        """Catch up with the feed."""
        if self._seen == self._feed.start + len(self._feed.log):
            return
        changed, self._seen = self._feed.since(self._seen)
        if changed is None:
            self._clear()
            changed = list(self._feed.entries)
        entries = self._feed.entries
        for name in set(changed) if len(changed) > 1 else changed:
            self._set(name, entries.get(name))

    def class_of(self, entry: Entry | None) -> Class | None:
        """Return the class of a node; None if the view does not count it."""
        kinds, cpu_milli, memory_bytes, without_gpus = self._host
        if entry is None or entry.kind not in kinds or not (entry.free or without_gpus):
            return None
        most = 1 if without_gpus else entry.free.bit_count()
        if cpu_milli and entry.cpu_milli is not None:
            most = min(most, entry.cpu_milli // cpu_milli)
        if memory_bytes and entry.memory_bytes is not None:
            most = min(most, entry.memory_bytes // memory_bytes)
        if most <= 0:
            return None
        node = entry.node
        island = node.island_gpus
        if not 0 < island < node.gpus:
            return (most, node.gpus, (entry.free.bit_count(),))
        every = (1 << island) - 1
        free = [(entry.free >> first & every).bit_count() for first in range(0, node.gpus, island)]
        return (most, island, tuple(sorted(free, reverse=True)))

    def _set(self, name: str, entry: Entry | None) -> None:
        cls = self.class_of(entry)
        column = None if cls is None else self._column_of(cls)
        domain = entry.node.domain if entry is not None else ()
        old = self.where.get(name)
        if old is not None:
            if column == old[1] and self.tree.domains[old[0][-1]] == domain:
                return
            del self.where[name]
            self._count(name, *old, -1)
        if column is not None and entry is not None:
            spans = entry.node.island_gpus > entry.node.gpus  # then the innermost domain is an island, below the rack
            where = (self._rows(domain, -1 if spans else 0), column)
            self.where[name] = where
            self._count(name, *where, +1)

    def _count(self, name: str, rows: tuple[int, ...], column: int, sign: int) -> None:
        self.found.clear()
        cls = self.classes[column]
        for row in rows:
            self.counts[row, column] += sign
            self.free[row] += sign * cls[0]
        left = self.total.get(cls, 0) + sign
        if left:
            self.total[cls] = left
        else:
            del self.total[cls]
        names = self.names.get((rows[-1], column))
        if names is None:
            names = self.names[rows[-1], column] = []
            if rows[-1] not in self._own:
                self._own.add(rows[-1])
                self._leaves = None
        if sign > 0:
            insort(names, name)
        else:
            del names[bisect_left(names, name)]

    def _column_of(self, cls: Class) -> int:
        column = self._column.get(cls)
        if column is None:
            column = self._column[cls] = len(self.classes)
            self.classes.append(cls)
            if column >= self.counts.shape[1]:
                self.counts = np.pad(self.counts, ((0, 0), (0, column)))
            self._weights.clear()
        return column

    def _rows(self, domain: tuple[str, ...], height: int) -> tuple[int, ...]:
        """Return the rows of a domain and of all above it; extend the arrays for new ones."""
        before = len(self.tree)
        rows = self.tree.rows(domain, height)
        if len(self.tree) > before:
            self._leaves = None
            while len(self.tree) > len(self.free):
                more = len(self.free)
                self.counts, self.free = np.pad(self.counts, ((0, more), (0, 0))), np.pad(self.free, (0, more))
        return rows

    # -- queries of placement --------------------------------------------------------------------------------

    def total_if(self, entries: Mapping[str, Entry]) -> Mapping[Class, int]:
        """Return `total` as if these nodes had the given entries."""
        if not entries:
            return self.total
        total = dict(self.total)
        for name, entry in entries.items():
            old, new = self.where.get(name), self.class_of(entry)
            if old is not None:
                total[self.classes[old[1]]] -= 1
            if new is not None:
                total[new] = total.get(new, 0) + 1
        return {cls: nodes for cls, nodes in total.items() if nodes}

    def first(self, cls: Class) -> str:
        """Return a node of a class: the first by name in the domain with the fewest free GPUs."""
        column = self._column[cls]
        rows = self.leaves()
        if len(rows) == 1:
            return self.names[int(rows[0]), column][0]
        for row in self.fullest_first(rows[self.counts[rows, column] > 0]):
            names = self.names.get((int(row), column))
            if names:
                return names[0]
        raise AssertionError(f"a node of class {cls} is counted and is in no domain")

    def fullest_first(self, rows: Ints | None = None) -> Ints:
        """Return rows ordered by their free GPUs, ties in domain order; without `rows` those of `leaves`."""
        rows = self.leaves() if rows is None else rows
        return rows[np.argsort(self.free[rows], kind="stable")] if len(rows) > 1 else rows

    def column(self, cls: Class) -> int:
        """Return the column of a known class."""
        return self._column[cls]

    def leaves(self) -> Ints:
        """Return the rows with nodes directly in their domain, in domain order."""
        if self._leaves is None:
            self._leaves = self.tree.in_order(self._own)
        return self._leaves

    def weights(self, unit: int, rest: int, in_island: bool) -> tuple[Floats, Floats]:
        """Return for each class the units that a node holds, and whether a rest fits beside them."""
        key = (unit, rest, in_island)
        found = self._weights.get(key)
        if found is None:
            width = self.counts.shape[1]
            units, rests = np.zeros(width), np.zeros(width)
            for column, cls in enumerate(self.classes):
                units[column], rests[column] = holds(cls, unit, rest, in_island)
            found = self._weights[key] = (units, rests)
        return found
