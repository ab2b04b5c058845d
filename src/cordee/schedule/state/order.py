"""The order of jobs: tiers, and the standing of a job among those of its tier, priority and queue.

The whole order is: tier; overdue jobs, then jobs that restart, then the others; priority; the fair share of
the queue; standing; time of submission; job id. No two jobs are equal, and the order of reports does not matter. A
preempted job keeps its time of submission and so its turn.
"""

from bisect import bisect_right

from cordee.events import Tier
from cordee.schedule.policy import Policy
from cordee.schedule.quota.bounds import milli
from cordee.schedule.quota.held import MILLI
from cordee.schedule.state.records import JobRecord

TIERS = (Tier.PRODUCTION, Tier.STANDARD, Tier.PREEMPTIBLE)
"""Highest first."""

_LEVEL = {tier: level for level, tier in enumerate(TIERS)}

LEVEL_BITS = 59
"""The bits below the level in a standing; those of snapshots of earlier versions hold GPU time."""

UNKNOWN = 2**60
"""The standing of a job without a known run time, in orders by run time."""


def is_below(lower: Tier, upper: Tier) -> bool:
    """Return whether a job of tier `upper` may preempt one of tier `lower`.

    >>> is_below(Tier.PREEMPTIBLE, Tier.STANDARD), is_below(Tier.STANDARD, Tier.STANDARD)
    (True, False)
    """
    return _LEVEL[lower] > _LEVEL[upper]


def level(tier: Tier) -> int:
    """Return the number of a tier; 0 is the highest."""
    return _LEVEL[tier]


def counts_service(policy: Policy) -> bool:
    """Return whether standings are GPU time received, for which run times need not be known."""
    return policy.order in ("service", "las")


def pace(policy: Policy, gpu_milli: int, served_gpu_us: int, left_us: int | None) -> tuple[int, float]:
    """Return the value behind a job's standing, and its change in each microsecond that the job runs.

    `gpu_milli` are the thousandths of GPUs that it runs on.
    """
    if counts_service(policy):
        return served_gpu_us, gpu_milli / MILLI
    if policy.order == "fifo":
        return 0, 0
    if left_us is None:
        return UNKNOWN, 0
    return (left_us, 0) if policy.order == "sjf" else (left_us * gpu_milli // MILLI, -gpu_milli / MILLI)


def standing(policy: Policy, levels: tuple[int, ...], record: JobRecord, left_us: int | None) -> int:
    """Return the standing of a waiting job; the smaller, the sooner its turn.

    In orders by GPU time received it is a level: jobs of one level have their turns in the order of arrival, so that
    jobs of one length end one after another instead of all at the end. In the others it is the run time or GPU time
    that is left.
    """
    value, _ = pace(policy, milli(record.job), record.served_gpu_us, left_us)
    if not counts_service(policy):
        return value
    return bisect_right(levels, value) << LEVEL_BITS


def relevelled(standing_: int, before: tuple[int, ...], levels: tuple[int, ...]) -> int:
    """Return the standing of a level once there are other levels: of the one in which it begins.

    >>> relevelled(2 << LEVEL_BITS, (1, 16, 256), (1, 256)) >> LEVEL_BITS
    1
    """
    return bisect_right(levels, (0, *before)[standing_ >> LEVEL_BITS]) << LEVEL_BITS


def compared_standing(policy: Policy, standing_: int) -> int:
    """Return the part of a standing that counts against running jobs: one of a worse level can lose its turn."""
    return standing_ >> LEVEL_BITS if counts_service(policy) else standing_
