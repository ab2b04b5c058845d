"""The streams that the agent forwards to its server, over the connection of the moment.

Rank streams go before the node's own streams, so that a RanksEnded never overtakes the reports of its ranks.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

from cordee.agent.messages import FromAgent, Records
from cordee.telemetry.stream import StreamReader, StreamRecord

IN_FLIGHT_MAX = 1000  # records sent and not yet committed; bounds memory on both sides
CHECKED_MAX = 1000  # records of one stream read per call: refused ones do not count against the window
SKIPS_MAX = 20  # reads of one stream per call that find no record in megabytes of what is none

Convert = Callable[[StreamRecord], dict[str, object] | None]
"""Return the event to forward, or None to leave the record out."""


class Line(Protocol):
    """An open connection to a server (`connection.Line`, or a test's).

    Attributes:
        address: this machine's address towards the server.
    """

    address: str

    def send(self, message: FromAgent) -> None:
        """Send a message, unless the connection ends before it is sent; never wait."""
        ...

    def hang_up(self) -> None:
        """Drop the connection at once; another one is opened by itself."""
        ...


class Reader(Protocol):
    """A reader of a stream while it grows (`StreamReader`, or one that reads memory too)."""

    @property
    def at_end(self) -> bool:
        """Return whether the last `read` reached the current end."""
        ...

    def read(self, limit: int) -> list[StreamRecord]:
        """Return the next records, `limit` at most; perhaps none where much is skipped."""
        ...

    def close(self) -> None:
        """Close the file."""
        ...


Opens = Callable[[int], Reader]
"""Return a reader of the records after a seq."""


@dataclass(slots=True)
class _Source:
    opens: Opens
    reader: Reader
    convert: Convert
    sent: int = 0
    seen: int = 0
    complete: bool = False  # no more records will be written


class Link:
    """The streams for the server, and the connection over which they are sent.

    Attributes:
        line: the connection; None while there is none.
        welcomed: whether the server accepted the claim.
    """

    def __init__(self) -> None:
        self.line: Line | None = None
        self.welcomed = False
        self._ranks: dict[str, _Source] = {}
        self._nodes: dict[str, _Source] = {}

    @property
    def sources(self) -> list[str]:
        """The names of the streams."""
        return [*self._ranks, *self._nodes]

    def add_rank_source(self, name: str, path: Path, convert: Convert) -> None:
        """Forward a rank's spool, except records for which `convert` returns None."""
        opens = partial(StreamReader, path)
        self._ranks[name] = _Source(opens, opens(0), convert)

    def add_node_source(self, name: str, opens: Opens) -> None:
        """Forward a stream of this node's agents, after those added before it."""
        self._nodes[name] = _Source(opens, opens(0), lambda record: record.event)

    def drop(self, name: str) -> None:
        """Stop forwarding a stream, since the server has all of it."""
        source = self._ranks.pop(name, None) or self._nodes.pop(name, None)
        if source is not None:
            source.reader.close()

    def close(self) -> None:
        """Close the streams' files."""
        for source in (*self._ranks.values(), *self._nodes.values()):
            source.reader.close()

    def complete(self, prefix: str) -> None:
        """Forward the rank streams of this prefix to their end before anything more of the node's own streams."""
        for name, source in self._ranks.items():
            source.complete = source.complete or name.startswith(prefix)

    def open(self, line: Line) -> None:
        """Use a new connection, which is not welcomed yet."""
        self.line, self.welcomed = line, False

    def hang_up(self) -> None:
        """Drop the connection; the next one starts from the server's marks."""
        if self.line is not None:
            self.line.hang_up()
        self.closed()

    def closed(self) -> None:
        """Forget the connection, which has ended."""
        self.line, self.welcomed = None, False

    def send(self, message: FromAgent) -> None:
        """Send a message if there is a connection."""
        if self.line is not None:
            self.line.send(message)

    def welcome(self, marks: dict[str, int]) -> None:
        """Continue each stream after the server's mark."""
        for name, source in (self._ranks | self._nodes).items():
            source.reader.close()
            source.sent = source.seen = marks.get(name, 0)
            source.reader = source.opens(source.seen)
        self.welcomed = True

    def seen(self, name: str, seq: int) -> None:
        """Note that the server has committed a stream up to `seq`."""
        source = self._ranks.get(name) or self._nodes.get(name)
        if source is not None:
            source.seen = max(source.seen, seq)

    def forward(self, *, hold: bool = False) -> None:
        """Send as many records of the streams as their windows allow; with `hold` none of the node's own streams.

        Each rank's stream has an equal part of one window, so that a rank that floods its spool does not block the
        others. The node's own streams wait only for spools that are complete.
        """
        if not self.welcomed:
            return
        window = max(1, IN_FLIGHT_MAX // max(1, len(self._ranks)))
        waits = hold
        for name, source in list(self._ranks.items()):
            at_end = self._send_records(name, source, window)
            waits = waits or (source.complete and not at_end)
        for name, source in list(self._nodes.items()) if not waits else ():
            if not self._send_records(name, source, IN_FLIGHT_MAX):
                return

    def _send_records(self, name: str, source: _Source, window: int) -> bool:
        """Send the records of a stream that its window allows; return whether its end was reached."""
        checked = 0
        while checked < CHECKED_MAX and source.sent - source.seen < window:
            records = source.reader.read(window - (source.sent - source.seen))
            if not records and source.reader.at_end:
                return True
            checked += len(records) or CHECKED_MAX // SKIPS_MAX
            converted = [(record.seq, source.convert(record)) for record in records]
            good = [(seq, event) for seq, event in converted if event is not None]
            if good:
                source.sent = good[-1][0]
                self.send(Records(source=name, seqs=[seq for seq, _ in good], events=[event for _, event in good]))
        return False
