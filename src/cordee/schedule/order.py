"""Whose turn it is: tiers, and where a job stands among those of its tier, priority and queue.

The whole order is: tier; who has waited too long, then who starts again at once, then the others; priority; the share
of the queue; standing; time of submission; job id. No two jobs are equal and the order of reports does not matter. A
job that was preempted keeps its time of submission and so its turn.
"""

from bisect import bisect_right

from cordee.events import Tier
from cordee.schedule.policy import Policy
from cordee.schedule.records import JobRecord

TIERS = (Tier.PRODUCTION, Tier.STANDARD, Tier.PREEMPTIBLE)
"""Highest first."""

_LEVEL = {tier: level for level, tier in enumerate(TIERS)}

LEVEL_BITS = 59
"""A standing is a level and, below it, so many bits of GPU time: 160 million GPU-hours."""

UNKNOWN = 2**60
"""The standing of a job of which nobody says how long it takes, where that decides."""


def is_below(lower: Tier, upper: Tier) -> bool:
    """Whether a job of tier `upper` may push one of tier `lower`.

    >>> is_below(Tier.PREEMPTIBLE, Tier.STANDARD), is_below(Tier.STANDARD, Tier.STANDARD)
    (True, False)
    """
    return _LEVEL[lower] > _LEVEL[upper]


def level(tier: Tier) -> int:
    """0 is the highest tier."""
    return _LEVEL[tier]


def counts_service(policy: Policy) -> bool:
    """Whether a standing is what a job has received; nobody needs to know how long it takes."""
    return policy.order in ("service", "las")


def pace(policy: Policy, gpus: int, served_gpu_us: int, left_us: int | None) -> tuple[int, int]:
    """What decides a job's standing, and how fast it changes while the job runs on so many GPUs, each microsecond."""
    if counts_service(policy):
        return served_gpu_us, gpus
    if policy.order == "fifo":
        return 0, 0
    if left_us is None:
        return UNKNOWN, 0
    return (left_us, 0) if policy.order == "sjf" else (left_us * gpus, -gpus)


def standing(policy: Policy, record: JobRecord, left_us: int | None) -> int:
    """Where a waiting job stands; the smaller, the sooner.

    With levels of GPU time received it is the level, and inside a level (ours) the time; else by length or GPU time.
    """
    value, _ = pace(policy, record.job.gpus, record.served_gpu_us, left_us)
    if not counts_service(policy):
        return value
    return (bisect_right(policy.levels_gpu_us, value) << LEVEL_BITS) + (value if policy.order == "service" else 0)


def compared_standing(policy: Policy, standing_: int) -> int:
    """What of a standing counts against a running job: who is of a worse level can lose its turn, not an equal."""
    return standing_ >> LEVEL_BITS if counts_service(policy) else standing_
