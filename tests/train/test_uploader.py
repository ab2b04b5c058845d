"""The uploader and retention: commits, deaths at every named point, full disks, zombies, gc beside a running save."""

import errno
import os
import signal
import subprocess
import sys
import threading

import pytest
from uploading import FROZEN, Bench, Process, fill, generations, open_log

from cordee.errors import DestinationError
from cordee.storage.chunks import FOLDER as CHUNKS
from cordee.storage.destination import open_blobs
from cordee.storage.files import FileBlobs
from cordee.storage.generations import collect
from cordee.storage.log import live_commits, read_entries, unfinished_gcs
from cordee.storage.manifest import read_manifest
from cordee.storage.sealed import seal
from cordee.train.checkpoint.reuse import REREAD_SAVES
from cordee.workload.keep import Keep


def test_saves_commit_and_retention_keeps_two_verified(tmp_path) -> None:
    bench = Bench(open_log(tmp_path), tmp_path)
    for step in range(1, 6):
        assert bench.save(step, step * 10) == ["written", "committed", "collected"]
    assert generations(tmp_path) == [(40, None), (50, None)]
    blobs = FileBlobs(tmp_path)
    needed = set()
    for entry in live_commits(read_entries(blobs)):
        needed |= {chunk.key for chunk in read_manifest(blobs, entry.record.fields["manifest"]).chunks}
    assert set(blobs.list(CHUNKS)) == needed, "exactly what the two generations need is left"
    assert list(blobs.list("gc")) == [] and len(list(blobs.list("manifests"))) == 2
    assert unfinished_gcs(read_entries(blobs)) == []


def test_unchanged_chunks_are_not_written_again(tmp_path) -> None:
    log = open_log(tmp_path)
    bench = Bench(log, tmp_path)
    bench.save(1, 10)
    bench.save(2, 20)
    blobs = FileBlobs(tmp_path)
    frozen = [key for key in blobs.list(CHUNKS) if blobs.get(key) == FROZEN]
    assert len(frozen) == 1 and frozen[0].endswith(".1.1")
    # A new attempt that has loaded the newest generation uses its chunks too.
    newest = live_commits(read_entries(blobs))[-1]
    again = Bench(open_log(tmp_path, "n2"), tmp_path, verified=newest.index)
    again.save(1, 30)
    assert [key for key in blobs.list(CHUNKS) if blobs.get(key) == FROZEN] == frozen


def test_a_bit_that_rots_in_what_is_used_again_is_healed_for_all_generations(tmp_path, caplog) -> None:
    bench = Bench(open_log(tmp_path), tmp_path)
    for save in (1, 2, 3):
        bench.save(save, save)
    (frozen,) = [key for key in bench.blobs.list(CHUNKS) if bench.blobs.get(key) == FROZEN]
    rotten = FROZEN[:99] + b"f" + FROZEN[100:]
    with (tmp_path / frozen).open("r+b") as file:
        file.write(rotten)
        os.fsync(file.fileno())
    assert [problem is None for _, problem in generations(tmp_path)] == [False, False]
    save = 3
    while bench.blobs.get(frozen) == rotten:
        save += 1
        assert save <= 3 + REREAD_SAVES + 1, "not read again in all this time, and mended by the next one"
        bench.save(save, save)
    assert f"{frozen} had decayed" in caplog.text
    assert generations(tmp_path) == [(save - 1, None), (save, None)]
    assert [key for key in bench.blobs.list(CHUNKS) if bench.blobs.get(key) == FROZEN] == [frozen]


def frozen_chunk(blobs: FileBlobs) -> str:
    (key,) = [key for key in blobs.list(CHUNKS) if blobs.get(key) == FROZEN]
    return key


def reads_of(blobs: FileBlobs, seen=lambda key: None) -> list[str]:
    """The keys that are read from the disk, from now on."""
    read, read_blocks = [], blobs.read_blocks

    def noting(key, *args, from_disk=False, **how):
        if from_disk:
            read.append(key)
            seen(key)
        return read_blocks(key, *args, from_disk=from_disk, **how)

    blobs.read_blocks = noting
    return read


def test_reused_chunks_are_read_again_at_a_bounded_rate(tmp_path) -> None:
    bench = Bench(open_log(tmp_path), tmp_path)
    bench.save(1, 1)
    frozen = frozen_chunk(bench.blobs)
    read = reads_of(bench.blobs)
    for save in range(2, 2 + 2 * REREAD_SAVES):
        bench.save(save, save)
    assert read.count(frozen) == 2 and len(read) == 2 + 2 * 2 * REREAD_SAVES, "and each new chunk once"


