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
from cordee.workload.kubernetes_cluster import PORT, ServerPods, server_objects

DEADLINE_S = 60.0
TOKEN = "the-token-of-the-secret-of-kubernetes"


class Container:
    """A rendered container as a process.

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
        self.log = mounts["log"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*container["command"], script], env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )

    def until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()
            time.sleep(0.05)


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


@pytest.fixture
def server(tmp_path: Path, port: int) -> Iterator[Container]:
    for name in ("home", "secrets", "tls"):
        (tmp_path / name).mkdir()
    (tmp_path / "secrets/token").write_text(TOKEN)
    certificate = self_made(tmp_path)
    (tmp_path / "tls/tls.crt").write_bytes(certificate.path.read_bytes())
    (tmp_path / "tls/tls.key").write_bytes(certificate.key.read_bytes())
    pod = server_objects(ServerPods(image="i", replicas=1))[-1]["spec"]["template"]["spec"]
    mounts = {"/home/cordee": tmp_path / "home", "/run/cordee": tmp_path / "secrets", "/run/tls": tmp_path / "tls"}
    started = Container(pod, {**mounts, "log": tmp_path / "server.log"}, {"CORDEE_DATABASE": "sqlite"}, port)
    yield started
    with Client(tmp_path / "home") as client:
        client.down()  # its agents too
    assert started.process.wait(DEADLINE_S) == 0, started.log.read_text()


def answers(home: Path) -> bool:
    try:
        with Client(home) as client:
            return client.health().pid > 0
    except CordeeError:
        return False


def test_the_server_answers_under_its_own_name_with_the_token_of_the_secret(
    server: Container, tmp_path: Path, port: int
) -> None:
    server.until(lambda: answers(tmp_path / "home"))
    name = subprocess.run(["hostname", "-f"], check=True, capture_output=True, text=True).stdout.strip()
    fingerprint = self_made(tmp_path).fingerprint
    with Client(url=f"https://{name}:{port}", token=TOKEN, fingerprint=fingerprint) as client:
        assert client.health().listens == f"https://{name}:{port}"
