"""A knowledge base on disk: built from documents, added to and removed from, checked, and searched without a server.

    catalogue.db          documents, chunks and partitions (catalog.py)
    partitions/*.faiss    vectors, clustered and cut into files of one size; immutable (partition.py)

Added documents come as partitions of their own, which are always searched; when there are many, all are clustered anew.
"""

import fcntl
import os
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash

from cordee.errors import BusyError, InputError
from cordee.serve.rag.catalog import Catalog, ChunkRow, Partition, Passage
from cordee.serve.rag.documents import CHUNK_CHARS, OVERLAP_CHARS, Document, chunks, read_document
from cordee.serve.rag.embed import BUILTIN, Embedder, HashedWords, open_embedder
from cordee.serve.rag.merge import BestChunks
from cordee.serve.rag.partition import (
    Ids,
    Kind,
    MappedPartition,
    Vectors,
    clusters,
    encode,
    read_checked,
    read_vectors,
)
from cordee.storage.files import FileBlobs
from cordee.storage.sealed import Damaged
from cordee.units import MiB

PARTITION_BYTES = 64 * MiB
ADDED_MAX = 8
"""Partitions of added documents beyond which all vectors are clustered anew."""
REMOVED_MAX = 0.25
"""Fraction of a partition's chunks that may be removed before it is written again without them."""
_BATCH = 256  # texts that are embedded at once


@dataclass(frozen=True, slots=True)
class IndexSettings:
    """The settings with which an index was built: they hold for what is added later."""

    embedder: str = BUILTIN
    kind: Kind = "flat"
    partition_bytes: int = PARTITION_BYTES
    chunk_chars: int = CHUNK_CHARS
    overlap_chars: int = OVERLAP_CHARS


class Change(NamedTuple):
    """Documents and chunks that came or went; `refused` are files that could not be read, with the reason."""

    documents: int = 0
    chunks: int = 0
    unchanged: int = 0
    refused: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Problem:
    """Something of an index that is not as it was written."""

    name: str
    why: str


@dataclass(frozen=True, slots=True)
class Retrieved:
    """The passages of one query with their scores, and the partitions that could not be searched, with the reason."""

    passages: tuple[tuple[Passage, float], ...]
    not_searched: tuple[Problem, ...] = ()


