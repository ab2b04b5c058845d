"""One partition as a faiss index in a file: made, checked, mapped into memory, searched."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from cordee.errors import MissingExtraError
from cordee.serve.rag.catalog import Partition
from cordee.storage.sealed import Damaged

try:
    faiss: Any = importlib.import_module("faiss")
except ImportError as missing:
    raise MissingExtraError("faiss-cpu is not installed", hint="pip install 'cordee[rag]'") from missing

# Else a batch of 20 goes through BLAS, whose threads spin beside the engine's, and whose sums differ in the last bits:
# the score of a chunk would depend on what else is asked.
faiss.cvar.distance_compute_blas_threshold = 1 << 30

Vectors = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
Kind = Literal["flat", "ivf"]
BLOCK_BYTES = 1 << 20
_LISTED_MIN = 4_096  # vectors below which lists save no time


class Found(NamedTuple):
    """Scores and chunk ids of each query, the best first; fewer than asked for end with the id -1."""

    scores: Vectors
    ids: Ids


def encode(kind: Kind, vectors: Vectors, ids: Ids) -> bytes:
    """Return the file of a partition: all vectors in a row (`flat`, exact), or in sqrt(n) lists (`ivf`)."""
    dims = vectors.shape[1]
    if kind == "ivf" and len(vectors) >= _LISTED_MIN:
        index = faiss.IndexIVFFlat(
            faiss.IndexFlatIP(dims), dims, round(len(vectors) ** 0.5), faiss.METRIC_INNER_PRODUCT
        )
        index.cp.seed = 1234
        index.train(vectors)
        index.add_with_ids(vectors, ids)
    else:
        index = faiss.IndexIDMap2(faiss.IndexFlatIP(dims))
        index.add_with_ids(vectors, ids)
    return bytes(faiss.serialize_index(index).tobytes())


def read_vectors(path: Path) -> tuple[Vectors, Ids]:
    """Return the vectors of a partition and their ids, in the order of the ids."""
    index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    if isinstance(index, faiss.IndexIVF):
        lists = [_of_list(index, each) for each in range(index.nlist)]
        ids, vectors = np.concatenate([one for one, _ in lists]), np.concatenate([other for _, other in lists])
    else:
        ids = faiss.vector_to_array(index.id_map)
        vectors = index.index.reconstruct_n(0, index.ntotal)
    order = np.argsort(ids, kind="stable")
    return vectors[order], ids[order]


def _of_list(index: Any, number: int) -> tuple[Ids, Vectors]:
    size, lists = index.invlists.list_size(number), index.invlists
    if not size:
        return np.zeros(0, np.int64), np.zeros((0, index.d), np.float32)
    ids = faiss.rev_swig_ptr(lists.get_ids(number), size).copy()
    codes = faiss.rev_swig_ptr(lists.get_codes(number), size * index.code_size).copy()
    return ids, codes.view(np.float32).reshape(size, index.d)


def read_checked(path: Path, partition: Partition, seen: Callable[[int], object] = lambda size: None) -> None:
    """Read a partition's file into the page cache, and compare its checksum; `seen` gets the bytes of each block.

    Raises:
        Damaged: it is missing or was altered.
    """
    check = xxhash.xxh3_128()
    try:
        with path.open("rb", buffering=0) as file:
            block = memoryview(bytearray(BLOCK_BYTES))
            while size := file.readinto(block):
                check.update(block[:size])
                seen(size)
    except FileNotFoundError:
        raise Damaged("its file is missing") from None
    except OSError as error:
        raise Damaged(f"its file cannot be read: {error.strerror}") from error
    if check.hexdigest() != partition.xxh3:
        raise Damaged(f"its checksum does not match over {path.stat().st_size:,} bytes of {partition.size_bytes:,}")


class MappedPartition:
    """A partition that is mapped into memory: no byte is copied, and `close` gives its pages back to the system."""

    def __init__(self, path: Path, partition: Partition) -> None:
        self.partition, self._path = partition, path
        self._index: Any = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
        self._selector: Any = None
        self.leave_out(partition)

    def leave_out(self, partition: Partition) -> None:
        """Leave out the chunks that are removed now."""
        self.partition, gone = partition, None
        if partition.removed:
            gone = faiss.IDSelectorNot(faiss.IDSelectorBatch(np.array(partition.removed, np.int64)))
        self._selector = gone

    def search(self, queries: Vectors, k: int, probes: int = 16) -> Found:
        """Return the `k` best chunks of each query; other threads go on meanwhile.

        Args:
            queries: unit vectors.
            k: of each.
            probes: lists that are looked at, of a partition that has lists.
        """
        # Of this thread: OpenMP's others would spin on the processor that the engine needs.
        faiss.omp_set_num_threads(1)
        selector = self._selector
        if isinstance(self._index, faiss.IndexIVF):
            options = faiss.SearchParametersIVF(sel=selector, nprobe=probes)
        else:
            options = faiss.SearchParameters(sel=selector)
        return Found(*self._index.search(queries, k, params=options))

    def close(self) -> None:
        """Give its memory back: the mapping, and its pages in the page cache."""
        self._index = None
        drop_pages(self._path)


def drop_pages(path: Path) -> None:
    """Take a file's pages out of the page cache, where the system can."""
    if not hasattr(os, "posix_fadvise"):
        return
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return  # It was removed, and its pages with it.
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


def clusters(vectors: Vectors, number: int) -> Ids:
    """Return the cluster of each vector, by k-means over a sample with a fixed seed."""
    if number <= 1 or len(vectors) <= number:
        return np.zeros(len(vectors), np.int64)
    sample = vectors[np.random.default_rng(0).choice(len(vectors), min(len(vectors), 256 * number), replace=False)]
    found = faiss.Kmeans(vectors.shape[1], number, niter=8, seed=1, spherical=True, min_points_per_centroid=1)
    found.train(np.ascontiguousarray(sample))
    out = np.empty(len(vectors), np.int64)
    for at in range(0, len(vectors), 65_536):
        part = np.ascontiguousarray(vectors[at : at + 65_536])
        out[at : at + 65_536] = found.index.search(part, 1)[1][:, 0]
    return out
