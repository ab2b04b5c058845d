"""Captures that are held in memory: whoever dies, what all ranks hold is brought; a torn one never is."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from forks import run
from test_job import alone, end_of, environment, folders, gang, steps_of
from test_uploader import Process, capture, fill, generations, open_log

from cordee.errors import CheckpointError
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
        self.marks.clear(slot)
        fd = (self.fd, self.second)[slot]
        os.ftruncate(fd, len(memory))
        os.pwrite(fd, memory, 0)
        if not torn:
            self.marks.set(slot, save)
            self.tell({**command, "do": "keep", "slot": slot})

    def bring(self, save: int, step: int) -> None:
        """As `save` of an uploader, with the seal that the trainer sets."""
        self.marks.clear(0)
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
    for _ in range(500):
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


TRAINER = """
import os, signal, sys, torch
from cordee.train.checkpoint.checkpointer import Checkpointer
checkpointer = Checkpointer(sys.argv[1], rank=0, world_size=1)
checkpointer.open()
state = {"w": torch.zeros(300_000)}
for step in range(1, 48):
    state["w"].fill_(step)
    if step == 40:
        checkpointer.save(state, step=step, extras={})
        checkpointer.wait(60)
    elif step > 40 and step % 2 == 0:
        checkpointer.save(state, step=step, extras={"at": step}, reach=0)
