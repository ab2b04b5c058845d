"""The cache of a node: each byte fetched once, verified, and evicted by what jobs will still read."""

import errno
import fcntl
import os
import threading
from contextlib import ExitStack

import pytest
from cache_world import Counted, direct, fill
from hypothesis import given
from hypothesis import strategies as st

from cordee.errors import CacheFullError, DataDamagedError, DataReplacedError
from cordee.storage.cache.evict import Held, victims
from cordee.storage.cache.hints import Hint, read_hints
from cordee.storage.cache.node import NodeCache
from cordee.storage.cache.pieces import PIECE_BYTES, Pieces
from cordee.storage.cache.pins import Pin

SIZES = {"a.bin": 3 * PIECE_BYTES + 7, "b/c.bin": PIECE_BYTES, "d.bin": 1, "empty.bin": 0}


def pieces_of(world, name: str) -> Pieces:
    found = world.node.open(world.data.pins[world.data.number(name)].object_id)
    assert found is not None
    return found


def whole(world, name: str) -> bytes:
    number = world.data.number(name)
    return world.data.read(number, 0, world.data.pins[number].size_bytes)


def test_bytes_are_those_of_the_store_and_fetched_once(tmp_path) -> None:
    contents = fill(tmp_path / "set", SIZES)
    world = direct(tmp_path / "set", tmp_path / "cache")
    for _ in range(2):
        for name, data in contents.items():
            assert whole(world, name) == data
            assert world.data.open(name).read() == data
    number = world.data.number("a.bin")
    assert world.data.read(number, PIECE_BYTES - 3, PIECE_BYTES + 5) == contents["a.bin"][PIECE_BYTES - 3 :][:8]
    assert world.source.read_bytes == sum(SIZES.values())
    other = direct(tmp_path / "set", tmp_path / "cache")
    assert whole(other, "a.bin") == contents["a.bin"] and other.source.read_bytes == 0, "another job of this node"


