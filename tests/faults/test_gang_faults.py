"""kill -9 of the server, a rank, a rank that saves, and the agent, all in the life of one real gang.

An uploader that is stopped (SIGSTOP) holds its save open, so that each kill falls where the test wants it.
"""

import os
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from gang_scene import ALONE, GANG, RANKS, STEPS, Scene, processes_of

from cordee.client import Client
from cordee.control.spawn import start_server
from cordee.events import AttemptEnded, AttemptPlaced, JobEnded, NodeUp, Outcome, Restored


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    try:
        yield Scene(tmp_path)
    finally:
        for process in processes_of(tmp_path):
            process.kill()


def _kill_the_server_while_it_commits(scene: Scene) -> None:
    """Rank 0's uploader, which commits, has its own part to write still when the server dies."""
    scene.until_committed(4)
    scene.until_step(1, 5)
    uploader, before = scene.uploader(1, 0), scene.parts(1)
    uploader.suspend()
    scene.allow(GANG, 9)
    scene.until_step(1, 9)
    scene.until(lambda: bool(scene.parts(1) - before))
    os.kill(scene.server, signal.SIGKILL)
    os.waitpid(scene.server, 0)
    uploader.resume()
    scene.server = start_server(scene.home).pid
    scene.until_committed(8)  # told by ranks that nobody restarted
    assert len(scene.events(AttemptPlaced)) == 1 and len(scene.events(NodeUp)) == 1


def _kill_a_rank(scene: Scene) -> None:
    os.kill(scene.pids(1)[1], signal.SIGKILL)
    scene.allow(GANG, 13)
    scene.until_step(2, 13)
    scene.until_committed(12)


def _kill_a_rank_that_saves(scene: Scene) -> None:
    """Its uploader has begun and never comes to its part; rank 0 waits for that part."""
    uploader, before = scene.uploader(2, 1), scene.parts(0)
    uploader.suspend()
    scene.allow(GANG, 17)
    scene.until_step(2, 17)
    scene.until(lambda: bool(scene.parts(0) - before))
    os.kill(scene.pids(2)[1], signal.SIGKILL)
    scene.until_step(3, 17)
    scene.until_committed(16)


def _kill_the_agent(scene: Scene) -> None:
    agents = [each for each in processes_of(scene.folder) if "cordee.agent" in each.cmdline()]
    assert len(agents) == 1
    agents[0].kill()
    scene.until_step(4, 17)
    scene.allow(GANG, STEPS)


@pytest.mark.gang
@pytest.mark.soak
@pytest.mark.timeout(280)
def test_one_gang_survives_every_kill(scene: Scene) -> None:
    scene.submit(ALONE, STEPS)
    scene.submit(GANG, 5)
    scene.until(lambda: scene.ended(ALONE))
    _kill_the_server_while_it_commits(scene)
    _kill_a_rank(scene)
    _kill_a_rank_that_saves(scene)
    _kill_the_agent(scene)
    scene.until(lambda: scene.ended(GANG))
    with Client(scene.home) as client:
        bill = {row.key: row for row in client.cost("epoch").rows}
    ended = scene.events(AttemptEnded)
    restored = [(event.epoch, event.step) for event in scene.events(Restored)]
    agents = [event.node.epoch for event in scene.events(NodeUp)]
    assert [event.state for event in scene.events(JobEnded)] == ["done"], scene.told()
    scene.down()

    # Each loss is one of infrastructure, and the gang went on from the newest commit.
    assert [event.outcome for event in ended] == [Outcome.LOST, Outcome.LOST, Outcome.LOST, Outcome.FINISHED]
    assert restored == [(1, 0), (2, 8), (3, 12), (4, 16)]
    assert agents == [1, 2], "the agent was replaced once, after it was killed"
    for rank in range(RANKS):
        diary = scene.diary(GANG, rank)
        starts = [line for line in diary if "start" in line]
        assert [line["start"] for line in starts] == [1, 2, 3, 4]
        assert all(line["left_of_the_one_before"] == [] for line in starts), "two attempts overlapped"
        steps = {epoch: [line["step"] for line in diary if line.get("epoch") == epoch] for epoch in (1, 2, 3, 4)}
        assert steps == {1: [*range(10)], 2: [*range(8, 18)], 3: [*range(12, 18)], 4: [*range(16, 20)]}
        # Only what came after the last commit was done twice, and nobody can see it in the weights.
        weights = [(scene.out(job_id) / f"weights{rank}").read_bytes() for job_id in (ALONE, GANG)]
        assert weights[0] == weights[1] != b""

    # The ledger says what that cost, and why.
    for before, after in pairwise([f"{GANG}.{epoch}" for epoch in (1, 2, 3, 4)]):
        assert [each.cause for each in bill[before].lost_by_cause] == ["infrastructure"]
        assert bill[before].gpu_us.lost > 0 and bill[after].gpu_us.useful > 0
    assert bill[f"{GANG}.4"].gpu_us.lost == 0
