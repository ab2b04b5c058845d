"""A node's part of the store: fetched once, verified when in doubt, removed when unused."""

import os
import time
from pathlib import Path

import numpy as np
import pytest

from cordee.errors import CheckpointError
from cordee.storage.content import pack
from cordee.storage.files import FileBlobs
from cordee.storage.registry.mirror import ArtifactMirror, suspect
from cordee.storage.registry.store import ArtifactStore, files_below, key_of
from cordee.storage.safetensors import write_file


class Server:
    """A store with a model, and one that is stored as a difference to it."""

    def __init__(self, folder: Path) -> None:
        self.store = ArtifactStore(FileBlobs(folder / "store"))
        self.asked: list[tuple[str, int]] = []
        self.liar = False
        rng = np.random.default_rng(0)
        values = rng.normal(0, 0.02, (512, 512)).astype(np.float32)
        self.base = self._push(folder / "base", values)
        near = (values + 1e-7 * rng.normal(0, 1, values.shape)).astype(np.float32)
        self.tuned = self._push(folder / "tuned", near, self.base)

    def _push(self, folder: Path, values: np.ndarray, base: str = "") -> str:
        folder.mkdir()
        tensors = [("w", "float32", values.shape, values.nbytes)]
        write_file(folder / "model.safetensors", tensors, iter([values.tobytes()]))
        over = self.store.read(base) if base else None
        return self.store.push(files_below(folder), "model", base=over).manifest.digest

    def ask(self, kind: str, digests: list[str]) -> bytes:
        self.asked.append((kind, len(digests)))
        return pack(digests, lambda each: b"?" if self.liar else self.store.blobs.get(key_of(kind, each)) or b"")


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def chunks(folder: Path) -> list[Path]:
    return [path for path in (folder / "chunks").rglob("*") if path.is_file()]


def test_a_version_is_fetched_once_with_what_its_differences_need(server: Server, tmp_path: Path) -> None:
    mirror = ArtifactMirror(tmp_path / "node")
    assert mirror.fetch(server.tuned, server.ask) > 0
    here = ArtifactStore(FileBlobs(tmp_path / "node"))
    here.pull(here.read(server.tuned), tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (
        tmp_path / "tuned" / "model.safetensors"
    ).read_bytes()
    asked = len(server.asked)
    assert mirror.fetch(server.tuned, server.ask) == 0 and len(server.asked) == asked
    before = len(chunks(tmp_path / "node"))
    mirror.fetch(server.base, server.ask)
    assert len(chunks(tmp_path / "node")) <= before + 1, "what the two share is there: all but the base's header"


def test_a_chunk_that_is_damaged_is_fetched_again_when_a_reader_said_so(server: Server, tmp_path: Path) -> None:
    mirror = ArtifactMirror(tmp_path / "node")
    mirror.fetch(server.tuned, server.ask)
    largest = max(chunks(tmp_path / "node"), key=lambda path: path.stat().st_size)
    whole = largest.read_bytes()
    largest.chmod(0o644)
    largest.write_bytes(bytes(len(whole)))
    assert mirror.fetch(server.tuned, server.ask) == 0, "its size is right"
    suspect(tmp_path / "node", server.tuned)
    assert mirror.fetch(server.tuned, server.ask) == len(whole) and largest.read_bytes() == whole
    largest.unlink()
    largest.write_bytes(whole[:-1])
    assert mirror.fetch(server.tuned, server.ask) == len(whole), "one that was cut off is found by its size"


def test_what_has_another_digest_is_not_kept(server: Server, tmp_path: Path) -> None:
    server.liar = True
    with pytest.raises(CheckpointError, match="do not have the digest"):
        ArtifactMirror(tmp_path / "node").fetch(server.tuned, server.ask)
    assert not [path for path in (tmp_path / "node").rglob("*") if path.is_file()]


def test_versions_that_were_not_used_for_long_are_removed(server: Server, tmp_path: Path) -> None:
    mirror, folder = ArtifactMirror(tmp_path / "node"), tmp_path / "node"
    mirror.fetch(server.tuned, server.ask)
    mirror.fetch(server.base, server.ask)
    long_ago_s = time.time() - 10 * 86_400
    os.utime(folder / "manifests" / server.tuned, (long_ago_s, long_ago_s))
    assert mirror.collect() > 0 and not (folder / "manifests" / server.tuned).exists()
    here = ArtifactStore(FileBlobs(folder))
    here.pull(here.read(server.base), tmp_path / "out")
    for path in (folder / "manifests").iterdir():
        os.utime(path, (long_ago_s, long_ago_s))
    mirror.collect()
    assert not chunks(folder)
