"""One real gang of torch ranks, and what can befall it: kill -9 of its processes, of the agent, of the server; pushes.

What befalls it is drawn from the seed; when exactly it does is also the machine's to say: a replay is a close relative.
"""

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest
from gang_scene import ALONE, GANG, RANKS, Scene, processes_of
from kill_story import POINTS
from soaking import Soak

from cordee.agent.process import find, send
from cordee.answers.jobs import JobDetailView
from cordee.client import Client
from cordee.control.spawn import start_server
from cordee.errors import NoServerError
from cordee.events import AttemptEnded, AttemptPlaced, JobEnded

T = TypeVar("T")
STEPS_PER_S = 5.0
PAUSE_S = (0.0, 8.0)  # between two faults
UPLOADER_POINTS = ("chunks.before", "chunks.one", "part.before", "manifest.before", "commit.before", "commit.after")
UPLOADER_POINTS += ("gc.before", "gc.begun", "gc.deleting")
BARREN = 1  # so many attempts without a commit are let pass before one is waited for: three would end the job


class Fate:
    """What befalls the gang of a scene."""

    def __init__(self, scene: Scene, soak: Soak, seed: int) -> None:
        self.scene, self.soak, self.draw = scene, soak, random.Random(seed)
        self.faults = dict.fromkeys(("process", "uploader", "agent", "server", "freeze", "power", "push", "down"), 0)
        self._committed = (0, -1)  # the epoch in which a commit was last seen, and its step
        self._next_s = 0.0
        self._began_s = soak.elapsed_s

    def over(self) -> bool:
        """Whether the time is up; until then the gang goes no faster than it should."""
        lived_s = self.soak.elapsed_s - self._began_s
        self.scene.allow(GANG, min(self.scene.steps, 1 + round(lived_s * STEPS_PER_S)))
        return lived_s >= self.soak.seconds

    def ask(self, question: Callable[[Client], T]) -> T:
        """Of the server; it may have died at a point that was drawn for it."""
        while True:
            with suppress(NoServerError), Client(self.scene.home) as client:
                return question(client)
            self._revive()

    def _revive(self) -> None:
        with suppress(ChildProcessError):
            os.waitpid(self.scene.server, 0)
        time.sleep(self.draw.choice([0.0, self.draw.uniform(0, 2)]))
        point = self.draw.choice(["", f"{self.draw.choice(list(POINTS))}:{self.draw.randint(1, 20)}"])
        os.environ["CORDEE_TEST_KILL_AT"] = point
        try:
            self.scene.server = start_server(self.scene.home).pid
        except NoServerError:  # it came to its point before it was ready
            self.faults["server"] += 1
        finally:
            del os.environ["CORDEE_TEST_KILL_AT"]

    def gang(self) -> JobDetailView:
        return self.ask(lambda client: client.job(GANG))

    def befall(self) -> None:
        """Perhaps something, now."""
        gang = self.gang()
        if gang.checkpoint_step is not None and gang.checkpoint_step != self._committed[1]:
            self._committed = (gang.epoch, gang.checkpoint_step)
        if self.soak.elapsed_s < self._next_s or gang.epoch - self._committed[0] > BARREN:
            return
        what = self.draw.choice(list(self.faults))
        if getattr(self, f"_{what}")(gang):
            self.faults[what] += 1
            self.soak.say(f"attempt {gang.epoch} ({gang.state}, committed {gang.checkpoint_step}): {what}")
            # Often two in a row, the second while the first is still being dealt with.
            self._next_s = self.soak.elapsed_s + self.draw.choice(
                [self.draw.uniform(0, 1), self.draw.uniform(*PAUSE_S)]
            )

    def _process(self, gang: JobDetailView) -> bool:
        """A rank, starting or running, or a rank's uploader."""
        able = sorted(find(f"{GANG}.{gang.epoch}"), key=lambda each: each.pid)
        return bool(able) and send(self.draw.choice(able), signal.SIGKILL)

    def _uploader(self, gang: JobDetailView) -> bool:
        """Kill an uploader at a point, again and again, in the next attempt: its saves fail, the trainer goes on."""
        rank, point = self.draw.randrange(RANKS), self.draw.choice(UPLOADER_POINTS)
        (self.scene.out(GANG) / f"kill_uploader{rank}").write_text(f"{point}:{self.draw.randint(2, 12)}")
        return True

    def _agent(self, gang: JobDetailView) -> bool:
        agents = [each for each in processes_of(self.scene.folder) if _runs(each, "cordee.agent")]
        with suppress(psutil.NoSuchProcess):
            for agent in agents:
                agent.kill()
        return bool(agents)

    def _server(self, gang: JobDetailView) -> bool:
        with suppress(ProcessLookupError):
            os.kill(self.scene.server, signal.SIGKILL)
        self._revive()
        return True

    def _freeze(self, gang: JobDetailView) -> bool:
        """Anything that runs, for a moment: it wakes up to a world that has gone on."""
        able = [each for each in processes_of(self.scene.folder) if each.pid != os.getpid()]
        if not able:
            return False
        with suppress(psutil.NoSuchProcess):
            process = self.draw.choice(able)
            process.suspend()
            time.sleep(self.draw.uniform(0, 3))
            process.resume()
        return True

    def _power(self, gang: JobDetailView) -> bool:
        """All at once, as when the machine's power is cut."""
        for process in processes_of(self.scene.folder):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._revive()
        return True

    def _down(self, gang: JobDetailView) -> bool:
        """The gang leaves with a checkpoint, nobody is left, and all come back."""
        self.ask(Client.down)
        while os.waitpid(self.scene.server, os.WNOHANG) == (0, 0):
            self.over()
            time.sleep(0.05)
        self.scene.until(lambda: not processes_of(self.scene.folder))
        self._revive()
        return True

    def _push(self, gang: JobDetailView) -> bool:
        name = f"push{self.faults['push']}"
        spec = {"run": ["sleep", "0.3"], "gpus": RANKS, "tier": "production", "name": name}
        self.ask(lambda client: client.submit(spec | {"cwd": str(self.scene.folder)}))
        return True


