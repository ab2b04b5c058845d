"""A notice at a bad moment, on real ranks (stop_cases.py): what is left is the newest capture that can be brought."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from test_job import environment

import forks

SCRIPT = Path(__file__).with_name("stop_cases.py")
# Most of a case is waiting: these rows of cases run beside each other, each case as alone on its ranks.
CASES = [["collective", "points", "warmup", "dies"], ["held", "finish", "step", "agent"], ["near", "eval", "cloud"]]


def run(*args: str) -> str:
    done = subprocess.run([sys.executable, str(SCRIPT), *args], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, Any]]:
    """Of all cases, which share one start of torch."""
    rows = forks.run([[sys.executable, str(SCRIPT), *row] for row in CASES], [environment()] * len(CASES), 600)
    for code, said, errors in rows:
        assert code == 0, said[-6000:] + errors[-3000:]
    found = [json.loads(line) for _, said, _ in rows for line in said.splitlines() if line.startswith("{")]
    return {each["name"]: each for each in found}


def aborted(step: int, world: int) -> list[list[Any]]:
    return [[rank, "aborted", step] for rank in range(world)]


@pytest.mark.gang
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("name", "codes", "commits", "left"),
    [
        ("collective", [60, 60], [10], aborted(15, 2)),
        ("held", [60, 60], [10, 15], aborted(15, 2)),
        ("points", [75, 75], [10, 16], [[0, "checkpointed", 16], [1, "checkpointed", 16]]),
        ("eval", [60], [10], aborted(15, 1)),
        ("warmup", [75], [], [[0, "checkpointed", 0]]),
        ("finish", [60, 60], [10, 20], aborted(21, 2)),
        ("near", [75, 75], [10, 16], [[0, "checkpointed", 16], [1, "checkpointed", 16]]),
        ("dies", [60, 9], [10], aborted(15, 1)),
        ("agent", [60], [10], aborted(15, 1)),
    ],
)
def test_notice_leaves_the_expected_checkpoint(
    results: dict[str, dict[str, Any]], name: str, codes: list[int], commits: list[int], left: list[list[Any]]
) -> None:
    result = results[name]
    said = "\n".join(result["logs"])
    assert result["codes"] == codes, said
    assert result["commits"] == commits, said
    assert result["left"] == left, said
    if name == "near":
        near, home = result["chunks"]
        assert near > home and "/near only" in said, "the last checkpoint went to the near store alone"


@pytest.mark.gang
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", ["step", "cloud"])
def test_a_notice_that_is_heard_in_time_loses_no_step(results: dict[str, dict[str, Any]], name: str) -> None:
    result = results[name]
    said = "\n".join(result["logs"])
    durable = result["commits"][-1]
    assert result["codes"] == [75, 75] and result["ran"] == [durable - 1, durable - 1], said
    assert result["left"] == [[0, "checkpointed", durable], [1, "checkpointed", durable]], said
    assert "s left; " in said and ": saving at step " in said, "it says what it decided"
    if name == "cloud":
        assert result["asked"] == 1, "one rank of the node asks"
        assert len(result["commits"]) == 2, "the hint is answered by a save"


@pytest.mark.gang
@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_random_notices_at_random_moments() -> None:
    run("--seed", "1", "--rounds", "60")
