"""The commit log of one job: dense records `log/<n>`, each created only if absent. It defines which generations exist.

Kinds: `open` (an attempt begins and fences older ones), `commit` (a generation is whole), `gc` (some retire), `pin`.
A writer tries only the index after the last record it has read, so it has seen everything before what it appends.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from cordee.errors import CheckpointError, DestinationError, FencedError
from cordee.storage.files import Blobs
from cordee.storage.old_keys import renamed
from cordee.storage.sealed import FORMAT, Damaged, seal, unseal

FOLDER = "log"
DIGITS = 12
PUT_TRIES = 4
# The epoch of a visitor's records, which belong to no attempt.
VISITOR = 0


def log_key(index: int) -> str:
    """Return the key of a record; zero padded, so that listings sort.

    >>> log_key(7)
    'log/000000000007'
    """
    return f"{FOLDER}/{index:0{DIGITS}d}"


@dataclass(frozen=True)
class LogRecord:
    """One record; its kind has more `fields` (docs/design/checkpoint-format.md lists them)."""

    kind: str
    epoch: int
    nonce: str
    fields: dict[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the sealed bytes to store."""
        base = {"format": FORMAT, "kind": self.kind, "epoch": self.epoch, "nonce": self.nonce}
        return seal({**self.fields, **base})

    @staticmethod
    def from_bytes(data: bytes) -> "LogRecord":
        """Read a stored record.

        Raises:
            Damaged: the bytes are not what was written.
            CheckpointError: a newer Cordee wrote them.
        """
        body = renamed(unseal(data))
        version = body.pop("format", None)
        if not isinstance(version, int) or version > FORMAT:
            raise CheckpointError(
                f"the checkpoint log has format {version}, and this Cordee reads up to {FORMAT}",
                hint="install a newer Cordee",
            )
        try:
            return LogRecord(body.pop("kind"), body.pop("epoch"), body.pop("nonce"), body)
        except KeyError as error:
            raise Damaged(f"field {error} is missing") from error


@dataclass(frozen=True)
class LogEntry:
    """The content of one index: a record, or the reason why it cannot be read."""

    index: int
    record: LogRecord | None
    damage: str = ""

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a record that can be read."""
        assert self.record is not None, "an entry with a kind has a record"
        return self.record.fields


class Log:
    """One writer's view of the log: the entries that it has read, after which it appends."""

    def __init__(self, blobs: Blobs, *, epoch: int, nonce: str, entries: list[LogEntry]) -> None:
        self.blobs = blobs
        self.epoch = epoch
        self.nonce = nonce
        self.entries = entries
        self._opening = False

    @classmethod
    def open(cls, blobs: Blobs, *, nonce: str, epoch: int | None = None, **fields: Any) -> "Log":
        """Begin an attempt: append `open(epoch)`. Without a server the epoch is the last one in the log plus one.

        `fields` of the record: the time, and the number of ranks.

        Raises:
            FencedError: the log has a newer epoch, or this epoch with another nonce.
        """
        entries = read_entries(blobs)
        seen = max((entry.record.epoch for entry in entries if entry.record), default=0)
        log = cls(blobs, epoch=seen + 1 if epoch is None else epoch, nonce=nonce, entries=entries)
        log._opening = True
        for entry in entries:
            log._check(entry)
        log.append("open", **fields)
        log._opening = False
        return log

    @classmethod
    def visit(cls, blobs: Blobs, *, nonce: str) -> "Log":
        """Open the log to inspect, pin or collect while an attempt runs: fence nothing, and allow no commit."""
        return cls(blobs, epoch=VISITOR, nonce=nonce, entries=read_entries(blobs))

    @classmethod
    def join(cls, blobs: Blobs, *, epoch: int, nonce: str) -> "Log":
        """Open the log as part of an attempt that another process has opened."""
        log = cls(blobs, epoch=epoch, nonce=nonce, entries=[])
        log.refresh()
        return log

    def append(self, kind: str, make: Callable[[], dict[str, object]] | None = None, **fields: object) -> int:
        """Append one record, and return its index.

        `make` returns the fields, and is called again if another record came first, so that they fit the entries before
        the record. If it raises, nothing is appended.

        Raises:
            FencedError: a newer attempt owns the log.
            DestinationError: the store failed, and the record was not seen to arrive.
        """
        record, data = self._record(kind, make() if make else fields)
        failures = 0
        while True:
            index = len(self.entries)
            problem: DestinationError | None = None
            try:
                if self.blobs.put_if_absent(log_key(index), data):
                    self.entries.append(LogEntry(index, record))
                    return index
            except DestinationError as error:
                problem = error  # The put may still have arrived: the log shows it.
            entry = _read(self.blobs, index)
            if entry is None:
                failures += 1
                if failures == PUT_TRIES:
                    raise problem or DestinationError(f"{log_key(index)} exists and cannot be read")
                continue
            self._check(entry)  # Before it counts as read, so that a fenced writer finds this record each time.
            self.entries.append(entry)
            if entry.record == record:
                return index
            if make:
                record, data = self._record(kind, make())

    def refresh(self) -> list[LogEntry]:
        """Read the entries that were appended since, and return them.

        Raises:
            FencedError: a newer attempt is among them.
        """
        before = len(self.entries)
        for entry in _read_from(self.blobs, before):
            self._check(entry)
            self.entries.append(entry)
        return self.entries[before:]

    def commits(self) -> list[LogEntry]:
        """Return the entries of live generations, oldest first."""
        return live_commits(self.entries)

    def _record(self, kind: str, fields: dict[str, object]) -> tuple[LogRecord, bytes]:
        data = LogRecord(kind, self.epoch, self.nonce, fields).to_bytes()
        return LogRecord.from_bytes(data), data

    def _check(self, entry: LogEntry) -> None:
        if self.epoch == VISITOR:
            return  # A visitor commits nothing, so nothing fences it.
        record = entry.record
        if record is None:
            if self._opening or not self._has_opened():
                return  # A commit without effect: its writer finds this attempt's `open` before it.
            raise FencedError(
                f"log record {entry.index} cannot be read ({entry.damage}), so a newer attempt may own this log",
                hint="start the job again: a new attempt skips it",
            )
        if record.epoch > self.epoch or (record.epoch == self.epoch and record.nonce != self.nonce):
            raise FencedError(
                f"epoch {self.epoch} may not write any more: log record {entry.index} ({record.kind})"
                f" is of epoch {record.epoch}",
                hint="a newer attempt uses this destination, so this one must stop; give each job its own",
            )

    def _has_opened(self) -> bool:
        return any(entry.record and entry.record.nonce == self.nonce for entry in self.entries)


