"""The Store port in memory: the log, the marks of the streams and the commands that wait."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from cordee.control.ports import Pending
from cordee.events import AttemptEnded, AttemptPlaced, Event, JobEnded, JobSubmitted, KillOrdered, NoticeGiven
from cordee.ids import JobId

_COMMANDS = frozenset((AttemptPlaced, NoticeGiven, KillOrdered))


class MemoryStore:
    """A store whose result is `log`; with a `sink` each event goes there, and none is kept."""

    def __init__(self, sink: Callable[[Event], None] | None = None) -> None:
        self.log: list[Event] = []
        self._take = sink or self.log.append
        self._number = 0
        self._marks: dict[str, int] = {}
        self._pending: dict[int, Pending] = {}
        self._specs: dict[JobId, str] = {}

    @property
    def open_jobs(self) -> int:
        """Jobs that have not ended."""
        return len(self._specs)

    def commit(self, events: Sequence[Event], *, seen: Iterable[tuple[str, int]] = ()) -> None:
        """Append, enqueue the commands that follow, move the marks: nothing here can fail half-way."""
        take = self._take
        for event in events:
            take(event)
            self._number += 1
            kind = type(event)
            if kind in _COMMANDS:
                spec = self._specs[event.job_id]  # type: ignore[union-attr]
                self._pending[self._number] = Pending(number=self._number, command=event, spec=spec)  # type: ignore[arg-type]
            elif kind is AttemptEnded and self._pending:
                self._forget(event)  # type: ignore[arg-type]
            elif kind is JobSubmitted:
                self._specs[event.job.job_id] = event.spec  # type: ignore[union-attr]
            elif kind is JobEnded:
                self._specs.pop(event.job_id, None)  # type: ignore[union-attr]
        marks = self._marks
        for source, seq in seen:
            if seq > marks.get(source, 0):
                marks[source] = seq

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """The log from the record after number `after`, numbered from 1."""
        for number in range(after, len(self.log)):
            yield number + 1, self.log[number]

    def mark(self, source: str) -> int:
        """The highest `seq` committed of a stream; 0 if none."""
        return self._marks.get(source, 0)

    def pending(self) -> Sequence[Pending]:
        """Commands not confirmed, oldest first."""
        return list(self._pending.values())

    def confirm(self, number: int) -> None:
        """The command was delivered."""
        self._pending.pop(number, None)

    def _forget(self, ended: AttemptEnded) -> None:
        """What was not delivered has nobody left to reach, and a late start must never be."""
        self._pending = {
            number: pending
            for number, pending in self._pending.items()
            if (pending.command.job_id, pending.command.epoch) != (ended.job_id, ended.epoch)
        }
