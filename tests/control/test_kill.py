"""kill -9 of the server at named points of a whole story, with real agents and ranks (without torch).

    a preemptible gang runs · a production gang preempts it · it comes back · both end

Whatever the moment: nothing is lost, nothing runs twice, and ranks that run are adopted, not restarted.
A failing seed is replayed by `pytest tests/control/test_kill.py -k 'seed-name'`.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from kill_story import LOW, POINTS, WAIT_S, Nursery, Stage, check, check_shut_down, left_behind, play, replay, shut_down

pytestmark = pytest.mark.long


def _moments() -> list[str]:
    """Every point once at a pass drawn at random, and then points at random; the same in every run."""
    draw = random.Random(1953)
    names = [*POINTS, *draw.choices(list(POINTS), k=20)]
    moments = [f"{name}:{draw.randint(1, POINTS[name])}" for name in names]
    # And some whose second server is killed too, soon after it came up.
    twice = [f"{name}:1+{then}:1" for name, then in zip(POINTS, draw.choices(list(POINTS), k=len(POINTS)), strict=True)]
    return [*sorted(set(moments)), *twice]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def stage(tmp_path: Path, nursery: Nursery) -> Iterator[Stage]:
    yield Stage(tmp_path, nursery)
    for process in left_behind(tmp_path):
        process.kill()


@pytest.mark.parametrize("kill_at", ["", *_moments()], ids=lambda moment: moment.replace(":", "-") or "never")
def test_the_server_is_killed(stage: Stage, kill_at: str) -> None:
    story = stage.story(kill_at)
    play(story)
    check(story)
    assert story.deaths == (len(kill_at.split("+")) if kill_at else 0), f"the story never came to {kill_at}"


@pytest.mark.parametrize(
    "kill_at",
    [
        "decision.before_commit:2",
        "decision.after_commit:2",
        "command.before_carry_out:2",
        "command.before_confirm:2",
        "reports.before_commit:3",
        "reports.after_commit:3",
        "decision.after_commit:3",
    ],
)
def test_the_server_is_killed_while_it_shuts_down(stage: Stage, kill_at: str) -> None:
    """The first `down` is cut off."""
    story = stage.story(kill_at)
    shut_down(story)
    story.until(lambda: story.deaths == 1)
    check_shut_down(story)


def test_a_terminated_server_leaves_its_ranks_alone(stage: Stage, nursery: Nursery) -> None:
    story = stage.story("")
    story.submit(LOW, "standard")
    story.until(story.wrote(f"start {LOW}.1 0", f"start {LOW}.1 1"))
    os.kill(story.pid, signal.SIGTERM)
    assert nursery.ask(wait=story.pid)["code"] == 0
    assert not (story.home / "server.json").exists()
    story.release(LOW)  # no server is there to record its end
    deadline = time.monotonic() + WAIT_S
    while not story.wrote(f"end {LOW}.1 0", f"end {LOW}.1 1")():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    story.start()
    story.until(story.ended(LOW))
    story.down()
    assert Counter(story.diary()) == Counter(f"{what} {LOW}.1 {rank}" for what in ("start", "end") for rank in (0, 1))
    replay(story)
