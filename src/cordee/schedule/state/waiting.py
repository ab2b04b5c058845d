"""Waiting jobs in lines: if the head of a line finds no place, the jobs behind it find none either.

A line is a tier, a priority, a queue and a shape, so that ten thousand waiting jobs are a few dozen lines. In a line
jobs are ordered by their standing (`order.standing`), then by the time of submission, then by id.
"""

from bisect import bisect_right, insort
from dataclasses import dataclass, field
from typing import NamedTuple

from cordee.events import Job
from cordee.ids import JobId
from cordee.schedule.quota.bounds import milli
from cordee.schedule.state.journal import Journal, remove_from
from cordee.schedule.state.order import TIERS, level
from cordee.schedule.state.records import JobRecord


class Place(NamedTuple):
    """The place of a waiting job in its line; places compare field by field, and the smallest goes first."""

    rank: int  # given by people (`records.Order`)
    standing: int
    submitted_us: int
    job_id: JobId


def place_of(record: JobRecord, standing: int) -> Place:
    """Return the place of a job of this standing, or the one that people gave it."""
    order = record.gate.order
    if order is None:
        return Place(0, standing, record.submitted_us, record.job.job_id)
    standing = standing if order.standing is None else order.standing
    submitted_us = record.submitted_us if order.submitted_us is None else order.submitted_us
    return Place(order.rank, standing, submitted_us, record.job.job_id)


class Age(NamedTuple):
    """The total wait of a waiting job; ages compare field by field, and the smallest has waited longest."""

    since_us: int  # the time since which it would have waited if it had waited without a break
    job_id: JobId
    used_us: int  # the run time of its attempts


Shape = tuple[object, ...]
"""All properties of a job on which its possible places depend."""

LineKey = tuple[int, int, str, str, Shape]
"""Tier, priority (negative), queue, owner where users have limits, shape."""


def shape_of(job: Job) -> Shape:
    """Return a key that is equal for two jobs that fit in exactly the same places."""
    return (
        job.gpus, job.gpu_name, job.capacity, job.unit_gpus, job.within, job.sizes,
        job.gpu_milli, job.cpu_milli, job.memory_bytes, job.mig,
    )  # fmt: skip


@dataclass(slots=True)
class Line:
    """Waiting jobs of one tier, priority, queue and shape.

    Attributes:
        gpu_milli: thousandths of GPUs that each of its jobs asks for.
        places: those of all its jobs, ascending.
        ages: those of all its jobs, ascending.
        lengths: (longest run time as far as it is known, job), ascending.
    """

    tier: int
    priority: int
    queue: str
    owner: str
    shape: Shape
    gpu_milli: int
    places: list[Place] = field(default_factory=list)
    ages: list[Age] = field(default_factory=list)
    lengths: list[tuple[int, JobId]] = field(default_factory=list)

    @property
    def key(self) -> LineKey:
        """Return its key in `Waiting.lines`."""
        return self.tier, -self.priority, self.queue, self.owner, self.shape

    def behind(self, place: Place) -> Place | None:
        """Return the place after this one."""
        at = bisect_right(self.places, place)
        return self.places[at] if at < len(self.places) else None


class _Entry(NamedTuple):
    """A waiting job as its line holds it."""

    key: LineKey
    place: Place
    standing: int
    age: Age
    length_us: int
    since_us: int


class Waiting:
    """All lines; changed by `State` only.

    Attributes:
        lines: by their keys; none is empty.
        count: waiting jobs.
        since: (time at which it was queued last, job), ascending.
        standings: (standing, job), ascending.
    """

    def __init__(self, journal: Journal) -> None:
        self.lines: dict[LineKey, Line] = {}
        self.count = 0
        self.since: list[tuple[int, JobId]] = []
        self.standings: list[tuple[int, JobId]] = []
        self._asked_milli = [0] * len(TIERS)
        self._entries: dict[JobId, _Entry] = {}
        self._journal = journal

    def __len__(self) -> int:
        return self.count

    def job_ids(self) -> set[JobId]:
        """Return all waiting jobs."""
        return set(self._entries)

    def standing(self, job_id: JobId) -> int:
        """Return the standing of a waiting job."""
        return self._entries[job_id].standing

    def place(self, job_id: JobId) -> Place:
        """Return the place of a waiting job in its line."""
        return self._entries[job_id].place

    def key(self, job_id: JobId) -> LineKey:
        """Return the key of the line of a waiting job."""
        return self._entries[job_id].key

    def line(self, job_id: JobId) -> Line:
        """Return the line of a waiting job."""
        return self.lines[self._entries[job_id].key]

    def length_us(self, job_id: JobId) -> int:
        """Return the longest run time of a waiting job; NEVER if it is not known."""
        return self._entries[job_id].length_us

    def age(self, job_id: JobId) -> int:
        """Return the time since which a job would have waited if it had waited without a break."""
        return self._entries[job_id].age.since_us

    def asked_milli(self, tier: int) -> int:
        """Return the thousandths of GPUs that the waiting jobs of a tier and of those above it ask for."""
        return sum(self._asked_milli[: tier + 1])

    def add(
        self,
        record: JobRecord,
        *,
        standing: int,
        length_us: int,
        queue: str,
        owner: str = "",
        reserved: tuple[str, ...] = (),
    ) -> None:
        """Queue a job.

        Args:
            record: the job's record.
            standing: its standing in the line.
            length_us: its longest run time; NEVER if it is not known.
            queue: the queue that counts it.
            owner: its owner if the GPUs of one user are limited there, else empty.
            reserved: for whom nodes are reserved, of those reservations that are for the job.
        """
        job = record.job
        shape = shape_of(job)
        key = (level(job.tier), -record.priority, queue, owner, (*shape, reserved) if reserved else shape)
        line = self.lines.get(key)
        if line is None:
            line = Line(level(job.tier), record.priority, queue, owner, key[-1], milli(job))
        place, since_us = place_of(record, standing), record.waits_since_us
        age = Age(record.waits_from_us, job.job_id, record.used_us)
        entry = _Entry(key, place, standing, age, length_us, since_us)
        self._put_in(job.job_id, entry, line)
        self._journal.note(self._take_out, job.job_id, entry, line)

    def remove(self, record: JobRecord) -> None:
        """Take out a job that was placed, or has ended."""
        job_id = record.job.job_id
        entry = self._entries[job_id]
        line = self.lines[entry.key]
        self._take_out(job_id, entry, line)
        self._journal.note(self._put_in, job_id, entry, line)

    def value(self) -> object:
        """Return a deep copy, to compare."""
        return {key: (tuple(line.places), tuple(line.ages)) for key, line in self.lines.items()}

    def _put_in(self, job_id: JobId, entry: _Entry, line: Line) -> None:
        if not line.places:
            self.lines[entry.key] = line
        insort(line.places, entry.place)
        insort(line.ages, entry.age)
        insort(line.lengths, (entry.length_us, job_id))
        insort(self.since, (entry.since_us, job_id))
        insort(self.standings, (entry.standing, job_id))
        self._entries[job_id] = entry
        self.count += 1
        self._asked_milli[line.tier] += line.gpu_milli

    def _take_out(self, job_id: JobId, entry: _Entry, line: Line) -> None:
        remove_from(line.places, entry.place)
        remove_from(line.ages, entry.age)
        remove_from(line.lengths, (entry.length_us, job_id))
        remove_from(self.since, (entry.since_us, job_id))
        remove_from(self.standings, (entry.standing, job_id))
        if not line.places:
            del self.lines[entry.key]
        del self._entries[job_id]
        self.count -= 1
        self._asked_milli[line.tier] -= line.gpu_milli
