"""The agenda of a cycle: jobs that it looks at besides the lines of waiting jobs."""

from dataclasses import dataclass, field, fields
from typing import NamedTuple

from cordee.events import Job, MaintenanceBooked, ReservationMade
from cordee.ids import JobId
from cordee.schedule.placement.place import is_for


class SweepCount(NamedTuple):
    """A sweep as the jobs that wait for its end see it."""

    ended: bool = False  # no further trial starts
    live: int = 0  # trials that have not ended
    done: int = 0  # trials that are done


@dataclass(slots=True)
class Agenda:
    """Jobs to look at; changed by `State` only, through its journal.

    Attributes:
        unsettled: jobs that leave, or that need a decision by the next `settle`.
        limits: (time of its notice for the job's own limits, live attempt), ascending.
        restarting: jobs that leave, or have left, for no other job's turn: they restart before others of their tier.
        entitled: jobs that wait for their queue's quota while borrowers give it back.
        shrunk: live attempts on fewer GPUs than their jobs asked for.
        times: (time at which a deferred job is looked at again, job), ascending.
        dependents: by a job or sweep that has not ended, the jobs that start after it.
        bookings: nodes booked for maintenance, by the booking's id.
        reservations: of nodes, to come or under way, by their ids.
        sweeps: sweeps that have not ended, and those for which a job waits.
    """

    unsettled: dict[JobId, None] = field(default_factory=dict)
    limits: list[tuple[int, JobId]] = field(default_factory=list)
    restarting: dict[JobId, None] = field(default_factory=dict)
    entitled: dict[JobId, None] = field(default_factory=dict)
    shrunk: dict[JobId, None] = field(default_factory=dict)
    times: list[tuple[int, JobId]] = field(default_factory=list)
    dependents: dict[str, tuple[JobId, ...]] = field(default_factory=dict)
    sweeps: dict[str, SweepCount] = field(default_factory=dict)
    bookings: dict[str, MaintenanceBooked] = field(default_factory=dict)
    reservations: dict[str, ReservationMade] = field(default_factory=dict)

    def reserved_for(self, job: Job) -> tuple[str, ...]:
        """Return for whom nodes are or will be reserved, of those reservations that are for a job."""
        return tuple(sorted({each.whom for each in self.reservations.values() if is_for(job, each.whom)}))

    def copied(self) -> "Agenda":
        """Return a copy for a second owner."""
        return Agenda(**{each.name: getattr(self, each.name).copy() for each in fields(self)})

    def value(self) -> object:
        """Return a deep copy, to compare."""
        sets = (self.unsettled, self.restarting, self.entitled, self.shrunk)
        chains = (tuple(self.times), dict(self.dependents), dict(self.sweeps), dict(self.bookings))
        return (*(frozenset(each) for each in sets), tuple(self.limits), *chains, dict(self.reservations))
