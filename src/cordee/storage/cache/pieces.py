"""One object in the cache: its bytes in a sparse file, and beside it a record of each piece that is there.

    data      the object's bytes; pieces that are not there are holes
    state     a head, then a record for each piece: the xxh3-128 of its bytes, and a checksum of the record

A record is written after the bytes of its piece. Nothing is flushed to the disk: a piece is hashed when a process first
reads it, so that what a power failure has torn is fetched again. Who fetches a piece holds a lock on one byte of
`state`, which the kernel releases if the process dies.
"""

import errno
import fcntl
import os
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import xxhash

PIECE_BYTES = 2**18
"""Small enough that the first batches of four shuffled epochs, a piece for each sample, arrive in 1.4 s at 50 MB/s."""
DATA, STATE, ABOUT = "data", "state", "about.json"
_HEAD = struct.Struct("<8sQII")  # magic, size of the object, size of a piece, whether the whole was checked
_MAGIC = b"cordee\x00\x01"
_HEAD_BYTES = 64
_CHECKED_AT = _HEAD.size - 4
_RECORD = struct.Struct("<16sII")  # digest, checksum of digest and number, 1
_LOCK = struct.Struct("hhqqi4x")  # struct flock of Linux, 64 bits
UNCHECKED, GOOD = 0, 1


class Evicted(Exception):
    """The object has left the cache."""


class Pieces:
    """An object in the cache, open in this process."""

    def __init__(self, folder: Path) -> None:
        """Open an object.

        Raises:
            FileNotFoundError: it is not in the cache.
        """
        self.folder = folder
        self.state_fd = os.open(folder / STATE, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.data_fd = os.open(folder / DATA, os.O_RDWR | os.O_CLOEXEC)
            head = os.pread(self.state_fd, _HEAD.size, 0)
            if len(head) < _HEAD.size or head[:8] != _MAGIC:
                raise FileNotFoundError(errno.ENOENT, "no head", str(folder))
            _, self.size_bytes, self.piece_bytes, _ = _HEAD.unpack(head)
            if self.piece_bytes != PIECE_BYTES or self.is_cut_off:
                raise FileNotFoundError(errno.ENOENT, "no whole file", str(folder))
        except OSError:
            self.close()
            raise
        self.count: int = -(-self.size_bytes // self.piece_bytes)
        self._first_missing: int = 0

    @staticmethod
    def lay_out(folder: Path, size_bytes: int, piece_bytes: int = PIECE_BYTES) -> None:
        """Make the files of an object in a new folder."""
        folder.mkdir(parents=True)
        with (folder / DATA).open("wb") as data:
            data.truncate(size_bytes)
        head = _HEAD.pack(_MAGIC, size_bytes, piece_bytes, UNCHECKED)
        (folder / STATE).write_bytes(head.ljust(_HEAD_BYTES, b"\0"))

    def close(self) -> None:
        """Close the files."""
        for name in ("state_fd", "data_fd"):
            fd = getattr(self, name, -1)
            setattr(self, name, -1)
            if fd >= 0:
                os.close(fd)

    def __del__(self) -> None:
        """Close the files of an object that is forgotten."""
        with suppress(Exception):
            self.close()

    @property
    def is_evicted(self) -> bool:
        """True if it has left the cache; its bytes can be read as long as it is open."""
        links: int = os.fstat(self.state_fd).st_nlink
        return links == 0

    @property
    def is_cut_off(self) -> bool:
        """True if its file has another size: what is written now would leave a hole for zeros before it."""
        size: int = os.fstat(self.data_fd).st_size
        is_whole: bool = size == self.size_bytes
        return not is_whole

    @property
    def checked(self) -> int:
        """The outcome of holding the whole against the digest of its store: UNCHECKED or GOOD."""
        head = os.pread(self.state_fd, 4, _CHECKED_AT)
        return int.from_bytes(head, "little") if len(head) == 4 else UNCHECKED

    @checked.setter
    def checked(self, value: int) -> None:
        os.pwrite(self.state_fd, value.to_bytes(4, "little"), _CHECKED_AT)

    def span(self, number: int) -> tuple[int, int]:
        """Return the first byte of a piece and the one behind its last."""
        start = number * self.piece_bytes
        return start, min(start + self.piece_bytes, self.size_bytes)

    def digest(self, number: int) -> bytes | None:
        """Return the digest in the record of a piece; None: the piece is not there."""
        record = os.pread(self.state_fd, _RECORD.size, _HEAD_BYTES + number * _RECORD.size)
        if len(record) < _RECORD.size:
            return None
        digest, check, written = _RECORD.unpack(record)
        good: bool = written == 1 and check == _checksum(digest, number)
        return digest if good else None

    def load(self, number: int) -> bytes | None:
        """Return the bytes of a piece; None: they are not those of its record, or it has none."""
        digest = self.digest(number)
        if digest is None:
            return None
        start, stop = self.span(number)
        data = os.pread(self.data_fd, stop - start, start)
        return data if xxhash.xxh3_128_digest(data) == digest else None

    def store(self, number: int, data: memoryview) -> None:
        """Write a piece, then its record.

        Raises:
            Evicted: the file was cut off, and must not be filled again: readers believe what they have hashed.
            OSError: the disk is full, or broken.
        """
        start, stop = self.span(number)
        if self.is_cut_off:
            raise Evicted
        assert len(data) == stop - start, f"piece {number} has {stop - start} bytes, not {len(data)}"
        done = 0
        while done < len(data):
            done += os.pwrite(self.data_fd, data[done:], start + done)
        digest = xxhash.xxh3_128_digest(data)
        record = _RECORD.pack(digest, _checksum(digest, number), 1)
        if os.pwrite(self.state_fd, record, _HEAD_BYTES + number * _RECORD.size) < len(record):
            raise OSError(errno.ENOSPC, "the record of a piece was cut off")

    @property
    def is_complete(self) -> bool:
        """True if all pieces are there."""
        while self._first_missing < self.count and self.digest(self._first_missing) is not None:
            self._first_missing += 1
        return self._first_missing == self.count

    @contextmanager
    def claimed(self, number: int) -> Iterator[bool]:
        """Hold the lock of a piece; yields False at once if another one holds it.

        Raises:
            Evicted: the object is not in the cache any more.
        """
        with self._opening() as fd:
            yield _lock(fd, number)

    @contextmanager
    def claimed_run(self, first: int, stop: int) -> Iterator[int]:
        """Hold the locks of missing pieces from `first` on; yields the number behind the last one.

        Raises:
            Evicted: as `claimed`.
        """
        with self._opening() as fd:
            end = first
            while end < stop and self.digest(end) is None and _lock(fd, end) and self.digest(end) is None:
                end += 1
            yield end

    @contextmanager
    def _opening(self) -> Iterator[int]:
        """Open the state again, since a lock belongs to one opening."""
        try:
            fd = os.open(self.folder / STATE, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise Evicted from None
        try:
            if os.fstat(fd).st_ino != os.fstat(self.state_fd).st_ino:
                raise Evicted
            yield fd
        finally:
            os.close(fd)

    @staticmethod
    def digest_of(data: memoryview) -> bytes:
        """Return the digest of a piece."""
        digest: bytes = xxhash.xxh3_128_digest(data)
        return digest


def _lock(fd: int, number: int) -> bool:
    """Lock one byte of a file; False: another opening holds it."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, number, 1, 0))
    except (BlockingIOError, PermissionError):
        return False
    return True


def _checksum(digest: bytes, number: int) -> int:
    return zlib.crc32(digest, number & 0xFFFFFFFF)
