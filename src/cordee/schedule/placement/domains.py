"""The tree of domains of a pool's nodes: a row for each domain, the whole cluster first."""

from collections.abc import Iterable

import numpy as np

from cordee.hardware.arrays import Ints
from cordee.schedule.placement.need import ANYWHERE

Domain = tuple[str, ...]


class DomainTree:
    """Domains by row; methods return rows in the order of the domains' names.

    Attributes:
        domains: by row.
    """

    def __init__(self) -> None:
        self.domains: list[Domain] = []
        self._children: list[list[int]] = []  # rows directly inside
        self._height: list[int] = []  # above the racks
        self._row: dict[Domain, int] = {}
        self._known: dict[tuple[Domain, int], tuple[int, ...]] = {}  # answers of `rows`
        self._levels: dict[int, Ints] = {}
        self._inside: dict[int, Ints] = {}
        self.rows((), 0)

    def __len__(self) -> int:
        return len(self.domains)

    def rows(self, domain: Domain, height: int) -> tuple[int, ...]:
        """Return the rows of a domain of this height and of all domains above it, the root first."""
        found = self._known.get((domain, height))
        if found is None:
            found = self._known[domain, height] = self._found(domain, height)
        return found

    def _found(self, domain: Domain, height: int) -> tuple[int, ...]:
        rows: list[int] = []
        for depth in range(len(domain) + 1):
            prefix = domain[:depth]
            row = self._row.get(prefix)
            if row is None:
                row = self._row[prefix] = len(self.domains)
                self.domains.append(prefix)
                self._children.append([])
                self._height.append(height + len(domain) - depth)
                if rows:
                    self._children[rows[-1]].append(row)
                self._levels, self._inside = {}, {}
            elif self._height[row] < height + len(domain) - depth:
                self._height[row] = height + len(domain) - depth
                self._levels, self._inside = {}, {}
            rows.append(row)
        return tuple(rows)

    def levels(self) -> dict[int, Ints]:
        """Return rows by ascending height: -1 for islands that span nodes, the whole cluster last."""
        if not self._levels:
            found: dict[int, list[int]] = {}
            for row, domain in enumerate(self.domains):
                found.setdefault(self._height[row] if domain else ANYWHERE, []).append(row)
            self._levels = {height: self.in_order(found[height]) for height in sorted(found)}
        return self._levels

    def inside(self, row: int) -> Ints:
        """Return the rows directly inside a row's domain."""
        found = self._inside.get(row)
        if found is None:
            found = self._inside[row] = self.in_order(self._children[row])
        return found

    def in_order(self, rows: Iterable[int]) -> Ints:
        """Return rows in the order of the domains' names."""
        return np.array(sorted(rows, key=lambda each: self.domains[each]), np.int64)
