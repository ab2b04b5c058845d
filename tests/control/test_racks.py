"""Placement by what agents report: a real server, four real agents in two racks, and a gang that asks for one rack."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cordee.agent.settings import AgentSettings
from cordee.answers.jobs import JobDetailView
from cordee.client import Client
from cordee.control.node_tokens import DerivedTokens
from cordee.control.spawn import is_owned, start_server
from cordee.errors import TooLargeError

DEADLINE_S = 60.0
RACKS = {"n0": "r0", "n1": "r1", "n2": "r0", "n3": "r1"}  # neighbours by name are in different racks
SLOTS = 2
WAITS = "import os, time\nwhile not os.path.exists('end'): time.sleep(0.05)"


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    home = tmp_path / "home"
    start_server(home, slots="1")
    tokens, agents = DerivedTokens((home / "token").read_text().strip()), []
    for node, rack in RACKS.items():
        folder = home / "nodes" / node
        labels = {"rack": rack, "price": "$2"}
        AgentSettings(node=node, token=tokens.issue(node), home=str(home), labels=labels, slots=SLOTS).write(folder)
        with (folder / "agent.log").open("wb") as log:
            argv = [sys.executable, "-m", "cordee.agent", "--folder", str(folder)]
            agents.append(subprocess.Popen(argv, stdout=log, stderr=log))
    with Client(home) as client:
        yield client
        client.down()
        for agent in agents:
            agent.terminate()
            agent.wait(DEADLINE_S)
        until(lambda: not is_owned(home))


def test_a_gang_that_asks_for_one_rack_lands_in_one(client: Client, tmp_path: Path) -> None:
    def run(name: str, gpus: int, *, state: str = "running", **spec: object) -> JobDetailView:
        """Submit a job that waits for the file `end`, and return it in this state."""
        whole = {"name": name, "run": [sys.executable, "-c", WAITS], "gpus": gpus, "cwd": str(tmp_path), **spec}
        job_id = client.submit(whole).job.job_id
        until(lambda: client.job(job_id).state == state)
        return client.job(job_id)

    def racks(job: JobDetailView) -> set[str | None]:
        return {RACKS.get(node) for node in job.attempts[-1].leases}

    until(lambda: len([node for node in client.nodes() if node.up]) == len(RACKS) + 1)
    nodes = {node.name: node for node in client.nodes()}
    assert {name: nodes[name].domain for name in RACKS} == {name: [rack] for name, rack in RACKS.items()}
    assert nodes["local"].domain == [] and nodes["n1"].price_source == "the node's label"
    assert nodes["n1"].micro_usd_per_gpu_hour == 2_000_000 and nodes["n1"].memory_bytes and nodes["n1"].cpu_milli
    three = run("three", SLOTS + 1, place={"within": "rack"})
    (taken,) = racks(three)
    gang = run("gang", 2 * SLOTS, place={"within": "rack"})
    assert len(gang.attempts[-1].leases) == 2 and racks(gang) == {"r0", "r1"} - {taken}
    waits = run("waits", 2, state="queued", place={"within": "rack"})
    assert "2 are free" in client.why(waits.job_id).text, "one in each of two places, of which one is in no rack"
    with pytest.raises(TooLargeError, match="1 GPUs of the job need 1 PB of host memory, but the nodes"):
        run("huge", 1, memory_bytes=10**15)
    (tmp_path / "end").touch()
    until(lambda: all(job.state == "done" for job in client.jobs()))
