"""How long a job will run, learnt from those that ended: alike ones first, then less and less alike ones.

Run times spread over orders of magnitude, so an estimate here is a quantile of what was seen and not an average; and
what a job has run already says that it is none of the shorter ones. Only `State` adds to it: a replay learns the same.
"""

from bisect import bisect_right, insort
from collections.abc import Iterator

from cordee.events import Job
from cordee.schedule.journal import remove_from

Key = tuple[object, ...]

KEPT = 64
"""So many run times of each key are kept, the newest."""

ENOUGH = 5
"""From so many on a key is believed."""


class History:
    """Run times by key; `add` answers with what `forget` needs to undo it."""

    def __init__(self) -> None:
        self._newest: dict[Key, list[int]] = {}
        self._sorted: dict[Key, list[int]] = {}

    def add(self, job: Job, ran_us: int) -> tuple[tuple[Key, int, int | None], ...]:
        """A job ended after so long; each key, its run time, and the one that it drives out."""
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
        """How much longer a job runs that has run so long, with so many in a hundred; None if too few are known.

        >>> from cordee.ids import JobId
        >>> job, history = Job(job_id=JobId("a"), name="a", owner="me", gpus=8), History()
        >>> for seconds in (10, 20, 30, 40, 1000): _ = history.add(job, seconds)
        >>> history.left_us(job, 0, 50), history.left_us(job, 25, 50), history.left_us(job, 0, 90)
        (30, 15, 1000)
        """
        known, shorter = self._alike(job, ran_us)
        longer = len(known) - shorter
        return known[shorter + min(longer - 1, longer * percent // 100)] - ran_us if longer else None

    def longer(self, job: Job, ran_us: int) -> list[int]:
        """Run times of the most alike jobs that ran longer, ascending; empty if too few are known."""
        known, shorter = self._alike(job, ran_us)
        return known[shorter:]

    def _alike(self, job: Job, ran_us: int) -> tuple[list[int], int]:
        """Run times of the most alike jobs of which some ran longer, and how many did not."""
        for key in _keys(job):
            known = self._sorted.get(key)
            if known is not None and len(known) >= ENOUGH and known[-1] > ran_us:
                return known, bisect_right(known, ran_us)
        return [], 0

    def copied(self) -> "History":
        """For a second owner."""
        new = History()
        new._newest = {key: list(times) for key, times in self._newest.items()}
        new._sorted = {key: list(times) for key, times in self._sorted.items()}
        return new

    def value(self) -> object:
        """A deep copy, to compare."""
        return {key: tuple(newest) for key, newest in self._newest.items()}


def _keys(job: Job) -> Iterator[Key]:
    """From the most to the least alike."""
    yield (job.owner, job.name, job.queue, job.gpus)
    yield (job.owner, job.gpus)
    yield (job.gpus,)
