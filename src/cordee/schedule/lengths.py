"""How long jobs run, learnt from those that ended and those that run: what is left, given how long one has run.

The product-limit estimator (Kaplan and Meier, JASA 1958) over jobs of the same user and size, or of the same size, or
over all. Where it ends, and where nothing is known, a job that has run for t goes on for as long again, by the median:
P(longer than x) = t / x. The uniform numbers come from the caller.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from cordee.events import Job
from cordee.ids import JobId
from cordee.schedule.records import Attempt, JobRecord, Phase
from cordee.schedule.state import State
from cordee.units import US_PER_S

ENOUGH = 8
"""A group says nothing of a job unless so many of it ended after they had run as long as it has."""

NEWEST = 5_000
"""Only so many jobs that ended are looked at, the newest."""

_SHORTEST_US = 60 * US_PER_S  # where nothing is known at all
_PARTS = 1_000_000  # of an estimate


@dataclass(slots=True)
class Curve:
    """How many last longer than how long.

    Attributes:
        ends: of those that ended, ascending.
        beyond: the share that lasts longer than each of them.
    """

    ends: list[int] = field(default_factory=list)
    beyond: list[float] = field(default_factory=list)

    @classmethod
    def of(cls, lives: Iterable[tuple[int, bool]]) -> "Curve":
        """From lives: how long, and whether that was the end.

        >>> Curve.of([(1, True), (2, False), (3, True)]).beyond
        [0.6666666666666667, 0.0]
        """
        made, share = cls(), 1.0
        ordered = sorted(lives, key=lambda life: (life[0], not life[1]))
        for at, (length, ended) in enumerate(ordered):
            if ended:
                share *= 1 - 1 / (len(ordered) - at)
                made.ends.append(length)
                made.beyond.append(share)
        return made

    def knows(self, ran: int) -> bool:
        """Whether enough ended after so long."""
        return len(self.ends) - bisect_right(self.ends, ran) >= ENOUGH

    def total(self, ran: int, u: float) -> int:
        """How long one lasts that has lasted so long, for a uniform u in [0, 1).

        >>> curve = Curve.of((length, True) for length in range(1, 11))
        >>> [curve.total(4, u) for u in (0.0, 0.5, 0.99)], Curve().total(100, 0.5)
        ([5, 7, 10], 200)
        """
        at = bisect_right(self.ends, ran)
        wanted = (self.beyond[at - 1] if at else 1.0) * (1 - u)
        # Shares fall, so the first that is not above what is wanted is the one; u = 0 asks for the next end.
        found = bisect_left(self.beyond, -wanted + 1e-12, lo=at, key=lambda share: -share)
        if found < len(self.ends):
            return self.ends[found]
        last = max(ran, self.ends[-1] if self.ends else 0, 1)
        share = self.beyond[-1] if self.ends and self.ends[-1] > ran else wanted / (1 - u)
        return int(last * share / wanted)


_Group = tuple[object, ...]


class Lengths:
    """What a state teaches."""

    def __init__(self, state: State, now_us: int) -> None:
        """Learn; the state is only read."""
        self._now_us = now_us
        self._lives: dict[_Group, list[tuple[int, bool]]] = {}
        self._curves: dict[_Group, Curve] = {}
        looked_at = 0
        for record in reversed(state.jobs.values()):
            attempt = state.attempts.get(record.job.job_id)
            ended = record.phase.ended
            looked_at += ended
            ran_us = ran(record, attempt, now_us)
            if looked_at > NEWEST:
                break
            if ran_us > 0 and (ended or attempt is not None):
                whole = ended and record.phase in (Phase.DONE, Phase.FAILED, Phase.STOPPED)
                for group in _groups(record.job):
                    self._lives.setdefault(group, []).append((ran_us, whole))
                if record.job.estimate_us:
                    part = ran_us * _PARTS // record.job.estimate_us
                    self._lives.setdefault(("estimate",), []).append((part, whole))

    def left_us(self, job: Job, ran_us: int, u: float) -> int:
        """How long it runs on, for a uniform u in [0, 1)."""
        if job.estimate_us:
            curve, part = self._curve(("estimate",)), ran_us * _PARTS // job.estimate_us
            if curve.knows(part):
                return max(1, curve.total(part, u) * job.estimate_us // _PARTS - ran_us)
            if ran_us < job.estimate_us:
                return job.estimate_us - ran_us
        curves = [self._curve(group) for group in _groups(job)]
        curve = next((each for each in curves if each.knows(ran_us)), curves[-1])
        floor_us = ran_us if curve.ends else max(ran_us, _SHORTEST_US)
        return max(1, curve.total(floor_us, u) - ran_us)

    def all_left_us(self, state: State, uniform: Callable[[], float]) -> dict[JobId, int]:
        """Of every job that has not ended, in the order of their ids."""
        return {
            job_id: self.left_us(record.job, ran(record, state.attempts.get(job_id), self._now_us), uniform())
            for job_id, record in sorted(state.jobs.items())
            if not record.phase.ended
        }

    def _curve(self, group: _Group) -> Curve:
        if group not in self._curves:
            self._curves[group] = Curve.of(self._lives.get(group, ()))
        return self._curves[group]


def ran(record: JobRecord, attempt: Attempt | None, now_us: int) -> int:
    """How long a job has held GPUs."""
    return record.used_us + (0 if attempt is None else max(0, now_us - attempt.placed_us))


def _groups(job: Job) -> tuple[_Group, ...]:
    """The narrowest first."""
    size = job.gpus.bit_length()
    return (job.owner, size), (size,), ()
