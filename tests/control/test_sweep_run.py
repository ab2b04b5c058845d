"""A sweep on a real server, with real trials without torch: one crashes, the server is killed, the best is found."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from kill_story import Nursery, left_behind

from cordee.answers.sweeps import SweepDetailView
from cordee.client import Client
from cordee.errors import NoServerError
from cordee.events import JobResumed, JobSubmitted
from cordee.workload.spec import JobSpec

TRIAL = Path(__file__).with_name("sweep_trial.py")
WAIT_S = 120


class Home:
    """A home whose server a test kills and starts again."""

    def __init__(self, folder: Path, nursery: Nursery) -> None:
        self.folder, self.path, self._nursery = folder, folder / "home", nursery
        self.start()

    def start(self) -> None:
        answer = self._nursery.ask(home=str(self.path), slots=2, env={}, kill_after_s=None)
        self.pid = answer["pid"]
        assert answer["said"] is not None and "ready" in answer["said"]

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        assert self._nursery.ask(wait=self.pid)["code"] == -9
        self.start()

    def until(self, holds: Callable[[SweepDetailView], bool]) -> SweepDetailView:
        deadline = time.monotonic() + WAIT_S
        with Client(self.path) as client:
            while not holds(found := client.sweep("lr")):
                assert time.monotonic() < deadline, (
                    f"waited too long: {found}\n{(self.path / 'server.log').read_text()}"
                )
                time.sleep(0.05)
        return found


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    nursery = Nursery()
    home = Home(tmp_path, nursery)
    yield home
    try:
        with Client(home.path) as client:
            client.down()
        nursery.ask(wait=home.pid)
    except NoServerError:
        pass
    nursery.close()
    for process in left_behind(tmp_path):
        process.kill()


def test_six_trials_in_three_rungs_of_which_one_crashes_and_a_server_that_is_killed(home: Home) -> None:
    out = home.folder / "out"
    out.mkdir()
    spec = JobSpec.from_flags(
        run=[sys.executable, str(TRIAL), "--lr", "{lr}", "--crash", "0.4", "--out", str(out)],
        gpus="1",
        name="lr",
        cwd=str(home.folder),
        checkpoint_to=str(home.folder / "ckpt"),
        sweep={"values": {"lr": "0.1,0.2,0.4,0.3,0.6,0.8"}, "max_running": 2, "rungs": "3..27:3"},
    )
    with Client(home.path) as client:
        client.declare_sweep(spec.model_dump(mode="json"))
    home.until(lambda found: any(each.rung for each in found.trials))
    home.kill()
    found = home.until(lambda found: found.state == "ended")
    assert (found.why, found.note) == ("all 6 trials are over", "")
    best = found.best
    assert best is not None and best.values == {"lr": 0.3} and best.metric == pytest.approx(1 / 27)
    assert (best.state, best.rung, best.step) == ("done", 3, 27)
    states = [each.state for each in found.trials]
    assert states.count("done") == 1 and states.count("failed") == 1 and states.count("stopped") == 4
    assert found.trials[2].state == "failed" and "exited with 3" in found.trials[2].why
    # A promoted trial goes on from its bytes: it runs each step once.
    assert (out / best.job_id).read_text().split() == [str(step) for step in range(27)]
    assert sum(each.step for each in found.trials) < 6 * 27 / 2
    assert all(each.gpu_us for each in found.trials)
    with Client(home.path) as client:
        log = [event for _, event in client.events()]
    promoted = [event for event in log if isinstance(event, JobResumed)]
    assert {event.why for event in promoted} <= {"promoted at rung 1, step 3", "promoted at rung 2, step 9"}
    submitted = [event.job.trial for event in log if isinstance(event, JobSubmitted)]
    assert submitted == [1, 2, 3, 4, 5, 6], "no trial starts twice"
