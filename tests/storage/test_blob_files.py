"""The file store: one winner, whole blobs, clear errors."""

import errno
import os
import threading
from pathlib import Path

import pytest

from cordee.errors import DestinationError
from cordee.storage.destination import open_blobs
from cordee.storage.files import BLOCK_BYTES, DIRECT_MIN_BYTES, TMP, FileBlobs


@pytest.mark.parametrize("size", [0, 1, BLOCK_BYTES, DIRECT_MIN_BYTES, DIRECT_MIN_BYTES + 17, 3 * DIRECT_MIN_BYTES - 1])
@pytest.mark.parametrize("shift", [0, 1])
def test_get_returns_the_bytes_that_were_put(tmp_path, size, shift) -> None:
    blobs = FileBlobs(tmp_path)
    data = memoryview(os.urandom(size + shift))[shift:]  # Also from memory that O_DIRECT cannot take.
    assert blobs.put_if_absent("a/b/c", data)
    assert blobs.get("a/b/c") == data
    assert blobs.size("a/b/c") == size


def test_the_first_wins_and_the_second_changes_nothing(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    assert blobs.put_if_absent("k", b"first")
    assert not blobs.put_if_absent("k", b"second")
    assert blobs.get("k") == b"first"
    blobs.put("k", b"third")
    assert blobs.get("k") == b"third"
    blobs.delete("k")
    blobs.delete("k")
    assert blobs.get("k") is None and blobs.size("k") is None


def test_one_of_many_writers_wins(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    for turn in range(20):
        ready = threading.Barrier(8)
        won: list[int] = []

        def write(me: int) -> None:
            ready.wait()
            if blobs.put_if_absent(f"log/{turn}", str(me).encode()):
                won.append(me)

        threads = [threading.Thread(target=write, args=(me,)) for me in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(won) == 1 and blobs.get(f"log/{turn}") == str(won[0]).encode()
    assert list(blobs.list(TMP)) == []


def test_list_is_sorted_and_keeps_to_its_folder(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    for key in ("log/2", "log/1", "logs/3", "log/x/0"):
        blobs.put(key, b"")
    assert list(blobs.list("log")) == ["log/1", "log/2", "log/x/0"]
    assert list(blobs.list("nothing")) == []


@pytest.mark.parametrize(("code", "hint"), [(errno.ENOSPC, "free some space"), (errno.EROFS, "read-only")])
def test_a_failed_write_leaves_nothing_and_says_why(tmp_path, monkeypatch, code, hint) -> None:
    blobs = FileBlobs(tmp_path)

    def fail(fd, data):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", fail)
        with pytest.raises(DestinationError, match=hint):
            blobs.put_if_absent("k", b"x")
    assert blobs.get("k") is None and list(blobs.list(TMP)) == []


def test_leftovers_of_killed_writers_are_swept(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    blobs.put(f"{TMP}/left", b"half a chu")
    blobs.sweep_tmp()
    assert list(blobs.list(TMP)) == []


def test_where_a_checkpoint_may_go(tmp_path) -> None:
    assert open_blobs(f"file://{tmp_path}/a%20b").root == tmp_path / "a b"
    assert open_blobs(f"{tmp_path}/c#1").root == tmp_path / "c#1"
    with pytest.raises(DestinationError, match="no store for ftp://"):
        open_blobs("ftp://host/run")
    with pytest.raises(DestinationError, match="names no bucket"):
        open_blobs("s3:///run")
    with pytest.raises(DestinationError, match="twice"):
        open_blobs(f"{tmp_path}/a,{tmp_path}/a/")
    with pytest.raises(DestinationError, match="empty storage level"):
        open_blobs(f"{tmp_path}/a,")
    (tmp_path / "file").write_text("")
    with pytest.raises(DestinationError, match="cannot create the folder"):
        open_blobs(f"{tmp_path}/file/run")


def test_a_read_only_folder_is_read_and_a_write_says_why(tmp_path, monkeypatch) -> None:
    FileBlobs(tmp_path / "base").put("k", b"v")
    (tmp_path / "base" / TMP).rmdir()

    def fail(self, *args, **kwargs):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("pathlib.Path.mkdir", fail)
    monkeypatch.setattr(os, "open", fail)
    blobs = FileBlobs(tmp_path / "base")
    assert blobs.get("k") == b"v"
    with pytest.raises(DestinationError, match="Read-only"):
        blobs.put("k", b"w")
    with pytest.raises(DestinationError, match="cannot create the folder"):
        FileBlobs(tmp_path / "none")


@pytest.mark.parametrize("from_disk", [False, True])
@pytest.mark.parametrize("size", [0, 1, 4096, 3 * 2**20 + 5, 9 * 2**20])
def test_blocks_are_the_blob_and_only_fitting_memory_is_filled(tmp_path, size, from_disk) -> None:
    blobs, data = FileBlobs(tmp_path), os.urandom(size)
    blobs.put("a/b", data)
    for into in (None, memoryview(bytearray(size))):
        found = bytearray()
        assert blobs.read_blocks("a/b", found.extend, into, from_disk=from_disk) == size
        assert found == data and (into is None or into == data)
    other, seen = memoryview(bytearray(size + 1)), []
    assert blobs.read_blocks("a/b", seen.append, other) == size
    assert not seen and not any(other)
    assert blobs.read_blocks("a/c", seen.append) is None


def test_put_that_is_not_durable_is_synced_later_with_its_folders(tmp_path, monkeypatch) -> None:
    blobs, synced, fsync = FileBlobs(tmp_path), set(), os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.add(str(Path(f"/proc/self/fd/{fd}").readlink())), fsync(fd))[1])
    assert blobs.put_if_absent("a/b/c", b"x", durable=False) and blobs.put_if_absent("a/d/e", b"y", durable=False)
    assert not synced and blobs.get("a/b/c") == b"x" and not blobs.put_if_absent("a/b/c", b"z", durable=False)
    blobs.sync(["a/b/c", "a/d/e"])
    assert synced == {str(tmp_path / name) for name in ("", "a", "a/b", "a/b/c", "a/d", "a/d/e")}
