"""The kinds of samples that `Data.samples` knows, and how a dataset's kind is told from its names."""

from collections.abc import Mapping
from typing import Any

from cordee.storage.cache.dataset import PinnedData
from cordee.storage.cache.mds import INDEX, MdsSamples
from cordee.storage.cache.parquet import ParquetSamples
from cordee.storage.cache.samples import Files, Records, Samples
from cordee.storage.cache.tar import TarSamples

KINDS: dict[str, type[Samples]] = {
    "mds": MdsSamples,
    "tar": TarSamples,
    "parquet": ParquetSamples,
    "records": Records,
    "files": Files,
}


def kind_of(data: PinnedData, options: Mapping[str, Any]) -> str:
    """Return the kind of a dataset's samples."""
    if "record_bytes" in options:
        return "records"
    names = set(data)
    if INDEX in names and any(name.endswith(".mds") for name in names):
        return "mds"
    for kind in ("tar", "parquet"):
        if any(name.endswith(f".{kind}") for name in names):
            return kind
    return "files"
