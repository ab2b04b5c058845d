"""Hundreds of leaders killed and frozen, over one PostgreSQL, while a gang runs and jobs come."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from pair import Pair
from soaking import Soak

from postgres import Postgres

ROUNDS = 200


@pytest.fixture
def pair(tmp_path: Path, postgres: Postgres) -> Iterator[Pair]:
    pair = Pair(tmp_path, postgres.database())
    yield pair
    pair.close()


def test_leaders_are_killed_and_frozen(soak: Soak, pair: Pair) -> None:
    draw = random.Random(1953)

    def story(seed: int) -> str:
        done = pair.play(draw.choice(["kill", "freeze"]), draw)
        return f"{done.how}: a new leader after {done.leads_s:.3f} s, its decision after {done.decides_s:.3f} s"

    soak.play(story, at_most=ROUNDS)
    pair.end()
    kills = sorted(done.leads_s for done in pair.rounds if done.how == "kill")
    assert not kills or kills[len(kills) // 2] < 1
