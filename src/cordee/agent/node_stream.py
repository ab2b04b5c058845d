"""The streams of a node's agents: that of this agent's epoch, and those of earlier epochs until the server has them."""

import logging
import math
from collections import deque
from functools import partial
from pathlib import Path

from cordee.agent.clock import Clock
from cordee.agent.link import Link
from cordee.agent.takeover import read_ends
from cordee.event_json import encode
from cordee.events import Event, RanksEnded
from cordee.telemetry.stream import StreamReader, StreamRecord, StreamWriter
from cordee.units import plural

RETRY_S = 5.0
"""The time between two tries to write what a full disk did not take."""

_log = logging.getLogger("cordee.agent")


class NodeStream:
    """The reports of one node's agent: on disk before they are sent, and in memory while the disk takes none.

    Args:
        folder: the agent's folder.
        node: the node's name.
        link: forwards the streams.
        clock: the time.

    Attributes:
        problem: why the disk takes no reports; "" while it does.
        retry_s: the monotonic time of the next try to write; infinite while nothing waits for the disk.
    """

    def __init__(self, folder: Path, node: str, link: Link, clock: Clock) -> None:
        self._folder, self._node, self._link, self._clock = folder, node, link, clock
        self.problem, self.retry_s = "", math.inf
        self._current: _EpochStream | None = None
        self._unwritten: list[_EpochStream] = []  # with records that the disk has not taken, oldest first
        self._waiting: list[Event] = []  # reports from before the first epoch
        # By stream: the ends that the server has not committed yet.
        self._ends: dict[str, list[tuple[int, RanksEnded]]] = {}
        self._older: dict[str, tuple[Path, int]] = {}  # streams of earlier epochs: file and last seq

    @property
    def epoch_min(self) -> int:
        """The lowest epoch without a stream on this disk."""
        return 1 + max((int(path.stem) for path in self._paths()), default=0)

    def forward_older(self) -> set[str]:
        """Forward the streams of earlier agents; return the tags of attempts that ended in them."""
        for path in self._paths():
            source = self._source(path.stem)
            self._link.add_node_source(source, partial(StreamReader, path))
            self._ends[source], last_seq = read_ends(path)
            self._older[source] = (path, last_seq)
        return {f"{ended.job_id}.{ended.epoch}" for ends in self._ends.values() for _, ended in ends}

    def begin(self, epoch: int) -> None:
        """Write the reports into the stream of this epoch from now on."""
        before = self._current
        if before is not None:
            self._older[before.source] = (before.path, before.seq)
            before.end()
        self._current = _EpochStream(self._source(str(epoch)), self._folder / f"{epoch}.jsonl")
        self._link.add_node_source(self._current.source, self._current.reader)
        waiting, self._waiting = self._waiting, []
        for event in waiting:
            self.append(event)

    def append(self, event: Event) -> None:
        """Report an event; before the first epoch, and on a full disk, it waits in memory."""
        stream = self._current
        if stream is None:
            self._waiting.append(event)
            return
        seq = stream.append(event)
        if isinstance(event, RanksEnded):
            self._ends.setdefault(stream.source, []).append((seq, event))
        if stream not in self._unwritten:
            self._unwritten.append(stream)
        self.write()

    def write(self) -> None:
        """Write what waits in memory, as far as the disk takes it."""
        try:
            while self._unwritten:
                self._unwritten[0].write()
                del self._unwritten[0]
        except OSError as error:
            self._failed(error)
        else:
            if self.problem:
                _log.warning("the disk of %s takes reports again", self._folder)
            self.problem, self.retry_s = "", math.inf

    def _failed(self, error: OSError) -> None:
        """Note that the disk has not taken something, and try again later."""
        if not self.problem:
            _log.error(
                "the disk of %s takes nothing: %s; reports wait in memory, and are lost if this agent ends"
                " (hint: free space on that disk)",
                self._folder,
                error,
            )
        self.problem = f"its agent cannot write to its disk: {error.strerror or error}"
        self.retry_s = self._clock.now_s() + RETRY_S

    def settle(self, source: str, seq: int) -> list[RanksEnded]:
        """Return the ends that the server has committed, now that it has a stream up to `seq`."""
        ends = self._ends.get(source, [])
        settled = [ended for each_seq, ended in ends if each_seq <= seq]
        self._ends[source] = [(each_seq, ended) for each_seq, ended in ends if each_seq > seq]
        older = self._older.get(source)
        if older is not None and seq >= older[1]:
            del self._older[source]
            self._link.drop(source)
            for stream in [each for each in self._unwritten if each.source == source]:
                self._unwritten.remove(stream)
                stream.close()
            older[0].unlink(missing_ok=True)
        return settled

    def close(self) -> None:
        """Close this agent's stream."""
        if self._unwritten:
            waiting = sum(each.waiting for each in self._unwritten)
            _log.error("%s that the disk did not take may be lost", plural(waiting, "report"))
        for stream in [*self._unwritten, *([self._current] if self._current else [])]:
            stream.close()

    def _paths(self) -> list[Path]:
        numbered = [path for path in self._folder.glob("*.jsonl") if path.stem.isdigit()]
        return sorted(numbered, key=lambda each: int(each.stem))

    def _source(self, epoch: str) -> str:
        return f"node/{self._node}/{epoch}"


class _EpochStream:
    """The stream of one epoch: a file, and the records that the disk has not taken.

    Attributes:
        source: its name.
        path: its file.
        seq: of its last record.
    """

    def __init__(self, source: str, path: Path) -> None:
        self.source, self.path, self.seq = source, path, 0
        self._unwritten: deque[tuple[int, Event]] = deque()
        self._writer: StreamWriter | None = None
        self._ended = False

    @property
    def waiting(self) -> int:
        """Return the number of records that are only in memory."""
        return len(self._unwritten)

    def append(self, event: Event) -> int:
        """Add a record, which `write` writes; return its seq."""
        self.seq += 1
        self._unwritten.append((self.seq, event))
        return self.seq

    def write(self) -> None:
        """Write the records that are only in memory.

        Raises:
            OSError: the disk does not take all of them.
        """
        if self._writer is None:
            self._writer = StreamWriter(self.path, durable=True)
        while self._unwritten:
            self._writer.append(self._unwritten[0][1])
            self._unwritten.popleft()
        if self._ended:
            self.close()

    def end(self) -> None:
        """Close the file once everything is written."""
        self._ended = True
        if not self._unwritten:
            self.close()

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def reader(self, after: int) -> "_EpochReader":
        """Return a reader of all records after this seq."""
        return _EpochReader(StreamReader(self.path, after), self._unwritten)


class _EpochReader:
    """A reader of a stream's file, and then of the records that are only in memory."""

    def __init__(self, file: StreamReader, unwritten: deque[tuple[int, Event]]) -> None:
        self._file, self._unwritten = file, unwritten

    @property
    def at_end(self) -> bool:
        """Return whether the last `read` reached the current end."""
        return self._file.at_end

    def read(self, limit: int) -> list[StreamRecord]:
        """Return the next records, `limit` at most."""
        found = self._file.read(limit)
        for seq, event in self._unwritten:
            if seq == self._file.after + 1 and len(found) < limit:
                found.append(StreamRecord(seq, encode(event)))
                self._file.after = seq  # so that it is skipped when it is in the file too
        return found

    def close(self) -> None:
        """Close the file."""
        self._file.close()
