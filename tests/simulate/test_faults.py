"""The control plane in worlds that fail: each seed keeps every promise, and together they fail in every way there is.

A failing seed prints its trace and the line that replays it. Which bugs are found within these seeds was tried out:
docs/design/faults.md.
"""

import hashlib
import os
import subprocess
import sys
from collections import Counter
from functools import cache

import pytest

from cordee.events import NoticeReason
from cordee.simulate.befall import BEFALLS
from cordee.simulate.faults import main, play

SEEDS = (*range(120), 231)  # the last is the first in which a job is moved
TOGETHER = 10
PORTS = {
    "clock.now_us",
    "store.commit",
    "store.events",
    "store.mark",
    "store.pending",
    "store.confirm",
    "executor.reports",
    "executor.acknowledge",
    "executor.carry_out",
}


@cache
def played(seed: int) -> Counter[str]:
    """What befell this world, and what became of its jobs."""
    world = play(seed)
    found = Counter(world.fuse.burnt) + Counter(world.befell)
    found.update(f"job {event.state}" for event in world.promises.ended.values())
    found.update(f"notice {reason}" for reason in world.promises.noticed)
    found["restarts that changed nothing"] += world.deaths
    return found


@pytest.mark.parametrize("first", SEEDS[::TOGETHER])
def test_every_promise_is_kept(first: int) -> None:
    for seed in range(first, first + TOGETHER):
        played(seed)


def test_these_seeds_fail_in_every_way_there_is() -> None:
    found = sum((played(seed) for seed in SEEDS), Counter[str]())
    assert {f"{when} {call}" for call in PORTS for when in ("before", "after")} <= found.keys()
    assert {f"refused {call}" for call in PORTS if call.startswith("store.")} <= found.keys()
    assert set(BEFALLS) <= found.keys()
    assert {"job done", "job failed", "job stopped"} <= found.keys()
    assert {f"notice {reason}" for reason in NoticeReason} <= found.keys()


def test_a_seed_gives_the_same_story_whatever_the_hash_seed() -> None:
    def story(hash_seed: int) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "cordee.simulate.faults", "--seed", "7"],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | {"PYTHONHASHSEED": str(hash_seed)},
        )
        return hashlib.sha256(done.stdout.encode()).hexdigest()

    assert story(1) == story(2)


def test_a_failing_seed_prints_its_trace_and_the_line_that_replays_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here a control plane that forgets to apply what it has committed."""
    monkeypatch.setattr("cordee.control.tick.Control._apply", lambda self, number, event: None)
    assert main(["--seed", "7"]) == 1
    said = capsys.readouterr().out
    assert "-m cordee.simulate.faults --seed 7\n" in said
    assert "ServerUp" in said
    assert "0 of 1 seeds kept every promise" in said
