"""A server on the nodes of a real Ray cluster: a gang over three nodes, and what is given back."""

import os
import signal
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest

from cordee.events import AttemptPlaced, JobEnded, RanksStarted
from ray_home import RayHome, until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'cordee[ray]'"),
]


@pytest.fixture
def world() -> Iterator[RayHome]:
    # A short path: it holds Unix sockets.
    with tempfile.TemporaryDirectory(prefix="cordee-", ignore_cleanup_errors=True) as folder:
        world = RayHome(Path(folder))
        try:
            yield world
        finally:
            world.close()


def test_a_gang_over_three_nodes_of_ray_needs_no_ray_to_run(world: RayHome) -> None:
    world.start({"n1": 2, "n2": 1, "n3": 1})
    job = world.run(gpus=4)
    (placed,) = world.events(AttemptPlaced)
    until(lambda: len(world.events(RanksStarted)) == 3, world.logs)
    started = world.events(RanksStarted)
    assert {event.node for event in started} == {"n1", "n2", "n3"}
    after_ms = (max(event.at_us for event in started) - placed.at_us) / 1000
    print(f"4 ranks on 3 Ray nodes {after_ms:.0f} ms after the commit")
    ranks = world.ranks(job)
    assert [rank["nice"] for rank in ranks] == [os.nice(0)] * 4
    assert not [name for rank in ranks for name in rank["environ"] if name.startswith("RAY_")]
    # Ray's own part of a node may die: agent and ranks do not notice.
    world.ray.raylet("n2").kill()
    # A frozen machine: the agent's silence is noticed, and nothing else happens to the gang.
    world.ray.send("n3", signal.SIGSTOP)
    frozen_s = time.monotonic()
    until(lambda: not world.is_reachable("n3"), world.logs)
    print(f"a frozen node is noticed after {time.monotonic() - frozen_s:.1f} s")
    world.ray.send("n3", signal.SIGCONT)
    until(lambda: world.is_reachable("n3"), world.logs)
    assert all(psutil.pid_exists(rank["pid"]) for rank in ranks)
    (world.out(job) / "end").touch()
    until(lambda: world.events(JobEnded), world.logs)
    assert len(world.events(AttemptPlaced)) == 1
    world.down()
    left = [each for name in ("n1", "n2", "n3") for each in world.ray.processes(name)]
    assert not [each for each in left if "cordee.agent" in each.cmdline()]
