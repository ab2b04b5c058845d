"""Artifacts in a blob store: push a folder, pull it, verify what lies there, and remove what nothing needs.

    chunks/<2 digits>/<BLAKE3 of the stored form>     manifests/<digest>

A push writes chunks, then the manifest; whoever keeps the names commits the digest after that. A chunk is verified by
its stored form and by its bytes each time it is read, so nothing that was altered is ever handed on.
"""

import os
import secrets
import shutil
import stat
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from cordee.errors import CheckpointError, InputError
from cordee.storage.files import Blobs
from cordee.storage.registry.cut import Cut, cut_file
from cordee.storage.registry.manifest import (
    FILES_MAX,
    MANIFEST_BYTES_MAX,
    ArtifactFile,
    ArtifactManifest,
    Kind,
    StoredChunk,
    is_digest,
)
from cordee.storage.registry.planes import DIFFERENCES, decode_chunk, encode_chunk
from cordee.storage.sealed import Damaged
from cordee.storage.tree import digest_of
from cordee.units import format_bytes, plural

T = TypeVar("T")
R = TypeVar("R")

BASES_MAX = 4  # A chunk is read through all of them.
_THREADS = 4
CHUNKS, MANIFESTS = "chunks", "manifests"

Seen = Callable[[int], object]


class Found(NamedTuple):
    """A file of a folder that is pushed: its path in the artifact, and on the disk."""

    name: str
    path: Path


@dataclass(slots=True)
class Pushed:
    """The result of a push: the manifest, and the bytes that it wrote and that were there."""

    manifest: ArtifactManifest
    written_bytes: int
    known_bytes: int


@dataclass(frozen=True)
class Artifact:
    """An artifact of a store, with its bases; the first is the nearest."""

    manifest: ArtifactManifest
    bases: tuple[ArtifactManifest, ...] = ()

    @cached_property
    def by_content(self) -> Mapping[str, StoredChunk]:
        """Return the chunk of each content, of the artifact or of a base."""
        manifests = (*reversed(self.bases), self.manifest)
        return {chunk.content: chunk for manifest in manifests for chunk in manifest.chunks()}

    @cached_property
    def by_label(self) -> Mapping[tuple[str, int], StoredChunk]:
        """Return the artifact's own chunk by its label and its length in bytes."""
        return {(chunk.label, chunk.length_bytes): chunk for chunk in self.manifest.chunks()}

    def needed_bytes(self) -> dict[str, int]:
        """Return the stored bytes of each chunk through which its files are read, those of its bases included."""
        needed: dict[str, int] = {}
        waiting, seen = list(self.manifest.chunks()), set[tuple[str, str]]()
        while waiting:
            chunk = waiting.pop()
            if (chunk.stored, chunk.base) not in seen:
                seen.add((chunk.stored, chunk.base))
                needed[chunk.stored] = chunk.stored_bytes
                waiting += filter(None, [self.by_content.get(chunk.base)])
        return needed


