"""Samples of a dataset by index: what torch's DataLoader and `cordee.ElasticBatchSampler` take.

Each kind says in which bytes a sample lies and how to read it; what is missing of a batch is fetched at once, and what
is read next is fetched ahead in that order.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from cordee.errors import DataError, InputError
from cordee.storage.cache.dataset import PinnedData, Span
from cordee.storage.cache.fetching import runs
from cordee.storage.cache.pieces import PIECE_BYTES
from cordee.units import parse_bytes

_AHEAD_SAMPLES, _AHEAD_SAMPLES_MAX = 256, 16_384
_AHEAD_PIECES = 16  # of one request: a third of the CPU seconds of one for each piece
_HINT_S = 5.0
_RUNS = 64  # of a window at least, where it has as many samples

log = logging.getLogger("cordee.data")


class Samples(ABC):
    """The samples of a dataset.

    Args:
        data: the dataset.
        decode: makes what the loop gets of a sample.

    Attributes:
        data: as given.
    """

    def __init__(self, data: PinnedData, decode: Callable[[Any], Any] | None = None) -> None:
        self.data, self._decode = data, decode
        self._follower: threading.Thread | None = None
        self._turn = 0

    def __getstate__(self) -> dict[str, Any]:
        """Return it without its thread, which stays in the process of the sampler."""
        return {**self.__dict__, "_follower": None}

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abstractmethod
    def span(self, index: int) -> Span:
        """Return where a sample lies."""

    @abstractmethod
    def parse(self, index: int, found: bytes) -> Any:
        """Return a sample from its bytes."""

    @property
    @abstractmethod
    def counts(self) -> Sequence[int]:
        """The number of samples in each part of the data that lies together."""

    def __getitem__(self, index: int) -> Any:
        """Return one sample.

        Raises:
            IndexError: there is none of this index.
            DataError: it cannot be had.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples, whose missing bytes are fetched at once; a DataLoader calls this for each batch.

        Raises:
            IndexError, DataError: as `__getitem__`.
        """
        n_samples = len(self)
        if indices and not 0 <= min(indices) <= max(indices) < n_samples:
            raise IndexError(f"samples {min(indices)} to {max(indices)} of {n_samples}")
        self.prepare(indices)
        spans = [self.span(index) for index in indices]
        found = [self.parse(index, each) for index, each in zip(indices, self.data.read_all(spans), strict=True)]
        return found if self._decode is None else [self._decode(each) for each in found]

    def prepare(self, indices: Sequence[int]) -> None:
        """Fetch what says where samples lie, at once for all of them; nothing where that is known."""
        del indices

    def window(self, size: str) -> tuple[int, int]:
        """Return the window of an order that shuffles within so many bytes at a time, for ElasticBatchSampler.

        A dataset that is larger than the cache is read so: a whole shuffle would need all of it at any time.

        Args:
            size: of the samples that are mixed with each other, such as "8GB".
        """
        n_samples = len(self)
        wanted = max(1, n_samples * parse_bytes(size) // max(1, self.data.size_bytes))
        run = max(1, min(max(self.counts), wanted // _RUNS))
        return run, max(1, wanted // run)

    def fetch_ahead(self, batches: Iterable[Sequence[int]]) -> None:
        """Fetch samples in the order in which they will be read, from now on instead of any given before.

        `cordee.ElasticBatchSampler` calls this with the rest of its epoch.
        """
        self._turn += 1
        follower = threading.Thread(
            target=self._follow, args=(self._turn, batches), name="cordee-data-ahead", daemon=True
        )
        self._follower = follower
        follower.start()

    def check_read(self) -> None:
        """Raise if what was read so far has turned out to be damaged; the sampler calls this after each epoch.

        Raises:
            DataDamagedError: samples may have been wrong.
        """
        self.data.check(settle=True)

    def close(self) -> None:
        """Fetch nothing more."""
        self._turn += 1
        if self._follower is not None:
            self._follower.join()
        self.data.close()

    def _follow(self, turn: int, batches: Iterable[Sequence[int]]) -> None:
        begin, gathered, wanted = True, list[int](), _AHEAD_SAMPLES
        uses = _Uses(self.data)
        try:
            for batch in batches:
                gathered += batch
                if len(gathered) >= wanted:
                    if turn != self._turn:
                        return
                    self._send(gathered, begin, uses)
                    begin, gathered, wanted = False, [], min(4 * wanted, _AHEAD_SAMPLES_MAX)
            if gathered and turn == self._turn:
                self._send(gathered, begin, uses)
        except DataError as error:  # the reader hears of it when it comes there
            log.warning("fetching ahead has ended: %s", error.message)

    def _send(self, indices: list[int], begin: bool, uses: "_Uses") -> None:
        self.prepare(indices)
        spans = [self.span(index) for index in indices]
        uses.note([span[0] for span in spans])
        fresh = uses.fresh(spans)
        if fresh or begin:
            self.data.ahead(fresh, begin=begin)


class _Uses:
    """The order in which objects are used next, as far as it is known: for the cache, which keeps them by it."""

    def __init__(self, data: PinnedData) -> None:
        self._data = data
        self._seen: set[int] = set()
        self._pieces: set[tuple[int, int]] = set()
        self._next_s = 0.0

    def fresh(self, spans: Sequence[Span]) -> list[Span]:
        """Return the pieces of these spans that were not returned before, as runs of neighbours by their first use.

        A run has the number of an object, the first piece and the one behind the last.
        """
        found: dict[int, dict[int, int]] = {}  # pieces of each object, and their turns
        for turn, (number, start, stop) in enumerate(spans):
            first, last = start // PIECE_BYTES, (stop - 1) // PIECE_BYTES
            if (number, first) in self._pieces and first == last:
                continue
            for piece in range(first, last + 1):
                if (number, piece) not in self._pieces:
                    self._pieces.add((number, piece))
                    found.setdefault(number, {})[piece] = turn
        rows = [
            (
                min(turns[each] for each in range(at, min(at + _AHEAD_PIECES, stop))),
                number,
                at,
                min(at + _AHEAD_PIECES, stop),
            )
            for number, turns in found.items()
            for first, stop in runs(turns)
            for at in range(first, stop, _AHEAD_PIECES)
        ]
        return [row[1:] for row in sorted(rows)]

    def note(self, numbers: Sequence[int]) -> None:
        """Note that these objects are read next; those that were not read yet come after them."""
        now = dict.fromkeys(numbers)
        self._seen |= now.keys()
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + _HINT_S
            others = [each for each in range(len(self._data)) if each not in now]
            self._data.will_read([*now, *sorted(others, key=lambda each: each in self._seen)])


class Located:
    """Places of samples by index: the number of samples in each object, summed up."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = counts
        self._ends = list(accumulate(counts))

    def __len__(self) -> int:
        """Return the number of samples."""
        return self._ends[-1] if self._ends else 0

    def place(self, index: int) -> tuple[int, int]:
        """Return the number of the part with this sample, and its number in there.

        >>> Located([3, 4]).place(5)
        (1, 2)
        """
        part = bisect_right(self._ends, index)
        return part, index - self._ends[part] + self.counts[part]