def test_each_store_is_read_again_once_in_so_many_saves_that_reach_it(tmp_path) -> None:
    to = f"{tmp_path}/near,{tmp_path}/far"
    bench = Bench(open_log(to), to, open_blobs(to))
    bench.save(1, 1)
    near, far = bench.blobs.levels
    frozen, reads = frozen_chunk(far), [reads_of(near), reads_of(far)]
    for save in range(2, 2 + 2 * REREAD_SAVES):
        bench.save(save, save, missing_levels=save % 2)
    assert [read.count(frozen) for read in reads] == [2, 1]


def test_nobody_waits_for_what_is_read_again(tmp_path) -> None:
    """Only what is committed is read again; never behind the last of an attempt, nor while the next save waits."""
    bench = Bench(open_log(tmp_path), tmp_path)
    bench.save(1, 1)
    frozen = frozen_chunk(bench.blobs)
    told = []
    read = reads_of(bench.blobs, lambda key: key == frozen and told.append(bench.events[-1]))
    for save in range(2, 2 + REREAD_SAVES):
        bench.save(save, save, ending="left")
    bench.uploader.is_busy = lambda: True
    for save in range(2 + REREAD_SAVES, 2 + 2 * REREAD_SAVES):
        bench.save(save, save)
    assert frozen not in read
    bench.uploader.is_busy = lambda: False
    for save in range(2 + 2 * REREAD_SAVES, 2 + 3 * REREAD_SAVES):
        bench.save(save, save)
    assert [event["event"] for event in told] == ["collected"]


@pytest.mark.parametrize("why", [errno.ETIMEDOUT, errno.EIO])
def test_a_store_that_is_away_has_not_decayed_and_a_sector_that_cannot_be_read_has(tmp_path, why) -> None:
    bench = Bench(open_log(tmp_path), tmp_path)
    bench.save(1, 1)
    frozen, put, puts = frozen_chunk(bench.blobs), bench.blobs.put, []

    def unreadable(key) -> None:
        if key == frozen and not puts:
            raise DestinationError(f"cannot read {key}") from OSError(why, os.strerror(why))

    def noting(key, data) -> None:
        puts.append(key)
        put(key, data)

    bench.blobs.put = noting
    read = reads_of(bench.blobs, unreadable)
    for save in range(2, 2 + REREAD_SAVES + 1):
        assert bench.save(save, save) == ["written", "committed", "collected"]
    assert frozen in read and puts == [frozen] * (why == errno.EIO)


def test_chunks_of_an_unfinished_gc_count_as_absent(tmp_path) -> None:
    log = open_log(tmp_path)
    bench = Bench(log, tmp_path)
    bench.save(1, 10)
    blobs = FileBlobs(tmp_path)
    frozen = next(key for key in blobs.list(CHUNKS) if blobs.get(key) == FROZEN)
    newest = live_commits(read_entries(blobs))[-1]
    blobs.put_if_absent("gc/list", seal({"format": 1, "keys": [frozen]}))
    bench.uploader.log.refresh()
    bench.uploader.log.append("gc", retired=[], doomed="list")
    again = Bench(open_log(tmp_path, "n2"), tmp_path, verified=newest.index)
    assert again.uploader.reusable.known and frozen not in {
        chunk.key for chunk in again.uploader.reusable.known.values()
    }
    again.save(1, 20)
    blobs.delete(frozen)  # The late delete of the old attempt.
    assert generations(tmp_path)[-1] == (20, None)


def test_unreadable_gc_list_makes_every_chunk_unsafe(tmp_path) -> None:
    bench = Bench(open_log(tmp_path), tmp_path)
    bench.save(1, 10)
    blobs = FileBlobs(tmp_path)
    newest = live_commits(read_entries(blobs))[-1]
    bench.uploader.log.append("gc", retired=[], doomed="lost")
    assert Bench(open_log(tmp_path, "n2"), tmp_path, verified=newest.index).uploader.reusable.known == {}


def test_generations_that_were_stepped_over_do_not_count_as_verified(tmp_path) -> None:
    bench = Bench(open_log(tmp_path), tmp_path, keep=4)
    for step in (1, 2, 3):
        bench.save(step, step * 10)
    whole, *decayed = [entry.index for entry in live_commits(read_entries(FileBlobs(tmp_path)))]
    again = Bench(open_log(tmp_path, "n2"), tmp_path, verified=whole, damaged=decayed)
    again.save(1, 40)
    assert [step for step, _ in generations(tmp_path)] == [10, 20, 30, 40], "10 is one of the two that verify"
    again.save(2, 50)
    assert [step for step, _ in generations(tmp_path)] == [40, 50]


