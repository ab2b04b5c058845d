"""A node's part of an artifact store: manifests and chunks of the versions that its replicas serve, each fetched once.

Contents are verified when they come. After that one counts as there by its size, until whoever reads a version finds it
damaged and says so (`suspect`): then the next fetch verifies all that it has of that version.
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from cordee.errors import CheckpointError
from cordee.storage.content import KEEP_S, batches, unpack
from cordee.storage.files import FileBlobs
from cordee.storage.registry.manifest import MANIFEST_BYTES_MAX, ArtifactManifest
from cordee.storage.registry.store import BASES_MAX, Artifact, ArtifactStore, key_of
from cordee.storage.tree import digest_of

Ask = Callable[[str, list[str]], bytes]
"""Return a pack of `chunks` or `manifests` with these digests."""

_SUSPECT = "suspect"  # empty files by the digest of a version


class ArtifactMirror:
    """The versions in a folder of a node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._blobs = FileBlobs(folder)

    def fetch(self, digest: str, ask: Ask) -> int:
        """Fetch what is missing here of a version, and return its bytes.

        Raises:
            CheckpointError: what came does not have its digest, or is not what a version needs.
        """
        manifests = [self._manifest(digest, ask)]
        while manifests[-1].base:
            if len(manifests) > BASES_MAX:
                raise CheckpointError(f"{digest[:12]} is stored over more than {BASES_MAX} bases")
            manifests.append(self._manifest(manifests[-1].base, ask))
        needed = Artifact(manifests[0], tuple(manifests[1:])).needed_bytes()
        doubt = self.folder / _SUSPECT / digest
        missing = self._missing(needed, verify=doubt.exists())
        for group in batches(missing):
            self._add("chunks", group, ask)
        doubt.unlink(missing_ok=True)
        return sum(missing.values())

    def collect(self, *, unused_s: float = KEEP_S) -> int:
        """Remove versions that were not fetched for `unused_s`, and chunks that no other needs; return their number."""
        before_s = time.time() - unused_s
        used = [key for key in self._blobs.list("manifests") if (self.folder / key).stat().st_mtime > before_s]
        return ArtifactStore(self._blobs).remove_unneeded({key.rpartition("/")[2] for key in used}, dry=False)[0]

    def _manifest(self, digest: str, ask: Ask) -> ArtifactManifest:
        key = key_of("manifests", digest)
        data = self._blobs.get(key)
        if data is None or digest_of(data) != digest:
            self._blobs.delete(key)
            self._add("manifests", [digest], ask)
            data = self._blobs.get(key)
        if data is None or len(data) > MANIFEST_BYTES_MAX:
            raise CheckpointError(f"the manifest {digest[:12]} did not come")
        os.utime(self.folder / key)
        return ArtifactManifest.decode(data)

    def _missing(self, needed: Mapping[str, int], *, verify: bool) -> dict[str, int]:
        missing = {}
        for digest, size_bytes in needed.items():
            key = key_of("chunks", digest)
            there = self._blobs.size(key) == size_bytes
            if there and verify:
                there = digest_of(self._blobs.get(key) or b"") == digest
            if not there:
                self._blobs.delete(key)
                missing[digest] = size_bytes
        return missing

    def _add(self, kind: str, wanted: Iterable[str], ask: Ask) -> None:
        left = list(wanted)
        for digest, data in unpack(ask(kind, left)):
            if digest_of(data) != digest:
                raise CheckpointError(f"{len(data)} bytes came that do not have the digest {digest[:12]}")
            self._blobs.put_if_absent(key_of(kind, digest), data, durable=False)
            left = [each for each in left if each != digest]
        if left:
            raise CheckpointError(f"{len(left)} of the {kind} did not come: {left[0][:12]}")


def suspect(folder: Path, digest: str) -> None:
    """Note that a version that was read from a node's folder is damaged there."""
    with suppress(OSError):  # a full disk: the next attempt fails as this one did
        (folder / _SUSPECT).mkdir(exist_ok=True)
        (folder / _SUSPECT / digest).touch()
