"""The rescue: uploaders of dead trainers commit the newest capture that all ranks have in memory."""

import json
import os
import signal
import socket
import threading

import pytest
from uploading import Process, capture, fill, generations, open_log

from cordee.event_json import decode
from cordee.events import CheckpointCommitted
from cordee.storage import rescue
from cordee.storage.destination import open_blobs
from cordee.storage.files import FileBlobs
from cordee.storage.log import Log, live_commits, read_entries
from cordee.storage.manifest import read_failed, write_failed
from cordee.telemetry.stream import last_records
from cordee.train.checkpoint.capture_marks import CaptureMarks
from cordee.train.checkpoint.checkpointer import Checkpointer

WAIT_S = 60


class Rank(Process):
    """An uploader whose trainer holds captures."""

    def __init__(self, log: Log, folder, rank: int = 0, world: int = 1, env: dict[str, str] | None = None) -> None:
        super().__init__(log, folder, env, rank=rank, world=world, grace_s=5.0)
        self.rank, self.world = rank, world
        self.marks = CaptureMarks(self.marks_fd)

    def hold(self, save: int, step: int, *, torn: bool = False) -> None:
        slot = save % 2
        memory, command = capture(save, step, self.rank, self.world)
        self.marks.set(slot, 0)
        fd = (self.fd, self.second)[slot]
        os.ftruncate(fd, len(memory))
        os.pwrite(fd, memory, 0)
        if not torn:
            self.marks.set(slot, save)
            self.tell({**command, "do": "keep", "slot": slot})

    def bring(self, save: int, step: int) -> None:
        """As `save` of an uploader, with the seal that the trainer sets."""
        self.marks.set(0, 0)
        self.save(save, step, self.rank, self.world)
        self.marks.set(0, save)


def dies(*ranks: Rank) -> None:
    """All trainers at once; wait for their uploaders."""
    for rank in ranks:
        rank.process.stdin.close()
    for rank in ranks:
        assert rank.process.wait(WAIT_S) == 0
        rank.process.stdout.close()
        rank.close()


def test_the_newest_capture_that_all_hold_is_brought(tmp_path) -> None:
    """Rank 0 has one more, and rank 1 dies while it writes a third: neither counts."""
    log = open_log(tmp_path)
    ranks = [Rank(log, tmp_path, rank, 3) for rank in range(3)]
    for rank in ranks:
        rank.hold(1, 44)
        rank.hold(2, 46)
    ranks[0].hold(3, 47)
    ranks[1].hold(3, 47, torn=True)
    dies(*ranks)
    assert generations(tmp_path) == [(46, None)]
    assert live_commits(read_entries(FileBlobs(tmp_path)))[-1].record.fields["ending"] == "rescued"
    assert rescue.EarlierUploaders(FileBlobs(tmp_path), 1, "n1").working() is None


def test_the_agent_hears_of_it_from_the_uploader(tmp_path) -> None:
    told = {"CORDEE_SPOOL": str(tmp_path / "spool"), "CORDEE_JOB": "job-a", "CORDEE_EPOCH": "1"}
    rank = Rank(open_log(tmp_path), tmp_path, env=told)
    rank.hold(1, 10)
    dies(rank)
    (record,) = last_records(tmp_path / "spool" / "rank0-uploader.jsonl")
    event = decode(record.event)
    assert isinstance(event, CheckpointCommitted)
    assert (event.job_id, event.epoch, event.step, event.at_us - event.upload_us) == ("job-a", 1, 10, 7)


def test_rescue_skips_durable_and_older_captures(tmp_path) -> None:
    log = open_log(tmp_path)
    rank = Rank(log, tmp_path)
    rank.hold(1, 10)
    rank.bring(2, 20)
    assert rank.events_until("collected")
    dies(rank)
    assert generations(tmp_path) == [(20, None)]
    assert (
        list(FileBlobs(tmp_path).list("parts/1-n1"))
        and rescue.EarlierUploaders(FileBlobs(tmp_path), 1, "n1").working() is None
    )


def test_a_capture_that_was_written_over_in_part_is_none(tmp_path) -> None:
    """The uploader still knows of the capture, but its seal is broken."""
    rank = Rank(open_log(tmp_path), tmp_path)
    rank.hold(2, 20)
    rank.hold(4, 40, torn=True)
    dies(rank)
    assert generations(tmp_path) == []


