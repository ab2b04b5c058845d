"""The objects of a dataset as they were when it was made, read through the cache of the node."""

import io
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from cordee.errors import DataDamagedError, DataError
from cordee.storage.cache.channel import Channel
from cordee.storage.cache.fetching import OPEN_MAX, runs
from cordee.storage.cache.node import NodeCache
from cordee.storage.cache.pieces import PIECE_BYTES
from cordee.storage.cache.pins import Pin, digest_of_pins
from cordee.storage.cache.reading import CachedReading, FileReading, Reading
from cordee.units import plural

Span = tuple[int, int, int]
"""The number of an object in a dataset, the first byte and the one behind the last."""
_CHECK_S = 1.0
_KEEP_BYTES = 2**24
"""glibc keeps twice as much for reuse as the largest block that was freed (mallopt, M_MMAP_THRESHOLD). With less than a
batch, each batch's memory is new to the kernel, which costs four times the reading."""


class PinnedData:
    """A dataset: its objects as they were when it was made.

    Attributes:
        url: its URL or folder.
        pins: its objects, sorted by name.
    """

    def __init__(self, url: str, pins: tuple[Pin, ...], node: NodeCache, channel: Channel | None) -> None:
        self.url, self.pins = url, pins
        self._node, self._channel = node, channel
        if not pins:
            raise DataError(f"{url} has no objects", hint="is the prefix right, with its last letter?")
        self._damaged_before = node.condemned()
        self._numbers = {pin.name: number for number, pin in enumerate(pins)}
        self._kept: set[str] = set()
        self._reads: list[str] = []
        self._begin()

    def _begin(self) -> None:
        self._pid = os.getpid()
        bytes(_KEEP_BYTES)
        self._open: OrderedDict[int, Reading] = OrderedDict()
        self._check_s = time.monotonic() + _CHECK_S

    def __getstate__(self) -> dict[str, Any]:
        """Return it without what belongs to this process."""
        mine = ("_open", "_check_s", "_pid")
        return {name: value for name, value in self.__dict__.items() if name not in mine}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Begin in another process."""
        self.__dict__.update(state)
        self._begin()

    def __repr__(self) -> str:
        return f"cordee.data({self.url!r}): {plural(len(self.pins), 'object')}, {self.size_bytes} bytes"

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of its objects."""
        return iter([pin.name for pin in self.pins])

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self.pins)

    @property
    def root(self) -> Path:
        """The folder of the node's cache."""
        return self._node.root

    @property
    def size_bytes(self) -> int:
        """The size of all objects."""
        return sum(pin.size_bytes for pin in self.pins)

    @property
    def digest(self) -> str:
        """A digest of the pinned names, sizes and tags."""
        return digest_of_pins(self.pins)

    def number(self, name: str) -> int:
        """Return the number of an object.

        Raises:
            DataError: there is none of this name.
        """
        found = self._numbers.get(name.strip("/"))
        if found is None:
            raise DataError(f"{self.url} has no object {name!r}", hint=f"its first is {self.pins[0].name!r}")
        return found

    def read(self, number: int, start: int, stop: int) -> bytes:
        """Return bytes of an object.

        Raises:
            DataError: they cannot be had: replaced (DataReplacedError) or damaged (DataDamagedError).
        """
        self._own()
        stop = min(stop, self.pins[number].size_bytes)
        return self._reading(number).read(start, stop) if start < stop else b""

    def read_all(self, spans: Sequence[Span]) -> list[bytes]:
        """Return the bytes of each span; what is missing is fetched at once.

        Raises:
            DataError: as `read`.
        """
        self.ensure(spans)
        return [self._reading(number).read(start, stop) if start < stop else b"" for number, start, stop in spans]

    def ensure(self, spans: Iterable[Span]) -> None:
        """Fetch what is missing of these bytes, all of it at once.

        Raises:
            DataError: as `read`.
        """
        self.check(every_s=_CHECK_S)
        if self._channel is None:
            return
        wanted: dict[int, set[int]] = {}
        for number, start, stop in spans:
            missing = self._reading(number).missing(start, stop) if start < stop else ()
            if missing:
                wanted.setdefault(number, set()).update(missing)
        rows = [
            [self.pins[number].as_json(), first, stop]
            for number, pieces in wanted.items()
            for first, stop in runs(pieces)
        ]
        if rows:
            try:
                self._channel.ask("get", pieces=rows)
            except DataError:
                pass  # each read asks for its own, and says what is wrong with it

    def ahead(self, pieces: Sequence[Span], *, begin: bool = False) -> None:
        """Let the fetcher bring these pieces, in this order, while nobody waits for others.

        Args:
            pieces: numbers of objects, of the first piece in each, and of the one behind the last.
            begin: forget what was asked for before.
        """
        if self._channel is not None:
            rows = [[self.pins[number].as_json(), first, stop] for number, first, stop in pieces]
            self._channel.ask("ahead", pieces=rows, begin=begin)

    def will_read(self, numbers: Sequence[int]) -> None:
        """Say in which order objects are read from now on: those that are read last leave the cache first."""
        self._reads = [self.pins[number].object_id for number in numbers]
        self._write_hint()

    def check(self, *, every_s: float = 0.0, settle: bool = False) -> None:
        """Raise if an object has turned out to be damaged since the dataset was made.

        Args:
            every_s: look no more often than this.
            settle: wait for the checks of objects that have become complete.

        Raises:
            DataDamagedError: samples of it may have been read.
        """
        self._own()
        now_s = time.monotonic()
        if now_s < self._check_s and not settle and every_s:
            return
        self._check_s = now_s + every_s
        if settle and self._channel is not None:
            self._channel.ask("settle")
        before = self._damaged_before
        condemned = {each for each, mark in self._node.condemned().items() if before.get(each) != mark}
        for pin in self.pins if condemned else ():
            if pin.object_id in condemned:
                raise DataDamagedError(
                    f"{pin.where} had other bytes than its store says, and samples of it may have been read",
                    hint="start again from the checkpoint before; the object has left the cache",
                )

    def path(self, name: str) -> Path:
        """Return the path of an object, after it was fetched; it stays as long as this process lives.

        Raises:
            CacheFullError: there is no room for it.
            DataError: as `read`.
        """
        self._own()
        number = self.number(name)
        pin, reading = self.pins[number], self._reading(number)
        if isinstance(reading, CachedReading) and self._channel is not None:
            self._kept.add(pin.object_id)
            self._write_hint()
            self._channel.ask("get", pieces=[[pin.as_json(), 0, -(-pin.size_bytes // PIECE_BYTES)]])
            self._channel.ask("settle")
            for start in range(0, pin.size_bytes, PIECE_BYTES):  # verifies
                reading.read(start, min(start + PIECE_BYTES, pin.size_bytes))
            self.check()
        return reading.path

    def open(self, name: str, *, buffer_bytes: int = PIECE_BYTES) -> io.BufferedReader:
        """Return a file object that fetches what is read from it, in buffers of this size.

        Raises:
            DataError: there is no such object.
        """
        return io.BufferedReader(_DataFile(self, self.number(name)), buffer_bytes)

    def fetched_bytes(self) -> int:
        """Return the bytes that this job's fetcher has brought from the store."""
        return 0 if self._channel is None else int(self._channel.ask("settle"))

    def close(self) -> None:
        """End the fetcher."""
        self._open.clear()
        if self._channel is not None:
            self._channel.close()

    def _write_hint(self) -> None:
        if self._channel is not None:
            self._channel.hint(reads=self._reads, queued=[], kept=sorted(self._kept))

    def _own(self) -> None:
        if self._pid != os.getpid():  # files that are open in another process are not shared with it
            self._begin()

    def _reading(self, number: int) -> Reading:
        found = self._open.get(number)
        if found is None:
            pin = self.pins[number]
            found = FileReading(pin) if self._channel is None else CachedReading(pin, self._node, self._channel)
            self._open[number] = found
            if len(self._open) > OPEN_MAX:
                self._open.popitem(last=False)
        else:
            self._open.move_to_end(number)
        return found


class _DataFile(io.RawIOBase):
    def __init__(self, dataset: PinnedData, number: int) -> None:
        super().__init__()
        self._dataset, self._number, self._at = dataset, number, 0
        self._size_bytes = dataset.pins[number].size_bytes

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size_bytes}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        memory = memoryview(into).cast("B")
        stop = min(self._at + len(memory), self._size_bytes)
        if stop <= self._at:
            return 0
        self._dataset.ensure([(self._number, self._at, stop)])
        found = self._dataset.read(self._number, self._at, stop)
        memory[: len(found)] = found
        self._at += len(found)
        return len(found)
