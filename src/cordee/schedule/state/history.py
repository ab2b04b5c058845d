"""Run times of ended jobs, from which the run time of another one is estimated: the most similar jobs first.

Run times spread over orders of magnitude, so an estimate is a quantile of the known run times and not an average.
Shorter run times do not count for a job that has already run longer. Only `State` adds to it: a replay learns the same.
"""

from bisect import bisect_right, insort
from collections.abc import Iterator

from cordee.events import Job
from cordee.schedule.state.journal import remove_from

Key = tuple[str | int, ...]

KEPT = 64
"""The number of run times kept for each key, the newest ones."""

ENOUGH = 5
"""The least number of run times with which a key is used."""


class History:
    """Run times by key; the result of `add` is the argument with which `forget` undoes it."""

    _newest: dict[Key, list[int]]
    _sorted: dict[Key, list[int]]

    def __init__(self) -> None:
        self._newest, self._sorted = {}, {}

    def add(self, job: Job, ran_us: int) -> tuple[tuple[Key, int, int | None], ...]:
        """Add the run time of a job; return each key, the run time, and the oldest one that it replaced."""
        undo: list[tuple[Key, int, int | None]] = []
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
        return new

    def value(self) -> object:
        """Return a deep copy, to compare."""
        return {key: tuple(newest) for key, newest in self._newest.items()}


def _keys(job: Job) -> Iterator[Key]:
    """Yield the keys from the most to the least similar jobs."""
    yield (job.owner, job.name, job.queue, job.gpus)
    yield (job.owner, job.gpus)
    yield (job.gpus,)
