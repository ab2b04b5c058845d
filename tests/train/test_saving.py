"""The saves of one attempt: when the first is due, what is estimated after it, which end is no failure."""

import gc
import json
import logging
import os
import signal
import sys
import weakref
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import cordee
import forks
from cordee.errors import CheckpointError, CorruptError
from cordee.storage.files import FileBlobs
from cordee.storage.history import PastAttempt
from cordee.storage.log import live_commits, read_entries
from cordee.telemetry.host import free_port
from cordee.train.checkpoint.saver import AUTO_FIRST_S, Saver
from cordee.train.report import Reporter
from cordee.train.settings import settings

WAIT_S = 60
SCRIPT = Path(__file__).with_name("saving_rank.py")


def begin(to: str, on_estimate=lambda: None, **options) -> Saver:
    told = settings({}, to=to, **options)
    state = {"w": torch.ones(10_000), "n": 0}
    saving = Saver(state, told, to, rank=0, world_size=1, reporter=Reporter(told, 0), on_estimate=on_estimate)
    saving.load()
    return saving


def test_the_interval_follows_what_was_measured_and_how_attempts_before_ended(tmp_path, caplog) -> None:
    waits_s = []
    with caplog.at_level(logging.INFO, "cordee"):
        for attempt in range(3):
            saving = begin(str(tmp_path))
            assert not saving.is_due() and 0 < saving.wait_s() <= AUTO_FIRST_S
            assert saving.save(10 * attempt + 1)
            saving.checkpointer.wait(WAIT_S)
            waits_s.append(saving.wait_s())
            saving.checkpointer.close()  # No last save: something has stopped it.
    assert [saving.checkpointer.past[at].left for at in range(2)] == [False, False]
    assert waits_s[0] > waits_s[1] > waits_s[2] > 0, "each failure shortens it"
    lines = [line for line in caplog.text.splitlines() if "saving every" in line]
    assert len(lines) == 3 and "(0 in earlier attempts)" in lines[0] and "(2 in earlier attempts)" in lines[2]


class Level:
    """Something with a state, such as a data loader."""

    def state_dict(self) -> dict:
        return {"at": 1}

    def load_state_dict(self, state: dict) -> None:
        assert state == {"at": 1}


def test_a_job_that_is_closed_holds_nothing_of_its_state(tmp_path) -> None:
    """Nor until the collector comes by, in whatever thread: a data loader's finalizer waits for its workers."""

    def train(until: int) -> weakref.ref:
        place = Level()
        with cordee.job({"w": torch.ones(3), "place": place}, to=tmp_path, every=2) as job:
            assert list(job.steps(until))[-1] == until - 1
        return weakref.ref(place)

    gc.disable()
    try:
        assert train(3)() is None and train(6)() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("when", ["find", "load"])
def test_failure_while_a_checkpoint_is_read_is_raised(tmp_path, when) -> None:
    """Whoever opens a job by hand leaves its `with` block after it has closed itself."""
    with cordee.job({"n": 0}, to=tmp_path) as job:
        assert list(job.steps(2)) == [0, 1]
    for path in (tmp_path / "manifests").iterdir():
        path.write_bytes(b"{}")
    job = cordee.job({"n": 0}, to=tmp_path)
    with pytest.raises(CorruptError, match="none of 1 generations"), ExitStack() as cleanup:
        job.open()
        cleanup.push(job)
        getattr(job, when)()


READING = """
import os, signal, sys, threading
import cordee
from cordee.telemetry.host import free_port
from cordee.train.checkpoint import checkpointer
with cordee.job({"n": 0}, to=sys.argv[1]) as job:
    assert len(list(job.steps(5))) == 5
def restore(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait()
if sys.argv[2] == "reads":
    checkpointer.restore = restore
else:
    checkpointer.Checkpointer._start_uploader = restore
job = cordee.job({"n": 0}, to=sys.argv[1], grace="1s")
job._reporter.left = lambda how, step: print(how, step, flush=True)
with job:
    print("it was read")
"""


@pytest.mark.parametrize("when", ["reads", "has read"])
def test_a_notice_that_runs_out_while_the_checkpoint_is_read_loses_nothing(tmp_path, when) -> None:
    script = tmp_path / "reading.py"
    script.write_text(READING)
    command = [sys.executable, str(script), str(tmp_path / "to"), when]
    ((code, said, errors),) = forks.run([command], [dict(os.environ)], WAIT_S)
    assert (code, said.split()) == (75, ["checkpointed", "5"]), errors


