"""Lessons of ended jobs: run times of similar jobs, how long the long jobs run, and at which levels fewer jobs end.

Run times spread over orders of magnitude, so an estimate is a quantile of the known run times and not an average.
Shorter run times do not count for a job that has already run longer. Only `State` adds to it: a replay learns the same.

A job is preempted for what it has received only where jobs that received more end at a lower rate: the rate of a level
is the number of jobs that ended on it over all GPU time spent on it, by live jobs as well. Neighbouring levels are one
while the rate does not fall from one to the next (pool adjacent violators), so that the levels are those at which the
Gittins index falls (docs/decisions/0046).
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

from cordee.events import Job
from cordee.schedule.state.journal import remove_from
from cordee.units import US_PER_HOUR, US_PER_S

Key = tuple[str | int, ...]

KEPT = 64
"""The number of run times kept for each key, the newest ones."""

ENOUGH = 5
"""The least number of run times with which a key is used."""

LADDER = tuple(US_PER_HOUR * 16**level for level in range(6))
"""All bounds that levels may have, in GPU time received. The first is always one: it is what a preemption costs."""

_WIDTHS = tuple(upper - lower for lower, upper in pairwise((0, *LADDER)))
"""The GPU time that a job receives on each level of `LADDER` but the last."""

_FIRST_ENDS = 1.0
"""As many jobs are taken to have ended on each level, after as much GPU time as its upper bound: rates that fall."""

_FADE = 1 - 1 / 4096
"""The weight of an ended job for levels after each further one: the last few thousand count, and not those of years."""

_GROWTH = 20
"""Levels are learnt anew once the number of ended jobs has grown by one in so many, so that the cost for each falls."""


class Ended(NamedTuple):
    """The jobs that ended: their number, and sums by level of `LADDER`, in which a job counts less with each later one.

    Attributes:
        ends: the jobs that ended on the level.
        gpu_us: the GPU time that jobs spent on it.
    """

    jobs: int
    ends: tuple[float, ...]
    gpu_us: tuple[float, ...]


class Added(NamedTuple):
    """A job that was added: the sums before it, and each key, the run time, and the oldest one that it replaced."""

    before: Ended
    times: tuple[tuple[Key, int, int | None], ...]


class History:
    """Run times by key, and levels; the result of `add` is the argument with which `forget` undoes it.

    Attributes:
        levels_gpu_us: those of `LADDER` at which the rate of ends fell when it was learnt last, and the first one.
    """

    _newest: dict[Key, list[int]]
    _sorted: dict[Key, list[int]]
    _sum_s: int  # of all run times
    _sum_s2: int  # of their squares
    _ended: Ended
    _learns_at: int  # as many ended jobs
    levels_gpu_us: tuple[int, ...]

    def __init__(self) -> None:
        self._newest, self._sorted = {}, {}
        none = (0.0,) * (len(LADDER) + 1)
        self._ended, self._learns_at, self.levels_gpu_us = Ended(0, none, none), 1, LADDER
        self._sum_s = self._sum_s2 = 0

    def add(self, job: Job, ran_us: int, served_gpu_us: int = 0) -> Added:
        """Add a job that ended: its run time, and the GPU time that it received."""
        before, undo = self._ended, list[tuple[Key, int, int | None]]()
        self._count_ended(served_gpu_us)
        self._count(ran_us, +1)
        for key in _keys(job):
            newest, ascending = self._newest.setdefault(key, []), self._sorted.setdefault(key, [])
            oldest = newest.pop(0) if len(newest) == KEPT else None
            if oldest is not None:
                remove_from(ascending, oldest)
            newest.append(ran_us)
            insort(ascending, ran_us)
            undo.append((key, ran_us, oldest))
        return Added(before, tuple(undo))

    def forget(self, added: Added) -> None:
        """Undo the newest `add`."""
        self._ended = added.before
        self._count(added.times[0][1], -1)
        for key, ran_us, oldest in reversed(added.times):
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
        """Return how long the jobs run that hold the cluster: the mean run time, weighted by run time; 0: not known.

        A random moment of work lies in a job of this length on average, so it is what waiting jobs wait for.

        >>> from cordee.ids import JobId
        >>> job, history = Job(job_id=JobId("a"), name="a", owner="me", gpus=8), History()
        >>> for _ in range(9_000): _ = history.add(job, 1000 * US_PER_S)
        >>> for _ in range(1_000): _ = history.add(job, 10_000 * US_PER_S)
        >>> history.long_run_us // US_PER_S  # (9,000 x 1,000^2 + 1,000 x 10,000^2) / (9,000 x 1,000 + 1,000 x 10,000)
        5736
        """
        return self._sum_s2 * US_PER_S // self._sum_s if self._sum_s else 0

    @property
    def ended(self) -> int:
        """Return the number of jobs that ended."""
        return self._ended.jobs

    @property
    def learns(self) -> bool:
        """Return whether enough jobs have ended since to learn levels anew."""
        return self._ended.jobs >= self._learns_at

    @property
    def learnt(self) -> tuple[tuple[int, ...], int]:
        """The levels learnt last, and when to learn again: all that `learn` changes, to take it back."""
        return self.levels_gpu_us, self._learns_at

    @learnt.setter
    def learnt(self, value: tuple[tuple[int, ...], int]) -> None:
        self.levels_gpu_us, self._learns_at = value

    def learn(self, live_gpu_us: Iterable[int]) -> None:
        """Learn the levels anew, from the ended jobs and from what each of the others has received.

        >>> from cordee.ids import JobId
        >>> job, history = Job(job_id=JobId("a"), name="a", owner="me", gpus=8), History()
        >>> for _ in range(93): _ = history.add(job, 1000 * US_PER_S, 100 * US_PER_HOUR)  # None ends after 1 to 16.
        >>> history.learn([])
        >>> [bound // US_PER_HOUR for bound in history.levels_gpu_us]
        [1, 256, 4096, 65536, 1048576]
        """
        ended = self._ended
        live = [0] * (len(LADDER) + 1)  # whole numbers: the order of the jobs, which is that of a set, must not matter
        counts = [0] * (len(LADDER) + 1)
        for served_gpu_us in live_gpu_us:
            at = bisect_left(LADDER, served_gpu_us)
            counts[at] += 1
            live[at] += served_gpu_us - (LADDER[at - 1] if at else 0)
        above = 0  # jobs on higher levels, each of which spent the whole width of this one
        for at in range(len(LADDER) - 1, -1, -1):
            above += counts[at + 1]
            live[at] += above * _WIDTHS[at]
        spent = [of_ended + of_live for of_ended, of_live in zip(ended.gpu_us, live, strict=True)]
        self.learnt = _falling(ended.ends, spent), ended.jobs + max(1, ended.jobs // _GROWTH)

    def _count_ended(self, served_gpu_us: int) -> None:
        at, old = bisect_left(LADDER, served_gpu_us), self._ended
        self._ended = Ended(
            old.jobs + 1,
            tuple([count * _FADE + (level == at) for level, count in enumerate(old.ends)]),
            tuple([a * _FADE + b for a, b in zip_longest(old.gpu_us, _by_level(served_gpu_us), fillvalue=0)]),
        )

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
        new._ended, new.learnt = self._ended, self.learnt
        return new

    def value(self) -> object:
        """Return a deep copy, to compare."""
        newest = {key: tuple(times) for key, times in self._newest.items()}
        return newest, self._sum_s, self._sum_s2, self._ended, self.learnt


def _by_level(served_gpu_us: int) -> tuple[int, ...]:
    """Return how much of the GPU time that a job received it spent on each level of `LADDER`, up to its own."""
    at = bisect_left(LADDER, served_gpu_us)
    return (*_WIDTHS[:at], served_gpu_us - (LADDER[at - 1] if at else 0))


def _falling(ends: Sequence[float], gpu_us: Sequence[float]) -> tuple[int, ...]:
    """Return the bounds of `LADDER` at which the rate of ends falls, after the first one."""
    groups: list[tuple[float, float, int]] = []
    uppers = (*LADDER[1:], 16 * LADDER[-1])
    for bound, upper, count, spent in zip(LADDER, uppers, ends[1:], gpu_us[1:], strict=True):
        group = (count + _FIRST_ENDS, spent + _FIRST_ENDS * upper, bound)
        while groups and groups[-1][0] * group[1] <= group[0] * groups[-1][1]:
            earlier = groups.pop()
            group = (earlier[0] + group[0], earlier[1] + group[1], earlier[2])
        groups.append(group)
    return tuple(bound for _, _, bound in groups)


def _keys(job: Job) -> Iterator[Key]:
    """Yield the keys from the most to the least similar jobs."""
    yield (job.owner, job.name, job.queue, job.gpus)
    yield (job.owner, job.gpus)
    yield (job.gpus,)
