"""Captures that are held in memory: whoever dies, what all ranks hold is brought; a torn one never is."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from test_job import alone, end_of, environment, folders, gang, steps_of
from uploading import generations

from cordee.errors import CheckpointError
from cordee.storage import rescue
from cordee.storage.files import FileBlobs
from cordee.storage.log import read_entries
from cordee.train.checkpoint.checkpointer import Checkpointer
from forks import run, start

WAIT_S = 60


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
    script = tmp_path / "hung.py"
    script.write_text(HUNG)
    read, write = os.pipe()
    rank = start([sys.executable, str(script), str(tmp_path / "to")], environment(), stdout=write)
    os.close(write)
    with os.fdopen(read) as said:
        uploader = int(said.readline())
    try:
        assert rank.wait(WAIT_S / 2) == 60
    finally:
        os.kill(uploader, signal.SIGKILL)
        rank.kill()
