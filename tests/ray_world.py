"""A throw-away Ray cluster: a node's processes are marked, so that all of it can be killed or frozen."""

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from cordee.telemetry.host import free_port

_MARK = "CORDEE_TEST_RAY"
RAY = (sys.executable, "-W", "ignore", "-c", "from ray.scripts.scripts import main; main()")
_TRIES = 3  # a raylet gives its Python agents 15 s to write their port files, and then aborts: a busy machine is slower
_START_S = 60.0


class RayWorld:
    """A head without CPUs and nodes with CPU slots, on 127.0.0.1.

    Args:
        folder: for Ray's files and the output of its processes. Keep it short: it holds Unix sockets.
        settings: environment variables of every Ray process, such as RAY_gcs_storage.
    """

    def __init__(self, folder: Path, settings: dict[str, str] | None = None, port: int | None = None) -> None:
        self.folder = folder
        self.port = port or free_port()
        self._id = uuid.uuid4().hex[:8]
        self._settings = settings or {}
        self._blockers: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def address(self) -> str:
        """The head's address, for RAY_ADDRESS."""
        return f"127.0.0.1:{self.port}"

    def start_head(self, options: str = "") -> None:
        """Start the head, or start it again after it died."""
        # `ray start --head` looks for raylets of this address on its machine, and here the other nodes have some.
        (self.folder / "ray" / "ray_current_cluster").unlink(missing_ok=True)
        self._start(
            "head",
            f"--head --port={self.port} --num-cpus=0 --include-dashboard=false {options}",
        )

    def start_node(self, name: str, cpus: int = 2) -> None:
        """Start a node with this many CPUs."""
        self._start(name, f"--address={self.address} --num-cpus={cpus} --node-name={name}")

    def processes(self, name: str) -> list[psutil.Process]:
        """Return all processes of a node: Ray's, the agent that it started, and everything below them."""
        mark = f"{self._id}/{name}"
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                if process.environ().get(_MARK) == mark:
                    found |= {each.pid: each for each in (process, *process.children(recursive=True))}
            except psutil.Error:
                continue
        return list(found.values())

    def send(self, name: str, number: signal.Signals) -> None:
        """Send a signal to all processes of a node: SIGKILL is a power cut, SIGSTOP a freeze."""
        for process in self.processes(name):
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue

    def kill(self, name: str) -> None:
        """Kill everything on a node, and wait until it is gone."""
        while self.processes(name):
            self.send(name, signal.SIGKILL)
            self._reap(name)
            time.sleep(0.02)

    def kill_gcs(self) -> None:
        """Kill the head's GCS, and wait until its `ray start --block` has ended for it."""
        self._named("head", "gcs_server").kill()
        self._blockers["head"].wait(60)
        self.kill("head")

    def raylet(self, name: str) -> psutil.Process:
        """Return a node's raylet."""
        return self._named(name, "raylet")

    def _named(self, name: str, program: str) -> psutil.Process:
        for process in self.processes(name):
            with suppress(psutil.NoSuchProcess):  # its workers come and go
                if process.name() == program:
                    return process
        raise AssertionError(f"no {program} on {name}")

    def ray(self, args: list[str]) -> None:
        """Run one of Ray's commands."""
        subprocess.run([*RAY, *args], check=True, stdout=subprocess.DEVNULL)

    def stop(self) -> None:
        """Kill every process of the cluster."""
        for name, blocker in self._blockers.items():
            self.kill(name)
            blocker.wait()

    def _start(self, name: str, options: str) -> None:
        for attempt in range(1, _TRIES + 1):
            log = self.folder / f"{name}.{attempt}.out"
            if self._try(name, options, log):
                return
            self.kill(name)
        raise AssertionError(f"Ray's node {name} did not start in {_TRIES} tries: {log.read_text()[-2000:]}")

    def _try(self, name: str, options: str, log: Path) -> bool:
        self._reap(name)
        environment = os.environ | self._settings | {_MARK: f"{self._id}/{name}"}
        environment |= {
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",
            "RAY_AUTH_MODE": "disabled",
        }
        argv = [*RAY, "start", "--block", *options.split(), "--object-store-memory=80000000", "--disable-usage-stats"]
        argv += [f"--temp-dir={self.folder / 'ray'}"] if name == "head" else []
        with log.open("wb") as out:
            process = subprocess.Popen(argv, env=environment, stdout=out, stderr=out, start_new_session=True)
        self._blockers[name] = process
        return _until(lambda: "Ray runtime started" in log.read_text() or process.poll() is not None) and (
            process.poll() is None
        )

    def _reap(self, name: str) -> None:
        process = self._blockers.get(name)
        if process is not None:
            process.poll()


def _until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + _START_S
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True
