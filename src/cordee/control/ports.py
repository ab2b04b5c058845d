"""The three ports between the scheduler core and a world: Clock, Store, Executor.

The server and the simulator implement them differently and use the same code for everything else;
that code does not know which of the two it runs in.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from cordee.events import AttemptPlaced, Estimate, Event, KillOrdered, ModelOrdered, NoticeGiven

Command = AttemptPlaced | NoticeGiven | KillOrdered | ModelOrdered
"""A decision that agents carry out: start, notify, kill, or hold a model; the last model ordered counts.

The others are idempotent by (job_id, epoch) and kind.
"""


class Report(NamedTuple):
    """One record of a stream that an executor forwards.

    Attributes:
        source: the stream's name, such as `gpt-abcdef.2/rank0` or `node/local/3`.
        seq: 1, 2, ... within the stream; the store keeps the highest one seen, so a repeated record changes nothing.
        is_checked: whether it comes from no other process, so that it needs no check.
    """

    source: str
    seq: int
    event: Event
    is_checked: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A committed command that the agents have not confirmed."""

    number: int
    command: Command
    spec: str  # the job's JobSpec as JSON
    estimate: Estimate | None = None  # the plan's answer for the GPUs of the attempt, if it starts one


class Clock(Protocol):
    """The current time, real or simulated."""

    def now_us(self) -> int:
        """Return microseconds since the Unix epoch."""
        ...


class Store(Protocol):
    """The log, and the tables derived from it in the same transaction."""

    def commit(self, events: Sequence[Event], *, seen: Iterable[tuple[str, int]] = ()) -> None:
        """Append events, update the tables, enqueue the resulting commands and move the streams' marks: all or nothing.

        Raises:
            StoreError: nothing was changed.
        """
        ...

    def events(self, after: int = 0) -> Iterable[tuple[int, Event]]:
        """Return the log after number `after`, numbered from 1."""
        ...

    def marks(self, sources: Sequence[str]) -> Mapping[str, int]:
        """Return the highest committed `seq` of each of these streams; 0 if none."""
        ...

    def pending(self) -> Sequence[Pending]:
        """Return the commands that are not confirmed, oldest first."""
        ...

    def confirm(self, numbers: Sequence[int]) -> None:
        """Record that these commands were delivered."""
        ...


class Executor(Protocol):
    """The machines that run the ranks."""

    def reports(self) -> Sequence[Report]:
        """Return the reports that were not acknowledged; they may repeat, and no stream skips a record."""
        ...

    def acknowledge(self, source: str, seq: int) -> None:
        """Record that a stream was committed up to `seq`."""
        ...

    def carry_out(self, pending: Pending) -> bool:
        """Hand the command to the agents concerned; return True when all of them have it on disk."""
        ...
