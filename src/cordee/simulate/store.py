"""The Store port in memory: the log, the marks of the streams and the commands that wait."""

from collections.abc import Iterable, Iterator, Sequence

from cordee.control.ports import Pending
from cordee.events import AttemptPlaced, Event, JobSubmitted, KillOrdered, NoticeGiven
from cordee.ids import JobId


class MemoryStore:
    """What a run leaves behind is `log`."""

    def __init__(self) -> None:
        self.log: list[Event] = []
        self._marks: dict[str, int] = {}
        self._pending: dict[int, Pending] = {}
        self._specs: dict[JobId, str] = {}

    def commit(self, events: Sequence[Event], *, seen: Iterable[tuple[str, int]] = ()) -> None:
        """Append, enqueue the commands that follow, move the marks: nothing here can fail half-way."""
        for event in events:
            self.log.append(event)
            if isinstance(event, JobSubmitted):
                self._specs[event.job.job_id] = event.spec
            elif isinstance(event, AttemptPlaced | NoticeGiven | KillOrdered):
                number = len(self.log)
                self._pending[number] = Pending(number=number, command=event, spec=self._specs[event.job_id])
        for source, seq in seen:
            self._marks[source] = max(seq, self.mark(source))

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
        del self._pending[number]