def test_jobs_that_start_in_the_same_instant_fetch_each_byte_once(tmp_path) -> None:
    contents = fill(tmp_path / "set", {f"{number}.bin": 2 * PIECE_BYTES for number in range(6)})
    source = Counted(str(tmp_path / "set"))
    jobs = [direct(tmp_path / "set", tmp_path / "cache", source=source) for _ in range(4)]
    ready, wrong = threading.Barrier(len(jobs)), []

    def run(world) -> None:
        ready.wait()
        wrong.extend(name for name, data in contents.items() if whole(world, name) != data)

    threads = [threading.Thread(target=run, args=(world,)) for world in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and source.read_bytes == sum(map(len, contents.values()))


def test_a_piece_that_was_altered_on_this_disk_is_fetched_again(tmp_path) -> None:
    contents = fill(tmp_path / "set", SIZES)
    whole(direct(tmp_path / "set", tmp_path / "cache"), "a.bin")
    world = direct(tmp_path / "set", tmp_path / "cache")
    pieces = pieces_of(world, "a.bin")
    os.pwrite(pieces.data_fd, b"x", PIECE_BYTES + 5)
    assert whole(world, "a.bin") == contents["a.bin"] and world.source.read_bytes == PIECE_BYTES


def test_a_file_that_was_cut_off_on_this_disk_is_fetched_again(tmp_path) -> None:
    contents = fill(tmp_path / "set", SIZES)
    world = direct(tmp_path / "set", tmp_path / "cache")
    whole(world, "a.bin")
    os.truncate(pieces_of(world, "a.bin").folder / "data", PIECE_BYTES + 1)
    assert whole(world, "a.bin") == contents["a.bin"], "while it is open"
    os.truncate(pieces_of(world, "a.bin").folder / "state", 70)
    assert whole(direct(tmp_path / "set", tmp_path / "cache"), "a.bin") == contents["a.bin"], "no records"
    os.truncate(pieces_of(world, "a.bin").folder / "state", 3)
    assert whole(direct(tmp_path / "set", tmp_path / "cache"), "a.bin") == contents["a.bin"], "no head"


def test_a_store_that_gives_other_bytes_under_the_same_tag_is_named(tmp_path) -> None:
    fill(tmp_path / "set", SIZES)
    world = direct(tmp_path / "set", tmp_path / "cache")
    whole(world, "a.bin")
    path = tmp_path / "set" / "a.bin"
    status = path.stat()
    with path.open("r+b") as file:
        file.write(b"other")
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    pieces = pieces_of(world, "a.bin")
    os.pwrite(pieces.data_fd, b"x", 5)
    again = direct(tmp_path / "set", tmp_path / "cache")
    with pytest.raises(DataDamagedError, match=r"a\.bin: bytes 0 to 262143 are not those that its store gave before"):
        whole(again, "a.bin")


def test_an_object_that_is_replaced_under_its_name_is_named_and_what_was_fetched_stays(tmp_path) -> None:
    contents = fill(tmp_path / "set", SIZES)
    world = direct(tmp_path / "set", tmp_path / "cache")
    number = world.data.number("a.bin")
    first = world.data.read(number, 0, 10)
    (tmp_path / "set" / "new").write_bytes(b"y" * SIZES["a.bin"])
    (tmp_path / "set" / "new").rename(tmp_path / "set" / "a.bin")
    assert world.data.read(number, 0, 10) == first == contents["a.bin"][:10]
    with pytest.raises(DataReplacedError, match=r"a\.bin was pinned as .* bytes, and is now"):
        world.data.read(number, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 1)
    assert whole(direct(tmp_path / "set", tmp_path / "cache"), "a.bin") == b"y" * SIZES["a.bin"]
    (tmp_path / "set" / "a.bin").unlink()
    with pytest.raises(DataReplacedError, match="it is gone"):
        world.data.read(number, 2 * PIECE_BYTES, 2 * PIECE_BYTES + 1)


def test_objects_leave_for_others_and_a_reader_does_not_notice(tmp_path) -> None:
    contents = fill(tmp_path / "set", {f"{number}.bin": 2 * PIECE_BYTES for number in range(6)})
    world = direct(tmp_path / "set", tmp_path / "cache", limit_bytes=5 * PIECE_BYTES)
    for _ in range(2):
        for name, data in contents.items():
            assert world.data.read(world.data.number(name), 0, PIECE_BYTES) == data[:PIECE_BYTES]
    for name, data in contents.items():
        assert whole(world, name) == data
    assert world.node.room().taken_bytes <= 5 * PIECE_BYTES


def test_what_does_not_fit_is_read_past_the_cache_and_has_no_path(tmp_path) -> None:
    contents = fill(tmp_path / "set", SIZES)
    world = direct(tmp_path / "set", tmp_path / "cache", limit_bytes=PIECE_BYTES)
    assert whole(world, "a.bin") == contents["a.bin"]
    assert whole(world, "b/c.bin") == contents["b/c.bin"]
    with pytest.raises(CacheFullError, match=r"no room for .*a\.bin of 786\.4 kB"):
        world.data.path("a.bin")
    assert world.data.path("b/c.bin").read_bytes() == contents["b/c.bin"]


def never(self, number, data) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_takes_room_from_what_nobody_reads_and_else_is_passed_by(tmp_path, monkeypatch) -> None:
    contents = fill(tmp_path / "set", SIZES)
    fill(tmp_path / "old", {"old.bin": 64 * PIECE_BYTES})
    old = direct(tmp_path / "old", tmp_path / "cache")
    whole(old, "old.bin")
    world = direct(tmp_path / "set", tmp_path / "cache")
    store, full = Pieces.store, [True]

    def fails(self, number, data) -> None:
        if full[0] and world.node.open(old.data.pins[0].object_id) is not None:
            raise OSError(errno.ENOSPC, "No space left on device")
        store(self, number, data)

    monkeypatch.setattr(Pieces, "store", fails)
    assert whole(world, "a.bin") == contents["a.bin"]
    assert world.node.open(old.data.pins[0].object_id) is None, "it has left for it"
    monkeypatch.setattr(
        Pieces, "store", lambda self, number, data: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
    )
    assert whole(world, "b/c.bin") == contents["b/c.bin"] and whole(world, "d.bin") == contents["d.bin"]


def test_a_fetcher_that_died_leaves_no_lock_and_a_frozen_one_is_not_waited_for(tmp_path, monkeypatch) -> None:
    contents = fill(tmp_path / "set", SIZES)
    world = direct(tmp_path / "set", tmp_path / "cache")
    world.node.admit(world.data.pins)
    pieces = pieces_of(world, "b/c.bin")
    with pieces.claimed(0) as held, pieces.claimed(0) as twice:
        assert held and not twice
    with ExitStack() as frozen:
        assert frozen.enter_context(pieces.claimed(0))
        monkeypatch.setattr("cordee.storage.cache.fetching._STALLED_S", 0.05)
        assert whole(world, "b/c.bin") == contents["b/c.bin"]


def test_a_hint_is_believed_as_long_as_its_process_lives(tmp_path) -> None:
    hint = Hint(tmp_path)
    hint.write(["x", "y"], queued=["s3://b/set/"], kept=["k"])
    next_use, kept = read_hints(tmp_path, {"x": "s3://a", "q": "s3://b/set", "n": "s3://c"})
    assert sorted(next_use, key=next_use.get) == ["x", "y", "q"] and kept == {"k"}
    fcntl.flock(hint._fd, fcntl.LOCK_UN)
    assert read_hints(tmp_path, {}) == ({}, set()) and not list((tmp_path / "hints").iterdir())


def test_what_a_waiting_job_will_read_leaves_last(tmp_path) -> None:
    node = NodeCache(tmp_path / "cache", 3 * PIECE_BYTES)
    sets = {name: Pin(f"s3://bucket/{name}", "x", PIECE_BYTES, name) for name in ("first", "second", "third", "new")}
    for name in ("first", "second", "third"):
        node.admit([sets[name]])
    hint = Hint(node.root)
    hint.write([sets["first"].object_id], queued=["s3://bucket/third", "s3://bucket/second"])
    node.admit([sets["new"]])
    assert node.open(sets["second"].object_id) is None, "the queue comes to it last"
    hint.write([sets["first"].object_id, sets["third"].object_id, sets["new"].object_id])
    with pytest.raises(CacheFullError):
        node.admit([sets["second"]], soon=4.0)
    hint.close()


@given(
    held=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.booleans()), max_size=8),
    uses=st.dictionaries(st.integers(0, 7), st.integers(1, 9), max_size=8),
    needed=st.integers(1, 30),
    before=st.integers(0, 5),
)
def test_who_leaves_is_read_later_than_who_stays(held, uses, needed, before) -> None:
    all_held = [Held(str(n), size, used, kept) for n, (size, used, kept) in enumerate(held)]
    next_use = {str(n): float(use) for n, use in uses.items()}
    out = victims(all_held, next_use, needed, before=before)
    free = sum(each.size_bytes for each in all_held if not each.is_kept and next_use.get(each.object_id, 99) > before)
    assert (out is None) == (free < needed)
    if out is not None:
        stay = [each for each in all_held if each not in out and not each.is_kept]
        assert sum(each.size_bytes for each in out) >= needed and not any(each.is_kept for each in out)
        assert sum(each.size_bytes for each in out[:-1]) < needed, "no more than are needed"
        last = min((next_use.get(each.object_id, 99) for each in out), default=99)
        assert all(next_use.get(each.object_id, 99) <= last for each in stay)
