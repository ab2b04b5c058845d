"""What was tried in vain and need not be tried again before something became free or somebody's turn changed."""

from dataclasses import dataclass, field
from typing import NamedTuple


class Power(NamedTuple):
    """Whom a waiting job may push."""

    tier: int
    priority: int
    standing: int | None  # in its own tier those who stand worse; None: nobody
    borrowers: frozenset[str] = frozenset()  # queues that hold what is its own by quota
    moves: int | None = None  # not to push, but to move attempts of so many GPUs at most

    def reaches(self, other: "Power") -> bool:
        """Whether it may push everybody that the other may."""
        if self.tier > other.tier or other.borrowers - self.borrowers:
            return False
        if self.tier < other.tier or other.standing is None:
            return True
        return self.standing is not None and self.standing <= other.standing and self.priority >= other.priority


@dataclass(slots=True)
class Vain:
    """Shapes for which no room could be made, and by which power.

    It holds while no GPU becomes free (`State.gains` stays) and until the next change of turns: whatever else happens,
    placements and arrivals, makes room for nobody.
    """

    gains: int = -1
    from_us: int = 0
    until_us: int | None = None
    tried: dict[object, list[Power]] = field(default_factory=dict)
    full: frozenset[object] = frozenset()  # shapes without a place, at whatever time, where nothing was kept for others

    def at(self, gains: int, now_us: int) -> "Vain":
        """What of it still holds."""
        if gains != self.gains or self.from_us > now_us:
            return Vain(gains, now_us)
        if self.until_us is not None and now_us >= self.until_us:
            return Vain(gains, now_us, full=self.full)
        tried = {shape: list(powers) for shape, powers in self.tried.items()}
        return Vain(gains, now_us, self.until_us, tried, self.full)

    def reaches(self, shape: object, power: Power) -> bool:
        """Whether as much or more was tried already."""
        tried = self.tried.get(shape)
        return tried is not None and any(each.reaches(power) for each in tried)

    def add(self, shape: object, power: Power) -> None:
        """This was not enough."""
        self.tried.setdefault(shape, []).append(power)
