"""The running jobs that quotas let a waiting job preempt."""

from collections.abc import Callable
from dataclasses import dataclass, field

from cordee.events import Job
from cordee.schedule.quota.bounds import Bound, Refusal
from cordee.schedule.quota.held import Holder
from cordee.schedule.quota.tree import upward


@dataclass(slots=True)
class VictimFilter:
    """The running jobs that a waiting one may preempt. Each one that is allowed counts as if it had notice.

    Any subset of the allowed jobs may therefore be preempted together. Query the cheapest first.
    """

    _path: tuple[Holder, ...]
    _inside: dict[Holder, bool]  # by queue of its path: whether the job's side stays inside its quota
    _within: Refusal | None
    _owner: str
    _leaf: Callable[[str], Holder]
    _gone: dict[Holder, int] = field(default_factory=dict)

    def allows(self, victim: Job, gpu_milli: int, *, below: bool) -> bool:
        """Return whether this running job may be preempted; `below`: by tier or by its time slice.

        In its own queue a job preempts jobs below it. From other queues it takes back borrowed GPUs of any tier while
        its own side stays inside its quota, and preempts jobs below it that no quota of theirs shields.
        """
        path = self._leaf(victim.queue).path
        meets = next(level for level, holder in enumerate(path) if holder in self._inside)
        if meets == 0:
            allowed = below
        else:
            over = all(holder.net - self._gone.get(holder, 0) > holder.quota for holder in path[:meets])
            inside = self._inside[self._path[self._path.index(path[meets]) - 1]]
            allowed = (inside and over) or (below and (inside or over))
        if allowed and self._helps(victim, path):
            for holder, less in upward(path, -gpu_milli, self._gone):
                self._gone[holder] = self._gone.get(holder, 0) - less
            return True
        return False

    def _helps(self, victim: Job, path: tuple[Holder, ...]) -> bool:
        """Return whether the victim lifts the refusal; only jobs of the queue (and the user) lift its limit."""
        if self._within is None or self._within.bound is Bound.KEPT:
            return True
        if self._within.bound is Bound.USER_LIMIT and victim.owner != self._owner:
            return False
        return any(holder.queue.name == self._within.queue for holder in path)