def test_an_attempt_that_ends_with_its_last_save_is_no_failure(tmp_path) -> None:
    saving = begin(str(tmp_path), every=100)
    assert saving.make_durable(7, lambda: WAIT_S)
    saving.checkpointer.close()
    record = live_commits(read_entries(FileBlobs(tmp_path)))[-1].record
    assert record.fields["ending"] == "left"
    again = begin(str(tmp_path), every=100)
    assert again.checkpointer.past == [PastAttempt(1, again.checkpointer.past[0].seconds, left=True)]
    again.checkpointer.close()


def test_a_capture_whose_uploader_failed_does_not_count(tmp_path) -> None:
    saving = begin(str(tmp_path), every=100)
    os.kill(saving.checkpointer._link.pid, signal.SIGSTOP)
    assert saving.save(7) and saving.is_coming(7, 1)
    os.kill(saving.checkpointer._link.pid, signal.SIGKILL)
    with pytest.raises(CheckpointError, match="signal 9"):
        saving.checkpointer.wait(WAIT_S)
    assert saving.is_captured(7, 1) and not saving.is_coming(7, 1)
    assert saving.make_durable(7, lambda: WAIT_S), "it is captured again"
    assert saving.is_coming(7, 1) and saving.durable_step == 7
    saving.checkpointer.close()


def test_between_checkpoints_by_steps_captures_may_come_by_time(tmp_path) -> None:
    """What a save costs is known only after two of them: then the job has to look at the clock again."""
    estimates = []
    saving = begin(str(tmp_path), every=4, on_estimate=lambda: estimates.append(saving.checkpointer.newest().step))
    for step in (4, 8, 12):
        saving.at_step(step)
        saving.checkpointer.wait(WAIT_S)
    assert estimates == [4, 8], "said after the saves of steps 8 and 12"
    saving.checkpointer.close()


def test_a_hint_is_a_checkpoint_in_all_stores(tmp_path) -> None:
    saving = begin(f"{tmp_path / 'near'},{tmp_path / 'home'} every 10", every="1h")
    for step, hinted in ((1, False), (2, False), (3, True)):
        if hinted:
            saving.hasten()
        assert saving.save(step, saving.asked())
        saving.checkpointer.wait(WAIT_S)
        assert saving.is_captured(step, 2) == (step != 2)
    saving.checkpointer.close()


def test_captures_between_checkpoints_by_steps(tmp_path) -> None:
    saving = begin(str(tmp_path), every=4, ram=2)
    reached = []
    for step in range(1, 9):
        saving.at_step(step)
        if saving.is_captured(step, 0):
            reached.append((step, saving.is_captured(step, 1)))
        if step % 4 == 0:
            saving.checkpointer.wait(WAIT_S)
    assert reached == [(2, False), (4, True), (6, False), (8, True)]
    assert saving.wait_s() is None, "nothing is due by time"
    saving.checkpointer.close()


def test_a_hint_is_a_checkpoint_also_where_only_memory_is_due(tmp_path) -> None:
    saving = begin(str(tmp_path), every="1h", ram="1ms")
    while saving.wait_s():
        pass
    assert saving.asked() == 0, "a capture in memory is due"
    saving.hasten()
    assert saving.is_due() and saving.asked() == 1, "all stores"
    saving.checkpointer.close()


@pytest.mark.gang
def test_a_capture_that_fails_on_one_rank_is_made_again_by_all_or_by_none(tmp_path: Path) -> None:
    """Ranks of which one saves and one asks would meet in different collectives, which aborts the process."""
    port = str(free_port())
    shared = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    envs = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    ranks = forks.run([[sys.executable, str(SCRIPT), str(tmp_path)]] * 2, envs, 120)
    for rank, (code, said, errors) in enumerate(ranks):
        assert code == 75, f"rank {rank} exited with {code}: {said[-2000:]}{errors[-5000:]}"
        found = json.loads(said.splitlines()[-1])
        assert found == {
            "step": 7,
            "loaded": True,
            "save 101": rank != 0,
            "durable 101": True,
            "save 102": rank != 1,
            "durable 102": True,
            "uncounted": [False, True],
            "tried": [4, 4 if rank == 0 else 103],
        }
        assert errors.count("could not be captured") == (3 if rank else 1), errors
    steps = [each.record.fields["step"] for each in live_commits(read_entries(FileBlobs(tmp_path)))]
    assert steps[-1] == 8, "it was captured again on leaving"
