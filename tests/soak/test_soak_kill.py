"""The stories of a killed server, at moments drawn from a seed: named points, or any time at all."""

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from kill_story import POINTS, Nursery, Stage, check, check_drained, drain, left_behind, play
from soaking import Soak

# A story that is drained passes fewer.
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
        told = stage_of(seed, tmp_path, nursery).story("+".join(drawn))
        play(told)
        check(told)
        assert told.deaths or drawn[0].endswith("s"), f"the story never came to {drawn[0]}"
        return f"{told.deaths} kills of {' '.join(drawn)}"

    soak.play(story)


def test_the_server_is_killed_at_any_moment_of_a_drain(soak: Soak, tmp_path: Path, nursery: Nursery) -> None:
    def story(seed: int) -> str:
        drawn = moments(seed, DRAIN_POINTS)
        told = stage_of(seed, tmp_path, nursery).story("+".join(drawn))
        drain(told)
        told.await_end()
        check_drained(told)
        return f"{told.deaths} kills of {' '.join(drawn)}"

    soak.play(story)