@dataclass(frozen=True, slots=True)
class ArtifactStore:
    """Artifacts below a destination; `blobs` is its store."""

    blobs: Blobs

    def read(self, digest: str) -> Artifact:
        """Return an artifact with its bases.

        Raises:
            CheckpointError: a manifest is missing or was altered.
        """
        found = [self.manifest(digest)]
        while found[-1].base:
            if len(found) > BASES_MAX:
                raise CheckpointError(f"{digest[:12]} is stored over more than {BASES_MAX} bases")
            found.append(self.manifest(found[-1].base))
        return Artifact(found[0], tuple(found[1:]))

    def push(
        self,
        files: Iterable[Found],
        kind: Kind,
        *,
        base: Artifact | None = None,
        facts: Mapping[str, Any] | None = None,
        on_bytes: Seen = lambda n: None,
    ) -> Pushed:
        """Write the chunks and the manifest of files; nothing refers to them until somebody commits the digest.

        Args:
            files: of the artifact.
            kind: of the artifact.
            base: an artifact from which it probably differs little: chunks are stored as the difference.
            facts: what the manifest says beside them, as JSON.
            on_bytes: called with the number of bytes of each chunk that is done, from several threads.

        Raises:
            InputError: a file cannot be read, or changes while it is read; or the base has too many bases itself.
            DestinationError: the store cannot be written.
        """
        if base is not None and len(base.bases) >= BASES_MAX:
            raise InputError(
                f"the base is itself stored over {plural(len(base.bases), 'base')}", hint="name one of those, or none"
            )
        pushing = _Pushing(self, base, on_bytes)
        done = [pushing.file(each) for each in sorted(files)]
        manifest = ArtifactManifest(
            kind=kind,
            files=tuple(done),
            base=base.manifest.digest if base is not None and pushing.used_base else "",
            facts=dict(facts or {}),
        )
        data = manifest.encode()
        if len(data) > MANIFEST_BYTES_MAX:
            raise InputError(f"the manifest has {format_bytes(len(data))}", hint="push fewer and larger files")
        ArtifactManifest.decode(data)
        self.blobs.put_if_absent(_manifest_key(manifest.digest), data)
        return Pushed(manifest, pushing.written_bytes, pushing.known_bytes)

    def pull(self, artifact: Artifact, folder: Path, on_bytes: Seen = lambda n: None) -> None:
        """Write the files of an artifact into a new folder: all of them, or none.

        Raises:
            InputError: the folder has something in it.
            CheckpointError: a chunk is missing or was altered.
        """
        folder = folder.absolute()
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder} is not empty", hint="name a new folder")
        folder.parent.mkdir(parents=True, exist_ok=True)
        half = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}.half")
        half.mkdir()
        try:
            for file in artifact.manifest.files:
                self._write_file(artifact, file, half / file.path, on_bytes)
            with suppress(FileNotFoundError):
                folder.rmdir()
            half.rename(folder)
        except BaseException:
            shutil.rmtree(half, ignore_errors=True)
            raise

    def verify(self, artifact: Artifact, on_bytes: Seen = lambda n: None) -> list[str]:
        """Read every chunk of an artifact, and return a sentence about each that is missing or was altered."""

        def problem(chunk: StoredChunk) -> str | None:
            try:
                self.content(artifact, chunk)
            except CheckpointError as error:
                return error.message
            finally:
                on_bytes(chunk.length_bytes)
            return None

        distinct = {chunk.content: chunk for chunk in artifact.manifest.chunks()}
        return [each for each in _parallel(problem, distinct.values()) if each is not None]

    def absent(self, manifest: ArtifactManifest) -> list[str]:
        """Return the stored forms of a manifest's chunks that are not here with their size."""

        def missing(entry: tuple[str, int]) -> str | None:
            stored, size_bytes = entry
            return None if self.blobs.size(_chunk_key(stored)) == size_bytes else stored

        return [each for each in _parallel(missing, manifest.stored_sizes().items()) if each is not None]

    def content(self, artifact: Artifact, chunk: StoredChunk, *, deeper: int = BASES_MAX) -> bytes:
        """Return the verified bytes of a chunk, whose base may be a difference itself, `deeper` times at most.

        Raises:
            CheckpointError: it, or the base's chunk from which it differs, is missing or was altered.
        """
        key = _chunk_key(chunk.stored)
        stored = self.blobs.get(key)
        if stored is None:
            raise CheckpointError(f"{chunk.label}: {key} is missing", hint="push the artifact again")
        if digest_of(stored) != chunk.stored:
            raise CheckpointError(
                f"{chunk.label}: {key} was altered: its {format_bytes(len(stored))} have another digest",
                hint="delete it, and push the artifact again",
            )
        try:
            base = self._base_of(artifact, chunk, deeper)
            data = decode_chunk(stored, chunk.codec, chunk.width, chunk.length_bytes, base)
            if digest_of(data) != chunk.content:
                raise Damaged("its bytes have another digest")
        except Damaged as error:
            raise CheckpointError(f"{chunk.label}: {key} cannot be read: {error}") from None
        return data

    def sizes(self) -> dict[str, int]:
        """Return the size in bytes of every chunk of the store, by the digest of its stored form."""
        return {key.rpartition("/")[2]: self.blobs.size(key) or 0 for key in self.blobs.list(CHUNKS)}

    def remove_unneeded(self, live: Collection[str], *, dry: bool) -> tuple[int, int]:
        """Remove manifests that are not live, and chunks that no live one needs; return their number and bytes.

        Args:
            live: digests of manifests, with those of their bases.
            dry: only count.

        Raises:
            CheckpointError: a live manifest cannot be read; nothing was removed.
        """
        needed = {stored for digest in live for stored in self.manifest(digest).stored_sizes()}
        sizes = {stored: size_bytes for stored, size_bytes in self.sizes().items() if stored not in needed}
        if not dry:
            for key in list(self.blobs.list(MANIFESTS)):
                if key.rpartition("/")[2] not in live:
                    self.blobs.delete(key)
            for stored in sizes:
                self.blobs.delete(_chunk_key(stored))
            self.blobs.sweep_tmp()
        return len(sizes), sum(sizes.values())

    def _base_of(self, artifact: Artifact, chunk: StoredChunk, deeper: int) -> bytes | None:
        if not chunk.base:
            return None
        base = artifact.by_content.get(chunk.base)
        if base is None or not deeper:
            raise Damaged(f"the base has no chunk {chunk.base[:12]}, or is itself stored over too many")
        return self.content(artifact, base, deeper=deeper - 1)

    def _write_file(self, artifact: Artifact, file: ArtifactFile, path: Path, on_bytes: Seen) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o777 if file.program else 0o666)
        try:
            os.truncate(fd, file.size_bytes)

            def write(entry: tuple[int, StoredChunk]) -> None:
                offset, chunk = entry
                data = memoryview(self.content(artifact, chunk))
                while data:
                    done = os.pwrite(fd, data, offset)
                    data, offset = data[done:], offset + done
                on_bytes(chunk.length_bytes)

            for _ in _parallel(write, _placed(file)):
                pass
            os.fsync(fd)
        finally:
            os.close(fd)

    def manifest(self, digest: str) -> ArtifactManifest:
        """Return the manifest of an artifact.

        Raises:
            CheckpointError: it is missing or was altered.
        """
        data = self.blobs.get(_manifest_key(digest)) if is_digest(digest) else None
        if data is None:
            raise CheckpointError(f"the manifest {digest[:12]} is not in {self.blobs}")
        if digest_of(data) != digest:
            raise CheckpointError(f"the manifest {digest[:12]} in {self.blobs} was altered")
        return ArtifactManifest.decode(data)


