"""Who waits, in lines of jobs that are alike: what one of a line cannot get, those behind it in the line cannot.

A line is a tier, a priority, a queue and a shape, so that ten thousand jobs that wait are a few dozen lines. Within a
line jobs stand by their standing (`share.standing`), then by the time of submission, then by id.
"""

from bisect import bisect_right
from dataclasses import dataclass, field

from cordee.events import Job
from cordee.ids import JobId
from cordee.schedule.journal import Journal
from cordee.schedule.order import level
from cordee.schedule.records import NEVER, JobRecord

Place = tuple[int, int, JobId]
"""Standing, time of submission, job id."""

Shape = tuple[object, ...]
"""Everything about a job that decides where it can lie."""


def shape_of(job: Job) -> Shape:
    """Equal for two jobs that fit in exactly the same places."""
    return (
        job.gpus, job.gpu_name, job.capacity, job.unit_gpus, job.within, job.sizes,
        job.gpu_milli, job.cpu_milli, job.memory_bytes,
    )  # fmt: skip


@dataclass(slots=True)
class Line:
    """Waiting jobs of one tier, priority, queue and shape.

    Attributes:
        places: all of them, ascending.
        ages: when each will have waited so long that it goes first, ascending.
        lengths: how long each will run at most, as far as somebody says so, ascending.
    """

    tier: int
    priority: int
    queue: str
    owner: str
    shape: Shape
    places: list[Place] = field(default_factory=list)
    ages: list[tuple[int, JobId]] = field(default_factory=list)
    lengths: list[tuple[int, JobId]] = field(default_factory=list)

    def behind(self, place: Place | None) -> Place | None:
        """The place after this one; None is before the first."""
        at = 0 if place is None else bisect_right(self.places, place)
        return self.places[at] if at < len(self.places) else None


LineKey = tuple[int, int, str, str, Shape]


class Waiting:
    """All lines; changed by `State` only."""

    def __init__(self, journal: Journal) -> None:
        self.lines: dict[LineKey, Line] = {}
        self.count = 0
        self._journal = journal
        self.since: list[tuple[int, JobId]] = []  # when each was queued for the last time, ascending
        self._known: dict[JobId, tuple[LineKey, int, int, int]] = {}  # line, standing, its ages and its lengths

    def __len__(self) -> int:
        return self.count

    def job_ids(self) -> set[JobId]:
        """Everybody who waits."""
        return set(self._known)

    def standing(self, job_id: JobId) -> int:
        """Where a waiting job stands in its line."""
        return self._known[job_id][1]

    def key(self, job_id: JobId) -> LineKey:
        """Return the key of the line of a waiting job."""
        return self._known[job_id][0]

    def line(self, job_id: JobId) -> Line:
        """The line of a waiting job."""
        return self.lines[self._known[job_id][0]]

    def length_us(self, job_id: JobId) -> int:
        """How long a waiting job will run at most; NEVER if nobody says so."""
        return self._known[job_id][3]

    def due_us(self, job_id: JobId) -> int:
        """When a waiting job will have waited too long; NEVER if that does not count."""
        return self._known[job_id][2]

    def add(
        self,
        record: JobRecord,
        *,
        standing: int,
        length_us: int,
        patience_us: int | None,
        queue: str,
        owner: str = "",
    ) -> None:
        """Queue a job.

        Args:
            record: of the job.
            standing: in its line.
            length_us: how long it will run at most; NEVER if nobody knows.
            patience_us: how long it may wait in all before it goes first.
            queue: where it counts.
            owner: if what one user may hold there is limited.
        """
        job, journal = record.job, self._journal
        key = (level(job.tier), -job.priority, queue, owner, shape_of(job))
        line = self.lines.get(key)
        if line is None:
            line = Line(level(job.tier), job.priority, queue, owner, key[-1])
            journal.put(self.lines, key, line)
        due_us = NEVER if patience_us is None else record.waits_since_us + patience_us - record.waited_us
        journal.insert(line.places, (standing, record.submitted_us, job.job_id))
        journal.insert(line.ages, (due_us, job.job_id))
        journal.insert(line.lengths, (length_us, job.job_id))
        journal.insert(self.since, (record.waits_since_us, job.job_id))
        journal.put(self._known, job.job_id, (key, standing, due_us, length_us))
        self._count(+1)

    def remove(self, record: JobRecord) -> None:
        """It was placed, or has ended."""
        job_id, journal = record.job.job_id, self._journal
        key, standing, due_us, length_us = self._known[job_id]
        line = self.lines[key]
        journal.remove(line.places, (standing, record.submitted_us, job_id))
        journal.remove(line.ages, (due_us, job_id))
        journal.remove(line.lengths, (length_us, job_id))
        journal.remove(self.since, (record.waits_since_us, job_id))
        journal.drop(self._known, job_id)
        if not line.places:
            journal.drop(self.lines, key)
        self._count(-1)

    def value(self) -> object:
        """A deep copy, to compare."""
        return {key: (tuple(line.places), tuple(line.ages)) for key, line in self.lines.items()}

    def _count(self, change: int) -> None:
        self.count += change
        self._journal.note(self._uncount, change)

    def _uncount(self, change: int) -> None:
        self.count -= change
