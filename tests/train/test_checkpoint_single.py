"""Checkpoints of one process: what comes back, what is refused, what is stepped over, what is told."""

import errno
import logging
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from states import WAIT_S, build, flat, same, saved, step

from cordee.errors import CheckpointError, CorruptError, DestinationError, FencedError
from cordee.storage.chunks import FOLDER as CHUNKS
from cordee.storage.files import FileBlobs
from cordee.storage.log import live_commits, log_key, read_entries
from cordee.storage.manifest import parts_prefix, read_failed, read_manifest
from cordee.train.checkpoint import link
from cordee.train.checkpoint.checkpointer import Checkpointer


def test_load_restores_the_saved_state_bitwise(make) -> None:
    commits = []
    first = make(on_commit=commits.append)
    states = saved(first, build(), 2)
    assert [commit.step for commit in commits] == [1, 2]
    assert first.newest() == commits[-1] and commits[-1].stall_us > 0 and commits[-1].uploaded_us > 0

    torch.manual_seed(99)
    state = build()
    step(state)
    second = make()
    commit = second.open()
    assert (commit, second.skipped) == (commits[-1], [])
    loaded = second.load(state, commit)
    assert same(flat(state), states[-1])
    assert (loaded.step, loaded.world_size, loaded.extras["at"]) == (2, 1, 2)
    assert state["opt"].param_groups[0]["lr"] == pytest.approx(0.1 * 0.1), "two steps of the scheduler"


def test_a_fresh_destination_has_nothing_to_load(make) -> None:
    assert make().open() is None