@dataclass(slots=True)
class _Pushing:
    """One push: the store, the base, and what was written so far."""

    store: ArtifactStore
    base: Artifact | None
    on_bytes: Seen
    written_bytes: int = 0
    known_bytes: int = 0
    used_base: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    # One a core: the first chunk is then sent while the next ones are encoded, and not after all of them.
    _encoders: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(os.cpu_count() or 1))

    def file(self, found: Found) -> ArtifactFile:
        """Write the chunks of a file."""
        try:
            with found.path.open("rb") as file:
                before = os.fstat(file.fileno())
                cuts = cut_file(found.path, found.name)
                fd = file.fileno()
                chunks = tuple(_parallel(lambda cut: self._chunk(fd, cut), cuts))
                after = os.fstat(fd)
        except OSError as error:
            raise InputError(f"{found.path} cannot be read: {error.strerror}") from error
        size_bytes = sum(chunk.length_bytes for chunk in chunks)
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns) or size_bytes != after.st_size:
            raise InputError(f"{found.path} changed while it was read", hint="push it once nobody writes to it")
        return ArtifactFile(
            found.name,
            size_bytes,
            digest_of("".join(chunk.content for chunk in chunks).encode()),
            bool(before.st_mode & stat.S_IXUSR),
            chunks,
        )

    def _chunk(self, fd: int, cut: Cut) -> StoredChunk:
        data = _pread(fd, cut)
        content = digest_of(data)
        chunk = self._of_base(cut, content) or self._stored(cut, content, data)
        self.on_bytes(cut.length_bytes)
        return chunk

    def _of_base(self, cut: Cut, content: str) -> StoredChunk | None:
        """Return the base's chunk with this content, if it has one."""
        there = self.base.by_content.get(content) if self.base is not None else None
        if there is None or there.length_bytes != cut.length_bytes:
            return None
        with self._lock:
            self.known_bytes += cut.length_bytes
            self.used_base |= there.codec in DIFFERENCES
        return there

    def _stored(self, cut: Cut, content: str, data: bytes) -> StoredChunk:
        store, near, before = self.store, None, None
        if self.base is not None:
            near = self.base.by_label.get((cut.label, cut.length_bytes))
            before = store.content(self.base, near) if near is not None else None
        with self._encoders:
            codec, stored = encode_chunk(data, cut.width, before)
            digest = content if codec == "raw" else digest_of(stored)
        key = _chunk_key(digest)
        size_bytes = store.blobs.size(key)
        if size_bytes is None:
            store.blobs.put_if_absent(key, stored)
        elif size_bytes != len(stored):
            store.blobs.put(key, stored)  # It was cut off; everything that needs it is whole again.
        with self._lock:
            self.known_bytes += cut.length_bytes if size_bytes == len(stored) else 0
            self.written_bytes += len(stored) if size_bytes != len(stored) else 0
            self.used_base |= codec in DIFFERENCES
        differs_from = near.content if near is not None and codec in DIFFERENCES else ""
        return StoredChunk(
            content, digest, cut.length_bytes, len(stored), codec, cut.width, cut.label, base=differs_from
        )


