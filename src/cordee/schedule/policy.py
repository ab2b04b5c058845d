"""By which rules `decide` decides: one value for each question that schedulers answer differently.

The default is Cordee's own answer to each. The others are here so that they can be compared on the same trace by the
same code: FIFO, SJF, EASY, Tiresias and the rest are combinations of these words (`named`).
"""

from dataclasses import dataclass
from typing import Literal

Order = Literal["service", "fifo", "sjf", "srsf", "las"]
"""Within a tier and a queue: least service first in a few levels (ours), arrival, shortest, shortest remaining, 2D-LAS."""

Backfill = Literal["easy", "fit", "none"]
"""Around a reservation for the first gang that waits; around nothing; never."""

Victims = Literal["dollars", "newest", "lowest", "none"]
"""The set that loses the fewest dollars; last started first; lowest tier and priority first; nobody is pushed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The rules of one scheduler."""

    order: Order = "service"
    backfill: Backfill = "easy"
    victims: Victims = "dollars"
    notice: bool = True  # False: victims are killed without warning
