"""Counts of the units that nodes hold after some victims have left."""

from collections.abc import Iterable

import numpy as np

from cordee.hardware.arrays import Ints
from cordee.schedule.placement.need import Need
from cordee.schedule.preemption.candidates import Field


class Counts:
    """Units of a gang that certain nodes hold."""

    def __init__(self, need: Need, field: Field, at: Ints) -> None:
        self.need, self._field, self._at = need, field, at

    def without(self, rows: list[int]) -> Ints:
        """Return the free GPUs of each node without these attempts."""
        field = self._field
        free = field.free.copy()
        if rows:
            chosen = np.zeros(len(field.cost), np.bool_)
            chosen[rows] = True
            leases = np.flatnonzero(chosen[field.row] & (field.gain > 0))
            np.add.at(free, field.node[leases], field.gain[leases])
        return free

    def units(self, free: Ints) -> int:
        """Return the number of units that these free GPUs of each node hold."""
        return int((free[self._at] // self.need.unit).sum())

    def are_enough(self, free: Ints) -> bool:
        """Return whether the gang fits into these free GPUs of each node."""
        here, need = free[self._at], self.need
        each = here // need.unit
        units = int(each.sum())
        if units < need.units or not need.rest:
            return units >= need.units
        fits = here >= need.rest
        kept = (here[fits] - need.rest) // need.unit - each[fits]
        return bool(len(kept)) and units + int(kept.max()) >= need.units

    def needed(self, chosen: list[int], in_order: Iterable[int]) -> list[int]:
        """Return the victims without the superfluous ones, which are tried in this order."""
        for row in in_order:
            rest = [each for each in chosen if each != row]
            if self.are_enough(self.without(rest)):
                chosen = rest
        return chosen