class Files(Samples):
    """Each object is a sample: a pair of its name and its bytes."""

    def __len__(self) -> int:
        """Return the number of objects."""
        return len(self.data)

    @property
    def counts(self) -> Sequence[int]:
        """One sample an object."""
        return [1] * len(self.data)

    def span(self, index: int) -> Span:
        """Return the whole object."""
        return index, 0, self.data.pins[index].size_bytes

    def parse(self, index: int, found: bytes) -> Any:
        """Return name and bytes."""
        return self.data.pins[index].name, found


class Records(Samples):
    """Samples of equal size, one after the other in each object: tokens of pretraining, for example.

    Args:
        data: the dataset.
        record_bytes: the size of a sample; what an object has beyond whole samples is left out.
        dtype: of numpy, to return arrays; None: bytes.
        decode: makes what the loop gets of a sample.
    """

    def __init__(
        self,
        data: PinnedData,
        *,
        record_bytes: int,
        dtype: str | None = None,
        decode: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(data, decode)
        if record_bytes < 1:
            raise InputError(f"records of {record_bytes} bytes hold nothing")
        self._record_bytes, self._dtype = record_bytes, dtype
        self._located = Located([pin.size_bytes // record_bytes for pin in data.pins])

    def __len__(self) -> int:
        """Return the number of records."""
        return len(self._located)

    @property
    def counts(self) -> Sequence[int]:
        """The number of records in each object."""
        return self._located.counts

    def span(self, index: int) -> Span:
        """Return where the record lies."""
        number, at = self._located.place(index)
        return number, at * self._record_bytes, (at + 1) * self._record_bytes

    def parse(self, index: int, found: bytes) -> Any:
        """Return the record."""
        return found if self._dtype is None else np.frombuffer(found, self._dtype)
