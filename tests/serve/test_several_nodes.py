"""A replica on several nodes: one wrapper on each, and an engine in parts (parted_engine.py: what it stands for)."""

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines_world import running_llama, until, until_ended
from replica_world import Wrapper, wrapped

from cordee.agent.settings import AgentSettings
from cordee.answers.services import ServiceView
from cordee.client import Client
from cordee.control.node_tokens import DerivedTokens
from cordee.control.spawn import start_server
from cordee.demo import tiny_model
from cordee.errors import EXIT_CHECKPOINTED, ReplicaError
from cordee.events import Event, ReplicaReady
from cordee.serve.engines.openai import COMPLETIONS
from cordee.telemetry.host import free_port
from cordee.workload.spec import JobSpec

ENGINE = Path(__file__).with_name("parted_engine.py")
RUN = (sys.executable, str(ENGINE))
PROMPT: dict[str, object] = {"model": "wide", "prompt": "a", "max_tokens": 2}


@contextmanager
def two_nodes(tmp: Path, settings: dict[str, object]) -> Iterator[tuple[Wrapper, Wrapper]]:
    """Run both wrappers of a replica on two nodes, as their agents start them."""
    port, env = str(free_port()), {"NNODES": "2", "MASTER_ADDR": "127.0.0.1", "CORDEE_GRACE_S": "60"}
    with ExitStack() as stack:
        for rank in (1, 0):
            (tmp / str(rank)).mkdir()
        first, other = (
            stack.enter_context(
                wrapped(
                    tmp / str(rank),
                    settings,
                    env | {"MASTER_PORT": port, "NODE_RANK": str(rank), "CORDEE_NODE": f"n{rank}"},
                )
            )
            for rank in (0, 1)
        )
        yield first, other


def test_all_nodes_answer_as_one_and_leave_together_when_one_gets_notice(tmp_path: Path) -> None:
    with two_nodes(tmp_path, {"engine": "command", "run": RUN}) as (first, other):
        engine = first.ready()
        assert json.loads(engine.ask(COMPLETIONS, PROMPT)[1])["choices"][0]["text"] == "n0 n1"
        other.notice()
        assert first.unready().draining
        first.notice()
        assert (first.exit_code(), other.exit_code()) == (EXIT_CHECKPOINTED, EXIT_CHECKPOINTED)
        assert other.read() == [], "rank 0 reports for all"
        assert "rank 0 ends the engine: rank 0 has drained" in other.output


def test_the_end_of_one_part_ends_the_replica(tmp_path: Path) -> None:
    with two_nodes(tmp_path, {"engine": "command", "run": RUN}) as (first, other):
        first.ready()
        os.kill(other.engine_pid(), signal.SIGKILL)
        assert first.unready().why.startswith("node 1 of 2 the engine command was ended by SIGKILL")
        assert (first.exit_code(), other.exit_code()) == (ReplicaError.exit_code, ReplicaError.exit_code)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(shutil.which("vllm") is None, reason="vLLM is not installed")
def test_vllm_answers_from_two_nodes(tmp_path: Path) -> None:
    """Each layer is cut over two processes that its own rendezvous brings together, with the answers of one process."""
    folder = tiny_model.build(tmp_path / "model", heads=2, kv_heads=2).parent
    flags = {"dtype": "float32", "enforce-eager": True, "tensor-parallel-size": 2}
    asked = {"model": "chat", "prompt": "def main", "max_tokens": 24, "temperature": 0}
    with (
        running_llama(folder / "tiny.gguf", tmp_path) as llama,
        two_nodes(tmp_path, {"engine": "vllm", "model": str(folder), "context": 512, "flags": flags}) as (first, other),
    ):
        until(lambda: first.read() or first.process.poll() is not None, "it is ready", 600)
        got = json.loads(first.ready().ask(COMPLETIONS, asked)[1])["choices"][0]["text"]
        assert got == json.loads(llama.ask(COMPLETIONS, asked)[1])["choices"][0]["text"]
        os.kill(other.engine_pid(), signal.SIGKILL)
        assert "node 1 of 2 the engine vllm was ended by SIGKILL" in first.unready().why
        assert first.exit_code() == ReplicaError.exit_code


class Cluster:
    """A server with a gateway and without slots of its own for the service, and two nodes that have one each."""

    def __init__(self, folder: Path) -> None:
        self.home = folder / "home"
        start_server(self.home, slots="1", gateway=str(free_port()))
        self.client = Client(self.home)
        token = DerivedTokens((self.home / "token").read_text().strip())
        self.agents = list[subprocess.Popen[bytes]]()
        for name in ("n1", "n2"):
            settings = AgentSettings(node=name, servers=(self.client.url,), token=token.issue(name), slots=1)
            settings.write(folder / name)
            argv = [sys.executable, "-m", "cordee.agent", "--folder", str(folder / name)]
            with (folder / name / "agent.log").open("wb") as log:
                self.agents.append(subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True))

    def service(self) -> ServiceView:
        return self.client.service("wide")

    def events(self, kind: type[Event]) -> list[Any]:
        return [event for _, event in self.client.events() if isinstance(event, kind)]

    def ask(self) -> str:
        [url] = self.service().urls
        asked = urllib.request.Request(f"{url}{COMPLETIONS}", json.dumps(PROMPT).encode(), method="POST")
        with urllib.request.urlopen(asked, timeout=120) as answer:
            return str(json.load(answer)["choices"][0]["text"])

    def close(self) -> None:
        for agent in self.agents:
            agent.terminate()
        self.client.down()
        self.client.close()
        for agent in self.agents:
            agent.wait(60)
        until_ended(self.home)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    made = Cluster(tmp_path)
    yield made
    made.close()


def part_on(node: str) -> int:
    """Return the engine's process on a node."""
    for each in psutil.process_iter(["cmdline"]):
        try:
            if each.info["cmdline"] == list(RUN) and each.environ().get("CORDEE_NODE") == node:
                return int(each.pid)
        except psutil.Error:
            continue
    raise AssertionError(f"no part runs on {node}")


def test_a_service_of_two_nodes_loses_one_and_comes_back(cluster: Cluster, tmp_path: Path) -> None:
    client = cluster.client
    until(lambda: {node.name for node in client.nodes() if node.up} == {"local", "n1", "n2"}, "the nodes are there")
    client.cordon("local")
    spec = JobSpec.from_flags(run=list(RUN), gpus="2", name="wide", service={"replicas": "1", "drain": "1s"})
    client.declare(spec.model_dump(mode="json") | {"cwd": str(tmp_path)})
    until(lambda: cluster.service().state == "ready" and cluster.service().urls, "it is ready", 120)
    assert sorted(cluster.ask().split()) == ["n1", "n2"]
    os.kill(part_on("n2"), signal.SIGKILL)
    until(lambda: len(cluster.events(ReplicaReady)) == 2, "all its nodes have started again", 120)
    assert sorted(cluster.ask().split()) == ["n1", "n2"]
    first, second = cluster.events(ReplicaReady)
    assert (first.job_id, first.epoch, second.epoch) == (second.job_id, 1, 2)
