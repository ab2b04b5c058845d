"""Datasets that a job names: on the node before its ranks start, where it says so; never in the way of the ranks."""

import os
import sys
from pathlib import Path

import pytest
from agent_world import World, python

from cordee.control.engines.local import NodeConfig
from cordee.events import Outcome

HAS_ALL = """
import cordee
data = cordee.data({at!r}, copy=True)
print("there", sum(len(data.open(name).read()) for name in data), data.fetched_bytes(), flush=True)
data.close()
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "set").mkdir()
    for number in range(3):
        (tmp_path / "set" / f"{number}.bin").write_bytes(os.urandom(700_000))
    made = World(tmp_path / "home", nodes=(NodeConfig(name="local", slots=2),))
    yield made
    made.close()


def test_ranks_that_wait_for_all_find_all(world, tmp_path):
    at = str(tmp_path / "set")
    world.start(python(HAS_ALL.format(at=at)), data={"sets": [at], "wait_s": "all"})
    assert "; data: 2.1 MB of 2.1 MB are on the node, 2.1 MB fetched in " in world.started().launch
    world.logged("there 2100000 0")
    assert world.ended().outcome is Outcome.FINISHED
    world.start(python(HAS_ALL.format(at=at)), epoch=2, data={"sets": [at], "wait_s": "all"})
    assert "2.1 MB of 2.1 MB are on the node, 0 B fetched" in world.started(epoch=2).launch
    assert world.ended(epoch=2).outcome is Outcome.FINISHED


def test_ranks_that_do_not_wait_start_at_once_and_a_dataset_that_is_not_there_is_told(world, tmp_path):
    at = str(tmp_path / "set")
    world.start(python("print('runs')"), data={"sets": [at], "wait_s": 0.0})
    assert "; data: still arriving after " in world.started().launch
    assert world.ended().outcome is Outcome.FINISHED
    world.start(python("print('runs')"), epoch=2, data={"sets": [at, str(tmp_path / "none")], "wait_s": "all"})
    assert f"; data: not prefetched: there is no folder {tmp_path}/none" in world.started(epoch=2).launch
    assert world.ended(epoch=2).outcome is Outcome.FINISHED


def test_a_prefetch_ends_with_its_attempt(world, tmp_path):
    """It opens a pipe that nobody writes to: a store that does not answer."""
    os.mkfifo(tmp_path / "cache" / "lock")
    at = str(tmp_path / "set")
    world.start(python("print('runs')"), data={"sets": [at], "wait_s": "all"})
    world.until(lambda: any(_is_prefetch(path, at) for path in Path("/proc").glob("[0-9]*/cmdline")))
    world.kill()
    assert world.ended().outcome is Outcome.KILLED
    assert not any(_is_prefetch(path, at) for path in Path("/proc").glob("[0-9]*/cmdline"))


def _is_prefetch(path: Path, at: str) -> bool:
    try:
        words = path.read_bytes().split(b"\0")
    except OSError:
        return False
    return b"cordee.storage.cache.prefetch" in words and at.encode() in words and sys.executable.encode() in words