def files_below(source: Path) -> list[Found]:
    """Return the files of a folder, or the one file; links are followed, as caches of models are made of them.

    Raises:
        InputError: there is nothing, or something that is no file.
    """
    source = source.expanduser()
    if source.is_file():
        return [Found(source.name, source)]
    if not source.is_dir():
        raise InputError(f"{source} does not exist", hint="name a file or a folder")
    found = []
    for folder, names, files in os.walk(source, followlinks=False):
        for name in names:
            if (link := Path(folder) / name).is_symlink():
                raise InputError(f"{link} is a link to a folder", hint="push that folder, or copy it here")
        for name in files:
            path = Path(folder) / name
            if not path.is_file():
                raise InputError(f"{path} is no file, or a link to nothing", hint="remove it, or push its folder")
            found.append(Found(path.relative_to(source).as_posix(), path))
    if not found or len(found) > FILES_MAX:
        raise InputError(f"{source} has {plural(len(found), 'file')}", hint=f"an artifact has 1 to {FILES_MAX:,}")
    return found


def _placed(file: ArtifactFile) -> Iterator[tuple[int, StoredChunk]]:
    offset = 0
    for chunk in file.chunks:
        yield offset, chunk
        offset += chunk.length_bytes


def _pread(fd: int, cut: Cut) -> bytes:
    data = os.pread(fd, cut.length_bytes, cut.offset)
    while len(data) < cut.length_bytes and (more := os.pread(fd, cut.length_bytes - len(data), cut.offset + len(data))):
        data += more
    if len(data) < cut.length_bytes:
        raise InputError("a file became shorter while it was read", hint="push it once nobody writes to it")
    return data


def _parallel(work: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Yield the results in order, with a few items under way at once."""
    waiting = iter(items)
    with ThreadPoolExecutor(_THREADS) as pool:
        going = [pool.submit(work, item) for item in islice(waiting, 2 * _THREADS)]
        try:
            while going:
                result = going.pop(0).result()
                going += [pool.submit(work, item) for item in islice(waiting, 1)]
                yield result
        finally:
            for future in going:
                future.cancel()


def key_of(kind: str, digest: str) -> str:
    """Return the key of a blob: `chunks` or `manifests`, and its digest."""
    return _chunk_key(digest) if kind == CHUNKS else _manifest_key(digest)


def _chunk_key(stored: str) -> str:
    return f"{CHUNKS}/{stored[:2]}/{stored}"


def _manifest_key(digest: str) -> str:
    return f"{MANIFESTS}/{digest}"
