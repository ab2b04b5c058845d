"""The manifest of an artifact: its files, the chunks of each, and the artifact from which it is stored as a difference.

A manifest is canonical JSON, and its BLAKE3 is the artifact's digest: the same files, chunks and base have one name.
"""

import json
import posixpath
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from cordee.errors import InputError
from cordee.storage.registry.planes import DIFFERENCES, WIDTH_MAX, Codec
from cordee.storage.sealed import canonical
from cordee.storage.tree import DIGEST_CHARS, digest_of

_VERSION = 1
FILES_MAX = 200_000
MANIFEST_BYTES_MAX = 64 * 2**20

Kind = Literal["model", "adapter", "checkpoint", "dataset", "index", "other"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk of a file, and where its stored form lies.

    Attributes:
        content: BLAKE3 of its bytes.
        stored: BLAKE3 of its stored form, by which that is found.
        length_bytes: of its bytes.
        stored_bytes: of its stored form.
        codec: how the stored form is read.
        width: bytes of an element.
        label: of what it holds.
        base: content of the base's chunk from which it differs; empty: of none.
    """

    content: str
    stored: str
    length_bytes: int
    stored_bytes: int
    codec: Codec
    width: int
    label: str
    base: str = ""


@dataclass(frozen=True, slots=True)
class ArtifactFile:
    """A file of an artifact; `content` is the BLAKE3 of its chunks' digests in hex, one after the other."""

    path: str
    size_bytes: int
    content: str
    program: bool
    chunks: tuple[StoredChunk, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ArtifactManifest:
    """The content of an artifact; `base` is the digest of the manifest whose chunks it needs, empty: of none."""

    kind: Kind
    files: tuple[ArtifactFile, ...]
    base: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def size_bytes(self) -> int:
        """Return the size of all files."""
        return sum(file.size_bytes for file in self.files)

    def chunks(self) -> Iterator[StoredChunk]:
        """Yield the chunks of all files in their order, with repetitions."""
        for file in self.files:
            yield from file.chunks

    def stored_sizes(self) -> dict[str, int]:
        """Return the size in bytes of each distinct stored form, by its digest."""
        return {chunk.stored: chunk.stored_bytes for chunk in self.chunks()}

    def encode(self) -> bytes:
        """Return the manifest as a blob; its `digest_of` is the artifact's digest."""
        return canonical({"version": _VERSION, **asdict(self)})

    @property
    def digest(self) -> str:
        """Return the artifact's digest."""
        return digest_of(self.encode())

    @classmethod
    def decode(cls, data: bytes) -> "ArtifactManifest":
        """Return the manifest in a blob.

        Raises:
            InputError: it is none, a file would lie outside the artifact's folder, or chunks do not make their files.
        """
        try:
            found = json.loads(data)
            version = found.pop("version")
            files = tuple(
                ArtifactFile(**{**file, "chunks": tuple(StoredChunk(**chunk) for chunk in file["chunks"])})
                for file in found.pop("files")
            )
            manifest = cls(**found, files=files)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"{len(data)} bytes that are no manifest of an artifact: {error}") from None
        if version != _VERSION:
            raise InputError(f"a manifest of version {version}, not {_VERSION}", hint="upgrade this Cordee")
        _check(manifest)
        return manifest


def _check(manifest: ArtifactManifest) -> None:
    """Raise InputError for what no push makes."""
    if manifest.kind not in KINDS or (manifest.base and not is_digest(manifest.base)):
        raise InputError(f"a manifest of the kind {manifest.kind!r} with the base {manifest.base!r:.80}")
    if not manifest.files or len(manifest.files) > FILES_MAX:
        raise InputError(f"an artifact of {len(manifest.files)} files", hint=f"it has 1 to {FILES_MAX:,}")
    paths = [file.path for file in manifest.files]
    for path in paths:
        odd = not isinstance(path, str) or path in ("", ".", "..") or path.startswith(("/", "../")) or "\0" in path
        if odd or posixpath.normpath(path) != path:
            raise InputError(f"the artifact's file {path!r:.200} would not lie in its folder")
    folders = {folder for path in paths for folder in _parents(path)}
    if len(set(paths)) < len(paths) or folders & set(paths):
        raise InputError("a file of the artifact lies there twice, or is a folder too")
    for file in manifest.files:
        _check_file(file, has_base=bool(manifest.base))


def _check_file(file: ArtifactFile, *, has_base: bool) -> None:
    total = 0
    for chunk in file.chunks:
        sizes = (chunk.length_bytes, chunk.stored_bytes, chunk.width)
        if any(type(size) is not int or size < 0 for size in sizes) or not 1 <= chunk.width <= WIDTH_MAX:
            raise InputError(f"{file.path}: a chunk of {sizes} bytes")
        if not (is_digest(chunk.content) and is_digest(chunk.stored)) or chunk.codec not in get_args(Codec):
            raise InputError(f"{file.path}: a chunk without a digest, or in the form {chunk.codec!r:.40}")
        differs = chunk.codec in DIFFERENCES
        if differs != is_digest(chunk.base) or (differs and not has_base):
            raise InputError(f"{file.path}: a chunk differs from a base that it does not name")
        total += chunk.length_bytes
    if total != file.size_bytes or not is_digest(file.content):
        raise InputError(f"{file.path}: its chunks have {total} bytes, and the file {file.size_bytes}")


def _parents(path: str) -> Iterator[str]:
    while path := posixpath.dirname(path):
        yield path


def is_digest(text: object) -> bool:
    """Return whether a value is a BLAKE3 in hex."""
    return isinstance(text, str) and len(text) == DIGEST_CHARS and set(text) <= set("0123456789abcdef")
