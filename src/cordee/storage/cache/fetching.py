"""Fetch pieces into the cache of a node: the work of a fetcher, whichever process it is in.

Fetchers of several jobs do not know each other. Who gets the lock of a piece fetches it, and the others wait until its
record is there; the kernel releases the locks of one that is killed.
"""

import errno
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress

from cordee.errors import CacheFullError, DataDamagedError
from cordee.storage.cache.neighbours import Neighbours
from cordee.storage.cache.node import NodeCache
from cordee.storage.cache.pieces import GOOD, PIECE_BYTES, UNCHECKED, Evicted, Pieces
from cordee.storage.cache.pins import Pin
from cordee.storage.cache.sources import PATIENCE_S, Source, open_source

RUN_PIECES = 32  # of one request
OPEN_MAX = 128  # objects; each takes two file descriptors
_POLL_S, _POLL_S_MAX, _LOOKS = 0.002, 0.02, 16
_STALLED_S = 30.0
"""The wait for another fetcher's piece, which may be frozen; then it is fetched twice."""

Row = tuple[Pin, int, int]
"""An object, the first of some pieces and the one behind the last."""

log = logging.getLogger("cordee.data")


class Fetching:
    """The fetches of one process.

    Attributes:
        fetched_bytes: that came from stores.
        neighbours: the caches of other nodes, which are asked first.
    """

    def __init__(self, node: NodeCache, patience_s: float = PATIENCE_S) -> None:
        self.node, self._patience_s = node, patience_s
        self.fetched_bytes = 0
        self._sources: dict[str, Source] = {}
        self._open: OrderedDict[str, Pieces] = OrderedDict()
        self._lock = threading.Lock()
        self.neighbours = Neighbours(node.root)
        self._digests_hold = False  # an object of this process' stores had the MD5 that its tag says

    def source(self, url: str) -> Source:
        """Return the source of a dataset."""
        with self._lock:
            if url not in self._sources:
                self._sources[url] = open_source(url, self._patience_s)
            return self._sources[url]

    def fetch(self, pin: Pin, first: int, stop: int, *, soon: float = 0.0, wait: bool = True) -> bool:
        """Bring the pieces from `first` to before `stop` into the cache, if they are not there.

        Returns whether the object is complete now, and has to be checked.

        Args:
            pin: the object.
            first: the first piece.
            stop: the one behind the last.
            soon: how soon they are read: 0 is now.
            wait: for pieces that another fetcher is about to bring.

        Raises:
            CacheFullError: there is no room; `read` passes the bytes by.
            DataError: as its source.
        """
        while True:
            pieces = self._opened(pin, soon)
            try:
                for number in range(first, stop):
                    self._fetch_at(pin, pieces, number, stop, soon, wait)
                break
            except Evicted:
                with self._lock:
                    self._open.pop(pin.object_id, None)
        return pin.md5 is not None and pieces.is_complete and pieces.checked == UNCHECKED

    def bring(self, rows: Sequence[Row], fetch: Callable[[Iterable[Row]], None]) -> None:
        """Fetch pieces by a function, and wait for those that other fetchers bring: one thread looks for all of them.

        Raises:
            CacheFullError, DataError: as `fetch`.
        """
        left = [(pin, number, number + 1) for pin, first, stop in rows for number in range(first, stop)]
        wait_s, until_s, looks = _POLL_S, time.monotonic() + _STALLED_S, 0
        fetch(rows)
        while left := [row for row in left if self._opened(row[0], 0.0).digest(row[1]) is None]:
            looks += 1
            if looks % _LOOKS == 0:  # its fetcher may have died; a look costs a tenth of a try
                fetch(left)
            if time.monotonic() > until_s:
                for pin, number, _ in left:
                    self._fetch_again(pin, number)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _POLL_S_MAX)

    def read(self, pin: Pin, number: int, piece_bytes: int) -> bytes:
        """Return the bytes of a piece from the store, past the cache."""
        start = number * piece_bytes
        stop = min(start + piece_bytes, pin.size_bytes)
        data = b"".join(self.source(pin.url).read(pin, start, stop, piece_bytes))
        self._count(len(data))
        return data

    def mend(self, pin: Pin, number: int) -> None:
        """Fetch a piece again whose bytes on this disk are not those of its record.

        Raises:
            DataDamagedError: the store gives other bytes than at the first time, under the same tag.
        """
        pieces = self._opened(pin, 0.0)
        digest = pieces.digest(number)
        for _ in range(2):
            data = memoryview(self.read(pin, number, pieces.piece_bytes))
            if digest is None or pieces.digest_of(data) == digest:
                log.warning("%s: piece %d was damaged on this disk, and is fetched again", pin.where, number)
                with suppress(Evicted):  # the reader asks again
                    self._write(pin, pieces, number, data, 0.0)
                return
        raise DataDamagedError(
            f"{pin.where}: bytes {number * pieces.piece_bytes} to {number * pieces.piece_bytes + len(data) - 1} are "
            f"not those that its store gave before, and its tag {pin.tag} has not changed",
            hint="one of the two is damaged: write the object again under a new name",
        )

    def prefetch(self, pins: Sequence[Pin]) -> int:
        """Bring whole objects into the cache as long as there is room; return how many are there."""
        for number, pin in enumerate(pins):
            try:
                self.node.admit([pin], soon=1.0)
                for _ in range(2):  # once more if it was damaged on its way
                    if self.fetch(pin, 0, -(-pin.size_bytes // PIECE_BYTES), soon=1.0):
                        self.check(pin)
            except CacheFullError as error:
                log.warning("%d of %d objects are in the cache: %s", number, len(pins), error.message)
                return number
        return len(pins)

    # -- a piece ---------------------------------------------------------------------------------------------

    def _opened(self, pin: Pin, soon: float) -> Pieces:
        with self._lock:
            found = self._open.get(pin.object_id)
            if found is not None and not found.is_evicted:
                return found
        opened = self.node.open(pin.object_id)
        while opened is None:
            self.node.admit([pin], soon=soon)
            opened = self.node.open(pin.object_id)
        with self._lock:
            self._open[pin.object_id] = opened
            while len(self._open) > OPEN_MAX:  # closed when no thread uses it any more
                self._open.popitem(last=False)
        return opened

    def _fetch_at(self, pin: Pin, pieces: Pieces, number: int, stop: int, soon: float, wait: bool) -> None:
        """Fetch a piece, and those behind it that nobody has or fetches; or wait until another one has."""
        wait_s, until_s = _POLL_S, time.monotonic() + _STALLED_S
        while pieces.digest(number) is None:
            with pieces.claimed(number) as held:
                if held and pieces.digest(number) is None:
                    self._fetch_run(pin, pieces, number, stop, soon)
                    return
            if held:
                continue  # it has come meanwhile
            if not wait:
                return
            if time.monotonic() > until_s:
                self._write(pin, pieces, number, memoryview(self.read(pin, number, pieces.piece_bytes)), soon)
                return
            for _ in range(_LOOKS):
                if pieces.digest(number) is None:
                    time.sleep(wait_s)
            wait_s = min(2 * wait_s, _POLL_S_MAX)

    def _fetch_again(self, pin: Pin, number: int) -> None:
        """Fetch a piece that a fetcher holds, which may be frozen."""
        pieces = self._opened(pin, 0.0)
        with suppress(Evicted):
            self._write(pin, pieces, number, memoryview(self.read(pin, number, pieces.piece_bytes)), 0.0)

    def _fetch_run(self, pin: Pin, pieces: Pieces, number: int, stop: int, soon: float) -> None:
        """Fetch a claimed piece and missing ones behind it: from neighbours, and what they lack in one request."""
        with pieces.claimed_run(number + 1, min(stop, number + RUN_PIECES)) as end:
            for data in self.neighbours.pieces(pin, pieces, number, end):
                self._write(pin, pieces, number, data, soon)
                number += 1
            if number == end:
                return
            start_byte, stop_byte = pieces.span(number)[0], pieces.span(end - 1)[1]
            arrived = self.source(pin.url).read(pin, start_byte, stop_byte, pieces.piece_bytes)
            for each, data in enumerate(arrived, number):
                self._count(len(data))
                self._write(pin, pieces, each, data, soon)

    def _write(self, pin: Pin, pieces: Pieces, number: int, data: memoryview, soon: float) -> None:
        while True:
            try:
                pieces.store(number, data)
                return
            except Evicted:
                if not pieces.is_evicted:
                    log.warning("%s was cut off on this disk, and is fetched again", pin.where)
                    self.node.drop(pin.object_id)
                raise
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                if not full or not self.node.make_room(64 * len(data), soon=soon, but=pin.object_id):
                    raise CacheFullError(
                        f"the cache {self.node.root} cannot take a piece of {pin.where}: {error.strerror}",
                        hint="free some space on its disk",
                    ) from error

    def _count(self, n_bytes: int) -> None:
        with self._lock:
            self.fetched_bytes += n_bytes

    # -- a whole object --------------------------------------------------------------------------------------

    def check(self, pin: Pin) -> None:
        """Hold a complete object against the MD5 that its store named it by; if it has another one, it goes.

        Raises:
            DataDamagedError: the object is damaged in its store.
        """
        pieces = self.node.open(pin.object_id)
        if pieces is None:
            return  # it has left since, for objects that are read before it
        with suppress(Evicted), pieces.claimed(pieces.count) as held:  # one process is enough
            if held and pieces.checked == UNCHECKED and pieces.is_complete:
                self._check_whole(pin, pieces)

    def _check_whole(self, pin: Pin, pieces: Pieces) -> None:
        digests = [pieces.digest(number) for number in range(pieces.count)]
        if self._md5(pin, pieces) == pin.md5:
            pieces.checked, self._digests_hold = GOOD, True
            return
        changed = [
            number
            for number in range(pieces.count)
            if pieces.digest_of(memoryview(self.read(pin, number, pieces.piece_bytes))) != digests[number]
        ]
        if not changed and not self._digests_hold:
            log.warning("%s: its tag is not the MD5 of its bytes, as with keys of KMS: not checked", pin.where)
            pieces.checked = GOOD
            return
        self.node.condemn(pin.object_id)
        self.neighbours.distrust(pin.object_id)
        if not changed:
            raise DataDamagedError(
                f"{pin.where}: its store says that its MD5 is {pin.md5}, and gives bytes with another one",
                hint="the object is damaged in its store: write it again under a new name",
            )
        log.warning("%s: piece %d was damaged on its way; it is fetched again", pin.where, changed[0])

    def _md5(self, pin: Pin, pieces: Pieces) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        for number in range(pieces.count):
            data = pieces.load(number)
            if data is None:
                self.mend(pin, number)
                data = pieces.load(number)
            digest.update(data or b"")
        return digest.hexdigest()


def runs(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return sorted numbers as ranges of neighbours.

    >>> runs([1, 2, 3, 7])
    [(1, 4), (7, 8)]
    """
    found: list[tuple[int, int]] = []
    for number in sorted(set(numbers)):
        if found and found[-1][1] == number:
            found[-1] = (found[-1][0], number + 1)
        else:
            found.append((number, number + 1))
    return found
