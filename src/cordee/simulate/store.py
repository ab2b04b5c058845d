"""The Store port in memory: the log, the marks of the streams and the pending commands."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import get_args

from cordee.control.ports import Command, Pending
from cordee.events import AttemptEnded, Event, JobEnded, JobSubmitted, RequeueRequested
from cordee.ids import JobId

_COMMANDS = frozenset(get_args(Command))
_KEPT = _COMMANDS | {AttemptEnded, JobSubmitted, JobEnded, RequeueRequested}


class MemoryStore:
    """A store whose result is `log`; with a `sink` each event goes there, and none is kept."""

    def __init__(self, sink: Callable[[Event], None] | None = None) -> None:
        self.log: list[Event] = []
        self._sink = sink
        self._number = 0
        self._marks: dict[str, int] = {}
        self._pending: dict[int, Pending] = {}
        self._specs: dict[JobId, str] = {}
        self._open: set[JobId] = set()

    @property
    def open_jobs(self) -> int:
        """Return the number of jobs that have not ended."""
        return len(self._open)

    def commit(self, events: Sequence[Event], *, seen: Iterable[tuple[str, int]] = ()) -> None:
        """Append events, enqueue their commands and move the marks; nothing here can fail half-way."""
        if self._sink is None:
            self.log.extend(events)
        else:
            for event in events:
                self._sink(event)
        for number, event in enumerate(events, start=self._number + 1):
            kind = type(event)
            if kind not in _KEPT:
                continue
            if kind in _COMMANDS:
                spec = self._specs[event.job_id]  # type: ignore[union-attr]
                self._pending[number] = Pending(number=number, command=event, spec=spec)  # type: ignore[arg-type]
            elif kind is AttemptEnded and self._pending:
                self._forget(event)  # type: ignore[arg-type]
            elif kind is JobSubmitted:
                self._specs[event.job.job_id] = event.spec  # type: ignore[union-attr]
                self._open.add(event.job.job_id)  # type: ignore[union-attr]
            elif kind is JobEnded:
                self._open.discard(event.job_id)  # type: ignore[union-attr]
            elif kind is RequeueRequested:
                self._open.add(event.job_id)  # type: ignore[union-attr]
        self._number += len(events)
        marks = self._marks
        for source, seq in seen:
            if seq > marks.get(source, 0):
                marks[source] = seq

    def events(self, after: int = 0) -> Iterator[tuple[int, Event]]:
        """Yield the log after record number `after`; records are numbered from 1."""
        for number in range(after, len(self.log)):
            yield number + 1, self.log[number]

    def marks(self, sources: Sequence[str]) -> dict[str, int]:
        """Return the highest committed `seq` of each of these streams; 0 if there is none."""
        return {source: self._marks.get(source, 0) for source in sources}

    def pending(self) -> Sequence[Pending]:
        """Return the commands that are not confirmed, oldest first."""
        return list(self._pending.values())

    def confirm(self, numbers: Sequence[int]) -> None:
        """Remove commands that were delivered."""
        for number in numbers:
            self._pending.pop(number, None)

    def _forget(self, ended: AttemptEnded) -> None:
        """Drop commands of an attempt that has ended: a late start must never be."""
        self._pending = {
            number: pending
            for number, pending in self._pending.items()
            if (pending.command.job_id, pending.command.epoch) != (ended.job_id, ended.epoch)
        }
