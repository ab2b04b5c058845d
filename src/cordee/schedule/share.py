"""Whose turn it is: the order of all waiting jobs, over all queues.

Tier first, then priority, then the time of submission, then the job's id, so that no two jobs are equal and the order
of reports does not matter. A job that was preempted keeps its time of submission and so its turn.
A queue is a name today; quotas come in here, as a further element of the rank.
"""

from cordee.events import Job, Tier
from cordee.ids import JobId

TIERS = (Tier.PRODUCTION, Tier.STANDARD, Tier.PREEMPTIBLE)
"""Highest first."""

_LEVEL = {tier: level for level, tier in enumerate(TIERS)}

Rank = tuple[int, int, int, JobId]


def rank(job: Job, submitted_us: int) -> Rank:
    """The smaller, the sooner."""
    return (_LEVEL[job.tier], -job.priority, submitted_us, job.job_id)


def is_below(lower: Tier, upper: Tier) -> bool:
    """Whether a job of tier `upper` may push one of tier `lower`.

    >>> is_below(Tier.PREEMPTIBLE, Tier.STANDARD), is_below(Tier.STANDARD, Tier.STANDARD)
    (True, False)
    """
    return _LEVEL[lower] > _LEVEL[upper]


def level(tier: Tier) -> int:
    """0 is the highest tier."""
    return _LEVEL[tier]
