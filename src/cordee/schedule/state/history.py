"""Run times of ended jobs: the estimate of another job's, by the most similar ones, and how long the long jobs run.

Run times spread over orders of magnitude, so an estimate is a quantile of the known run times and not an average.
Shorter run times do not count for a job that has already run longer. Only `State` adds to it: a replay learns the same.
"""

from bisect import bisect_right, insort
from collections.abc import Iterator

from cordee.events import Job
from cordee.schedule.state.journal import remove_from
from cordee.units import US_PER_S

Key = tuple[str | int, ...]

KEPT = 64
"""The number of run times kept for each key, the newest ones."""

ENOUGH = 5
"""The least number of run times with which a key is used."""

_FIRST_S, _FIRST_JOBS = 150_000, 7
"""A history begins as if this many jobs of this length had ended: the first few that end are the shortest ones."""


class History:
    """Run times by key; the result of `add` is the argument with which `forget` undoes it."""

    _newest: dict[Key, list[int]]
    _sorted: dict[Key, list[int]]
    _sum_s: int  # of all run times
    _sum_s2: int  # of their squares

    def __init__(self) -> None:
        self._newest, self._sorted = {}, {}
        self._sum_s, self._sum_s2 = _FIRST_JOBS * _FIRST_S, _FIRST_JOBS * _FIRST_S**2

    def add(self, job: Job, ran_us: int) -> tuple[tuple[Key, int, int | None], ...]:
        """Add the run time of a job; return each key, the run time, and the oldest one that it replaced."""
        undo: list[tuple[Key, int, int | None]] = []
        self._count(ran_us, +1)
        for key in _keys(job):
            newest, ascending = self._newest.setdefault(key, []), self._sorted.setdefault(key, [])
            oldest = newest.pop(0) if len(newest) == KEPT else None
            if oldest is not None:
                remove_from(ascending, oldest)
            newest.append(ran_us)
            insort(ascending, ran_us)
            undo.append((key, ran_us, oldest))
        return tuple(undo)

    def forget(self, added: tuple[tuple[Key, int, int | None], ...]) -> None:
        """Undo the newest `add`."""
        self._count(added[0][1], -1)
        for key, ran_us, oldest in reversed(added):
            newest, ascending = self._newest[key], self._sorted[key]
            newest.pop()
            ascending.remove(ran_us)
            if oldest is not None:
                newest.insert(0, oldest)
                insort(ascending, oldest)
            elif not newest:
                del self._newest[key], self._sorted[key]

    def left_us(self, job: Job, ran_us: int, percent: int) -> int | None:
        """Return the percentile of the run time left to such jobs; None if too few are known.

        >>> from cordee.ids import JobId
        >>> job, history = Job(job_id=JobId("a"), name="a", owner="me", gpus=8), History()
        >>> for seconds in (10, 20, 30, 40, 1000): _ = history.add(job, seconds)
        >>> history.left_us(job, 0, 50), history.left_us(job, 25, 50), history.left_us(job, 0, 90)
        (30, 15, 1000)
        """
        known, shorter = self._similar(job, ran_us)
        longer = len(known) - shorter
        return known[shorter + min(longer - 1, longer * percent // 100)] - ran_us if longer else None

    @property
    def long_run_us(self) -> int:
        """Return how long the jobs run that hold the cluster: the mean run time, weighted by run time.

        A random moment of work lies in a job of this length on average, so it is what waiting jobs wait for.

        >>> from cordee.ids import JobId
        >>> job, history = Job(job_id=JobId("a"), name="a", owner="me", gpus=8), History()
        >>> for _ in range(99_000): _ = history.add(job, 1000 * US_PER_S)
        >>> history.long_run_us // US_PER_S  # (7 x 150,000^2 + 99,000 x 1,000^2) / (7 x 150,000 + 99,000 x 1,000)
        2563
        """
        return self._sum_s2 * US_PER_S // self._sum_s

    def _count(self, ran_us: int, sign: int) -> None:
        ran_s = ran_us // US_PER_S
        self._sum_s += sign * ran_s
        self._sum_s2 += sign * ran_s**2

    def longer(self, job: Job, ran_us: int) -> list[int]:
        """Return the run times of the most similar jobs that ran longer, ascending; empty if too few are known."""
        known, shorter = self._similar(job, ran_us)
        return known[shorter:]

    def _similar(self, job: Job, ran_us: int) -> tuple[list[int], int]:
        """Return the run times of the most similar jobs among which some ran longer, and the number that did not."""
        for key in _keys(job):
            known = self._sorted.get(key)
            if known is not None and len(known) >= ENOUGH and known[-1] > ran_us:
                return known, bisect_right(known, ran_us)
        return [], 0

    def copied(self) -> "History":
        """Return a copy for a second owner."""
        new = History()
        new._newest = {key: list(times) for key, times in self._newest.items()}
        new._sorted = {key: list(times) for key, times in self._sorted.items()}
        new._sum_s, new._sum_s2 = self._sum_s, self._sum_s2
        return new

    def value(self) -> object:
        """Return a deep copy, to compare."""
        return {key: tuple(newest) for key, newest in self._newest.items()}, self._sum_s, self._sum_s2


def _keys(job: Job) -> Iterator[Key]:
    """Yield the keys from the most to the least similar jobs."""
    yield (job.owner, job.name, job.queue, job.gpus)
    yield (job.owner, job.gpus)
    yield (job.gpus,)
