"""Append-only streams of events, files of JSON lines {"seq": n, "event": {...}} with seq 1, 2, ...

Ranks write their spool with `StreamWriter`, agents their own stream; `StreamReader` follows either while it grows.
A process may be killed in the middle of a line, so a line counts once it has its newline. This file imports no torch.
"""

import json
import os
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from cordee.event_json import encode
from cordee.events import Event
from cordee.reports import COUNT_MAX

LINE_BYTES_MAX = 1 << 20
_TAIL_BYTES = 1 << 16
_READ_BYTES_MAX = 4 << 20  # lines that one `read` takes: bounds memory


class StreamRecord(NamedTuple):
    """One line of a stream; `event` is still encoded."""

    seq: int
    event: dict[str, object]


class StreamWriter:
    """A writer that appends to a stream and continues its numbers; safe to use from several threads.

    Args:
        path: the file; its folder is made.
        durable: fsync each record, so that it outlives the machine and not only the process.
    """

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._durable = durable
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        # A predecessor may have died within a line. No reader has taken that line, so cut it off.
        data = _tail(self._fd)
        size = os.fstat(self._fd).st_size
        if not data.endswith(b"\n") and data:
            os.ftruncate(self._fd, size - len(data) + data.rfind(b"\n") + 1)
        self.seq = max((record.seq for record in last_records(path)), default=0)

    def append(self, event: Event) -> int:
        """Write one event and return its seq.

        Raises:
            OSError: nothing was written.
        """
        with self._lock:
            seq = self.seq + 1
            line = memoryview(_line(seq, encode(event)))
            size = os.fstat(self._fd).st_size
            try:
                while line:
                    line = line[os.write(self._fd, line) :]
            except OSError:
                os.ftruncate(self._fd, size)  # a full disk took a part of the line; the next one must not continue it
                raise
            if self._durable:
                os.fsync(self._fd)
            self.seq = seq
            return seq

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)


class StreamReader:
    """A reader that follows a stream, which may not exist yet, and skips records up to seq `after` and invalid lines.

    A rank may replace its stream by anything: a file that is not a regular one counts as absent, and a line of more
    than LINE_BYTES_MAX bytes is skipped.

    Attributes:
        after: the seq of the last record read.
        at_end: whether the last `read` reached the current end; one may also end within what is skipped.
    """

    def __init__(self, path: Path, after: int = 0) -> None:
        self.path = path
        self.after = after
        self.at_end = False
        self._fd: int | None = None
        self._offset = 0
        self._overlong = False  # the offset is within a line that is too long

    def read(self, limit: int) -> list[StreamRecord]:
        """Return the next records, `limit` at most, from the next 5 MiB at most."""
        if self._fd is None:
            self._fd = _open_regular(self.path)
        self.at_end = self._fd is None
        records: list[StreamRecord] = []
        end = self._offset + _READ_BYTES_MAX
        while len(records) < limit and self._offset < end and not self.at_end:
            lines, self.at_end = self._lines()
            for line in lines:
                self._offset += len(line)
                record = None if self._overlong else _parse(line)
                self._overlong = False
                if record is not None and record.seq > self.after:
                    self.after = record.seq
                    records.append(record)
                    if len(records) == limit:
                        break
        return records

    def _lines(self) -> tuple[list[bytes], bool]:
        """Return the next complete lines, and whether there is none before the end of the file.

        An incomplete last line is read from the file again, since a new writer may replace it.
        """
        assert self._fd is not None
        size = _TAIL_BYTES
        while True:
            data = os.pread(self._fd, size, self._offset)
            end = data.rfind(b"\n") + 1
            if end or len(data) < size:
                return data[:end].splitlines(keepends=True), not end
            if size >= LINE_BYTES_MAX:
                self._offset += len(data)
                self._overlong = True
                return [], False
            size *= 2

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def last_records(path: Path) -> list[StreamRecord]:
    """Return the complete records within the stream's last 64 KiB, oldest first."""
    fd = _open_regular(path)
    if fd is None:
        return []
    try:
        data = _tail(fd)
    finally:
        os.close(fd)
    return list(_records(data))


def _open_regular(path: Path) -> int | None:
    """Open a file for reading; return None if it is absent, or a pipe, a folder or a link, or may not be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return None
    if stat.S_ISREG(os.fstat(fd).st_mode):
        return fd
    os.close(fd)
    return None


def _records(data: bytes) -> Iterator[StreamRecord]:
    *lines, _torn = data.split(b"\n")
    for line in lines:
        record = _parse(line)
        if record is not None:
            yield record


def _tail(fd: int) -> bytes:
    size = os.fstat(fd).st_size
    return os.pread(fd, _TAIL_BYTES, max(0, size - _TAIL_BYTES))


def _line(seq: int, event: dict[str, Any]) -> bytes:
    return json.dumps({"seq": seq, "event": event}, separators=(",", ":")).encode() + b"\n"


def _parse(line: bytes) -> StreamRecord | None:
    try:
        data = json.loads(line)
        record = StreamRecord(data["seq"], data["event"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    good = type(record.seq) is int and 0 < record.seq <= COUNT_MAX and isinstance(record.event, dict)
    return record if good else None
