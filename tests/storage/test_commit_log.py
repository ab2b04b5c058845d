"""The commit log under seeded interleavings, and by itself."""

import pytest
from log_histories import one_history

from cordee.errors import CheckpointError, DestinationError, FencedError
from cordee.storage.files import FileBlobs
from cordee.storage.log import Log, LogRecord, live_commits, log_key, read_entries, unfinished_gcs
from cordee.storage.sealed import canonical, seal

SEEDS = 500


def test_interleavings_keep_the_log_dense_fenced_and_complete() -> None:
    for seed in range(SEEDS):
        try:
            one_history(seed)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}; replay with one_history({seed})") from error


def test_a_timed_out_put_that_arrived_is_success(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    log = Log.open(blobs, nonce="a")
    put = blobs.put_if_absent

    def arrives_and_times_out(key, data):
        put(key, data)
        blobs.put_if_absent = put
        raise DestinationError("timed out")

    blobs.put_if_absent = arrives_and_times_out
    assert log.append("commit", save=1) == 1
    assert len(read_entries(blobs)) == 2


def test_a_newer_attempt_fences_the_older_and_the_same_epoch_has_one_owner(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    old = Log.open(blobs, nonce="a")
    new = Log.open(blobs, nonce="b")
    assert (old.epoch, new.epoch) == (1, 2)
    for _ in range(3):  # Fenced once, fenced for ever.
        with pytest.raises(FencedError, match=r"epoch 1 may not write.*record 1 .open. is of epoch 2"):
            old.append("commit", save=1)
    with pytest.raises(FencedError):
        old.refresh()
    with pytest.raises(FencedError):
        Log.open(blobs, nonce="c", epoch=2)
    with pytest.raises(FencedError):
        Log.open(blobs, nonce="c", epoch=1)
    assert new.append("commit", save=1) == 2


def test_a_full_disk_is_reported_and_changes_nothing(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    log = Log.open(blobs, nonce="a")

    def full(key, data):
        raise DestinationError("cannot create it: No space left on device")

    blobs.put_if_absent = full
    with pytest.raises(DestinationError, match="No space left"):
        log.append("commit", save=1)
    assert len(log.entries) == len(read_entries(blobs)) == 1


@pytest.mark.parametrize("at", [0, 5, 40, -2])
def test_a_flipped_bit_is_seen_and_a_new_attempt_steps_over_it(tmp_path, at) -> None:
    blobs = FileBlobs(tmp_path)
    log = Log.open(blobs, nonce="a")
    log.append("commit", save=1, step=10)
    path = tmp_path / log_key(1)
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
    new = Log.open(blobs, nonce="b")
    assert new.entries[1].record is None and new.entries[1].damage
    assert new.commits() == []
    assert new.epoch == 2
    with pytest.raises(FencedError):
        log.append("commit", save=2)


def test_a_writer_that_meets_a_damaged_record_stops(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    log = Log.open(blobs, nonce="a")
    blobs.put_if_absent(log_key(1), b'{"body":')
    for _ in range(2):
        with pytest.raises(FencedError, match="cannot be read"):
            log.append("commit", save=1)


def test_a_missing_record_is_damage_and_not_the_end(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    log = Log.open(blobs, nonce="a")
    log.append("commit", save=1)
    log.append("commit", save=2)
    blobs.delete(log_key(1))
    new = Log.open(blobs, nonce="b")
    assert [entry.record is None for entry in new.entries] == [False, True, False, False]
    assert [entry.index for entry in new.commits()] == [2]


def test_records_of_a_later_format_are_refused_not_guessed(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    blobs.put_if_absent(log_key(0), seal({"format": 2, "kind": "open", "epoch": 1, "nonce": "x"}))
    with pytest.raises(CheckpointError, match="format 2"):
        Log.open(blobs, nonce="a")


def test_gc_records_retire_and_end(tmp_path) -> None:
    log = Log.open(FileBlobs(tmp_path), nonce="a")
    first, second = log.append("commit", save=1), log.append("commit", save=2)
    begun = log.append("gc", retired=[first], doomed="d")
    assert [entry.index for entry in live_commits(log.entries)] == [second]
    assert [entry.index for entry in unfinished_gcs(log.entries)] == [begun]
    log.append("gc", ends=begun)
    assert unfinished_gcs(log.entries) == []


def test_format_1_byte_by_byte() -> None:
    """Format 1 is fixed: these bytes must stay readable, and be what is written, for ever."""
    record = LogRecord("commit", 3, "9f", {"save": 2, "step": 40})
    stored = (
        b'{"body":{"epoch":3,"format":1,"kind":"commit","nonce":"9f","save":2,"step":40},'
        b'"xxh3":"695d4728bdaf9759140e386039e611f8"}'
    )
    assert record.to_bytes() == stored
    assert LogRecord.from_bytes(stored) == record
    assert canonical({"é": [1, 2.5, None, True]}) == '{"é":[1,2.5,null,true]}'.encode()
