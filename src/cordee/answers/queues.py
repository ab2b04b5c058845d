"""The tree of queues."""

from cordee.answers.view import View


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


class QueuesSubmission(View):
    """The complete new tree of queues."""

    queues: list[QueueRules]
