"""Budgets: use in a calendar month or in total, exact at every microsecond, and the budgets that limit it.

Use is kept of every queue and user, whether or not there is a budget, so that a budget that is set later counts the
month from its begin. It is base + rate x time: a change of holdings is one step, which the opposite change undoes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from cordee.events import Budget, BudgetReached, Job
from cordee.schedule.quota.bounds import Bound, Refusal, runway_us, show_cost, show_gpu_time
from cordee.schedule.quota.day import DAY_US, Pair
from cordee.schedule.quota.held import MILLI, Held, Holder, count
from cordee.units import US_PER_HOUR, US_PER_S, format_duration, format_month, month_start_us

PERCENTS = (50, 80, 100)
"""The parts of a budget that are told when they are spent."""

MONTH, TOTAL = "month", "total"

User = tuple[str, str]
"""The queue that jobs name, and their owner."""

BudgetKey = tuple[str | None, str | None, str]


@lru_cache(maxsize=64)
def _month_of_day(day: int) -> tuple[int, int]:
    from_us = month_start_us(day * DAY_US)
    return from_us, month_start_us(from_us + 32 * DAY_US)


def month_of(at_us: int) -> tuple[int, int]:
    """Return the begin of the calendar month of UTC that a moment lies in, and its end.

    >>> [each // DAY_US for each in month_of(40 * DAY_US)]
    [31, 59]
    """
    return _month_of_day(at_us // DAY_US)


class Spent(NamedTuple):
    """Use of GPU time and money: base + rate x time; `before` is that at the begin of the month of the last change."""

    base: Pair = (0, 0)
    rate: Pair = (0, 0)
    month_us: int = 0
    before: Pair = (0, 0)

    def until(self, at_us: int) -> Pair:
        """Return all use until a moment that is not before the last change."""
        return self.base[0] + self.rate[0] * at_us, self.base[1] + self.rate[1] * at_us

    def moved(self, at_us: int, change: Pair) -> "Spent":
        """Return the use after a change of the rate; the opposite at the same time undoes it."""
        month_us = month_of(at_us)[0]
        (a, b), (x, y), (u, v) = self.base, self.rate, change
        before = self.before if month_us == self.month_us else self.until(month_us)
        return Spent((a - u * at_us, b - v * at_us), (x + u, y + v), month_us, before)

    def within(self, per: str, now_us: int) -> Pair:
        """Return the use within the month until now, or in total."""
        whole = self.until(now_us)
        if per == TOTAL:
            return whole
        month_us = month_of(now_us)[0]
        before = self.before if month_us == self.month_us else self.until(month_us)
        return whole[0] - before[0], whole[1] - before[1]

    def plus(self, other: "Spent", now_us: int) -> "Spent":
        """Return the use of both from now on."""
        month_us = month_of(now_us)[0]
        pairs = (
            (self.base, other.base),
            (self.rate, other.rate),
            tuple(each.before if each.month_us == month_us else each.until(month_us) for each in (self, other)),
        )
        base, rate, before = ((a[0] + b[0], a[1] + b[1]) for a, b in pairs)
        return Spent(base, rate, month_us, before)


class Reached(NamedTuple):
    """The highest part of a budget that was told, in which month."""

    from_us: int
    percent: int


@dataclass(slots=True)
class Kept:
    """A budget with its use.

    Attributes:
        budget: the budget.
        used: what it counts.
        graces: thousandths of GPUs held by jobs with each grace period.
        reached: what was told of it last.
    """

    budget: Budget
    used: Spent = field(default_factory=Spent)
    graces: dict[int, int] = field(default_factory=dict)
    reached: Reached = field(default_factory=lambda: Reached(0, 0))

    def period(self, now_us: int) -> tuple[int, int | None]:
        """Return the begin and the end of its period."""
        return month_of(now_us) if self.budget.per == MONTH else (0, None)

    def rules(self) -> Iterator[tuple[int, int, Callable[[int], str]]]:
        """Yield its limits: which of a pair, the most, and how such an amount is shown."""
        if self.budget.gpu_us is not None:
            yield 0, self.budget.gpu_us * MILLI, show_gpu_time
        if self.budget.micro_usd is not None:
            yield 1, self.budget.micro_usd * MILLI * US_PER_HOUR, show_cost

    def refusal(self, job: Job, more: int, average_nano: int, now_us: int) -> Refusal | None:
        """Return a refusal if the job and the running jobs would use more than the rest; prices are the average."""
        until_us = self.period(now_us)[1]
        span_us = runway_us(job) if until_us is None else min(runway_us(job), until_us - now_us)
        used = self.used.within(self.budget.per, now_us)
        for which, most, show in self.rules():
            wanted = ((more * average_nano if which else more) + self.used.rate[which]) * span_us
            if used[which] + wanted <= most:
                continue
            budget = self.budget
            month = f" for {format_month(now_us)}" if budget.per == MONTH else ""
            text = f"{budget.whose} spent {show(used[which])} of the budget of {show(most)}{month}"
            text += f"; with it, the next {format_duration(span_us / US_PER_S)} would take {show(wanted)}"
            return Refusal(bound=Bound.BUDGET, queue=budget.queue or job.queue, text=text, until_us=until_us)
        return None

    def never(self, job: Job, more: int, average_nano: int) -> str | None:
        """Return the rule by which the job can never start; None if there is none."""
        for which, most, show in self.rules():
            wanted = (more * average_nano if which else more) * runway_us(job)
            if wanted > most:
                span = format_duration(runway_us(job) / US_PER_S)
                return f"its first {span} takes {show(wanted)}, and the budget of {self.budget.whose} is {show(most)}"
        return None

    def is_spent(self, grace_us: int, now_us: int) -> bool:
        """Return whether it is spent within the grace period, and running jobs are to leave before."""
        if not self.budget.stops:
            return False
        until_us = self.period(now_us)[1]
        span_us = grace_us if until_us is None else min(grace_us, until_us - now_us)
        used = self.used.within(self.budget.per, now_us)
        return any(used[which] + self.used.rate[which] * span_us >= most for which, most, _ in self.rules())

    def percent(self, now_us: int) -> int:
        """Return the highest of `PERCENTS` that is spent; 0: none."""
        used = self.used.within(self.budget.per, now_us)
        spent = [part for part in PERCENTS for which, most, _ in self.rules() if 100 * used[which] >= part * most]
        return max(spent, default=0)

    def reported(self, now_us: int) -> int:
        """Return the percentage that was told last in this period."""
        return self.reached.percent if self.reached.from_us == self.period(now_us)[0] else 0

    def wake_us(self, now_us: int) -> int | None:
        """Return the time at which it is spent, or a part of it that is told, if no holding changes; else None."""
        used, until_us = self.used.within(self.budget.per, now_us), self.period(now_us)[1]
        times = []
        for which, most, _ in self.rules():
            rate = self.used.rate[which]
            marks = [-(-part * most // 100) for part in PERCENTS if part > self.reported(now_us)]
            marks += [most - rate * grace_us for grace_us in self.graces] if self.budget.stops else []
            times += [now_us - (used[which] - mark) // rate for mark in marks if rate > 0 and mark > used[which]]
        if until_us is not None and self.used.rate != (0, 0):
            times.append(until_us)
        return min(times, default=None)


class SavedBudgets(NamedTuple):
    """The saved form: use by queue and user, and the budgets with what was told of each."""

    used: dict[User, Spent]
    budgets: list[tuple[Budget, Reached]]


class Budgets:
    """All budgets, and the use that they count.

    Attributes:
        kept: the budgets with their use.
        used: use by the queue that jobs name and their owner.
    """

    def __init__(self, used: Mapping[User, Spent] | None = None) -> None:
        self.kept: dict[BudgetKey, Kept] = {}
        self.used: dict[User, Spent] = dict(used or {})
        self._of: dict[User, tuple[Kept, ...]] = {}  # the budgets that count a user of a queue

    @property
    def hard(self) -> bool:
        """Return whether one of them keeps jobs from starting."""
        return bool(self.kept) and any(each.budget.hard for each in self.kept.values())

    @property
    def by_user(self) -> bool:
        """Return whether one of them keeps the jobs of a user from starting, and not those of others."""
        return bool(self.kept) and any(each.budget.hard and each.budget.user is not None for each in self.kept.values())

    def move(self, user: User, path: Sequence[Holder], grace_us: int, held: Held, at_us: int) -> None:
        """Add holdings of a user; the opposite at the same time undoes it."""
        change = (held.gpu_milli, held.nano_usd_per_hour)
        used = self.used.get(user, _NOTHING).moved(at_us, change)
        self.used[user] = used
        for each in self.of(user, path):
            each.used = each.used.moved(at_us, change)
            count(each.graces, grace_us, held.gpu_milli)

    def of(self, user: User, path: Sequence[Holder]) -> tuple[Kept, ...]:
        """Return the budgets that count a user's jobs in a queue, given with all those above it."""
        if not self.kept:
            return ()
        if user not in self._of:
            names = {None, user[0], *(holder.queue.name for holder in path[:-1])}
            self._of[user] = tuple(
                each
                for each in self.kept.values()
                if each.budget.queue in names and each.budget.user in (None, user[1])
            )
        return self._of[user]

    def due(self, now_us: int) -> list[BudgetReached]:
        """Return the events of the parts of budgets that are spent and were not told yet."""
        found = []
        for each in self.kept.values():
            percent = each.percent(now_us)
            if percent > each.reported(now_us):
                gpu, money = each.used.within(each.budget.per, now_us)
                reached = BudgetReached(
                    at_us=now_us,
                    budget=each.budget,
                    percent=percent,
                    from_us=each.period(now_us)[0],
                    gpu_us=gpu // MILLI,
                    micro_usd=money // (MILLI * US_PER_HOUR),
                )
                found.append(reached)
        return found

    def wake_us(self, now_us: int) -> int | None:
        """Return the time at which the next budget is spent, or a part that is told; None: none will be."""
        times = (each.wake_us(now_us) for each in self.kept.values())
        return min((at_us for at_us in times if at_us is not None), default=None)

    def saved(self) -> SavedBudgets:
        """Return the saved form."""
        return SavedBudgets(self.used, [(each.budget, each.reached) for each in self.kept.values()])

    def value(self) -> object:
        """Return a deep copy as plain values, to compare."""
        used = {user: each[:2] for user, each in self.used.items() if each[:2] != _NOTHING[:2]}
        kept = [(each.budget, each.used[:2], dict(each.graces), each.reached) for each in self.kept.values()]
        return used, kept


_NOTHING = Spent()


def rebuilt(
    saved: SavedBudgets,
    held: Mapping[tuple[str, str, int], Held],
    path_of: Callable[[str], Sequence[Holder]],
    at_us: int,
) -> Budgets:
    """Return the budgets with their use as this tree of queues counts it.

    Args:
        saved: the budgets, and the use by queue and user.
        held: what is held, by queue, owner and grace period.
        path_of: returns the holders that count the jobs of a queue.
        at_us: the time, not before the last change.
    """
    new = Budgets(saved.used)
    for budget, reached in saved.budgets:
        new.kept[budget.key] = Kept(budget, reached=reached)
    for user, used in new.used.items():
        for each in new.of(user, path_of(user[0])):
            each.used = each.used.plus(used, at_us)
    for (queue, owner, grace_us), amount in held.items():
        for each in new.of((queue, owner), path_of(queue)):
            count(each.graces, grace_us, amount.gpu_milli)
    return new


def changed(
    budgets: Iterable[tuple[Budget, Reached]], key: BudgetKey, new: Budget | None
) -> list[tuple[Budget, Reached]]:
    """Return budgets with one of them replaced or removed; of a new one nothing was told yet."""
    others = [each for each in budgets if each[0].key != key]
    return others if new is None else [*others, (new, Reached(0, 0))]
