"""The tree of queues, and budgets."""

from typing import Annotated, Literal

from pydantic import Field

from cordee.answers.view import View

Name = Annotated[str, Field(min_length=1, max_length=100)]
Amount = Annotated[int, Field(ge=1, le=2**53)]


class QueueRules(View):
    """The rules of a queue. `gpu_us_per_day` and `micro_usd_per_day` limit a sliding window of 24 hours."""

    name: str
    parent: str | None = None
    quota_gpus: int = 0
    limit_gpus: int | None = None
    lend: bool = True
    weight: int = 1
    user_gpus: int | None = None
    gpu_us_per_day: int | None = None
    micro_usd_per_day: int | None = None


class QueueView(QueueRules):
    """The current state of a queue, including the queues below it.

    GPUs are in thousandths. `lends` is the part of its quota left to others. `fair_share_ppb` is its present and past
    borrowing, divided by its weight, in billionths of the cluster: the lowest goes first.
    """

    depth: int
    held_gpu_milli: int
    borrowed_gpu_milli: int
    lends_gpu_milli: int
    fair_share_ppb: int
    users_gpu_milli: dict[str, int]
    day_gpu_us: int | None
    day_micro_usd: int | None
    running_jobs: int
    waiting_jobs: int
    waiting_gpu_milli: int


class QueuesView(View):
    """The tree of queues, parents first; `gpu_milli` counts the GPUs of all nodes in use."""

    at_us: int
    gpu_milli: int
    queues: list[QueueView]


class BudgetRules(View):
    """A budget of a queue (with those below it), a user, a user in a queue, or, with neither, of the cluster.

    It is of a calendar month in UTC, or total; of money, GPU time, or both. Jobs over a hard one wait; with `stops`
    running ones get notice before it is spent.
    """

    queue: Name | None = None
    user: Name | None = None
    per: Literal["month", "total"] = "month"
    micro_usd: Amount | None = None
    gpu_us: Amount | None = None
    hard: bool = False
    stops: bool = False


class BudgetView(BudgetRules):
    """A budget, and what is spent of it.

    `from_us` and `until_us` are its month's. `percent` is the highest part that was told. `ahead` is what will have
    been spent at the end of the month, at the rate of the last seven days, or since the first node joined if that is
    less; None: it has no end.
    """

    from_us: int
    until_us: int | None
    spent_micro_usd: int
    spent_gpu_us: int
    held_gpu_milli: int
    micro_usd_per_hour: int
    percent: int
    ahead_micro_usd: int | None
    ahead_gpu_us: int | None


class QueuesSubmission(View):
    """The complete new tree of queues; with budgets, these replace all others."""

    queues: list[QueueRules]
    budgets: list[BudgetRules] | None = None
