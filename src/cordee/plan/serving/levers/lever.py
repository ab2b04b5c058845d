"""One lever: a change, its effect on tokens and dollars, and its crossover."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lever:
    """One change: tokens a second of a GPU after over before, dollars after over before, and its crossover.

    `usd_per_mtok` are the dollars of a million tokens after it; None without a price.
    """

    name: str
    change: str
    factor: float | None
    usd_factor: float | None
    crossover: str
    usd_per_mtok: float | None = None
