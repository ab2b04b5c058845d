"""One object as a reader in a job's process sees it: pieces from the node's cache, verified; or the file itself."""

import errno
import logging
import os
from collections import OrderedDict
from pathlib import Path

from cordee.errors import CacheFullError, DataError, DataReplacedError
from cordee.storage.cache.channel import Channel
from cordee.storage.cache.node import NodeCache
from cordee.storage.cache.pieces import PIECE_BYTES, Pieces
from cordee.storage.cache.pins import Pin
from cordee.storage.cache.sources import tag_of

_TRIES = 3  # then others need the room more, or the disk is broken
_LOOSE_MAX = 64

log = logging.getLogger("cordee.data")


class CachedReading:
    """An object in the cache, as one process reads it; each piece is hashed when it is first read."""

    def __init__(self, pin: Pin, node: NodeCache, channel: Channel) -> None:
        self._pin, self._node, self._channel = pin, node, channel
        self._pieces: Pieces | None = None
        self._good = bytearray(-(-pin.size_bytes // PIECE_BYTES))
        self._loose: OrderedDict[int, bytes] = OrderedDict()  # for which the cache has no room

    def missing(self, start: int, stop: int) -> list[int]:
        """Return the pieces of these bytes that are not in the cache."""
        first, last = start // PIECE_BYTES, (stop - 1) // PIECE_BYTES
        if all(self._good[first : last + 1]):
            return []
        numbers = [each for each in range(first, last + 1) if not self._good[each] and each not in self._loose]
        pieces = self._opened()
        return [number for number in numbers if pieces is None or pieces.digest(number) is None]

    def read(self, start: int, stop: int) -> bytes:
        """Return these bytes.

        Raises:
            DataError: they cannot be had.
        """
        first, last = start // PIECE_BYTES, (stop - 1) // PIECE_BYTES
        if first == last and not self._good[first]:
            return self._part(first, start, stop)
        if not all(self._good[first : last + 1]):
            for number in range(first, last + 1):
                if not self._good[number]:
                    self._obtain(number)
        if not all(self._good[first : last + 1]):
            return b"".join(self._part(number, start, stop) for number in range(first, last + 1))
        assert self._pieces is not None, "a good piece is in an open object"
        data = os.pread(self._pieces.data_fd, stop - start, start)
        if len(data) < stop - start:  # somebody has cut the file off
            self._good = bytearray(len(self._good))
            return b"".join(self._part(number, start, stop) for number in range(first, last + 1))
        return data

    def _part(self, number: int, start: int, stop: int) -> bytes:
        at = number * PIECE_BYTES
        whole = self._obtain(number)
        return whole[max(0, start - at) : stop - at]

    def _obtain(self, number: int) -> bytes:
        """Return a piece, verified; fetch it if it is missing, and again if it was altered on this disk."""
        for _ in range(_TRIES):
            pieces = self._opened()
            data = None if pieces is None else pieces.load(number)
            if data is not None:
                self._good[number] = 1
                return data
            if number in self._loose:
                return self._loose[number]
            try:
                if pieces is None or pieces.digest(number) is None:
                    self._channel.ask("get", pieces=[[self._pin.as_json(), number, number + 1]])
                else:
                    self._channel.ask("mend", pin=self._pin.as_json(), number=number)
            except CacheFullError as error:
                return self._pass_by(number, error.message)
        return self._pass_by(number, f"{self._pin.where}: piece {number} did not stay in the cache")

    def _pass_by(self, number: int, why: str) -> bytes:
        """Return a piece that the cache cannot take, from the store."""
        if not self._loose:
            log.warning("%s; read past the cache, which other jobs cannot use", why)
        data: bytes = self._channel.ask("read", pin=self._pin.as_json(), number=number, piece_bytes=PIECE_BYTES)
        self._loose[number] = data
        if len(self._loose) > _LOOSE_MAX:
            self._loose.popitem(last=False)
        return data

    def _opened(self) -> Pieces | None:
        """Return the object's files; those that it has now, if a piece is missing and it has left the cache."""
        if self._pieces is not None and self._pieces.is_evicted:
            self._pieces, self._good = None, bytearray(len(self._good))
        if self._pieces is None:
            self._pieces = self._node.open(self._pin.object_id)
        return self._pieces

    @property
    def path(self) -> Path:
        """The file of a complete object in the cache."""
        pieces = self._opened()
        if pieces is None:
            raise DataError(f"{self._pin.where} has left the cache")
        return pieces.folder / "data"


class FileReading:
    """A file on a disk of this machine, which is read where it is."""

    def __init__(self, pin: Pin) -> None:
        self._pin, self.path = pin, Path(pin.url, pin.name)
        try:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            kind = DataReplacedError if error.errno == errno.ENOENT else DataError
            raise kind(f"cannot read {pin.where}: {error.strerror}", hint="was it moved?") from error
        self._check()

    def __del__(self) -> None:
        """Close the file."""
        if hasattr(self, "_fd"):
            os.close(self._fd)

    def _check(self) -> None:
        status = os.fstat(self._fd)
        if tag_of(status) != self._pin.tag or status.st_size != self._pin.size_bytes:
            raise DataReplacedError(
                f"{self.path} was pinned with {self._pin.size_bytes} bytes, and was written to since: it has "
                f"{status.st_size}",
                hint="write changed data under a new name; the next cordee.data() pins what is there now",
            )

    def missing(self, start: int, stop: int) -> list[int]:
        """Return nothing: the file is here."""
        return []

    def read(self, start: int, stop: int) -> bytes:
        """Return these bytes.

        Raises:
            DataReplacedError: the file is not the pinned one any more.
        """
        data = os.pread(self._fd, stop - start, start)
        self._check()
        return data


Reading = CachedReading | FileReading
