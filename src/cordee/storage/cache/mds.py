"""Shards of MosaicML streaming (MDS): `index.json`, and shards that begin with a table of the samples' offsets.

The format is that of mosaicml-streaming 0.13, streaming/base/format/mds/{reader,encodings}.py.
"""

import hashlib
import json
import struct
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import xxhash

from cordee.errors import DataDamagedError, DataError
from cordee.storage.cache.dataset import PinnedData, Span
from cordee.storage.cache.samples import Located, Samples

INDEX = "index.json"
_OFFSET = np.dtype("<u4")
_SCALARS = {"uint8": "B", "uint16": "H", "uint32": "I", "uint64": "Q", "int8": "b", "int16": "h", "int32": "i"}
_SCALARS |= {"int64": "q", "int": "q", "float16": "e", "float32": "f", "float64": "d"}
_HASHES: dict[str, Callable[[bytes], Any]] = {
    "xxh3_64": xxhash.xxh3_64,
    "xxh3_128": xxhash.xxh3_128,
    "xxh64": xxhash.xxh64,
    "xxh128": xxhash.xxh128,
    "xxh32": xxhash.xxh32,
}


class MdsSamples(Samples):
    """Samples of MDS shards: dicts of columns; those whose encoding is not known here stay bytes."""

    def __init__(self, data: PinnedData, decode: Callable[[Any], Any] | None = None) -> None:
        super().__init__(data, decode)
        number = data.number(INDEX)
        try:
            index = json.loads(data.read(number, 0, data.pins[number].size_bytes))
            self._shards = index["shards"]
            names = [shard["raw_data"]["basename"] for shard in self._shards]
            self._located = Located([int(shard["samples"]) for shard in self._shards])
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{data.pins[number].where} is no index of MDS shards: {error!r}") from error
        packed = [shard["raw_data"]["basename"] for shard in self._shards if shard.get("compression")]
        if packed:
            raise DataError(
                f"{data.url}: {packed[0]} is compressed as a whole, so that a sample of it cannot be read",
                hint="write the shards without compression; columns may be compressed",
            )
        self._numbers = [data.number(name) for name in names]
        self._offsets: dict[int, array[int]] = {}
        self._rows: dict[int, _Row] = {}
        for shard, at in zip(self._shards, self._numbers, strict=True):
            if data.pins[at].size_bytes != shard["raw_data"]["bytes"]:
                raise DataDamagedError(
                    f"{data.pins[at].where} has {data.pins[at].size_bytes} bytes, and {INDEX} says "
                    f"{shard['raw_data']['bytes']}",
                    hint="it was cut off, or is of another index: write it again",
                )

    def __getstate__(self) -> dict[str, Any]:
        """Return it without what is made again when it is needed."""
        return {**super().__getstate__(), "_rows": {}}

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._located)

    @property
    def counts(self) -> Sequence[int]:
        """The number of samples in each shard."""
        return self._located.counts

    def prepare(self, indices: Sequence[int]) -> None:
        """Fetch the offsets of all shards that have these samples."""
        if len(self._offsets) == len(self._shards):
            return
        shards = {self._located.place(int(index))[0] for index in indices} - self._offsets.keys()
        if shards:
            self.data.ensure([(self._numbers[each], 0, self._table_bytes(each)) for each in shards])

    def span(self, index: int) -> Span:
        """Return where the sample lies."""
        shard, at = self._located.place(index)
        offsets = self._offsets.get(shard)
        if offsets is None:
            offsets = self._offsets[shard] = self._table(shard)
        return self._numbers[shard], offsets[at], offsets[at + 1]

    def parse(self, index: int, found: bytes) -> Any:
        """Return the sample's columns.

        Raises:
            DataDamagedError: its bytes are not those of its columns.
        """
        shard = self._located.place(index)[0]
        row = self._rows.get(shard)
        if row is None:
            of = self._shards[shard]
            columns = zip(of["column_names"], of["column_encodings"], of["column_sizes"], strict=True)
            row = self._rows[shard] = _Row(columns)
        try:
            return row.parse(found)
        except (ValueError, struct.error) as error:
            raise DataDamagedError(
                f"{self.data.pins[self._numbers[shard]].where}: sample {index} is not what {INDEX} says: {error}",
                hint="the shard is damaged in its store, or of another index: write it again",
            ) from error

    def verify(self) -> None:
        """Read all shards and hold them against the digests of the index, if it has any.

        Raises:
            DataDamagedError: a shard has another one.
        """
        for shard, number in zip(self._shards, self._numbers, strict=True):
            for name, expected in shard["raw_data"].get("hashes", {}).items():
                make = _HASHES.get(name) or getattr(hashlib, name, None)
                if make is None:
                    continue
                found = make(self.data.read(number, 0, self.data.pins[number].size_bytes)).hexdigest()
                if found != expected:
                    raise DataDamagedError(
                        f"{self.data.pins[number].where}: its {name} is {found}, and {INDEX} says {expected}",
                        hint="the shard is damaged in its store: write it again",
                    )

    def _table_bytes(self, shard: int) -> int:
        return (self._located.counts[shard] + 2) * _OFFSET.itemsize

    def _table(self, shard: int) -> "array[int]":
        number, count = self._numbers[shard], self._located.counts[shard]
        table = np.frombuffer(self.data.read(number, 0, self._table_bytes(shard)), _OFFSET)
        size_bytes = self.data.pins[number].size_bytes
        offsets = table[1:]
        if len(table) != count + 2 or table[0] != count or offsets[-1] > size_bytes or (np.diff(offsets) < 0).any():
            raise DataDamagedError(
                f"{self.data.pins[number].where} does not begin with the offsets of its {count} samples",
                hint="the shard is damaged in its store, or of another index: write it again",
            )
        return array("I", offsets.astype(np.uint32).tobytes())  # its items are ints, made faster than numpy's


class _Row:
    """The columns of a shard's samples: sizes of those that vary, then the columns, one after the other."""

    def __init__(self, columns: Iterable[tuple[str, str, int | None]]) -> None:
        self._columns = [(name, _decoder(encoding), size) for name, encoding, size in columns]
        self._sizes = struct.Struct(f"<{sum(not size for _, _, size in self._columns)}I")

    def parse(self, found: bytes) -> dict[str, Any]:
        """Return the columns of one sample.

        Raises:
            ValueError, struct.error: it has too few bytes, or too many, or a column is not of its encoding.
        """
        sizes, at = iter(self._sizes.unpack_from(found)), self._sizes.size
        sample = {}
        for name, decode, size in self._columns:
            end = at + (size or next(sizes))
            column = found[at:end]
            sample[name] = column if decode is None else decode(column)
            at = end
        if at != len(found):
            raise ValueError(f"its columns have {at} bytes of {len(found)}")
        return sample


def _decoder(encoding: str) -> Callable[[bytes], Any] | None:
    """Return how a column is read; None: it stays bytes."""
    if encoding in _SCALARS:
        unpack = struct.Struct(f"<{_SCALARS[encoding]}").unpack
        return lambda found: unpack(found)[0]
    if encoding.startswith("ndarray:") and encoding.count(":") == 2:
        _, dtype, shape = encoding.split(":")
        sizes = [int(each) for each in shape.split(",")]
        return lambda found: np.frombuffer(found, dtype).reshape(sizes)
    texts: dict[str, Callable[[bytes], Any]] = {"str": bytes.decode, "json": json.loads}
    texts |= {"str_int": int, "str_float": float}
    return texts.get(encoding)
