"""A home whose server runs jobs on a throw-away Ray cluster."""

import hashlib
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from cordee.answers.nodes import NodeView
from cordee.client import Client
from cordee.control.node_tokens import DerivedTokens
from cordee.control.spawn import start_server
from cordee.ids import JobId
from cordee.ids import job_id as new_id
from cordee.telemetry.host import free_port
from ray_world import RayWorld

T = TypeVar("T")
WAIT_S = 120
# A rank that says what it is, and lives until it may end.
RANK = """
import json, os, sys, time
out = sys.argv[1]
facts = {"pid": os.getpid(), "nice": os.nice(0), "environ": dict(os.environ)}
path = f"{out}/rank{os.environ['RANK']}"
with open(path + ".new", "w") as file:
    json.dump(facts, file)
os.replace(path + ".new", path)
while not os.path.exists(f"{out}/end"):
    time.sleep(0.05)
"""


def until(holds: Callable[[], object], why: Callable[[], str] = str) -> None:
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, f"it did not happen within {WAIT_S} s\n{why()}"
        time.sleep(0.05)


class RayHome:
    """A Ray cluster, and a server on it; with `outside` the server reaches it by Ray Client."""

    def __init__(
        self, folder: Path, settings: dict[str, str] | None = None, lease: str | None = None, *, outside: bool = False
    ) -> None:
        self.folder, self.home, self._lease = folder, folder / "home", lease
        self.ray = RayWorld(folder, settings)
        self._port = free_port()
        self._client_port = free_port() if outside else None

    def start(self, cpus: dict[str, int]) -> None:
        self.ray.start_head("" if self._client_port is None else f"--ray-client-server-port={self._client_port}")
        for name, count in cpus.items():
            self.ray.start_node(name, count)
        self.up()
        until(lambda: {node.name for node in self.nodes() if node.up} == cpus.keys(), self.logs)

    def up(self) -> None:
        on = f"ray:{self.ray.address}" if self._client_port is None else f"ray://127.0.0.1:{self._client_port}"
        self.server = start_server(self.home, on=on, slots="2", listen=f"127.0.0.1:{self._port}", lease=self._lease).pid

    def logs(self) -> str:
        files = [*self.home.glob("*.log"), *self.agents().glob("*/agent.log")]
        return "\n".join(f"--- {path}\n{path.read_text()[-4000:]}" for path in files)

    def agents(self) -> Path:
        """Return the folder of the nodes' agents."""
        tokens = DerivedTokens((self.home / "token").read_text().strip())
        name = hashlib.sha256(tokens.issue("ray").encode()).hexdigest()[:8]
        return Path("~/.cordee/agents").expanduser() / f"cordee-{name}"

    def nodes(self) -> list[NodeView]:
        with Client(self.home) as client:
            return client.nodes()

    def is_reachable(self, name: str) -> bool:
        return next(node.reachable for node in self.nodes() if node.name == name)

    def run(self, gpus: int) -> JobId:
        """Submit a gang whose ranks write down what they are, and wait until they have."""
        job_id = new_id("gang", os.urandom(6))
        self.out(job_id).mkdir()
        with Client(self.home) as client:
            run = [sys.executable, "-c", RANK, str(self.out(job_id))]
            client.submit({"name": "gang", "run": run, "gpus": gpus}, job_id=job_id)
        until(lambda: len(self.ranks(job_id)) == gpus, self.logs)
        return job_id

    def out(self, job_id: JobId) -> Path:
        return self.folder / job_id

    def ranks(self, job_id: JobId) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted(self.out(job_id).glob("rank?"))]

    def events(self, kind: type[T]) -> list[T]:
        with Client(self.home) as client:
            return [event for _, event in client.events() if isinstance(event, kind)]

    def down(self) -> None:
        with Client(self.home) as client:
            client.down()
        os.waitpid(self.server, 0)

    def close(self) -> None:
        with suppress(ProcessLookupError, AttributeError):
            os.kill(self.server, signal.SIGKILL)
            os.waitpid(self.server, 0)
        self.ray.stop()
        if (self.home / "token").exists():
            shutil.rmtree(self.agents(), ignore_errors=True)
