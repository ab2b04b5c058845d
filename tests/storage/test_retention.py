"""Retention by count, each Nth, time and pins; collections that are killed, and those of a visitor."""

import random

import pytest

from cordee.errors import FencedError, InputError
from cordee.storage.chunks import FOLDER as CHUNKS
from cordee.storage.chunks import write_chunk
from cordee.storage.files import FileBlobs
from cordee.storage.generations import check_generation, collect, commit_fields, kept_of
from cordee.storage.log import Log, live_commits, pins, read_entries, unfinished_gcs
from cordee.storage.manifest import Manifest, RankPart, parts_prefix, verified_key, write_manifest
from cordee.storage.sealed import seal
from cordee.workload.keep import Keep, parse_keep

HOUR_US = 3600 * 10**6


def commit(
    log: Log, save: int, *, at_us: int = 0, verified: bool = True, data: bytes | None = None, missing_levels: int = 0
) -> int:
    """One generation with one chunk of its own; its index."""
    chunk, _ = write_chunk(log.blobs, data or f"{log.epoch}.{save}".encode(), save=save, epoch=log.epoch, known={})
    rank = RankPart((), chunk.length_bytes, chunk.length_bytes, 1, 1)
    whole = Manifest(save * 10, log.epoch, save, 1, (chunk,), {}, {}, (rank,))
    if verified:
        log.blobs.put_if_absent(verified_key(parts_prefix(log.epoch, log.nonce, save), 0), seal({}))
    return log.append(
        "commit", **commit_fields(write_manifest(log.blobs, whole), whole, at_us=at_us, missing_levels=missing_levels)
    )


def saves(log: Log) -> list[int]:
    return [entry.record.fields["save"] for entry in live_commits(log.entries)]


@pytest.mark.parametrize(
    ("keep", "left"),
    [
        ("2", [9, 10]),
        ("3", [8, 9, 10]),
        ("2, every 4", [1, 5, 9, 10]),
        ("2, 3h", [7, 8, 9, 10]),
        ("2, every 5, 2h30m", [1, 6, 8, 9, 10]),
    ],
)
def test_retention_keeps_the_expected_generations(tmp_path, keep, left) -> None:
    log = Log.open(FileBlobs(tmp_path), nonce="a")
    for save in range(1, 11):
        commit(log, save, at_us=save * HOUR_US)
        collect(log, log.blobs, keep=parse_keep(keep), save=save)
    assert saves(log) == left
    assert len(list(log.blobs.list(CHUNKS))) == len(list(log.blobs.list("manifests"))) == len(left)


def test_clocks_cannot_take_the_newest_two(tmp_path) -> None:
    """One committer's clock is a year ahead, the next one's a year behind; files' own times are never looked at."""
    log = Log.open(FileBlobs(tmp_path), nonce="a")
    for save, at_us in enumerate((10**15, 10**15 + 365 * 24 * HOUR_US, 5, 4), start=1):
        commit(log, save, at_us=at_us)
        collect(log, log.blobs, keep=Keep(2, within_s=60), save=save)
    assert saves(log)[-2:] == [3, 4]