def test_no_rank_decides_alone(tmp_path) -> None:
    """A rank that is gone with its uploader, as with its host, leaves the others with what is durable."""
    log = open_log(tmp_path)
    ranks = [Rank(log, tmp_path, rank, 2) for rank in range(2)]
    for rank in ranks:
        rank.hold(1, 10)
    ranks[1].process.kill()
    ranks[1].process.wait(WAIT_S)
    dies(ranks[0])
    ranks[1].process.stdin.close()
    ranks[1].process.stdout.close()
    ranks[1].close()
    assert generations(tmp_path) == []
    blobs = FileBlobs(tmp_path)
    assert blobs.size(rescue.rescued_key(1, "n1")) is not None, "the next attempt need not wait"


def test_a_newer_attempt_fences_the_rescue(tmp_path) -> None:
    log = open_log(tmp_path)
    rank = Rank(log, tmp_path)
    rank.hold(1, 10)
    open_log(tmp_path, "n2")
    dies(rank)
    assert generations(tmp_path) == []


@pytest.mark.parametrize("at", ["chunks.one:2", "part.before:1", "manifest.before:1", "commit.before:1"])
def test_a_rescue_that_dies_commits_nothing_or_all(tmp_path, at) -> None:
    rank = Rank(open_log(tmp_path), tmp_path, env={"CORDEE_TEST_KILL_AT": at})
    rank.hold(1, 10)
    rank.process.stdin.close()
    assert rank.process.wait(WAIT_S) == -signal.SIGKILL
    rank.process.stdout.close()
    rank.close()
    assert generations(tmp_path) == []
    blobs = FileBlobs(tmp_path)
    attempt = rescue.newest_attempt(read_entries(blobs))
    assert any("/held-" in key for key in blobs.list("parts")), "it died within"
    assert blobs.size(rescue.rescued_key(*attempt)) is None, "and nobody has said that it is over"
    assert rescue.EarlierUploaders(blobs, *attempt).working() is None, "but it is seen to be dead at once"


def test_the_next_attempt_waits_for_an_uploader_that_lives(tmp_path) -> None:
    """It has not even said what it holds: it still does what it was handed, and waits for another rank's part."""
    rank = Rank(open_log(tmp_path), tmp_path, world=2)
    rank.bring(1, 10)
    blobs = FileBlobs(tmp_path)
    uploaders = rescue.EarlierUploaders(blobs, 1, "n1")
    assert uploaders.working() is None, "its trainer is there"
    rank.process.stdin.close()
    while not (named := uploaders.working()) and rank.process.poll() is None:
        pass
    assert named == f"rank 0 on {socket.gethostname()}"
    write_failed(blobs, "parts/1-n1/000001", "it is enough")
    dies(rank)
    assert uploaders.working() is None and not uploaders.silent


def test_an_uploader_elsewhere_is_believed_as_long_as_it_gives_signs_of_life(tmp_path) -> None:
    blobs, now_s = FileBlobs(tmp_path), 0.0
    uploaders = rescue.EarlierUploaders(blobs, 1, "n", lambda: now_s)
    far = {"host": "far", "where": "another machine", "pid": 1, "started": 1}
    for sign in range(3):
        rescue.give_sign(blobs, "parts/1-n/living-000003", sign, far)
        now_s += rescue.SILENT_S_MAX - 1
        assert uploaders.working() == "rank 3 on far"
    now_s += rescue.SILENT_S_MAX
    assert uploaders.working() is None and uploaders.silent == {"rank 3 on far"}
    rescue.give_sign(blobs, "parts/1-n/living-000003", 3, far)
    assert uploaders.working() == "rank 3 on far", "it was only slow"


def test_a_look_at_many_uploaders_asks_for_several_marks_at_once_and_says_in_time_what_it_knows(tmp_path) -> None:
    blobs, far = FileBlobs(tmp_path), {"host": "far", "where": "another machine", "pid": 1, "started": 1}
    for rank in range(64):
        rescue.give_sign(blobs, f"parts/1-n/living-{rank:06d}", 0, far)
    get, answers, together = blobs.get, threading.Event(), threading.Barrier(8)

    def slow(key: str) -> bytes | None:
        answers.wait(WAIT_S)
        together.wait(WAIT_S / 2)  # One after the other would never be eight.
        return get(key)

    blobs.get = slow
    uploaders = rescue.EarlierUploaders(blobs, 1, "n")
    assert [uploaders.working(within_s=0.01) for _ in range(3)] == ["not all looked at yet"] * 3
    # Nor longer than half of what the other ranks wait for rank 0's answer.
    bounds, working = [], uploaders.working
    uploaders.working = lambda within_s: bounds.append(within_s) or working(within_s)
    hasty = Checkpointer(str(tmp_path), rank=0, world_size=1, grace_s=0.04)
    assert hasty._attempt._still_working(uploaders) == "not all looked at yet"
    assert max(bounds) <= 0.02
    uploaders.working = working
    answers.set()
    assert uploaders.working(WAIT_S) == "rank 0 on far"


