"""Where the objects of a dataset are read from: an object store or a folder, each at the version that was pinned."""

import logging
import os
import random
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from cordee.errors import DataError, DataReplacedError
from cordee.storage.cache.pins import Pin
from cordee.storage.destination import is_remote
from cordee.storage.files import folder_of
from cordee.storage.remote import REFUSALS, connect, short_answer

T = TypeVar("T")

PATIENCE_S = 300.0
"""A store that does not answer, or says that it is too busy, is asked again for this long."""
REQUEST_S = 60.0
_WAIT_S, _WAIT_S_MAX = 0.2, 10.0

log = logging.getLogger("cordee.data")


class Source(Protocol):
    """The store of one dataset."""

    def pins(self) -> list[Pin]:
        """Return all its objects, sorted by name.

        Raises:
            DataError: they cannot be listed.
        """

    def read(self, pin: Pin, start: int, stop: int, piece_bytes: int) -> Iterator[memoryview]:
        """Yield bytes of an object as they arrive, `piece_bytes` at a time.

        Raises:
            DataReplacedError: the object is not the pinned one any more.
            DataError: it cannot be read.
        """


def open_source(url: str, patience_s: float = PATIENCE_S) -> Source:
    """Return the source of a dataset."""
    return RemoteSource(url, patience_s) if is_remote(url) else FolderSource(url)


def _replaced(pin: Pin, now: str) -> DataReplacedError:
    return DataReplacedError(
        f"{pin.where} was pinned as {pin.tag or 'it was'} with {pin.size_bytes} bytes, and {now}",
        hint="write changed data under a new name; the next cordee.data() pins what is there now",
    )


class RemoteSource:
    """A dataset in an object store, below a URL."""

    def __init__(self, url: str, patience_s: float = PATIENCE_S) -> None:
        self._url, self._patience_s = url.rstrip("/"), patience_s
        self._obstore, self._store = connect(self._url, REQUEST_S)

    def pins(self) -> list[Pin]:
        """Return all objects, sorted by name."""

        def walk() -> list[Pin]:
            entries = [entry for page in self._obstore.list(self._store) for entry in page]
            return [self._pin(entry) for entry in entries if not str(entry["path"]).endswith("/")]

        return sorted(self._trying(f"list {self._url}", walk), key=lambda pin: pin.name)

    def _pin(self, entry: Any) -> Pin:
        return Pin(self._url, str(entry["path"]), int(entry["size"]), str(entry["e_tag"] or entry["last_modified"]))

    def read(self, pin: Pin, start: int, stop: int, piece_bytes: int) -> Iterator[memoryview]:
        """Yield bytes of an object; what has arrived before a connection broke is not asked for again."""
        until_s = time.monotonic() + self._patience_s
        while start < stop:
            why = "its answer was cut off"
            try:
                for piece in _cut(self._asked(pin, start, stop), stop - start, piece_bytes):
                    yield piece
                    start += len(piece)
                    until_s = time.monotonic() + self._patience_s
            except (self._obstore.exceptions.BaseError, OSError) as error:
                why = short_answer(str(error))
            if start < stop:
                if time.monotonic() > until_s:
                    raise DataError(f"cannot read {pin.where}: {why}", hint="is the store reachable?")
                log.warning("%s: %s; asked again from byte %d on", pin.where, why, start)
                time.sleep(_WAIT_S * random.uniform(0.5, 1))

    def _asked(self, pin: Pin, start: int, stop: int) -> Iterator[Any]:
        return self._trying(f"read {pin.where}", lambda: self._open(pin, start, stop))

    def _open(self, pin: Pin, start: int, stop: int) -> Iterator[Any]:
        tagged = {"if_match": pin.tag} if pin.tag.startswith(('"', "0x")) else {}
        try:
            found = self._obstore.get(self._store, pin.name, options={"range": (start, stop), **tagged})
        except self._obstore.exceptions.PreconditionError as error:
            raise _replaced(pin, "another object is there now") from error
        except FileNotFoundError as error:
            raise _replaced(pin, "it is gone") from error
        meta = found.meta
        if (tagged and str(meta["e_tag"]) != pin.tag) or int(meta["size"]) != pin.size_bytes:
            raise _replaced(pin, f"is now {meta['e_tag']} with {meta['size']} bytes")
        return iter(found.stream(min_chunk_size=1))

    def _trying(self, doing: str, call: Callable[[], T]) -> T:
        errors = self._obstore.exceptions
        until_s, wait_s = time.monotonic() + self._patience_s, _WAIT_S
        while True:
            try:
                return call()
            except DataError:
                raise
            except (errors.BaseError, OSError) as error:
                answer = short_answer(str(error))
                if any(f"status code: {code}" in str(error) for code in REFUSALS):
                    raise DataError(
                        f"cannot {doing}: {answer}", hint="check the credentials in the environment"
                    ) from error
                if isinstance(error, FileNotFoundError) or time.monotonic() + wait_s > until_s:
                    raise DataError(
                        f"cannot {doing}: {answer}",
                        hint="does the bucket exist, in this region?"
                        if isinstance(error, FileNotFoundError)
                        else f"it was tried for {self._patience_s:g} s; is the store reachable?",
                    ) from error
                log.warning("cannot %s: %s; tried again", doing, answer)
            time.sleep(wait_s * random.uniform(0.5, 1))
            wait_s = min(2 * wait_s, _WAIT_S_MAX)


