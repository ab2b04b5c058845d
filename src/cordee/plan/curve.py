"""The scaling curve: the same step on 8, 16, 32, ... GPUs, and the knee beyond which more do not pay."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from cordee.errors import LayoutError
from cordee.hardware.catalog import Price
from cordee.plan.candidates import Candidate
from cordee.plan.optimum import Case, optimum
from cordee.plan.search import default_choices, evaluate
from cordee.plan.space import Choices
from cordee.plan.training import Training
from cordee.plan.wanted import ANY_LAYOUT, LayoutWanted

# Below this fraction of the best speed of one GPU an added one is no longer worth its price: the knee.
WORTH = 0.5


@dataclass(frozen=True, slots=True)
class Point:
    """The best layout of one size. `added_fraction` is what each GPU added since the last size
    brings, as a fraction of what one brought at its best."""

    gpus: int
    candidate: Candidate | None
    added_fraction: float | None

    @property
    def tokens_per_s(self) -> float | None:
        """None where nothing fits or divides."""
        return None if self.candidate is None else self.candidate.tokens_per_s


@dataclass(frozen=True, slots=True)
class Curve:
    """All sizes, and the last one that is worth its GPUs."""

    training: Training
    points: tuple[Point, ...]
    knee: Point | None

    @property
    def fits(self) -> bool:
        """Return whether any layout fits on any of the sizes."""
        return self.smallest is not None

    @property
    def smallest(self) -> Point | None:
        """The fewest GPUs of the range on which it can be trained at all."""
        return next((point for point in self.points if point.candidate is not None), None)


def sizes(first: int, last: int) -> tuple[int, ...]:
    """Return the first size, doubled until the last, which always is one of them.

    >>> sizes(8, 512)
    (8, 16, 32, 64, 128, 256, 512)
    >>> sizes(8, 96)
    (8, 16, 32, 64, 96)

    Raises:
        LayoutError: a range that is empty or starts below 1.
    """
    if not 1 <= first <= last:
        raise LayoutError(f"{first}..{last} GPUs is an empty range", hint="write the smaller number first: 8..512xH100")
    found = []
    size = first
    while size < last:
        found.append(size)
        size *= 2
    return (*found, last)


def scaling_curve(
    largest: Case,
    counts: tuple[int, ...],
    *,
    price: Price | None = None,
    wanted: LayoutWanted = ANY_LAYOUT,
    choices: Callable[[Case], Choices] = default_choices,
) -> Curve:
    """Return the best layout of each size for one and the same step, and the knee.

    The knee is the last size before added GPUs bring less than half of what one brought at its best.
    """
    points: list[Point] = []
    most = 0.0
    last: tuple[int, float] | None = None
    for count in counts:
        case = replace(largest, gpus=count)
        winner, _ = optimum(case, wanted, choices(case))
        candidate = None if winner is None or winner.seconds is None else evaluate(case, winner.layout, price)
        added_fraction = None
        if candidate is not None and candidate.tokens_per_s is not None:
            speed = candidate.tokens_per_s
            added_fraction = 1.0 if last is None else (speed - last[1]) / (count - last[0]) / most
            most, last = max(most, speed / count), (count, speed)
        points.append(Point(count, candidate, added_fraction))
    return Curve(largest.training, tuple(points), _knee(points))


def _knee(points: list[Point]) -> Point | None:
    """Return the last size whose added GPUs were worth it, if a larger one is not."""
    known = [point for point in points if point.added_fraction is not None]
    for before, after in pairwise(known):
        if (after.added_fraction or 0.0) < WORTH:
            return before
    return None