def harm(folder: Path, what: str, generation: int) -> None:
    """Damage one generation's own files."""
    blobs = FileBlobs(folder)
    entries = {entry.index: entry for entry in live_commits(read_entries(blobs))}
    name = entries[generation].record.fields["manifest"]
    if what == "record":
        path = folder / log_key(generation)
    elif what == "manifest":
        path = folder / "manifests" / name
    else:
        others = {
            chunk.key
            for index, entry in entries.items()
            if index != generation
            for chunk in read_manifest(blobs, entry.record.fields["manifest"]).chunks
        }
        own = [chunk.key for chunk in read_manifest(blobs, name).chunks if chunk.key not in others]
        path = folder / max(own, key=lambda key: (folder / key).stat().st_size)
    data = bytearray(path.read_bytes())
    if what == "missing chunk":
        path.unlink()
        return
    if what == "truncated chunk":
        data.pop()
    else:
        data[len(data) // 2] ^= 4
    path.write_bytes(data)


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("what", ["record", "manifest", "flipped chunk", "truncated chunk", "missing chunk"])
def test_damage_is_found_and_the_load_steps_back_and_says_so(make, tmp_path, what, passes, caplog) -> None:
    first = make()
    states = saved(first, build(), 2)
    newest = first.newest().generation
    first.close()
    harm(tmp_path, what, newest)
    state = build()
    second = make()
    with caplog.at_level(logging.WARNING, "cordee.train"):
        loaded = second.resume(state) if passes == 1 else second.load(state, second.open())
    assert loaded.step == second.newest().step == 1 and second.newest().generation < newest
    assert [skipped.generation for skipped in second.skipped] == [newest]
    assert f"skipping generation {newest}" in caplog.text
    assert same(flat(state), states[0]) and loaded.extras["at"] == 1
    # The damaged generation is no base for the next save, and never counts as one of the two that are kept.
    step(state)
    second.save(state, step=2, extras={})
    assert second.wait(WAIT_S).step == 2
    second.close()
    third = make()
    assert third.open().step == 2 and third.skipped == []


def test_when_nothing_verifies_it_is_an_error_not_a_fresh_start(make, tmp_path) -> None:
    first = make()
    saved(first, build(), 1)
    first.close()
    harm(tmp_path, "manifest", first.newest().generation)
    with pytest.raises(CorruptError, match="none of 1 generations"):
        make().open()
    with pytest.raises(CorruptError, match="none of 1 generations"):
        make().resume(build())


def test_load_verifies_chunks_that_no_rank_reads(make, tmp_path) -> None:
    first = make()
    state = build() | {"big": torch.rand(300_000)}
    states = saved(first, state, 1)
    state["big"] += 1
    first.save(state, step=2, extras={})
    first.close()
    whole = read_manifest(FileBlobs(tmp_path), first.newest().manifest)
    (shard,) = whole.tensors["big"].shards  # alone in its chunk
    (piece,) = shard.pieces
    path = tmp_path / whole.chunks[piece.chunk].key
    path.write_bytes(path.read_bytes()[::-1])
    model = {"model": build()["model"]}
    again = make()
    assert again.resume(model).step == 1, "the newest generation is damaged where no rank of this job reads"
    mine, _ = flat(model)
    assert all(torch.equal(value, states[0][0][name]) for name, value in mine.items())


@pytest.mark.parametrize("why", [errno.EIO, errno.ETIMEDOUT])
def test_a_sector_that_is_lost_is_damage_and_a_store_that_is_away_is_not(make, monkeypatch, why) -> None:
    """No disk here fails when it is asked to: the error is put where the system would return it."""
    first = make()
    state = build() | {"big": torch.rand(300_000)}
    saved(first, state, 1)
    state["big"] += 1
    first.save(state, step=2, extras={})
    first.close()
    whole = read_manifest(first._attempt.blobs, first.newest().manifest)
    lost = whole.chunks[whole.tensors["big"].shards[0].pieces[0].chunk].key
    for name in ("get", "read_blocks"):

        def fails(self, key, *args, read=getattr(FileBlobs, name), **options):
            if key == lost:
                raise DestinationError(f"cannot read {key}") from OSError(why, os.strerror(why))
            return read(self, key, *args, **options)

        monkeypatch.setattr(FileBlobs, name, fails)
    again = make()
    if why == errno.EIO:
        assert again.resume(state).step == 1
    else:
        with pytest.raises(DestinationError, match="cannot read chunks/"):
            again.resume(state)


def test_a_new_job_finds_nothing_and_its_state_stays(make) -> None:
    state = build()
    before = flat(state)
    checkpointer = make()
    assert checkpointer.resume(state) is None and same(flat(state), before)
    checkpointer.save(state, step=1, extras={})
    assert checkpointer.wait(WAIT_S).step == 1


def test_damage_between_open_and_load_is_found(make, tmp_path) -> None:
    first = make()
    saved(first, build(), 1)
    first.close()
    second = make()
    commit = second.open()
    harm(tmp_path, "flipped chunk", commit.generation)
    with pytest.raises(CorruptError, match="does not match its checksum"):
        second.load(build(), commit)


def test_another_model_is_refused_with_its_name(make) -> None:
    first = make()
    saved(first, build(), 1)
    with pytest.raises(CheckpointError, match=r"model/0\.weight"):
        first.load(build(width=9), first.newest())
    with pytest.raises(CheckpointError, match="has no ema"):
        first.load({**build(), "ema": {}}, first.newest())


def test_part_of_a_state_can_be_loaded(make) -> None:
    first = make()
    states = saved(first, build(), 1)
    model = build()["model"]
    first.load({"model": model}, first.newest())
    assert torch.equal(model[0].weight, states[0][0]["model/0.weight"])


def test_a_failed_save_is_told_and_is_not_fatal(make) -> None:
    failures = []
    checkpointer = make(on_failure=failures.append)
    state = build()
    saved(checkpointer, state, 1)
    os.kill(checkpointer._link.pid, signal.SIGSTOP)
    checkpointer.save(state, step=2, extras={})
    os.kill(checkpointer._link.pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match="the uploader ended by signal 9 before save 2"):
        checkpointer.wait(WAIT_S)
    assert len(failures) == 1
    assert checkpointer.save(state, step=3, extras={}).previous_failure is None, "wait() has told it already"
    assert checkpointer.wait(WAIT_S).step == 3


def test_the_other_ranks_hear_of_a_dead_uploader_also_when_the_next_one_runs_already(make) -> None:
    told = threading.Event()
    checkpointer = make(on_failure=lambda error: told.wait(WAIT_S))
    state = build()
    saved(checkpointer, state, 1)
    dead = checkpointer._link
    os.kill(dead.pid, signal.SIGSTOP)
    checkpointer.save(state, step=2, extras={})
    os.kill(dead.pid, signal.SIGKILL)
    assert dead.wait_until_read(WAIT_S)
    checkpointer.save(state, step=3, extras={})
    assert checkpointer._link is not dead and checkpointer._link.alive
    told.set()
    dead._thread.join(WAIT_S)
    attempt = checkpointer._attempt
    reason = read_failed(attempt.blobs, parts_prefix(attempt.epoch, attempt.nonce, 2))
    assert "signal 9 before save 2" in str(reason)
    checkpointer.wait(WAIT_S)


def test_training_goes_on_while_the_pipe_of_a_stopped_uploader_is_full(make, monkeypatch) -> None:
    monkeypatch.setattr(link, "HAND_OVER_S_MAX", 0.01)
    checkpointer = make()
    state = build()
    saved(checkpointer, state, 1)
    checkpointer.wait(WAIT_S)
    talker = checkpointer._link
    os.kill(talker.pid, signal.SIGSTOP)
    state["more"] = {f"name{i}": torch.zeros(1) for i in range(2000)}  # A pipe takes 64 KiB.
    checkpointer.save(state, step=2, extras={})
    assert talker._pipe._unsent, "the uploader reads nothing"
    checkpointer.leave(lambda: 0.0)
    assert not talker._pipe._stdin.closed, "there is still something to say"
    os.kill(talker.pid, signal.SIGCONT)
    assert checkpointer.wait(WAIT_S).step == 2
    talker._thread.join(WAIT_S)
    assert not talker._pipe._unsent and talker._pipe._stdin.closed and talker._pipe._sender is None


def test_command_larger_than_a_pipe_is_handed_over_by_the_save(make) -> None:
    checkpointer = make()
    checkpointer.resume({})
    checkpointer.save({"all": {f"name{i}": torch.zeros(1) for i in range(3000)}}, step=1, extras={})
    assert not checkpointer._link._pipe._unsent
    assert checkpointer.wait(WAIT_S).step == 1


def test_a_capture_is_handed_over_by_whoever_made_it(make, monkeypatch) -> None:
    """No other thread has to run for it: the collector may have that one wait in somebody's finalizer."""
    monkeypatch.setattr(link._CommandPipe, "_send_rest", lambda self: pytest.fail("a thread was needed"))
    checkpointer = make()
    saved(checkpointer, build(), 3)
    assert checkpointer.wait(WAIT_S).step == 3


def test_a_failure_that_nobody_waited_for_is_told_by_the_next_save(make) -> None:
    checkpointer = make()
    state = build()
    saved(checkpointer, state, 1)
    os.kill(checkpointer._link.pid, signal.SIGKILL)
    checkpointer._link._thread.join(WAIT_S)
    checkpointer._failed(None, CheckpointError("the disk is full"))
    assert "disk is full" in str(checkpointer.save(state, step=2, extras={}).previous_failure)
    assert checkpointer.save(state, step=3, extras={}).previous_failure is None
    assert checkpointer.wait(WAIT_S).step == 3


def test_a_fenced_attempt_stops_saving(make) -> None:
    old, new = make(), make()
    state = build()
    saved(old, state, 1)
    new.open()
    old.save(state, step=2, extras={})
    with pytest.raises(FencedError):
        old.wait(WAIT_S)
    with pytest.raises(FencedError):
        old.save(state, step=3, extras={})
    assert (old.epoch, new.epoch) == (1, 2)


def test_the_servers_epoch_is_used_and_an_older_one_refused(make) -> None:
    assert make(epoch=7).open() is None
    with pytest.raises(FencedError):
        make(epoch=6).open()
    assert make(epoch=8).open() is None


def test_frozen_weights_are_written_once(make, tmp_path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.Linear(1024, 4))
    model[0].requires_grad_(False)
    state = {"model": model, "opt": torch.optim.AdamW(model[1].parameters())}
    checkpointer = make()
    checkpointer.open()
    for number in (1, 2, 3):
        state["opt"].zero_grad()
        model(torch.randn(2, 1024)).sum().backward()
        state["opt"].step()
        checkpointer.save(state, step=number, extras={})
        checkpointer.wait(WAIT_S)
    checkpointer.close()
    large = [key for key in FileBlobs(tmp_path).list(CHUNKS) if (tmp_path / key).stat().st_size == 4 * 1024 * 1024]
    assert len(large) == 1 and large[0].endswith(".1.1")


def test_a_state_that_changes_shape_is_planned_again(make) -> None:
    checkpointer = make()
    checkpointer.open()
    for number, size in enumerate((10, 3_000_000, 5), start=1):
        tensor = torch.arange(size)
        checkpointer.save({"t": {"x": tensor}}, step=number, extras={})
        commit = checkpointer.wait(WAIT_S)
        state = {"t": {"x": torch.zeros(size, dtype=torch.int64)}}
        checkpointer.load(state, commit)
        assert torch.equal(state["t"]["x"], tensor)


def test_chunks_hold_no_bytes_of_earlier_captures(tmp_path) -> None:
    """Gaps between tensors are stored too: they hold zeros, so that equal states have equal chunks."""
    small = {"t": {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(5, dtype=torch.uint8)}}
    addresses = []
    for folder, before in (("used", [{"t": torch.full((5000,), 7)}]), ("fresh", [])):
        checkpointer = Checkpointer(str(tmp_path / folder), rank=0, world_size=1)
        checkpointer.open()
        for number, state in enumerate([*before, small]):
            checkpointer.save(state, step=number, extras={})
            commit = checkpointer.wait(WAIT_S)
        checkpointer.close()
        chunks = read_manifest(FileBlobs(tmp_path / folder), commit.manifest).chunks
        addresses.append([chunk.xxh3 for chunk in chunks])
    assert addresses[0] == addresses[1]


def test_a_damaged_base_is_no_base(make, tmp_path) -> None:
    """The manifest that was loaded decays, and then the uploader has to start again: saves still succeed."""
    first = make()
    saved(first, build(), 1)
    first.close()
    second = make()
    commit = second.open()
    second._start_uploader(saves_before=0)
    second._link.wait_until_read(WAIT_S)
    os.kill(second._link.pid, signal.SIGKILL)
    second._link._thread.join(WAIT_S)
    harm(tmp_path, "manifest", commit.generation)
    second.save(build(), step=2, extras={})
    assert second.wait(WAIT_S).step == 2


def test_a_world_of_many_needs_torch_distributed(tmp_path) -> None:
    with pytest.raises(CheckpointError, match="a world of 2 ranks needs"):
        Checkpointer(str(tmp_path), rank=0, world_size=2)
