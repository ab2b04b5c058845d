"""The three ports between the scheduler core and a world: Clock, Store, Executor.

The service and the simulator implement them differently and share everything else.
Nothing asks which of the two it serves.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cordee.events import AttemptPlaced, Estimate, Event, KillOrdered, NoticeGiven

Command = AttemptPlaced | NoticeGiven | KillOrdered
"""A decision that agents carry out: start, notify, kill. Idempotent by (job_id, epoch) and kind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One record of a stream that an executor forwards.

    Attributes:
        source: the stream's name, such as `gpt-abcdef.2/rank0` or `node/local/3`.
        seq: 1, 2, ... within the stream; the store keeps the highest one seen, so a repeated record changes nothing.
    """

    source: str
    seq: int
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A command that was committed and whose delivery is not confirmed."""

    number: int
    command: Command
    spec: str  # the job's JobSpec as JSON
    estimate: Estimate | None = None  # the plan's answer for the GPUs of an attempt that starts


class Clock(Protocol):
    """Time as the world tells it."""

    def now_us(self) -> int:
        """Microseconds since the Unix epoch."""
        ...


class Store(Protocol):
    """The log and what is derived from it, in one transaction."""

    def commit(self, events: Sequence[Event], *, seen: Iterable[tuple[str, int]] = ()) -> None:
        """Append events, update the tables, enqueue the commands that follow and move the streams' marks, or nothing.

        Raises:
            StoreError: nothing was changed.
        """
        ...

    def events(self, after: int = 0) -> Iterable[tuple[int, Event]]:
        """The log from the record after number `after`, numbered from 1."""
        ...

    def mark(self, source: str) -> int:
        """Return the highest committed `seq` of a stream; 0 if none."""
        ...

    def pending(self) -> Sequence[Pending]:
        """Return the commands that are not confirmed, oldest first."""
        ...

    def confirm(self, number: int) -> None:
        """Take note that the command was delivered."""
        ...


class Executor(Protocol):
    """The machines that run the ranks."""

    def reports(self) -> Sequence[Report]:
        """Return the reports that were not acknowledged; they may repeat, and never skip within a stream."""
        ...

    def acknowledge(self, source: str, seq: int) -> None:
        """Take note that a stream was committed up to `seq`."""
        ...

    def carry_out(self, pending: Pending) -> bool:
        """Hand the command to the agents concerned; return True when all of them have it on disk."""
        ...
