"""Counts of the changes to a state, by which the scheduler knows whether earlier results still hold."""

from cordee.events import Event
from cordee.schedule.state.journal import Journal


class Changes:
    """Counts of changes.

    Attributes:
        total: changes after which a cycle may decide something.
        gains: those of them after which more may fit, or turns may change otherwise than by time.
        newest: the event of the last change.
    """

    __slots__ = ("_journal", "gains", "newest", "total")

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.total = self.gains = 0
        self.newest: Event | None = None

    def count(self, *, gain: bool = True) -> None:
        """Count a change."""
        self._journal.note(self.set, self.total, self.gains, self.newest)
        self.total += 1
        self.gains += gain

    def name(self, event: Event) -> None:
        """Note the event that made the last change; what `count` noted of it takes this back as well."""
        self.newest = event

    def set(self, total: int, gains: int, newest: Event | None) -> None:
        """Set all of them: to take changes back, or to equal another state."""
        self.total, self.gains, self.newest = total, gains, newest