def _runs(process: psutil.Process, module: str) -> bool:
    with suppress(psutil.NoSuchProcess):
        return module in process.cmdline()
    return False


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for process in processes_of(tmp_path):
        process.kill()


@pytest.mark.gang
def test_a_gang_survives_whatever_befalls_it(soak: Soak, folder: Path) -> None:
    steps = max(40, round(1.1 * soak.seconds * STEPS_PER_S))  # more than it can do in this time

    def story(seed: int) -> str:
        scene = Scene(folder, steps)
        scene.submit(ALONE, steps)
        scene.until(lambda: scene.ended(ALONE))
        scene.submit(GANG, 1)
        fate = Fate(scene, soak, seed)
        while not fate.over():
            assert fate.gang().ended_us is None, scene.told()
            fate.befall()
            time.sleep(0.1)
        scene.allow(GANG, steps)
        # A push may have waited until the gang was through.
        scene.until(lambda: all(job.ended_us is not None for job in fate.ask(Client.jobs)))
        _check(fate, steps)
        return ", ".join(f"{count} of {what}" for what, count in fate.faults.items())

    soak.play(story, at_most=1)


def _check(fate: Fate, steps: int) -> None:
    scene = fate.scene
    log = fate.ask(lambda client: [event for _, event in client.events()])
    bill = fate.ask(lambda client: client.cost("job"))
    scene.down()
    ended = [event for event in log if isinstance(event, JobEnded)]
    assert {event.state for event in ended} == {"done"}, scene.told()
    assert len(ended) == 2 + fate.faults["push"], "no job is lost, none ends twice"
    placed = [event.epoch for event in log if isinstance(event, AttemptPlaced) and event.job_id == GANG]
    assert placed == [*range(1, len(placed) + 1)]
    for rank in range(RANKS):
        diary = scene.diary(GANG, rank)
        starts = [line for line in diary if "start" in line]
        epochs = [line["start"] for line in starts]
        assert epochs == sorted(set(epochs)), "an attempt ran twice"
        assert all(line["left_of_the_one_before"] == [] for line in starts), "two attempts overlapped"
        assert {line["step"] for line in diary if "step" in line} == {*range(steps)}
        weights = [(scene.out(job_id) / f"weights{rank}").read_bytes() for job_id in (ALONE, GANG)]
        assert weights[0] == weights[1] != b"", "the weights are not those of a gang that nothing befell"
    row = next(each for each in bill.rows if each.key == GANG)
    ends = [event for event in log if isinstance(event, AttemptEnded) and event.job_id == GANG]
    outcomes = [f"{event.epoch} {event.outcome}" for event in ends]
    fate.soak.say(f"{len(placed)} attempts: {', '.join(outcomes)}")
    held = row.gpu_us.held
    fate.soak.say(
        f"goodput {row.gpu_us.useful / held:.1%} of {held / 1e6:.1f} GPU-s held; {row.steps_repeated} steps repeated"
    )
    for name, gpu_us in row.gpu_us.model_dump().items():
        fate.soak.say(f"  {name:<12}{gpu_us / 1e6:10.3f} GPU-s")
    for lost in row.lost_by_cause:
        fate.soak.say(f"  lost by {lost.cause:<16}{lost.gpu_us / 1e6:10.3f} GPU-s")
