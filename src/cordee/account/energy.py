"""The energy of one attempt by class: what its GPUs drew, spread over the segments of its time.

The driver counts energy in stretches of half a minute, and a segment may begin within one. A stretch is drawn evenly,
and a class gets the difference of the cumulative sum between the ends of its segments: in whole millijoules the
differences add up to what was counted, whatever the rounding.
"""

from collections.abc import Iterable, Iterator

from cordee.account.split import Class
from cordee.events import GpusSampled
from cordee.units import US_PER_S

LATE_US = 120 * US_PER_S
"""Time is folded into sums once its energy is known, or after so long: an agent reports each half minute."""

_STRETCHES_MAX = 128
_WIDTH_US = 30 * US_PER_S


class AttemptEnergy:
    """The millijoules of one attempt.

    Attributes:
        folded: by class, of time that the attempt's timeline has folded.
        integrated_mj: the part that is power over time, since the driver's counter was missing.
    """

    folded: dict[Class, int]
    integrated_mj: int
    _folded_until_us: int
    _stretches: dict[int, tuple[int, int, int]]  # by start in widths: from, to, millijoules
    _width_us: int
    _newest_us: dict[str, int]  # by node

    def __init__(self, from_us: int) -> None:
        self.folded, self.integrated_mj, self._folded_until_us = {}, 0, from_us
        self._stretches, self._width_us, self._newest_us = {}, _WIDTH_US, {}

    def add(self, event: GpusSampled) -> None:
        """Count a sample. One that comes after its time was folded counts from then on; a negative one is none."""
        energy_mj = max(0, event.energy_mj)
        self.integrated_mj += min(energy_mj, max(0, event.integrated_mj))
        self._newest_us[event.node] = max(event.at_us, self._newest_us.get(event.node, 0))
        self._put(max(event.from_us, self._folded_until_us), max(event.at_us, self._folded_until_us), energy_mj)
        while len(self._stretches) > _STRETCHES_MAX:
            self._width_us *= 2
            every, self._stretches = self._stretches.values(), {}
            for stretch in every:
                self._put(*stretch)

    def foldable_us(self, at_us: int) -> int:
        """Return the time until which the energy of all its nodes is known, or has been late for long."""
        return min(at_us, max(min(self._newest_us.values(), default=at_us), at_us - LATE_US))

    def fold(self, cls: Class, until_us: int) -> None:
        """Give the energy until a time to a class, and keep the rest."""
        self.folded[cls] = self.folded.get(cls, 0) + self._until(until_us)
        self._folded_until_us = max(self._folded_until_us, until_us)
        self._stretches = {
            key: (max(from_us, until_us), to_us, energy_mj - _drawn(until_us, from_us, to_us, energy_mj))
            for key, (from_us, to_us, energy_mj) in self._stretches.items()
            if to_us > until_us
        }

    def by_class(self, segments: Iterable[tuple[Class, int]], tail: Class) -> dict[Class, int]:
        """Return the millijoules of each class.

        Args:
            segments: the class and end of each segment after the folded time, in order; the last one gets what is left.
            tail: the class that gets it if there is none.
        """
        parts, before = dict(self.folded), 0
        for cls, until in self._cuts([*segments] or [(tail, 0)]):
            parts[cls] = parts.get(cls, 0) + until - before
            before = until
        return parts

    def _cuts(self, segments: list[tuple[Class, int]]) -> Iterator[tuple[Class, int]]:
        for cls, to_us in segments[:-1]:
            yield cls, self._until(to_us)
        yield segments[-1][0], sum(energy_mj for _, _, energy_mj in self._stretches.values())

    def _put(self, from_us: int, to_us: int, energy_mj: int) -> None:
        key = from_us // self._width_us
        known = self._stretches.get(key, (from_us, to_us, 0))
        whole_mj = known[2] + energy_mj
        self._stretches[key] = (min(known[0], from_us), max(known[1], to_us, from_us), whole_mj)

    def _until(self, at_us: int) -> int:
        return sum(_drawn(at_us, *stretch) for stretch in self._stretches.values())


def _drawn(at_us: int, from_us: int, to_us: int, energy_mj: int) -> int:
    """Return the millijoules of a stretch until a time, drawn evenly.

    >>> [_drawn(at_us, 10, 20, 7) for at_us in (5, 10, 15, 20, 25)]
    [0, 0, 3, 7, 7]
    """
    if at_us >= to_us:
        return energy_mj
    return energy_mj * (at_us - from_us) // (to_us - from_us) if at_us > from_us else 0