def test_fewer_than_two_verified_generations_retire_nothing(tmp_path) -> None:
    log = open_log(tmp_path)
    bench = Bench(log, tmp_path, grace_s=0.01)
    bench.uploader._read_back = lambda *args: None  # Nobody ever says "verified".
    for step in (1, 2, 3, 4):
        bench.save(step, step)
    assert [step for step, _ in generations(tmp_path)] == [1, 2, 3, 4]


def test_a_full_disk_fails_the_save_and_nothing_else(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    bench = Bench(open_log(tmp_path), tmp_path, blobs)
    bench.save(1, 10)
    put = blobs.put_if_absent

    def full(key, data, **how):
        if key.startswith(CHUNKS):
            raise DestinationError(f"cannot create {key}: No space left on device", hint="free some space")
        return put(key, data, **how)

    blobs.put_if_absent = full
    assert bench.save(2, 20) == ["failed"]
    assert "No space left" in bench.events[-1]["message"] and bench.events[-1]["save"] == 2
    assert generations(tmp_path) == [(10, None)]
    blobs.put_if_absent = put
    assert bench.save(3, 30) == ["written", "committed", "collected"]
    assert generations(tmp_path) == [(10, None), (30, None)]


def test_a_zombie_cannot_commit(tmp_path) -> None:
    old = Bench(open_log(tmp_path), tmp_path)
    old.save(1, 10)
    new = Bench(open_log(tmp_path, "n2"), tmp_path)
    new.save(1, 11)
    for save in (2, 3):
        assert old.save(save, 99)[-1] == "fenced"
    assert generations(tmp_path) == [(10, None), (11, None)]


def test_two_ranks_commit_together_and_a_missing_one_fails_the_save(tmp_path) -> None:
    log = open_log(tmp_path)
    ranks = [Bench(log, tmp_path, rank=rank, world=2, grace_s=0.3) for rank in range(2)]

    def both(save: int, step: int) -> list[list[str]]:
        told: list[list[str]] = [[], []]
        threads = [
            threading.Thread(target=lambda me=me: told.__setitem__(me, ranks[me].save(save, step))) for me in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return told

    assert both(1, 10) == [["written", "committed", "collected"], ["written", "committed"]]
    assert ranks[0].save(2, 20) == ["written", "failed"], "rank 1 has no part"
    assert "no part of ranks [1]" in ranks[0].events[-1]["message"]
    assert ranks[1].save(2, 20) == ["written", "failed"]
    assert "rank 0: no part of ranks [1]" in ranks[1].events[-1]["message"], "the others hear the reason"
    ranks[1].uploader.abandon(3)
    assert ranks[0].save(3, 30) == ["written", "failed"]
    assert "rank 1: its process ended" in ranks[0].events[-1]["message"]
    assert generations(tmp_path) == [(10, None)]


def test_gc_beside_a_running_save_takes_nothing_from_it(tmp_path) -> None:
    """Retention runs between every two store operations of a save that uses an old chunk again and writes new ones."""
    log = open_log(tmp_path)
    bench = Bench(log, tmp_path)
    for step in (1, 2):
        bench.save(step, step)
    blobs = FileBlobs(tmp_path)
    put = blobs.put_if_absent
    beside = Bench(log, tmp_path)  # Another view of the same attempt: rank 0's retention.

    def collecting(key, data, **how):
        beside.uploader.log.refresh()
        collect(beside.uploader.log, FileBlobs(tmp_path), keep=Keep(), save=2)
        done = put(key, data, **how)
        collect(beside.uploader.log, FileBlobs(tmp_path), keep=Keep(), save=2)
        return done

    bench.uploader.blobs = blobs
    blobs.put_if_absent = collecting
    assert bench.save(3, 3)[:2] == ["written", "committed"]
    assert generations(tmp_path)[-2:] == [(2, None), (3, None)]


def test_a_part_that_uses_a_retired_generation_is_not_committed(tmp_path) -> None:
    bench = Bench(open_log(tmp_path), tmp_path)
    bench.save(1, 1)
    stale, since = dict(bench.uploader.reusable.known), bench.uploader.reusable.since
    for step in (2, 3, 4):
        bench.save(step, step)
    bench.uploader.reusable.known, bench.uploader.reusable.since = stale, since
    assert bench.save(5, 5) == ["written", "failed"]
    assert "is retired" in bench.events[-1]["message"]


# The real process, without torch.


POINTS = [
    ("chunks.before:3", 20),
    ("chunks.one:8", 20),
    ("part.before:3", 20),
    ("manifest.before:3", 20),
    ("commit.before:3", 20),
    ("commit.after:3", 30),
    ("gc.before:1", 30),
    ("gc.begun:1", 30),
    ("gc.deleting:1", 30),
    ("gc.deleting:3", 30),
]


def killed_at(to, at: str, newest: int) -> None:
    process = Process(open_log(to), to, {"CORDEE_TEST_KILL_AT": at})
    for save in (1, 2, 3):
        process.save(save, save * 10)
        if not process.events_until("collected"):
            break
    assert process.end() == -signal.SIGKILL
    left = generations(to)
    assert left[-1] == (newest, None)
    assert all(problem is None for _, problem in left), "gc took from a live generation"
    # The next attempt goes on, and cleans up what the dead one left.
    blobs = open_blobs(str(to))
    newest_index = live_commits(read_entries(blobs))[-1].index
    bench = Bench(open_log(to, "n2"), to, blobs, verified=newest_index)
    for save in (1, 2):
        assert bench.save(save, 100 + save) == ["written", "committed", "collected"]
    assert generations(to) == [(101, None), (102, None)]
    assert len(list(blobs.list("manifests"))) == 2
    assert unfinished_gcs(read_entries(blobs)) == []


@pytest.mark.parametrize(("at", "newest"), POINTS)
def test_killed_at_a_point_the_newest_committed_generation_verifies(tmp_path, at, newest) -> None:
    killed_at(tmp_path, at, newest)


@pytest.mark.parametrize(("at", "newest"), [POINTS[1], POINTS[9]])
def test_the_same_in_an_object_store_on_a_bad_network(s3, at, newest) -> None:
    with s3.failing(s3.by_chance(int(newest), 0.03)):
        killed_at("s3://bucket/run", at, newest)


def test_on_a_full_disk_a_failed_save_is_heard_of_and_the_next_one_is_clean(small_disk) -> None:
    log = open_log(small_disk)
    uploaders = [Process(log, small_disk, rank=rank, world=2, grace_s=5.0) for rank in range(2)]
    for rank, uploader in enumerate(uploaders):
        uploader.save(1, 10, rank, 2)
    assert all(uploader.events_until("committed") for uploader in uploaders) and uploaders[0].events_until("collected")
    # Rank 1 has written its part and waits for rank 0, which finds no room for its chunks, nor for a word.
    uploaders[1].save(2, 20, 1, 2)
    assert uploaders[1].events_until("written")
    fill(small_disk)
    uploaders[0].save(2, 20, 0, 2)
    assert "No space left" in uploaders[0].event()["message"]
    heard = uploaders[1].event()
    assert heard["event"] == "failed" and "had no room for its reason" in heard["message"]
    assert generations(small_disk) == [(10, None)]
    (small_disk / "filler").unlink()
    for rank, uploader in enumerate(uploaders):
        uploader.save(3, 30, rank, 2)
    assert all(uploader.events_until("committed") for uploader in uploaders)
    assert [uploader.end() for uploader in uploaders] == [0, 0]
    assert generations(small_disk) == [(10, None), (30, None)]


def test_a_failure_that_the_store_takes_no_word_of_is_told_as_soon_as_it_does(tmp_path) -> None:
    log = open_log(tmp_path)
    ranks = [Bench(log, tmp_path, rank=rank, world=2, grace_s=30.0) for rank in range(2)]
    put = ranks[0].blobs.put_if_absent

    def away(key, data, **how):
        raise DestinationError(f"cannot create {key}: Input/output error")

    ranks[0].blobs.put_if_absent = away
    assert ranks[0].save(1, 10) == ["failed"]
    ranks[0].blobs.put_if_absent = put
    other = threading.Thread(target=lambda: [ranks[1].save(save, 10 * save) for save in (1, 2)])
    other.start()
    assert ranks[0].save(2, 20)[:2] == ["written", "committed"]
    other.join()
    assert [event["event"] for event in ranks[1].events] == ["written", "failed", "written", "committed"]
    assert "rank 0: cannot create" in ranks[1].events[1]["message"]


def test_the_uploader_outlives_its_trainer_and_commits_what_was_captured(tmp_path) -> None:
    process = Process(open_log(tmp_path), tmp_path)
    process.save(1, 10)
    assert process.events_until("collected")  # It is up and ignores signals from here on.
    process.save(2, 20)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.process.send_signal(number)
    process.process.stdin.write(b'{"do": "save", "save": 3, "st')  # The trainer dies in the middle of a word.
    process.process.stdout.close()
    process.process.stdin.close()
    assert process.process.wait(30) == 0
    process.close()
    assert generations(tmp_path) == [(10, None), (20, None)]
    assert "its process ended" in (tmp_path / "parts/1-n1/000003.failed").read_text()


def test_the_uploader_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, cordee.train.checkpoint.uploader; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0
