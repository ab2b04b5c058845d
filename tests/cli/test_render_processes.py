"""The rendered commands of server and agent run as processes, with their argv and environment; no container is there.

The folders that Kubernetes mounts are folders of the test, and the port is a free one, since others may use 8470.
"""

import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cordee.client import Client
from cordee.control.listen import self_made
from cordee.errors import CordeeError
from cordee.workload.kubernetes_cluster import PORT, AgentPods, ServerPods, agent_objects, server_objects

DEADLINE_S = 60.0
TOKEN = "the-token-of-the-secret-of-kubernetes"


class Container:
    """A rendered container as a process, which writes its output to the file `log` of the mounts.

    Args:
        pod: the rendered pod.
        mounts: folders of the test by the path in the pod.
        given: values of the variables that Kubernetes takes from Secrets and fields.
        port: stands for the server's.
    """

    def __init__(self, pod: Any, mounts: dict[str, Path], given: dict[str, str], port: int) -> None:
        (container,) = pod["containers"]
        script = container["args"][0].replace("$$", "$").replace(f":{PORT}", f":{port}")
        env = {each["name"]: each["value"] if "value" in each else given[each["name"]] for each in container["env"]}
        for path, folder in mounts.items():
            env = {name: re.sub(f"^{path}(?=/|$)", str(folder), value) for name, value in env.items()}
        env["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.log, self.port = mounts["log"], port
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*container["command"], script], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Container]:
    root = tmp_path_factory.mktemp("pods")
    for name in ("home", "secrets", "tls"):
        (root / name).mkdir()
    (root / "secrets/token").write_text(TOKEN)
    certificate = self_made(root)
    (root / "tls/tls.crt").write_bytes(certificate.path.read_bytes())
    (root / "tls/tls.key").write_bytes(certificate.key.read_bytes())
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    pod = server_objects(ServerPods(image="i", replicas=1))[-1]["spec"]["template"]["spec"]
    mounts = {"/home/cordee": root / "home", "/run/cordee": root / "secrets", "/run/tls": root / "tls"}
    started = Container(pod, {**mounts, "log": root / "server.log"}, {"CORDEE_DATABASE": "sqlite"}, port)
    started.until(lambda: answers(root / "home"))
    yield started
    with Client(root / "home") as client:
        client.down()  # its agents too
    assert started.process.wait(DEADLINE_S) == 0, started.log.read_text()


def answers(home: Path) -> bool:
    try:
        with Client(home) as client:
            return client.health().pid > 0
    except CordeeError:
        return False


def nodes_up(home: Path) -> list[tuple[str, int, list[str]]]:
    with Client(home) as client:
        return [(node.name, node.epoch, node.domain) for node in client.nodes() if node.up]


def test_the_server_answers_under_its_own_name_with_the_token_of_the_secret(server: Container) -> None:
    name = subprocess.run(["hostname", "-f"], check=True, capture_output=True, text=True).stdout.strip()
    fingerprint = self_made(server.log.parent).fingerprint
    with Client(url=f"https://{name}:{server.port}", token=TOKEN, fingerprint=fingerprint) as client:
        assert client.health().listens == f"https://{name}:{server.port}"


def test_an_agent_joins_once_and_comes_back_as_the_same_node(server: Container, tmp_path: Path) -> None:
    home = server.log.parent / "home"
    with Client(home) as client:
        made = client.join_token(uses=1, for_s=600)
    pod = agent_objects(AgentPods(image="i", url=made.url, labels={"rack": "r7"}))[-1]["spec"]["template"]["spec"]
    given = {"CORDEE_NODE": "gpu-1", "CORDEE_JOIN_TOKEN": made.token}
    mounts = {"/var/lib/cordee": tmp_path / "folder", "log": tmp_path / "agent.log"}
    for epoch in (1, 2):  # the token is good for one node, and it is one
        agent = Container(pod, mounts, given, server.port)
        agent.until(lambda: any(each == ("gpu-1", epoch, ["r7"]) for each in nodes_up(home)))
        agent.process.terminate()
        assert agent.process.wait(DEADLINE_S) == 0, agent.log.read_text()
