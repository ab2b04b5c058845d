"""Shards of MosaicML streaming (MDS): `index.json`, and shards that begin with a table of the samples' offsets.

The format is that of mosaicml-streaming 0.13, streaming/base/format/mds/{reader,encodings}.py.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from cordee.errors import DataDamagedError, DataError
from cordee.storage.cache.dataset import PinnedData, Span
from cordee.storage.cache.samples import Located, Samples

INDEX = "index.json"
_OFFSET = np.dtype("<u4")
_NUMBERS = "uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 float32 float64"
_SCALARS: dict[str, Any] = {name: np.dtype(name).newbyteorder("<") for name in _NUMBERS.split()}
_SCALARS["int"] = np.dtype("<i8")
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
        self._offsets: dict[int, Any] = {}
        self._columns = [
            list(zip(each["column_names"], each["column_encodings"], each["column_sizes"], strict=True))
            for each in self._shards
        ]
        for shard, at in zip(self._shards, self._numbers, strict=True):
            if data.pins[at].size_bytes != shard["raw_data"]["bytes"]:
                raise DataDamagedError(
                    f"{data.pins[at].where} has {data.pins[at].size_bytes} bytes, and {INDEX} says "
                    f"{shard['raw_data']['bytes']}",
                    hint="it was cut off, or is of another index: write it again",
                )

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self._located)

    @property
    def counts(self) -> Sequence[int]:
        """The number of samples in each shard."""
        return self._located.counts

    def prepare(self, indices: Sequence[int]) -> None:
        """Fetch the offsets of all shards that have these samples."""
        shards = {self._located.place(int(index))[0] for index in indices} - self._offsets.keys()
        if shards:
            self.data.ensure([(self._numbers[each], 0, self._table_bytes(each)) for each in shards])

    def span(self, index: int) -> Span:
        """Return where the sample lies."""
        shard, at = self._located.place(index)
        offsets = self._offsets.get(shard)
        if offsets is None:
            offsets = self._offsets[shard] = self._table(shard)
        return self._numbers[shard], int(offsets[at]), int(offsets[at + 1])

    def parse(self, index: int, found: bytes) -> Any:
        """Return the sample's columns."""
        columns = self._columns[self._located.place(index)[0]]
        at, sizes = 0, []
        for _, _, size in columns:
            if size:
                sizes.append(size)
            else:
                sizes.append(int(np.frombuffer(found, _OFFSET, 1, at)[0]))
                at += _OFFSET.itemsize
        sample = {}
        for (name, encoding, _), size in zip(columns, sizes, strict=True):
            sample[name] = _value(encoding, found[at : at + size])
            at += size
        return sample

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

    def _table(self, shard: int) -> Any:
        number, count = self._numbers[shard], self._located.counts[shard]
        table = np.frombuffer(self.data.read(number, 0, self._table_bytes(shard)), _OFFSET)
        size_bytes = self.data.pins[number].size_bytes
        offsets = table[1:]
        if len(table) != count + 2 or table[0] != count or offsets[-1] > size_bytes or (np.diff(offsets) < 0).any():
            raise DataDamagedError(
                f"{self.data.pins[number].where} does not begin with the offsets of its {count} samples",
                hint="the shard is damaged in its store, or of another index: write it again",
            )
        return offsets


def _value(encoding: str, found: bytes) -> Any:
    if encoding in _SCALARS:
        return np.frombuffer(found, _SCALARS[encoding])[0].item()
    if encoding == "str":
        return found.decode()
    if encoding == "json":
        return json.loads(found)
    if encoding == "str_int":
        return int(found)
    if encoding == "str_float":
        return float(found)
    if encoding.startswith("ndarray:") and encoding.count(":") == 2:
        _, dtype, shape = encoding.split(":")
        return np.frombuffer(found, dtype).reshape([int(each) for each in shape.split(",")])
    return found
