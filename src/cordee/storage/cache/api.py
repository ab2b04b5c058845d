"""`cordee.data(url)`: a dataset whose names are pinned, read through the cache of the node.

data = cordee.data("s3://bucket/set")
data.path("train/00000.parquet")         a path in the file system, after the whole object was fetched
data.open("train/00000.parquet")         a file object that fetches what is read
data.fs()                                the same for libraries that take an fsspec file system
data.samples()                           a dataset for torch's DataLoader and cordee.ElasticBatchSampler
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cordee.errors import InputError
from cordee.storage.cache.channel import Channel
from cordee.storage.cache.dataset import PinnedData
from cordee.storage.cache.kinds import KINDS, kind_of
from cordee.storage.cache.node import NodeCache
from cordee.storage.cache.pins import Pin
from cordee.storage.cache.samples import Samples
from cordee.storage.cache.sources import FolderSource
from cordee.storage.destination import is_remote

if TYPE_CHECKING:
    from cordee.storage.cache.filesystem import DataFileSystem


def data(url: str | Path, *, cache: str | Path | None = None, copy: bool | None = None) -> "Data":
    """Return a dataset, with its names pinned as they are now.

    Args:
        url: `s3://bucket/prefix`, `gs://...`, `az://...`, or a folder.
        cache: the folder of the node's cache; CORDEE_CACHE by default, which an agent sets.
        copy: whether a folder is copied into the cache. By default it is if it is on another file system; one beside
            the cache is read where it is.

    Raises:
        DataError: it cannot be listed, or is empty.
    """
    node = NodeCache(None if cache is None else Path(cache).expanduser())
    text = str(url)
    if not is_remote(text):
        source = FolderSource(text)
        found = source.pins()
        beside = bool(found) and Path(found[0].url).stat().st_dev == node.root.stat().st_dev
        if found and (not beside if copy is None else copy):
            return Data(source.url, tuple(found), node, Channel(node.root, node.limit_bytes))
        return Data(source.url, tuple(found), node, None)
    channel = Channel(node.root, node.limit_bytes)
    return Data(text.rstrip("/"), tuple(Pin(*row) for row in channel.ask("pins", url=text)), node, channel)


class Data(PinnedData):
    """A dataset: its objects as they were when it was made, as files and as samples."""

    def fs(self) -> "DataFileSystem":
        """Return an fsspec file system with the objects as files."""
        from cordee.storage.cache.filesystem import DataFileSystem  # fsspec is torch's, or the user's own

        return DataFileSystem(self)

    def samples(self, kind: str = "auto", **options: Any) -> "Samples":
        """Return the dataset's samples, by index.

        Args:
            kind: `mds` (MosaicML's shards), `tar` (WebDataset's), `parquet`, `records` (of equal size, such as tokens),
                `files` (each file is a sample), or `auto`: by the names of the objects.
            options: `record_bytes` and `dtype` for records, `decode`: a function for each sample.

        Raises:
            InputError: the kind is not known, or the objects are not of it.
        """
        kind = kind_of(self, options) if kind == "auto" else kind
        if kind not in KINDS:
            raise InputError(f"samples of {kind!r} are not known", hint=f"one of {', '.join(KINDS)}, or auto")
        return KINDS[kind](self, **options)
