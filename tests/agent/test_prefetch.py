"""Datasets that a job names: on the node before its ranks start, where it says so; never in the way of the ranks."""

import os
import sys
from pathlib import Path

import pytest
from agent_world import World, python

from cordee.agent.prefetches import Prefetches
from cordee.control.engines.local import NodeConfig
from cordee.events import HeldSet, NodeUp, Outcome
from cordee.storage.cache.node import NodeCache
from cordee.storage.cache.pins import Pin

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


def test_a_node_tells_which_datasets_it_has_and_what_that_has_saved(world, tmp_path):
    at = str(tmp_path / "set")
    sizes = {"url": at, "held_bytes": 2_100_000, "size_bytes": 2_100_000, "fetched_bytes": 2_100_000}
    for epoch, found_bytes in ((1, 0), (2, 2_100_000)):
        world.start(python("print('runs')"), epoch=epoch, data={"sets": [at], "wait_s": "all"})
        assert world.ended(epoch=epoch).outcome is Outcome.FINISHED
        world.until(lambda bytes=found_bytes: [each.found_bytes for each in _told(world)] == [bytes])
        [held] = _told(world)
        assert held == HeldSet(**sizes, found_bytes=found_bytes, bytes_per_s=held.bytes_per_s) and held.bytes_per_s > 0


def _told(world) -> tuple[HeldSet, ...]:
    return [event for event in world.log if isinstance(event, NodeUp)][-1].node.data


def test_the_cache_keeps_what_waiting_jobs_will_read(tmp_path, monkeypatch):
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path / "cache"))
    node = NodeCache(limit_bytes=3_000_000)
    for name in ("first", "second", "unwanted"):
        node.admit([Pin(f"s3://bucket/{name}", "x", 1_000_000, name)])
    prefetches = Prefetches()
    prefetches.will_come(None)
    prefetches.will_come([])
    prefetches.will_come(["s3://bucket/first", "s3://bucket/second/"])
    for new, left in (("new", "unwanted"), ("newer", "new")):
        node.admit([Pin(f"s3://bucket/{new}", "x", 1_000_000, new)], soon=1.0)
        urls = {node.about(each.object_id)["url"].rpartition("/")[2] for each in node.held()}
        assert urls == {"first", "second", new}, f"{left} goes, which nobody waits for"
    prefetches.will_come(["s3://bucket/newer"])
    node.admit([Pin("s3://bucket/last", "x", 2_000_000, "last")], soon=1.0)
    assert {node.about(each.object_id)["url"].rpartition("/")[2] for each in node.held()} == {"newer", "last"}


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