class RagIndex:
    """An index in a folder."""

    def __init__(self, folder: Path) -> None:
        """Open an index.

        Raises:
            InputError: the folder has none.
        """
        self.folder = folder
        self.catalog = Catalog(folder)
        self.settings = IndexSettings(**self.catalog.get("settings"))
        self._blobs = FileBlobs(folder)

    @classmethod
    def create(cls, folder: Path, settings: IndexSettings) -> "RagIndex":
        """Make an empty index.

        Raises:
            InputError: the folder is not empty.
        """
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise InputError(f"{folder} is not empty", hint="name a new folder, or use `cordee rag add`")
        catalog = Catalog(folder, create=True)
        catalog.set("settings", asdict(settings))
        catalog.close()
        return cls(folder)

    def close(self) -> None:
        """Close the catalogue."""
        self.catalog.close()

    @cached_property
    def embedder(self) -> Embedder:
        """The embedder with which the index was built."""
        return open_embedder(self.settings.embedder, self.catalog.get("embedder_state", b""))

    def embed(self, texts: Sequence[str]) -> Vectors:
        """Return a unit vector for each question.

        Raises:
            InputError: the embedder is no longer that of the index: its vectors have other dimensions.
        """
        found, dims = self.embedder.embed(texts), self.catalog.dims()
        if dims not in (0, found.shape[1]):
            raise InputError(
                f"the embedder {self.settings.embedder} makes vectors of {found.shape[1]} dimensions, and those of "
                f"{self.folder} have {dims}",
                hint="give it the model with which the index was built, or build the index again",
            )
        return found

    def path_of(self, partition: Partition) -> Path:
        """Return the file of a partition."""
        return self.folder / partition.key

    # Changes.

    def add(self, files: Sequence[Path], seen: Callable[[int], object] = lambda done: None) -> Change:
        """Add documents, replace those that have changed, and leave the others; `seen` gets the number done.

        Raises:
            BusyError: another process changes the index.
        """
        with self._writing():
            known = self.catalog.documents()
            digests = {path: _digest(path) for path in files}
            fresh = [path for path in files if known.get(str(path), (0, ""))[1] != digests[path]]
            refused = dict[str, str]()
            if not known and isinstance(self.embedder, HashedWords):
                self._fit(self.embedder, fresh)
            with self.catalog.change(), self._scratch() as vectors:
                rows = self._take_in(fresh, known, digests, vectors, refused, seen)
                self.catalog.set("embedder_state", getattr(self.embedder, "state", b""))
                if rows:
                    new = self._write(vectors.read(), vectors.ids(), added=bool(known))
                    self.catalog.replace_partitions((), new)
            stale = self._tidy()
        self._remove_files(stale)
        return Change(len(fresh) - len(refused), rows, len(files) - len(fresh), tuple(refused.items()))

    def remove(self, names: Iterable[str]) -> Change:
        """Remove documents by name.

        Raises:
            BusyError: another process changes the index.
            InputError: there is no such document; nothing was removed.
        """
        with self._writing():
            known, wanted = self.catalog.documents(), list(dict.fromkeys(names))
            if lacking := [name for name in wanted if name not in known]:
                raise InputError(f"the index has no document {lacking[0]}", hint=f"cordee rag show {self.folder}")
            with self.catalog.change():
                gone = sum(self.catalog.remove_document(known[name][0]) for name in wanted)
            stale = self._tidy()
        self._remove_files(stale)
        return Change(len(wanted), gone)

    def _take_in(
        self,
        files: Sequence[Path],
        known: dict[str, tuple[int, str]],
        digests: dict[Path, str],
        vectors: "_Scratch",
        refused: dict[str, str],
        seen: Callable[[int], object],
    ) -> int:
        """Write documents and chunks into the catalogue, and their vectors into a scratch file; return the chunks."""
        next_id, waiting = self.catalog.next_chunk(), list[ChunkRow]()
        first = next_id
        for done, path in enumerate(files, 1):
            try:
                document = read_document(path)
            except InputError as error:
                refused[str(path)] = error.message
                continue
            if str(path) in known:
                self.catalog.remove_document(known[str(path)][0])
            id_ = self.catalog.add_document(str(path), document.title, digests[path])
            rows = [
                ChunkRow(next_id + at, each.start, each.end, each.heading, each.page, each.text)
                for at, each in enumerate(self._chunks(document))
            ]
            next_id += len(rows)
            self.catalog.add_chunks(id_, {row.id: 0 for row in rows}, rows)
            waiting += rows
            if len(waiting) >= _BATCH:
                self._embed(waiting, vectors)
                waiting = []
            seen(done)
        self._embed(waiting, vectors)
        return next_id - first

    def _embed(self, rows: Sequence[ChunkRow], vectors: "_Scratch") -> None:
        for at in range(0, len(rows), _BATCH):
            part = rows[at : at + _BATCH]
            vectors.append(
                self.embedder.embed([_searched(row.heading, row.text) for row in part]), [row.id for row in part]
            )

    def _fit(self, embedder: HashedWords, files: Iterable[Path]) -> None:
        def texts() -> Iterator[str]:
            for path in files:
                try:
                    yield from (_searched(each.heading, each.text) for each in self._chunks(read_document(path)))
                except InputError:
                    continue  # It is refused, with its reason, when it is taken in.

        embedder.fit(texts())

    def _chunks(self, document: Document) -> Iterator[Any]:
        return chunks(document, most_chars=self.settings.chunk_chars, overlap_chars=self.settings.overlap_chars)

    def _write(self, vectors: Vectors, ids: Ids, *, added: bool) -> dict[int, int]:
        """Write vectors as partitions of one size, near ones together; return the partition of each chunk."""
        each = max(1, self.settings.partition_bytes // (4 * vectors.shape[1] + 8))
        number = -(-len(vectors) // each)
        order = np.lexsort((ids, clusters(vectors, number)))
        found: dict[int, int] = {}
        for cut in np.array_split(order, number):
            rows = np.sort(cut)
            part, part_ids = np.ascontiguousarray(vectors[rows]), np.ascontiguousarray(ids[rows])
            data = encode(self.settings.kind, part, part_ids)
            key = f"partitions/{secrets.token_hex(8)}.faiss"
            self._blobs.put(key, data)
            id_ = self.catalog.add_partition(key, data, len(part), part.mean(0), added=added)
            found |= dict.fromkeys(map(int, part_ids), id_)
        return found

    def _tidy(self) -> list[str]:
        """Cluster anew what has become many or holey; return the keys of files that are needed no more.

        A partition whose file is damaged stays as it is: `verify` names it, and `build` makes it anew.
        """
        before = self.catalog.partitions()
        if sum(each.added for each in before) > ADDED_MAX:
            chosen = before
        else:
            chosen = [each for each in before if len(each.removed) > REMOVED_MAX * each.vectors]
        if not chosen or self._problems(chosen):
            return []
        with self.catalog.change(), self._scratch() as vectors:
            for each in chosen:
                part, ids = read_vectors(self.path_of(each))
                kept = ~np.isin(ids, each.removed)
                vectors.append(part[kept], ids[kept].tolist())
            added = all(each.added for each in chosen)
            found = self._write(vectors.read(), vectors.ids(), added=added) if vectors.rows else {}
            self.catalog.replace_partitions([each.id for each in chosen], found)
        return [each.key for each in chosen]

    def _remove_files(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._blobs.delete(key)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        fd = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._blobs.sweep_tmp()
            named = {each.key for each in self.catalog.partitions()}
            self._remove_files(set(self._blobs.list("partitions")) - named)  # Of a writer that was killed.
            yield
        except BlockingIOError:
            raise BusyError(f"another process changes {self.folder}", hint="try again when it has ended") from None
        finally:
            os.close(fd)

    @contextmanager
    def _scratch(self) -> Iterator["_Scratch"]:
        with tempfile.TemporaryFile(dir=self.folder / "tmp") as file:
            yield _Scratch(file)

    # Reading.

    def verify(self) -> list[Problem]:
        """Return all that is not as it was written: files of partitions, texts of chunks, and their numbers."""
        partitions = self.catalog.partitions()
        found = self._problems(partitions)
        counts = self.catalog.chunk_counts()
        for each in partitions:
            if counts.get(each.id, 0) != each.vectors - len(each.removed):
                why = f"{counts.get(each.id, 0):,} chunks for {each.vectors - len(each.removed):,} vectors"
                found.append(Problem(f"partition {each.id}", why))
        found += [
            Problem(f"chunk {id_} of {name}", "its text does not match its checksum")
            for id_, name in self.catalog.damaged_chunks()
        ]
        return found

    def _problems(self, partitions: Iterable[Partition]) -> list[Problem]:
        found = []
        for each in partitions:
            try:
                read_checked(self.path_of(each), each)
            except Damaged as damage:
                found.append(Problem(f"partition {each.id}", str(damage)))
        return found

    def query(self, texts: Sequence[str], k: int, probes: int | None = None) -> list[Retrieved]:
        """Return the best passages for each text, out of `probes` partitions (None: all), one after the other."""
        vectors, partitions = self.embed(texts), self.catalog.partitions()
        best, missing = [BestChunks(k) for _ in texts], list[list[Problem]]([] for _ in texts)
        wanted = probed(partitions, vectors, probes)
        for each in partitions:
            rows = [at for at, chosen in enumerate(wanted) if each.id in chosen]
            if not rows:
                continue
            try:
                read_checked(self.path_of(each), each)
            except Damaged as damage:
                for at in rows:
                    missing[at].append(Problem(f"partition {each.id}", str(damage)))
                continue
            mapped = MappedPartition(self.path_of(each), each)
            found = mapped.search(vectors[rows], k)
            for at, scores, ids in zip(rows, found.scores, found.ids, strict=True):
                best[at].add(scores, ids)
            mapped.close()
        return [
            Retrieved(self.passages(each.ranked()), tuple(lacking)) for each, lacking in zip(best, missing, strict=True)
        ]

    def passages(self, ranked: Sequence[tuple[int, float]]) -> tuple[tuple[Passage, float], ...]:
        """Return the texts of chunks, in their order; those that were removed meanwhile, or damaged, are left out."""
        found = self.catalog.passages([id_ for id_, _ in ranked])
        return tuple((found[id_], score) for id_, score in ranked if id_ in found and found[id_].intact)


def probed(partitions: Sequence[Partition], queries: Vectors, probes: int | None) -> list[set[int]]:
    """Return the ids of the partitions in which each query is searched: the nearest ones, and all added ones."""
    if probes is None or probes >= len(partitions) or not partitions:
        return [{each.id for each in partitions}] * len(queries)
    centres = np.stack([each.centroid for each in partitions])
    scores = queries @ centres.T
    nearest = np.argsort(-scores, axis=1, kind="stable")[:, :probes]
    always = {each.id for each in partitions if each.added}
    return [{partitions[at].id for at in row} | always for row in nearest]


class _Scratch:
    """Vectors in a file, so that a build needs no memory for all of them."""

    def __init__(self, file: Any) -> None:
        self._file, self._dims, self.rows = file, 0, 0
        self._ids: list[list[int]] = []

    def append(self, vectors: Vectors, ids: list[int]) -> None:
        """Add rows."""
        if self._dims and vectors.shape[1] != self._dims:
            raise InputError(f"the embedder made vectors of {vectors.shape[1]} and of {self._dims} dimensions")
        self._dims, self.rows = vectors.shape[1], self.rows + len(ids)
        self._file.write(np.ascontiguousarray(vectors, np.float32).data)
        self._ids.append(ids)

    def read(self) -> Vectors:
        """Return all rows, mapped."""
        self._file.flush()
        return np.memmap(self._file, np.float32, "r", shape=(self.rows, self._dims))

    def ids(self) -> Ids:
        """Return the ids of all rows."""
        return np.fromiter(chain.from_iterable(self._ids), np.int64, self.rows)


def _searched(heading: str, text: str) -> str:
    """Return what is embedded of a chunk: its text under its heading."""
    return f"{heading}\n{text}" if heading and heading not in text else text


def _digest(path: Path) -> str:
    try:
        return str(xxhash.xxh3_128_hexdigest(path.read_bytes()))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from error