def test_nobody_waits_for_an_uploader_that_only_looks_after_what_is_committed(tmp_path) -> None:
    """The trainers leave within the third save; retention then hangs in a manifest that nobody writes."""
    log = open_log(tmp_path)
    blobs = FileBlobs(tmp_path)
    ranks = [Rank(log, tmp_path, rank, 2) for rank in range(2)]
    for save in (1, 2):
        for rank in ranks:
            rank.bring(save, save)
        assert all(rank.events_until("committed") for rank in ranks) and ranks[0].events_until("collected")
    manifest = tmp_path / "manifests" / live_commits(read_entries(blobs))[-1].record.fields["manifest"]
    whole = manifest.read_bytes()
    manifest.unlink()
    os.mkfifo(manifest)
    ranks[0].bring(3, 3)
    ranks[0].process.stdin.close()
    uploaders, heard = rescue.EarlierUploaders(blobs, 1, "n1"), threading.Event()
    while uploaders.working() is None:
        assert ranks[0].process.poll() is None
    ranks[1].bring(3, 3)
    assert ranks[1].events_until("committed")
    for _ in range(round(WAIT_S / 0.02)):
        if uploaders.working() is None:
            break
        heard.wait(0.02)
    assert uploaders.working() is None, "all that it had is committed"
    assert ranks[0].process.poll() is None
    with manifest.open("wb") as pipe:  # Opens once the uploader reads it.
        pipe.write(whole)
    dies(*ranks)


def test_a_rescue_that_fails_says_that_nothing_came_of_it(tmp_path) -> None:
    rank = Rank(open_log(tmp_path), tmp_path)
    rank.hold(1, 10)
    (tmp_path / "chunks").write_bytes(b"no folder")
    dies(rank)
    assert generations(tmp_path) == []
    assert json.loads((tmp_path / rescue.rescued_key(1, "n1")).read_bytes())["body"]["save"] is None


def test_a_rescue_waits_for_room_on_a_full_disk(small_disk) -> None:
    rank = Rank(open_log(small_disk), small_disk)
    rank.bring(1, 10)
    assert rank.events_until("collected")
    rank.hold(2, 20)
    fill(small_disk)
    rank.process.stdin.close()
    tries, heard = small_disk / "tmp", threading.Event()
    before = tries.stat().st_mtime_ns
    while tries.stat().st_mtime_ns == before and rank.process.poll() is None:
        heard.wait(0.005)
    (small_disk / "filler").unlink()
    dies(rank)
    assert [step for step, problem in generations(small_disk) if problem is None] == [10, 20]


def test_no_attempt_waits_for_an_uploader_that_has_died(tmp_path, caplog, monkeypatch) -> None:
    """The uploader died in the middle, and so nobody says that it is over; a sleep would be a wait for it."""
    rank = Rank(open_log(tmp_path), tmp_path, env={"CORDEE_TEST_KILL_AT": "rescue.held:1"})
    rank.hold(1, 10)
    rank.process.stdin.close()
    assert rank.process.wait(WAIT_S) == -signal.SIGKILL
    rank.process.stdout.close()
    rank.close()
    monkeypatch.setattr(rescue, "RESCUE_S_MAX", 5.0)
    checkpointer = Checkpointer(str(tmp_path), rank=0, world_size=1)
    with caplog.at_level("INFO", "cordee"):
        assert checkpointer.open() is None
    checkpointer.close()
    assert "uploaders of the previous attempt" not in caplog.text, "there was nothing to wait for"


def test_a_save_of_a_dead_trainer_is_refused_by_the_others_all_the_same(tmp_path) -> None:
    rank = Rank(open_log(tmp_path), tmp_path)
    rank.hold(1, 10)
    dies(rank)
    assert generations(tmp_path) == [(10, None)]
    assert "its process ended" in str(read_failed(open_blobs(str(tmp_path)), "parts/1-n1/000002"))
    assert json.loads((tmp_path / rescue.rescued_key(1, "n1")).read_bytes())["body"]["save"] == 1
