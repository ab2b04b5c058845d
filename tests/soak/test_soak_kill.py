"""The stories of a killed server or agent, at moments drawn from a seed: named points, or any time at all."""

import random
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from kill_story import (
    HIGH,
    LOW,
    POINTS,
    Nursery,
    Stage,
    Story,
    check,
    check_shut_down,
    left_behind,
    play,
    replay,
    shut_down,
)
from soaking import Soak

from cordee.events import AttemptEnded, JobEnded, NodeUp
from cordee.ids import JobId

# A story that is shut down passes fewer.
DRAIN_POINTS = {name: 1 if name.startswith("submit") else 3 for name in POINTS}


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture(autouse=True)
def _nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    for process in left_behind(tmp_path):
        process.kill()


def moments(seed: int, points: Mapping[str, int]) -> list[str]:
    """When the first server is killed, the one after it, and so on; `points` and how often each is passed."""
    draw = random.Random(seed)
    drawn = []
    for number in range(draw.choice([1, 1, 2, 2, 3, 5])):
        name = draw.choice(list(points))
        point = f"{name}:{draw.randint(1, points[name] if number == 0 else 2)}"
        drawn.append(draw.choice([point, point, f"{draw.uniform(0.01, 2):.3f}s"]))
    return drawn


def stage_of(seed: int, folder: Path, nursery: Nursery) -> Stage:
    folder = folder / str(seed)
    folder.mkdir()
    return Stage(folder, nursery)


def test_the_server_is_killed_at_any_moment(soak: Soak, tmp_path: Path, nursery: Nursery) -> None:
    def story(seed: int) -> str:
        drawn = moments(seed, POINTS)
        played = stage_of(seed, tmp_path, nursery).story("+".join(drawn))
        play(played)
        check(played)
        assert played.deaths or drawn[0].endswith("s"), f"the story never came to {drawn[0]}"
        return f"{played.deaths} kills of {' '.join(drawn)}"

    soak.play(story)


def test_the_server_is_killed_at_any_moment_of_a_shutdown(soak: Soak, tmp_path: Path, nursery: Nursery) -> None:
    def story(seed: int) -> str:
        drawn = moments(seed, DRAIN_POINTS)
        played = stage_of(seed, tmp_path, nursery).story("+".join(drawn))
        shut_down(played)
        played.await_end()
        check_shut_down(played)
        return f"{played.deaths} kills of {' '.join(drawn)}"

    soak.play(story)


def test_agent_and_server_are_killed_at_any_moment(soak: Soak, tmp_path: Path, nursery: Nursery) -> None:
    """A gang that lost its agent starts again, after what was left of it is gone. Three losses would end a job."""

    def story(seed: int) -> str:
        draw = random.Random(seed)
        drawn, times = moments(seed, DRAIN_POINTS), [draw.uniform(0, 3) for _ in range(draw.choice([1, 2]))]
        folder = tmp_path / str(seed)
        timers = [threading.Timer(when, _kill_the_agent, [folder]) for when in times]
        for timer in timers:
            timer.start()
        played = stage_of(seed, tmp_path, nursery).story("+".join(drawn))
        for job_id, tier in ((LOW, "preemptible"), (HIGH, "production")):
            played.submit(job_id, tier)
            played.until(lambda job_id=job_id: _starts(played, job_id) >= 2)
        for timer in timers:
            timer.join()
        for job_id in (HIGH, LOW):
            played.release(job_id)
            played.until(played.ended(job_id))
        log = played.log()
        played.down()
        assert [event.state for event in log if isinstance(event, JobEnded)] == ["done", "done"], played.report()
        starts = [line for line in played.diary() if line.startswith("start")]
        assert len(starts) == len(set(starts)), f"a rank was started twice\n{played.report()}"
        replay(played)
        agents = sum(isinstance(event, NodeUp) for event in log)
        attempts = sum(isinstance(event, AttemptEnded) for event in log)
        return f"{agents} agents, {attempts} attempts, {played.deaths} kills of {' '.join(drawn)}"

    soak.play(story)


def _starts(story: Story, job_id: JobId) -> int:
    return sum(line.startswith(f"start {job_id}.") for line in story.diary())


def _kill_the_agent(folder: Path) -> None:
    for process in left_behind(folder):
        with suppress(psutil.NoSuchProcess):
            if "cordee.agent" in process.cmdline():
                process.kill()
