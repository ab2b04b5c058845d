"""Contents of files by their BLAKE3, in a folder of the server or of a node, and packs in which they travel.

A pack is a sequence of records `<digest> <bytes>\\n<content>`: a request for each small file would cost more than its
bytes.
"""

import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path

from cordee.errors import InputError
from cordee.storage.files import FileBlobs
from cordee.storage.sealed import Damaged
from cordee.storage.tree import DIGEST_CHARS, digest_of
from cordee.units import MiB

PACK_BYTES = 8 * MiB
PACK_FILES = 1000
_DAY_S = 86_400
KEEP_S = 7 * _DAY_S  # since its last use, a content that no job needs


class Contents:
    """Contents of files in a folder."""

    def __init__(self, folder: Path) -> None:
        self._blobs = FileBlobs(folder)
        self._folder = folder

    def missing(self, digests: Iterable[str]) -> list[str]:
        """Return the digests without a content here; those with one count as used now."""
        return [digest for digest in digests if not self._touch(digest)]

    def add(self, contents: Iterable[tuple[str, bytes]], *, durable: bool) -> int:
        """Store contents, and return their number.

        Raises:
            InputError: a content does not have its digest.
            DestinationError: the disk is full.
        """
        keys = []
        for digest, data in contents:
            if digest_of(data) != digest:
                raise InputError(f"{len(data)} bytes came that do not have the digest {digest}", hint="send them again")
            keys.append(_key(digest))
            self._blobs.put_if_absent(keys[-1], data, durable=False)
        if durable:
            self._blobs.sync(keys)
        return len(keys)

    def get(self, digest: str) -> bytes:
        """Return a verified content; one that was altered is removed.

        Raises:
            Damaged: it is missing or was altered.
        """
        data = self._blobs.get(_key(digest))
        if data is None:
            raise Damaged(f"{digest} is missing")
        if digest_of(data) != digest:
            self._blobs.delete(_key(digest))
            raise Damaged(f"{digest} was altered on the disk ({len(data)} bytes)")
        return data

    def size_bytes(self, digest: str) -> int:
        """Return the size of a content that is here.

        Raises:
            FileNotFoundError: it is not.
        """
        return (self._folder / _key(digest)).stat().st_size

    def collect(self, needed: Collection[str], *, unused_s: float = KEEP_S) -> int:
        """Remove contents that are not needed and were not used for `unused_s`; return their number."""
        before_s, removed = time.time() - unused_s, 0
        for path in self._folder.glob(f"??/{'?' * DIGEST_CHARS}"):
            if path.name not in needed and path.stat().st_mtime <= before_s:
                path.unlink(missing_ok=True)
                removed += 1
        return removed

    def _touch(self, digest: str) -> bool:
        try:
            os.utime(self._folder / _key(digest))
        except FileNotFoundError:
            return False
        return True


def _key(digest: str) -> str:
    return f"{digest[:2]}/{digest}"


def batches(sizes: Mapping[str, int]) -> Iterator[list[str]]:
    """Yield the digests in groups that fit a pack; a content of more than that travels alone."""
    group: list[str] = []
    total = 0
    for digest, size_bytes in sizes.items():
        if group and (total + size_bytes > PACK_BYTES or len(group) == PACK_FILES):
            yield group
            group, total = [], 0
        group.append(digest)
        total += size_bytes
    if group:
        yield group


def pack(digests: Iterable[str], read: Callable[[str], bytes]) -> bytes:
    """Return a pack of these contents."""
    parts = []
    for digest in digests:
        data = read(digest)
        parts += [f"{digest} {len(data)}\n".encode(), data]
    return b"".join(parts)


def unpack(data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the contents of a pack by digest.

    Raises:
        InputError: it is cut off, or is no pack.

    >>> list(unpack(pack(["ab" * 32], lambda digest: b"x")))[0][1]
    b'x'
    """
    at = 0
    while at < len(data):
        end = data.find(b"\n", at, at + DIGEST_CHARS + 16)
        digest, _, length = data[at:end].decode("ascii", "replace").partition(" ")
        start = end + 1
        if end < 0 or len(digest) != DIGEST_CHARS or not length.isdecimal() or start + int(length) > len(data):
            raise InputError(f"a pack of {len(data)} bytes is cut off or damaged at byte {at}", hint="send it again")
        at = start + int(length)
        yield digest, data[start:at]
