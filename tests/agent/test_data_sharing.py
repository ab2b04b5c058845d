"""Two agents: what one has in its cache, the other one takes from there and not from the store."""

import os
import signal
from pathlib import Path

import pytest
from agent_world import World, python

from cordee.control.agents.neighbourhoods import neighbourhood
from cordee.control.engines.local import NodeConfig
from cordee.events import Lease, NodeUp, Outcome

SIZE = 3 * 700_000


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path / "cache-local"))
    (tmp_path / "set").mkdir()
    for number in range(3):
        (tmp_path / "set" / f"{number}.bin").write_bytes(os.urandom(700_000))
    made = World(tmp_path / "home", nodes=(NodeConfig(name="local", slots=2),))
    made.until(lambda: "local" in nodes(made))
    monkeypatch.setenv("CORDEE_CACHE", str(tmp_path / "cache-far"))
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "machine").write_text("another-host/1\n")
    made.join("far", tmp_path / "far")
    made.until(lambda: "far" in nodes(made))
    yield made
    made.close()


def nodes(world) -> dict[str, NodeUp]:
    return {event.node.name: event.node for event in world.log if isinstance(event, NodeUp)}


def told(world) -> dict[str, str]:
    """Tell the agents of each other, as the server's loop does; return where each gives its pieces."""
    world.executor.neighbours.now = neighbourhood(nodes(world).values(), "key")
    return {name: node.gives_at for name, node in nodes(world).items() if node.gives_at}


def read_on(world, node: str, epoch: int, at: str) -> str:
    """Run a job whose ranks wait for the dataset, on a node; return what is said of its data."""
    leases = (Lease(node=node, gpus=(0,)),)
    world.start(python("print('runs')"), epoch=epoch, leases=leases, data={"sets": [at], "wait_s": "all"})
    says = world.started(epoch=epoch).launch
    assert world.ended(epoch=epoch).outcome is Outcome.FINISHED
    return says


def test_the_second_node_takes_its_data_from_the_first_one(world, tmp_path):
    at = str(tmp_path / "set")
    assert f"{SIZE / 1e6:.1f} MB fetched" in read_on(world, "local", 1, at)
    world.until(lambda: "local" in told(world), "the first node's cache")
    far = tmp_path / "cache-far" / "neighbours.json"
    world.until(lambda: told(world)["local"] in (far.read_text() if far.exists() else ""), "the second one's neighbour")
    assert "0 B fetched" in (says := read_on(world, "far", 2, at)) and "2.1 MB came from other nodes" in says
    [held] = world.until(lambda: [each for each in nodes(world)["far"].data if each.held_bytes])
    assert (held.given_bytes, held.fetched_bytes, held.found_bytes) == (SIZE, 0, 0)
    assert far.stat().st_mode & 0o077 == 0, "the key is for the jobs of this user only"
    world.until(lambda: "far" in told(world), "the second node's cache")

    os.kill(sharing(world, "local"), signal.SIGKILL)  # its process, and then its node's disk
    for path in (tmp_path / "cache-far" / "objects").glob("*/*/*"):
        path.unlink()
    assert "2.1 MB fetched" in read_on(world, "far", 3, at), "a neighbour that died is done without"


def sharing(world, node: str) -> int:
    root = str(world.home.parent / f"cache-{node}").encode()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        if b"cordee.storage.cache.sharing" in words and root in words:
            return int(path.parent.name)
    raise AssertionError("no process gives pieces")
