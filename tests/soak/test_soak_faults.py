"""Worlds that fail, with as many seeds as the time allows: about 3 in a second of CPU in memory."""

import pytest
from soaking import Soak

from faults_world.play import play


@pytest.mark.parametrize("sql", [False, True], ids=["memory", "sqlite"])
def test_every_invariant_holds(soak: Soak, sql: bool) -> None:
    def story(seed: int) -> str:
        world = play(seed, sql=sql)
        return f"{world.steps} steps, {world.events} events, {world.crashes} crashes of the server"

    soak.play(story, say_every=200)
