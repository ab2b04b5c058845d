"""Rent or buy: the month from which owned GPUs have cost less than rented ones, and what it hangs on.

Renting costs what is used. Owning costs the purchase at once and power, housing and people every month, used or not,
until the hardware is worn out; then it is worth its resale. No interest, no tax: a page to start the talk with.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

from cordee.errors import SpecError
from cordee.near import did_you_mean

HOURS_PER_YEAR = 8760.0
SWING = 0.2


@dataclass(frozen=True, slots=True)
class Ownership:
    """The assumptions of rent or buy. `busy_fraction` is the part of the year in which the GPUs are needed."""

    gpus: int
    busy_fraction: float
    rent_usd_per_gpu_hour: float
    purchase_usd_per_gpu: float
    life_years: float
    power_kw_per_gpu: float = 0.0
    usd_per_kwh: float = 0.0
    housing_usd_per_year: float = 0.0
    staff_usd_per_year: float = 0.0
    resale_fraction: float = 0.0

    @property
    def rent_usd_per_month(self) -> float:
        """Renting what is used."""
        return self.gpus * self.busy_fraction * HOURS_PER_YEAR / 12 * self.rent_usd_per_gpu_hour

    @property
    def purchase_usd(self) -> float:
        """The purchase of all GPUs, with their part of servers and network."""
        return self.gpus * self.purchase_usd_per_gpu

    @property
    def running_usd_per_month(self) -> float:
        """The monthly cost of owning; power is drawn while the GPUs work."""
        power = self.gpus * self.power_kw_per_gpu * self.busy_fraction * HOURS_PER_YEAR * self.usd_per_kwh
        return (power + self.housing_usd_per_year + self.staff_usd_per_year) / 12

    @property
    def life_months(self) -> float:
        """Until it is worn out."""
        return 12 * self.life_years


@dataclass(frozen=True, slots=True)
class Swing:
    """The break-even month when one assumption is a fifth lower, and a fifth higher; None is never."""

    name: str
    value: float
    low_month: int | None
    high_month: int | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """Rent against purchase over the life of the hardware."""

    assumed: Ownership
    break_even_month: int | None
    rent_usd: float
    own_usd: float
    own_usd_per_gpu_hour: float
    break_even_busy_fraction: float | None
    swings: tuple[Swing, ...]

    @property
    def verdict(self) -> str:
        """One sentence."""
        years = f"{self.assumed.life_years:g} years"
        if self.break_even_month is None:
            return f"Rent: bought GPUs never pay for themselves within their {years}."
        return f"Buy: they have paid for themselves in month {self.break_even_month} of {self.assumed.life_months:g}."


def break_even_month(
    purchase_usd: float, running_usd_per_month: float, rent_usd_per_month: float, life_months: float
) -> int | None:
    """Return the first month at whose end rent has cost more than owning; None if that is never within the life.

    >>> break_even_month(2_500_000, 250_000 / 12, 470_400, 96)
    6
    >>> break_even_month(2_500_000, 250_000 / 12, 470_400 / 12, 96) is None
    True
    """
    saved = rent_usd_per_month - running_usd_per_month
    if saved <= 0:
        return None
    months = purchase_usd / saved
    return max(1, math.ceil(months)) if math.ceil(min(months, life_months + 1)) <= life_months else None


def compare(assumed: Ownership) -> Comparison:
    """Compare both sides: the month in which they meet, and which assumptions move it most."""
    months = assumed.life_months
    rent = assumed.rent_usd_per_month * months
    running = assumed.running_usd_per_month * months
    own = assumed.purchase_usd * (1 - assumed.resale_fraction) + running
    used_hours = assumed.gpus * assumed.busy_fraction * HOURS_PER_YEAR * assumed.life_years
    return Comparison(
        assumed=assumed,
        break_even_month=_month(assumed),
        rent_usd=rent,
        own_usd=own,
        own_usd_per_gpu_hour=own / used_hours,
        break_even_busy_fraction=_break_even_busy_fraction(assumed),
        swings=_swings(assumed),
    )


def _month(assumed: Ownership) -> int | None:
    return break_even_month(
        assumed.purchase_usd, assumed.running_usd_per_month, assumed.rent_usd_per_month, assumed.life_months
    )


def _break_even_busy_fraction(assumed: Ownership) -> float | None:
    """Return the busy fraction at which both cost the same over the life; None if no year is long enough."""
    full = replace(assumed, busy_fraction=1.0)
    idle = replace(assumed, busy_fraction=0.0)
    per_fraction = full.rent_usd_per_month - (full.running_usd_per_month - idle.running_usd_per_month)
    fixed = assumed.purchase_usd * (1 - assumed.resale_fraction) / assumed.life_months + idle.running_usd_per_month
    if per_fraction <= 0 or fixed > per_fraction:
        return None
    return fixed / per_fraction


def _swings(assumed: Ownership) -> tuple[Swing, ...]:
    """Return each assumption a fifth lower and higher, the one that moves the month most first."""
    found = []
    for field in fields(assumed):
        value = getattr(assumed, field.name)
        if field.name in ("gpus", "resale_fraction", "life_years") or not value:
            continue
        low, high = (
            _month(
                replace(
                    assumed, **{field.name: min(value * factor, 1.0 if field.name == "busy_fraction" else math.inf)}
                )
            )
            for factor in (1 - SWING, 1 + SWING)
        )
        found.append(Swing(field.name, value, low, high))
    never = assumed.life_months + 1
    return tuple(sorted(found, key=lambda s: (-abs((s.low_month or never) - (s.high_month or never)), s.name)))


def ownership_from(table: Mapping[str, object], *, gpus: int, rent_usd_per_gpu_hour: float | None) -> Ownership:
    """Return the assumptions of a TOML file; GPUs and rent come from the plan where the file has none.

    Raises:
        SpecError: a name that is unknown or missing, or a value that is not a number in its range.
    """
    given = {"gpus": gpus, "rent_usd_per_gpu_hour": rent_usd_per_gpu_hour} | dict(table)
    names = {field.name for field in fields(Ownership)}
    unknown = sorted(set(given) - names)
    if unknown:
        hint = did_you_mean(unknown[0], sorted(names), listed="known are ")
        raise SpecError(f"assumptions: unknown name {unknown[0]!r}", hint=hint)
    for name in ("busy_fraction", "rent_usd_per_gpu_hour", "purchase_usd_per_gpu", "life_years"):
        if given.get(name) is None:
            raise SpecError(f"assumptions: {name} is missing", hint=f"add a line: {name} = {_EXAMPLES[name]}")
    for name, value in given.items():
        limit = 1.0 if name.endswith("_fraction") else math.inf
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= limit:
            within = "between 0 and 1" if limit == 1.0 else "that is not negative"
            raise SpecError(f"assumptions: {name} is {value!r}", hint=f"{name} must be a number {within}")
    for name in ("gpus", "busy_fraction", "life_years"):
        if not given[name]:
            raise SpecError(f"assumptions: {name} is 0", hint=f"{name} must be more than 0")
    return Ownership(**given)  # type: ignore[arg-type]


_EXAMPLES = {
    "busy_fraction": "0.7", "rent_usd_per_gpu_hour": "2.99", "purchase_usd_per_gpu": "40_000", "life_years": "4"
}  # fmt: skip