def read_entries(blobs: Blobs) -> list[LogEntry]:
    """Return all entries; a record that is missing in the middle counts as damaged."""
    listed = [int(key.rsplit("/", 1)[1]) for key in blobs.list(FOLDER) if key.rsplit("/", 1)[1].isdigit()]
    entries = [
        _read(blobs, index) or LogEntry(index, None, "it is missing") for index in range(max(listed, default=-1) + 1)
    ]
    return [*entries, *_read_from(blobs, len(entries))]


def of_kind(entries: list[LogEntry], kind: str) -> list[LogEntry]:
    """Return the entries whose record is of this kind."""
    return [entry for entry in entries if entry.record and entry.record.kind == kind]


def live_commits(entries: list[LogEntry]) -> list[LogEntry]:
    """Return the commits that no gc record has retired, oldest first."""
    retired = {index for entry in of_kind(entries, "gc") for index in entry.fields.get("retired", [])}
    return [entry for entry in of_kind(entries, "commit") if entry.index not in retired]


def pins(entries: list[LogEntry]) -> dict[int, str]:
    """Return the names of the pinned generations, which no gc retires."""
    found: dict[int, str] = {}
    for entry in of_kind(entries, "pin"):
        found.pop(entry.fields["generation"], None)
        if entry.fields["name"] is not None:
            found[entry.fields["generation"]] = entry.fields["name"]
    return found


def unfinished_gcs(entries: list[LogEntry]) -> list[LogEntry]:
    """Return begun gc records without their end: blobs that they name may be deleted at any time."""
    gcs = of_kind(entries, "gc")
    ended = {entry.fields["ends"] for entry in gcs if "ends" in entry.fields}
    return [entry for entry in gcs if "doomed" in entry.fields and entry.index not in ended]


def _read_from(blobs: Blobs, index: int) -> Iterator[LogEntry]:
    while (entry := _read(blobs, index)) is not None:
        yield entry
        index += 1


def _read(blobs: Blobs, index: int) -> LogEntry | None:
    data = blobs.get(log_key(index))
    if data is None:
        return None
    try:
        return LogEntry(index, LogRecord.from_bytes(data))
    except Damaged as damage:
        return LogEntry(index, None, str(damage))