def _cut(arrived: Iterator[Any], n_bytes: int, piece_bytes: int) -> Iterator[memoryview]:
    """Yield what arrives in pieces; the last one is shorter, one that was cut off is not yielded."""
    piece, filled, left = bytearray(min(piece_bytes, n_bytes)), 0, n_bytes
    for each in arrived:
        data = memoryview(each)
        while data and left:
            taken = min(len(data), len(piece) - filled)
            piece[filled : filled + taken] = data[:taken]
            data, filled = data[taken:], filled + taken
            if filled == len(piece):
                yield memoryview(piece)
                left -= filled
                piece, filled = bytearray(min(piece_bytes, left)), 0


class FolderSource:
    """A dataset in a folder, which may be on another machine's disk."""

    def __init__(self, url: str) -> None:
        self.url, self.root = url.rstrip("/"), folder_of(url)

    def pins(self) -> list[Pin]:
        """Return all files, sorted by name; of a file, the file itself."""
        if self.root.is_file():
            return [Pin(str(self.root.parent), self.root.name, self.root.stat().st_size, tag_of(self.root.stat()))]
        if not self.root.is_dir():
            raise DataError(f"there is no folder {self.root}", hint="give a folder, or s3://, gs:// or az://")
        found = []
        for folder, names, files in os.walk(self.root, followlinks=True):
            names.sort()
            for name in files:
                path = Path(folder, name)
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    below = path.relative_to(self.root).as_posix()
                    found.append(Pin(str(self.root), below, status.st_size, tag_of(status)))
        return sorted(found, key=lambda pin: pin.name)

    def read(self, pin: Pin, start: int, stop: int, piece_bytes: int) -> Iterator[memoryview]:
        """Yield bytes of a file, which is looked at before and after each read."""
        try:
            fd = os.open(Path(pin.url, pin.name), os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise _replaced(pin, "it is gone") from error
        except OSError as error:
            raise DataError(f"cannot read {pin.where}: {error.strerror}") from error
        try:
            for at in range(start, stop, piece_bytes):
                wanted = min(piece_bytes, stop - at)
                data = os.pread(fd, wanted, at)
                status = os.fstat(fd)
                if tag_of(status) != pin.tag or status.st_size != pin.size_bytes or len(data) < wanted:
                    raise _replaced(pin, f"is now {tag_of(status)} with {status.st_size} bytes")
                yield memoryview(data)
        finally:
            os.close(fd)


def tag_of(status: os.stat_result) -> str:
    """Return the tag of a file: another one whenever it is replaced or written to."""
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}"
