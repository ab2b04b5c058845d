"""Events of chains: people hold, release, requeue and prioritize jobs; jobs leave the lines for a while, and return."""

from dataclasses import dataclass

from cordee.ids import JobId


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHeld:
    """The owner or an operator holds a job: it does not start until a `HoldReleased`.

    With `leave` the job is paused: while it runs it gets notice, saves, and gives its GPUs back.
    """

    at_us: int
    job_id: JobId
    by: str
    leave: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class HoldReleased:
    """The owner or an operator resumes a held or paused job: it may start again."""

    at_us: int
    job_id: JobId
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RequeueRequested:
    """The owner or an operator sends a job to the end of its queue.

    A running one gets notice and saves first; one that has ended runs again.
    """

    at_us: int
    job_id: JobId
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPrioritized:
    """A waiting job goes to the top of its queue (by an operator), or takes the place of another job of its owner."""

    at_us: int
    job_id: JobId
    by: str
    place_of: JobId | None = None  # the job that gets its place in turn; None: to the top


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceBooked:
    """An operator books a node for maintenance: by then its attempts have saved and left, and nothing starts there."""

    at_us: int
    booking: str  # its id
    node: str
    from_us: int
    until_us: int
    by: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class MaintenanceCancelled:
    """A booking is void: an operator cancelled it, or it is over."""

    at_us: int
    booking: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationMade:
    """Nodes are reserved: in this time they take only jobs of one queue or one user, and others have left by then."""

    at_us: int
    reservation: str  # its id
    nodes: tuple[str, ...]
    from_us: int
    until_us: int
    by: str
    why: str = ""
    queue: str | None = None  # either this or `user`
    user: str | None = None

    @property
    def whom(self) -> str:
        """For whom the nodes are reserved: `queue eval`, `user ann`."""
        return f"user {self.user}" if self.queue is None else f"queue {self.queue}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationBegan:
    """From now on a reserved node takes only the jobs for which it is reserved; the others there leave in time."""

    at_us: int
    reservation: str
    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationCancelled:
    """A reservation is void: somebody cancelled it, or it is over."""

    at_us: int
    reservation: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDeferred:
    """The scheduler takes a job out of its line: it may not start now."""

    at_us: int
    job_id: JobId
    state: str  # held, paused, or waiting: for other jobs or for a time
    why: str
    until_us: int | None = None  # when it is looked at again; None: only after a change


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReleased:
    """The scheduler puts a job that was deferred into its line."""

    at_us: int
    job_id: JobId
    why: str
