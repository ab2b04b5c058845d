"""Budgets: what a queue or a user may spend in a calendar month or in total, and what happens to it."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The most that a queue, a user, or a user in a queue may spend.

    Attributes:
        queue: it counts what this queue and those below it hold; None: the whole cluster.
        user: it counts the jobs of one user; None: everybody's.
        per: `month` (of the calendar, in UTC) or `total`.
        micro_usd: the most money; None: any.
        gpu_us: the most GPU time; None: any.
        hard: jobs over it wait; otherwise it is only told when parts of it are spent.
        stops: of a hard one: running jobs get notice before it is spent; otherwise they are finished.
    """

    queue: str | None = None
    user: str | None = None
    per: str = "month"
    micro_usd: int | None = None
    gpu_us: int | None = None
    hard: bool = False
    stops: bool = False

    @property
    def key(self) -> tuple[str | None, str | None, str]:
        """Return what there is one budget of: queue, user and period."""
        return self.queue, self.user, self.per

    @property
    def whose(self) -> str:
        """Return whose it is.

        >>> Budget(queue="llm", user="yuki").whose, Budget(user="yuki").whose, Budget().whose
        ('yuki in queue llm', 'yuki', 'the cluster')
        """
        parts = (
            [self.user] if self.user is not None else [],
            [f"queue {self.queue}"] if self.queue is not None else [],
        )
        return " in ".join([*parts[0], *parts[1]]) or "the cluster"


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetSet:
    """An admin set a budget; it replaces that of the same queue, user and period."""

    at_us: int
    budget: Budget
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetRemoved:
    """An admin removed a budget."""

    at_us: int
    queue: str | None
    user: str | None
    per: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetReached:
    """A part of a budget is spent: the highest of the percentages that are told which is reached."""

    at_us: int
    budget: Budget
    percent: int
    from_us: int  # the begin of its month; 0: it has no period
    micro_usd: int  # spent
    gpu_us: int
