"""The chargeback of each month: by user, queue, project and model, to the microsecond and micro-dollar of the ledger.

An attempt that lies in several months is divided by its time in each, every class alike, such that its parts sum to it.
What it lost for another job's sake is passed on to that job. Idle time is a line of its own, or divided by use.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple

from cordee.account.attempt import AttemptRow
from cordee.account.split import Class, Split, apportioned
from cordee.ids import JobId
from cordee.units import US_PER_DAY, US_PER_HOUR, month_start_us

_amounts = attrgetter(*Class)

IDLE = "(idle)"
"""The user of idle time that is charged to nobody."""


class About(NamedTuple):
    """The project and the model that a job names; "": none."""

    project: str
    model: str


class ChargeKey(NamedTuple):
    """The key of a line."""

    month_us: int
    user: str
    queue: str
    project: str
    model: str


class Amount(NamedTuple):
    """GPU time and money."""

    gpu_us: int = 0
    micro_usd: int = 0

    def plus(self, other: "Amount") -> "Amount":
        """Return the sum."""
        return Amount(self.gpu_us + other.gpu_us, self.micro_usd + other.micro_usd)


NO_AMOUNT = Amount()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChargeLine:
    """A line of the chargeback.

    Attributes:
        jobs: ids of the jobs that held something.
        gpu_us, micro_usd: what they held, by class.
        passed_on: the part of what they lost that others are charged with, who gained by it.
        payers: those others: users with their queues.
        charged: what others lost for the sake of these jobs.
        idle: what nobody held, as far as it is charged to this line.
        sources: of the prices.
    """

    key: ChargeKey
    jobs: frozenset[JobId] = frozenset()
    gpu_us: Split = field(default_factory=Split)
    micro_usd: Split = field(default_factory=Split)
    passed_on: Amount = NO_AMOUNT
    payers: frozenset[tuple[str, str]] = frozenset()
    charged: Amount = NO_AMOUNT
    idle: Amount = NO_AMOUNT
    sources: frozenset[str] = frozenset()

    @property
    def billed(self) -> Amount:
        """Return what it is charged with: held, less what is passed on, and what others lost and nobody held."""
        gpu_us = self.gpu_us.held - self.passed_on.gpu_us + self.charged.gpu_us + self.idle.gpu_us
        money = self.micro_usd.held - self.passed_on.micro_usd + self.charged.micro_usd + self.idle.micro_usd
        return Amount(gpu_us, money)

    @property
    def micro_usd_per_gpu_hour(self) -> int | None:
        """Return the mean price of what was held; None: nothing was."""
        held = self.gpu_us.held
        return self.micro_usd.held * US_PER_HOUR // held if held else None

    def plus(self, other: "ChargeLine") -> "ChargeLine":
        """Return the sum of two lines of one key."""
        return ChargeLine(
            key=self.key,
            jobs=self.jobs | other.jobs,
            gpu_us=self.gpu_us + other.gpu_us,
            micro_usd=self.micro_usd + other.micro_usd,
            passed_on=self.passed_on.plus(other.passed_on),
            payers=self.payers | other.payers,
            charged=self.charged.plus(other.charged),
            idle=self.idle.plus(other.idle),
            sources=self.sources | other.sources,
        )


def by_month(from_us: int, to_us: int) -> Iterator[tuple[int, int, int]]:
    """Yield the months of UTC that a stretch touches: start, and what of the stretch has passed before and after it.

    >>> [(at // US_PER_DAY, *days) for at, *days in by_month(30 * US_PER_DAY, 33 * US_PER_DAY)] == [
    ...     (0, 0, US_PER_DAY), (31, US_PER_DAY, 3 * US_PER_DAY)
    ... ]
    True
    """
    start_us = month_start_us(from_us)
    while True:
        after_us = month_start_us(start_us + 32 * US_PER_DAY)
        yield start_us, max(0, start_us - from_us), min(to_us, after_us) - from_us
        if after_us >= to_us:
            return
        start_us = after_us


def _part(amount: Split, before_us: int, after_us: int, whole_us: int) -> Split:
    """Return what of an amount, spread evenly over a stretch, lies between two of its times; the parts sum to it."""
    if after_us - before_us >= whole_us:
        return amount
    return Split(*(each * after_us // whole_us - each * before_us // whole_us for each in _amounts(amount)))


def charge_lines(
    rows: Iterable[AttemptRow],
    idle: Mapping[int, tuple[int, int]],
    about: Mapping[str, About],
    now_us: int,
    *,
    divides_idle: bool = False,
    others: Mapping[ChargeKey, ChargeLine] = MappingProxyType({}),
) -> list[ChargeLine]:
    """Return the lines, by month, user, queue, project and model.

    Args:
        rows: the accounts of attempts.
        idle: GPU-microseconds and micro-dollars that nobody held, by the start of the month.
        about: what each job names.
        now_us: the end of what is live.
        divides_idle: idle time is divided over the lines of its month by what they held, in dollars, else GPU time.
        others: lines of further attempts, without idle time.
    """
    lines = dict(others)
    for line in held_lines(rows, about, now_us).values():
        add_line(lines, line)
    for month_us, amounts in idle.items():
        if any(amounts):
            _charge_idle(lines, month_us, Amount(*amounts), divides=divides_idle)
    return [lines[key] for key in sorted(lines)]


def held_lines(rows: Iterable[AttemptRow], about: Mapping[str, About], now_us: int = 0) -> dict[ChargeKey, ChargeLine]:
    """Return the lines of these attempts by their keys, without idle time; `now_us` is the end of those that live."""
    lines: dict[ChargeKey, ChargeLine] = {}
    for row in rows:
        to_us = now_us if row.ended_us is None else row.ended_us
        for month_us, before_us, after_us in by_month(row.placed_us, to_us):
            parts = [_part(each, before_us, after_us, to_us - row.placed_us) for each in (row.gpu_us, row.micro_usd)]
            key = ChargeKey(month_us, row.owner, row.queue, *about.get(row.job_id, _NOTHING))
            line = ChargeLine(
                key=key,
                jobs=frozenset((row.job_id,)),
                gpu_us=parts[0],
                micro_usd=parts[1],
                sources=frozenset(row.price_sources),
            )
            lost = Amount(parts[0].lost, parts[1].lost)
            if row.charged is not None and lost != NO_AMOUNT:
                payer = ChargeKey(
                    month_us, row.charged.owner, row.charged.queue, *about.get(row.charged.job_id, _NOTHING)
                )
                add_line(lines, ChargeLine(key=payer, charged=lost))
                line = replace(line, passed_on=lost, payers=frozenset(((payer.user, payer.queue),)))
            add_line(lines, line)
    return lines


_NOTHING = About("", "")


def add_line(lines: dict[ChargeKey, ChargeLine], line: ChargeLine) -> None:
    """Add a line to that of its key, if there is one."""
    known = lines.get(line.key)
    lines[line.key] = line if known is None else known.plus(line)


def _charge_idle(lines: dict[ChargeKey, ChargeLine], month_us: int, amount: Amount, *, divides: bool) -> None:
    keys = sorted(key for key in lines if key.month_us == month_us) if divides else []
    weights = [lines[key].micro_usd.held for key in keys]
    if not any(weights):
        weights = [lines[key].gpu_us.held for key in keys]
    if not any(weights):
        key = ChargeKey(month_us, IDLE, "", "", "")
        lines[key] = ChargeLine(key=key, idle=amount)
        return
    parts = zip(*(apportioned(each, weights) for each in amount), strict=True)
    for key, part in zip(keys, parts, strict=True):
        lines[key] = replace(lines[key], idle=Amount(*part))
