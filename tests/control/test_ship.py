"""A job from a folder that its nodes cannot see: real servers, agents and ranks, each node with a folder of its own."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from cordee.agent.settings import AgentSettings
from cordee.cli.capture import capture_job
from cordee.client import Client
from cordee.control.node_tokens import DerivedTokens
from cordee.control.spawn import start_server
from cordee.storage.tree import digest_of
from cordee.workload.spec import JobSpec

SCRIPT = """
import os, time
from pathlib import Path
from lib import NAME

def wait_for(name):
    while not Path(os.environ["STAGE"], name).exists():
        time.sleep(0.02)

rank, epoch = os.environ["RANK"], os.environ["CORDEE_EPOCH"]
here = os.getcwd() == os.environ["CORDEE_FILES"] and not Path("attempt").exists()
print(f"rank {rank} of attempt {epoch} runs {NAME} in a fresh copy: {here}", flush=True)
Path("lib.py").write_text("NAME = 'what an attempt wrote'")
if epoch == "1":
    wait_for("away")
    print("".join(f"line {number} without a server\\n" for number in range(2000)), flush=True)
    Path(os.environ["STAGE"], f"written{rank}").touch()
    wait_for("leave")
    raise SystemExit(75)
"""


class Cluster:
    """A server without slots for the job, and two nodes that have one each."""

    def __init__(self, folder: Path) -> None:
        self.home, self.folder = folder / "home", folder
        start_server(self.home, slots="1")
        self.agents: dict[str, subprocess.Popen[bytes]] = {}
        for name in ("n1", "n2"):
            self.settle(name)
            argv = [sys.executable, "-m", "cordee.agent", "--folder", str(folder / name)]
            with (folder / name / "agent.log").open("wb") as log:
                self.agents[name] = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)

    @property
    def url(self) -> str:
        return str(json.loads((self.home / "server.json").read_text())["url"])

    def settle(self, name: str) -> None:
        """Tell an agent where the server is: its port changes when it starts again."""
        token = DerivedTokens((self.home / "token").read_text().strip()).issue(name)
        AgentSettings(node=name, servers=(self.url,), token=token, slots=1).write(self.folder / name)

    def kill_server(self) -> None:
        os.kill(json.loads((self.home / "server.json").read_text())["pid"], signal.SIGKILL)

    def start_again(self) -> None:
        start_server(self.home)
        for name in self.agents:
            self.settle(name)

    def close(self) -> None:
        for agent in self.agents.values():
            agent.terminate()
        with Client(self.home) as client:
            client.down()
        for agent in self.agents.values():
            agent.wait(30)


def until(true: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


def test_every_attempt_runs_what_was_submitted_and_no_line_of_its_logs_is_lost(cluster: Cluster) -> None:
    project, stage = cluster.folder / "project", cluster.folder / "stage"
    project.mkdir()
    stage.mkdir()
    (project / "train.py").write_text(SCRIPT)
    (project / "lib.py").write_text("NAME = 'what was submitted'")
    env = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "STAGE": str(stage)}
    run = ("python", str(project / "train.py"))
    with Client(cluster.home) as client:
        until(lambda: {node.name for node in client.nodes() if node.up} == {"local", "n1", "n2"})
        client.cordon("local")
        spec, _ = capture_job(client, JobSpec(run=run, gpus=2, cwd=str(project), env=env), remote=True)
        (project / "lib.py").write_text("NAME = 'what was edited after the submission'")
        job_id = client.submit(spec.model_dump(mode="json")).job.job_id
        shutil.rmtree(project)
        until(lambda: len(list(client.logs(job_id))) == 4 if client.job(job_id).epoch else False)
    cluster.kill_server()
    (stage / "away").touch()
    until(lambda: len(list(stage.glob("written*"))) == 2)
    lib = digest_of(b"NAME = 'what was submitted'")
    damaged = cluster.folder / "n1" / "files" / lib[:2] / lib
    damaged.write_text("NAME = 'what the disk made of it'")
    cluster.start_again()
    followed: list[str] = []
    with Client(cluster.home) as client:
        reader = threading.Thread(target=lambda: followed.extend(client.logs(job_id, follow=True)))
        reader.start()
        (stage / "leave").touch()
        reader.join(60)
        job = client.job(job_id)
    assert job.files is not None and (job.files.files, job.files.commit, job.files.changed) == (2, None, False)
    assert (job.state, [attempt.outcome for attempt in job.attempts]) == ("done", ["checkpointed", "finished"])
    expected = [
        f"[rank{rank}] rank {rank} of attempt {epoch} runs what was submitted in a fresh copy: True"
        for epoch in (1, 2)
        for rank in (0, 1)
    ]
    assert sorted(line for line in followed if "runs" in line) == sorted(expected)
    for rank, lease in enumerate(job.attempts[0].leases):
        path = Path("attempts", job_id, "1", lease, "logs", f"rank{rank}.log")
        received = (cluster.home / path).read_bytes()
        assert received == (cluster.folder / lease / path).read_bytes() and received.count(b"\n") == 2003
        assert [line for line in followed if line.startswith(f"[rank{rank}] line")] == [
            f"[rank{rank}] line {number} without a server" for number in range(2000)
        ]
    assert "was altered on the disk" in (cluster.folder / "n1" / "agent.log").read_text()
    assert damaged.read_text() == "NAME = 'what was submitted'"
    assert "2 files laid out" in (cluster.folder / "n2" / "agent.log").read_text()
