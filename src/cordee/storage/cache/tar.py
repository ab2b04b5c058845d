"""WebDataset: files of a tar whose names differ in their endings are one sample.

A tar has no table of contents. Its headers are read once through the cache, and the table is kept beside it.
"""

import json
import os
import posixpath
import secrets
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from cordee.errors import DataDamagedError
from cordee.storage.cache.dataset import PinnedData, Span
from cordee.storage.cache.pieces import PIECE_BYTES
from cordee.storage.cache.samples import Located, Samples

_TABLES, _THREADS = "tables", 8
_READ_PIECES = 32

Member = list[Any]
"""The ending of a file's name, its first byte, and its size."""
Table = list[tuple[str, list[Member]]]


class TarSamples(Samples):
    """Samples of tar shards: dicts with `__key__`, and the bytes of each file by its ending."""

    def __init__(self, data: PinnedData, decode: Callable[[Any], Any] | None = None) -> None:
        super().__init__(data, decode)
        self._numbers = [number for number, pin in enumerate(data.pins) if pin.name.endswith(".tar")]
        with ThreadPoolExecutor(_THREADS) as pool:
            self._tables = list(pool.map(self._table, self._numbers))
        self._located = Located([len(table) for table in self._tables])

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._located)

    @property
    def counts(self) -> Sequence[int]:
        """The number of samples in each tar."""
        return self._located.counts

    def span(self, index: int) -> Span:
        """Return the bytes from the sample's first file to its last."""
        shard, at = self._located.place(index)
        members = self._tables[shard][at][1]
        return self._numbers[shard], members[0][1], members[-1][1] + members[-1][2]

    def parse(self, index: int, found: bytes) -> Any:
        """Return the sample's files by their endings."""
        shard, at = self._located.place(index)
        key, members = self._tables[shard][at]
        begin = members[0][1]
        return {"__key__": key} | {ending: found[at - begin : at - begin + size] for ending, at, size in members}

    def _table(self, number: int) -> Table:
        pin, root = self.data.pins[number], self.data.root
        path = root / _TABLES / f"{pin.object_id}.json"
        with suppress(OSError, ValueError):
            return [(key, members) for key, members in json.loads(path.read_text())]
        table = self._read_table(number)
        _keep(path, json.dumps(table))
        return table

    def _read_table(self, number: int) -> Table:
        pin, table = self.data.pins[number], Table()
        size = min(pin.size_bytes, _READ_PIECES * PIECE_BYTES)
        try:
            with self.data.open(pin.name, buffer_bytes=size) as file, tarfile.open(fileobj=file, mode="r:") as tar:
                last = 0
                for member in tar:
                    last = member.offset_data + member.size
                    if not member.isfile():
                        continue
                    key, ending = split_name(member.name)
                    if not table or table[-1][0] != key:
                        table.append((key, []))
                    table[-1][1].append([ending, member.offset_data, member.size])
        except tarfile.TarError as error:
            raise DataDamagedError(
                f"{pin.where} is no whole tar: {error}", hint="it is damaged in its store: write it again"
            ) from error
        if not table or last > pin.size_bytes:
            raise DataDamagedError(
                f"{pin.where} ends within a file, or has none: {pin.size_bytes} bytes",
                hint="it was cut off: write it again",
            )
        return table


def split_name(name: str) -> tuple[str, str]:
    """Return a file's key and its ending, which begins at the first dot of its name.

    >>> split_name("a.b/0001.left.png")
    ('a.b/0001', 'left.png')
    """
    folder, base = posixpath.split(name)
    stem, _, ending = base.partition(".")
    return posixpath.join(folder, stem), ending


def _keep(path: Path, text: str) -> None:
    with suppress(OSError):  # without it the next process reads the headers again
        path.parent.mkdir(exist_ok=True)
        new = path.with_name(f"{secrets.token_hex(8)}.new")
        new.write_text(text)
        os.replace(new, path)  # noqa: PTH105
