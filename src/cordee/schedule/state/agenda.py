"""The agenda of a cycle: jobs that it looks at besides the lines of waiting jobs."""

from dataclasses import dataclass, field

from cordee.ids import JobId


@dataclass(slots=True)
class Agenda:
    """Jobs to look at; changed by `State` only, through its journal.

    Attributes:
        unsettled: jobs that leave, or that need a decision by the next `settle`.
        limits: (time of its notice for the job's own limits, live attempt), ascending.
        restarting: jobs that leave, or have left, for no other job's turn: they restart before others of their tier.
        entitled: jobs that wait for their queue's quota while borrowers give it back.
        shrunk: live attempts on fewer GPUs than their jobs asked for.
    """

    unsettled: dict[JobId, None] = field(default_factory=dict)
    limits: list[tuple[int, JobId]] = field(default_factory=list)
    restarting: dict[JobId, None] = field(default_factory=dict)
    entitled: dict[JobId, None] = field(default_factory=dict)
    shrunk: dict[JobId, None] = field(default_factory=dict)

    def copied(self) -> "Agenda":
        """Return a copy for a second owner."""
        return Agenda(
            self.unsettled.copy(), self.limits.copy(), self.restarting.copy(), self.entitled.copy(), self.shrunk.copy()
        )

    def value(self) -> object:
        """Return a deep copy, to compare."""
        sets = (self.unsettled, self.restarting, self.entitled, self.shrunk)
        return (*(frozenset(each) for each in sets), tuple(self.limits))