held = checkpointer.status()
print(held.memory_step, held.durable_step, flush=True)
if sys.argv[2] == "torn":
    fill = checkpointer._captures._writers[0].staging.fill
    def die(targets, sources):
        targets[0][: len(targets[0]) // 2].copy_(sources[0][: len(targets[0]) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    for writer in checkpointer._captures._writers:
        writer.staging.fill = die
    state["w"].fill_(47)
    checkpointer.save(state, step=47, extras={}, reach=0)
if sys.argv[2] == "closed":
    checkpointer.close()
    sys.exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("how", ["killed", "torn", "closed"])
def test_a_trainer_that_is_killed_goes_on_from_its_newest_capture(tmp_path: Path, how) -> None:
    """SIGKILL at step 47, durable is 40, in memory is 46. The next attempt waits for the uploader by itself."""
    script, to = tmp_path / "trainer.py", tmp_path / "to"
    script.write_text(TRAINER)
    ((code, said, errors),) = run([[sys.executable, str(script), str(to), how]], [environment()], WAIT_S)
    assert code == (0 if how == "closed" else -signal.SIGKILL), errors
    assert said.split() == ["46", "40"]
    blobs = FileBlobs(to)
    heard = threading.Event()
    while how != "closed" and not any("/living-" in key or key.endswith("/rescued") for key in blobs.list("parts")):
        heard.wait(0.005)  # The trainer has gone this moment; a new one needs longer than this to start.
    checkpointer = Checkpointer(str(to), rank=0, world_size=1)
    commit = checkpointer.open()
    state = {"w": torch.zeros(300_000)}
    loaded = checkpointer.load(state, commit)
    checkpointer.close()
    assert (loaded.step, loaded.extras) == (46, {"at": 46})
    assert bool((state["w"] == 46).all())


def test_captures_are_held_while_the_uploader_reads_and_the_one_it_reads_stays(tmp_path) -> None:
    checkpointer = Checkpointer(str(tmp_path), rank=0, world_size=1)
    checkpointer.open()
    state = {"w": torch.full((300_000,), 1.0)}
    checkpointer.save(state, step=1, extras={})
    checkpointer.wait(WAIT_S)
    os.kill(checkpointer._link.pid, signal.SIGSTOP)
    for step in range(2, 7):
        state["w"].fill_(step)
        saved = checkpointer.save(state, step=step, extras={}, reach=1 if step == 3 else 0)
        assert saved.reach == (step == 3)
    standing = checkpointer.status()
    assert (standing.memory_step, standing.uploading_step, standing.durable_step) == (6, 3, 1)
    os.kill(checkpointer._link.pid, signal.SIGCONT)
    assert checkpointer.wait(WAIT_S).step == 3
    assert checkpointer.status().upload_s[0] > 0
    checkpointer.load(state, checkpointer.newest())
    assert bool((state["w"] == 3).all())
    checkpointer.close()
    assert generations(tmp_path)[-1] == (6, None), "closed before its time: what was held is brought"


def test_capture_in_memory_is_lost_with_its_uploader(tmp_path) -> None:
    checkpointer = Checkpointer(str(tmp_path), rank=0, world_size=1)
    checkpointer.open()
    state = {"w": torch.full((300_000,), 1.0)}
    checkpointer.save(state, step=1, extras={}, reach=0)
    assert checkpointer.status().memory_step == 1
    os.kill(checkpointer._link.pid, signal.SIGKILL)
    checkpointer._link._thread.join(WAIT_S)
    assert checkpointer.status().memory_step is None
    checkpointer.save(state, step=2, extras={}, reach=1)
    assert checkpointer.wait(WAIT_S).step == 2 and checkpointer.status().memory_step is None
    checkpointer.save(state, step=3, extras={}, reach=0)
    assert checkpointer.status().memory_step == 3
    checkpointer.close()


def test_memory_made_beforehand_is_the_memory_of_the_first_save(tmp_path) -> None:
    checkpointer = Checkpointer(str(tmp_path), rank=0, world_size=1)
    checkpointer.open()
    state = {"w": torch.arange(3_000_000)}
    checkpointer.prepare(state)
    checkpointer._captures.buffers.settle()
    staging = checkpointer._captures.buffers.buffers[0]
    made, place = staging.bytes.numel(), staging.bytes.data_ptr()
    assert made >= state["w"].nbytes and checkpointer._captures.buffers.buffers[1].bytes.numel() == 0
    checkpointer.save({"w": state["w"]}, step=1, extras={})
    assert (staging.bytes.numel(), staging.bytes.data_ptr()) == (made, place)
    commit = checkpointer.wait(WAIT_S)
    state["w"] = torch.zeros(3_000_000, dtype=torch.int64)
    checkpointer.load(state, commit)
    assert torch.equal(state["w"], torch.arange(3_000_000))
    checkpointer.close()


@pytest.mark.gpu
def test_captures_come_from_a_gpu_through_pinned_memory(tmp_path) -> None:
    checkpointer = Checkpointer(str(tmp_path), rank=0, world_size=1)
    checkpointer.open()
    state = {"w": torch.arange(3_000_000, device="cuda")}
    checkpointer.prepare(state, in_memory=True)
    for step, reach in ((1, 1), (2, 0), (3, 0)):
        state["w"] += 1
        checkpointer.save(state, step=step, extras={}, reach=reach)
        state["w"] += 0
    assert all(staging._pinned for staging in checkpointer._captures.buffers.buffers)
    checkpointer.wait(WAIT_S)
    checkpointer.close()
    again = Checkpointer(str(tmp_path), rank=0, world_size=1)
    again.load(state, again.open())
    again.close()
    assert torch.equal(state["w"].cpu(), torch.arange(3_000_000) + 3)


def test_a_save_of_a_dead_trainer_is_refused_by_the_others_all_the_same(tmp_path) -> None:
    rank = Rank(open_log(tmp_path), tmp_path)
    rank.hold(1, 10)
    dies(rank)
    assert generations(tmp_path) == [(10, None)]
    assert "its process ended" in str(read_failed(open_blobs(str(tmp_path)), "parts/1-n1/000002"))
    assert json.loads((tmp_path / rescue.rescued_key(1, "n1")).read_bytes())["body"]["save"] == 1


def test_a_job_that_is_killed_repeats_one_step_and_no_bit(tmp_path: Path) -> None:
    """Killed in step 47 with a checkpoint each 40 steps: it goes on from the capture of step 46."""
    whole, out, to = folders(tmp_path, "whole", "out", "to")
    assert alone(whole).wait() == 0
    killed = alone(out, "--to", str(to), "--every", "40", "--ram", "2", "--die", "0:47")
    assert killed.wait() == -signal.SIGKILL, "".join(killed.lines)
    again = alone(out, "--to", str(to), "--every", "40", "--ram", "2")
    assert again.wait() == 0, "".join(again.lines)
    assert steps_of(out) == [*range(48), *range(46, 60)]
    end, wanted = end_of(out), end_of(whole)
    assert end["losses"] == wanted["losses"][46:]
    for name in ("weights", "buffers", "at", "seen"):
        assert end[name] == wanted[name], name


@pytest.mark.gang
def test_ranks_go_on_from_what_all_held_when_one_is_killed(tmp_path: Path) -> None:
    """The others find out by their collectives; no agent, so the next attempt waits for the uploaders by itself."""
    out, to = folders(tmp_path, "out", "to")
    told = ["--to", str(to), "--every", "40", "--ram", "2"]
    ranks = gang(out, 2, *told, "--die", "1:47")
    assert ranks[1].wait() == -signal.SIGKILL, "".join(ranks[1].lines)
    assert ranks[0].wait() not in (0, 75), "".join(ranks[0].lines)
    blobs = FileBlobs(to)
    assert [step for step, problem in generations(to) if problem is None][-1] == 46
    assert blobs.size(rescue.rescued_key(1, read_entries(blobs)[0].record.nonce)) is not None
    for rank in (ranks := gang(out, 2, *told)):
        assert rank.wait() == 0, "".join(ranks[0].lines)
    for rank in range(2):
        assert steps_of(out, rank) == [*range(48), *range(46, 60)]


# Its rank is the first process of a container: when it ends, the kernel kills whatever else runs there.
CONTAINER = ("unshare", "--pid", "--fork", "--kill-child")


@pytest.mark.gang
@pytest.mark.skipif(
    subprocess.run([*CONTAINER, "true"], check=False, capture_output=True).returncode != 0,
    reason="this user may not make process namespaces",
)
def test_ranks_that_take_their_uploaders_along_wait_until_these_have_brought_what_is_held(tmp_path: Path) -> None:
    """Notice in step 47, which never ends; durable is 40, in memory is 46, and nobody spares the uploaders."""
    out, to = folders(tmp_path, "out", "to")
    told = ["--to", str(to), "--every", "40", "--ram", "2", "--grace", "5s"]
    ranks = gang(out, 2, *told, "--notice", "1:47", "--hang", "1:47", within=CONTAINER)
    assert [rank.wait() for rank in ranks] == [60, 60], "".join(ranks[0].lines + ranks[1].lines)
    assert [step for step, problem in generations(to) if problem is None][-1] == 46


def test_no_capture_begins_over_one_that_the_uploader_may_bring(tmp_path) -> None:
    """The thread that ends a process waits for the uploader, while the script goes on to its next save."""
    checkpointer = Checkpointer(str(tmp_path), rank=0, world_size=1)
    checkpointer.open()
    state = {"w": torch.full((300_000,), 1.0)}
    for step in (1, 2):
        state["w"].fill_(step)
        checkpointer.save(state, step=step, extras={}, reach=0)
    uploader = checkpointer._link.pid
    os.kill(uploader, signal.SIGSTOP)
    checkpointer.leave(lambda: 0.0)
    for step in (3, 4):
        state["w"].fill_(step)
        with pytest.raises(CheckpointError, match="this process is ending"):
            checkpointer.save(state, step=step, extras={}, reach=0)
    os.kill(uploader, signal.SIGCONT)
    checkpointer.leave(lambda: WAIT_S)
    assert generations(tmp_path) == [(2, None)]
    again = Checkpointer(str(tmp_path), rank=0, world_size=1)
    again.load(state, again.open())
    again.close()
    assert bool((state["w"] == 2).all())


HUNG = """
import os, signal, sys, torch, cordee
from cordee.train import rank_exit
rank_exit.RESCUE_S_MAX = 0.2
with cordee.job({"w": torch.zeros(8)}, to=sys.argv[1], every=1000) as job:
    for step in job.steps(10):
        uploader = job._saving.checkpointer._link.pid
        os.kill(uploader, signal.SIGSTOP)
        print(uploader, flush=True)
        job._on_hung(1.0)
"""


def test_an_uploader_that_hangs_does_not_hold_a_rank_that_ends_itself(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HUNG, str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
        uploader = int(run.stdout.readline())
        try:
            assert run.wait(WAIT_S / 2) == 60
        finally:
            os.kill(uploader, signal.SIGKILL)
            run.kill()
