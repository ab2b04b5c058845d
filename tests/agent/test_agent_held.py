"""A real rank under a real agent: when it is killed between two checkpoints, its uploader stores its newest capture."""

import signal
import sys
import time
from pathlib import Path

import pytest
from agent_world import JOB

from cordee.agent import process
from cordee.events import CheckpointCommitted, Outcome, Restored

SCRIPT = Path(__file__).parents[1] / "train" / "job_script.py"


@pytest.mark.soak
def test_the_attempt_after_a_kill_starts_from_the_newest_capture(world, tmp_path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    run = [sys.executable, str(SCRIPT), "--out", str(out), "--every", "40", "--ram", "2"]
    to = {"to": str(tmp_path / "to"), "every_s": "auto"}
    world.start([*run, "--die", "0:47"], checkpoint=to)
    ended = world.ended()
    assert ended.outcome is Outcome.LOST and not process.find(f"{JOB}.1"), "the uploader has ended before the attempt"
    reported = world.until(lambda: world.of(CheckpointCommitted), "the report of the uploader")
    assert reported[-1].step == 46
    world.start(run, epoch=2, checkpoint=to)
    assert world.ended(epoch=2).outcome is Outcome.FINISHED
    assert [each.step for each in world.of(Restored, epoch=2)] == [46]


@pytest.mark.soak
def test_the_deadline_ends_an_uploader_that_hangs(world, tmp_path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    run = [sys.executable, str(SCRIPT), "--out", str(out), "--every", "40", "--ram", "2", "--hang", "0:47"]
    world.start(run, checkpoint={"to": str(tmp_path / "to"), "every_s": "auto"})
    steps = out / "steps0"
    world.until(lambda: steps.exists() and "47" in steps.read_text().split(), "step 47")
    (uploader,) = [each for each in process.find(f"{JOB}.1") if process.has(each, "CORDEE_UPLOADER")]
    process.send(uploader, signal.SIGSTOP)
    began_s = time.monotonic()
    world.notice(3.0)
    assert world.ended().outcome in (Outcome.KILLED, Outcome.LOST)
    assert not process.find(f"{JOB}.1") and time.monotonic() - began_s < 60