@pytest.mark.parametrize("seed", range(30))
def test_the_newest_verified_and_the_pinned_always_stay(tmp_path, seed) -> None:
    rng = random.Random(seed)
    blobs = FileBlobs(tmp_path)
    log = Log.open(blobs, nonce="n0")
    good: list[int] = []
    keep = Keep(rng.choice([2, 3]), rng.choice([None, 3]), rng.choice([None, 3600.0]))
    save = 0
    for turn in range(12):
        if rng.random() < 0.2:
            log, save = Log.open(blobs, nonce=f"n{turn + 1}"), 0
        save += 1
        verified = rng.random() < 0.7
        index = commit(log, save, at_us=turn * HOUR_US // 2, verified=verified)
        good += [index] if verified else []
        if rng.random() < 0.2:
            visitor = Log.visit(blobs, nonce="v")
            visitor.append("pin", generation=rng.choice(live_commits(visitor.entries)).index, name="p")
        who = log if rng.random() < 0.7 else Log.visit(blobs, nonce="v")
        collect(who, blobs, keep=keep, save=save if who is log else None)
        entries = read_entries(blobs)
        live = [entry.index for entry in live_commits(entries)]
        assert set(good[-keep.last :]) <= set(live) and set(pins(entries)) <= set(live), f"seed {seed}"
        assert all(check_generation(blobs, e.record.fields["manifest"]) is None for e in live_commits(entries)), (
            f"replay: -k always_stay, seed {seed}"
        )
        log.refresh()


def test_a_pin_that_comes_between_is_seen(tmp_path) -> None:
    """A visitor pins a generation after a collection has decided to retire it, and before its record stands."""
    blobs = FileBlobs(tmp_path)
    log = Log.open(blobs, nonce="a")
    first = commit(log, 1)
    for save in (2, 3):
        commit(log, save)
    put = blobs.put_if_absent

    def pinning(key, data):
        if key.startswith("log/"):
            blobs.put_if_absent = put
            Log.visit(blobs, nonce="v").append("pin", generation=first, name="base")
        return put(key, data)

    blobs.put_if_absent = pinning
    assert collect(log, blobs, keep=Keep(), save=3).retired == []
    assert saves(log) == [1, 2, 3] and pins(log.entries) == {first: "base"}
    assert list(blobs.list("gc")) == []
    Log.visit(blobs, nonce="v").append("pin", generation=first, name=None)
    log.refresh()
    assert collect(log, blobs, keep=Keep(), save=3).retired == [first]


def test_a_visitor_collects_beside_a_running_attempt_and_takes_nothing_of_its_running_save(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    log = Log.open(blobs, nonce="a")
    for save in (1, 2, 3):
        commit(log, save)
    running, _ = write_chunk(blobs, b"of save 4", save=4, epoch=1, known={})
    blobs.put_if_absent(f"{parts_prefix(1, 'a', 4)}.rank-000000", b"part")
    done = collect(Log.visit(blobs, nonce="v"), blobs, keep=Keep())
    assert len(done.retired) == 1 and done.deleted == 3, "a chunk, a manifest, a part"
    assert blobs.get(running.key) == b"of save 4" and blobs.get(f"{parts_prefix(1, 'a', 4)}.rank-000000") == b"part"
    commit(log, 4)  # The attempt is not fenced.
    with pytest.raises(FencedError):
        Log.open(blobs, nonce="b", epoch=1)


def test_a_commit_that_uses_what_a_visitor_has_just_retired_is_not_made(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    log = Log.open(blobs, nonce="a")
    base = commit(log, 1)
    for save in (2, 3):
        commit(log, save)
    collect(Log.visit(blobs, nonce="v"), blobs, keep=Keep())  # The attempt has not read this yet.

    def fields() -> dict:
        if base not in {entry.index for entry in log.commits()}:
            raise InputError("it is retired")
        return {"save": 4}

    with pytest.raises(InputError):
        log.append("commit", fields)
    assert [entry.record.kind for entry in read_entries(blobs)][-2:] == ["gc", "gc"]


@pytest.mark.parametrize("lost", [False, True])
def test_next_collection_ends_a_killed_one(tmp_path, lost) -> None:
    blobs = FileBlobs(tmp_path)
    log = Log.open(blobs, nonce="a")
    for save in (1, 2, 3):
        commit(log, save)
    delete, deleted = blobs.delete, []

    def dies(key: str) -> None:
        if deleted:
            raise KeyboardInterrupt
        deleted.append(key)
        delete(key)

    blobs.delete = dies
    with pytest.raises(KeyboardInterrupt):
        collect(log, blobs, keep=Keep(), save=3)
    blobs.delete = delete
    assert len(unfinished_gcs(log.entries)) == 1
    if lost:
        delete(next(iter(blobs.list("gc"))))
    new = Log.open(blobs, nonce="b")
    collect(new, blobs, keep=Keep(), save=0)
    assert unfinished_gcs(read_entries(blobs)) == [] and list(blobs.list("gc")) == []
    assert len(list(blobs.list(CHUNKS))) == 2


def test_every_names_the_same_generations_whatever_was_retired(tmp_path) -> None:
    log = Log.open(FileBlobs(tmp_path), nonce="a")
    for save in range(1, 8):
        commit(log, save)
    before = [entry.index for entry in kept_of(log.entries, live_commits(log.entries), Keep(2, every=3))]
    collect(log, log.blobs, keep=Keep(2, every=3), save=7)
    assert [entry.index for entry in live_commits(log.entries)] == before


def test_keep_is_parsed_and_refused() -> None:
    for text, keep in [
        ("3", Keep(3)),
        (4, Keep(4)),
        ("every 10", Keep(2, 10)),
        ("3, every 10, 7d", Keep(3, 10, 604800.0)),
    ]:
        assert parse_keep(text) == keep and parse_keep(str(keep)) == keep
    for bad in ("1", "0, every 3", "every 0", "sometimes", "3,"):
        with pytest.raises(InputError):
            parse_keep(bad)


@pytest.mark.parametrize("seed", range(20))
def test_each_tier_keeps_its_own_newest_verified(tmp_path, seed) -> None:
    """Whatever farther levels lack: of what reaches each, the newest two that verify stay, and all newer ones."""
    rng = random.Random(seed)
    log = Log.open(FileBlobs(tmp_path), nonce="a")
    good: list[tuple[int, int]] = []
    keep = Keep(rng.choice([2, 3]), rng.choice([None, 2]))
    for save in range(1, 16):
        missing_levels, verified = rng.choice([0, 1, 1, 2]), rng.random() < 0.7
        index = commit(log, save, verified=verified, missing_levels=missing_levels)
        good += [(index, missing_levels)] if verified else []
        collect(log, log.blobs, keep=keep, save=save)
        live = {entry.index for entry in live_commits(log.entries)}
        for reach in range(3):
            newest = [index for index, missing_levels in good if missing_levels <= reach][-keep.last :]
            assert set(newest) <= live, f"python -m pytest {__file__} -k each_tier_keeps, seed {seed}"
    near = [entry for entry in live_commits(log.entries) if entry.record.fields.get("missing_levels")]
    assert len(near) < 12, "near generations go too"
