"""The commit log's interleavings, the scheduler's worlds and the stop protocol's rounds, with many more seeds."""

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import hypothesis
import log_histories
import pytest
import random_worlds
from soaking import Soak

HISTORIES = 200_000  # 400 times those of the default suite
EXAMPLES, ROUNDS = 500, 40


def test_interleavings_of_the_log(soak: Soak) -> None:
    def history(seed: int) -> str:
        log_histories.one_history(seed)
        return "holds"

    soak.play(history, at_most=HISTORIES, say_every=1000)


@pytest.mark.parametrize(
    ("promise", "drawn"),
    [
        (random_worlds.comes_to_its_end_and_keeps_its_promises, random_worlds.WORLDS),
        (random_worlds.keeps_the_rules_of_queues, random_worlds.QUEUES),
        (random_worlds.does_not_depend_on_the_order_of_reports, random_worlds.ORDERS),
    ],
    ids=["worlds", "queues", "orders"],
)
def test_the_scheduler(soak: Soak, promise: Callable[..., None], drawn: Mapping[str, Any]) -> None:
    """Each seed is a batch of examples."""

    def batch(seed: int) -> str:
        @hypothesis.seed(seed)
        @hypothesis.settings(max_examples=EXAMPLES, database=None, suppress_health_check=list(hypothesis.HealthCheck))
        @hypothesis.given(**drawn)
        def examples(**world: Any) -> None:
            promise(**world)

        examples()
        return f"{EXAMPLES} examples hold"

    soak.play(batch)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_rounds_of_the_stop_protocol(soak: Soak, world: int) -> None:
    """Each seed is the first of a row of rounds on ranks that are started once."""
    rounds = Path(__file__).parents[1] / "train" / "stop_rounds.py"

    def row(seed: int) -> str:
        command = [sys.executable, str(rounds), "--world", str(world)]
        command += ["--seed", str(seed * ROUNDS), "--rounds", str(ROUNDS)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 30 * ROUNDS, check=False)
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
        return done.stdout.strip()

    soak.play(row)
