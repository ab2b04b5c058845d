"""A real server for `machines.py`, with what it uses of this machine, and real agents beside it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cordee.agent.settings import AgentSettings, AgentState
from cordee.client import Client
from cordee.control.home import Home
from cordee.control.node_tokens import DerivedTokens
from cordee.control.spawn import start_server

TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """Return the processor seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


def pss_bytes(pid: int) -> int:
    """Return the memory of a process, with its part of what it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Wait until this holds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"{timeout_s} s have passed"
        time.sleep(0.01)


class RunningServer:
    """A server with a home in a scratch folder; no node but those that dial it.

    Args:
        fill: writes into the home what an earlier server left there.
        options: further ones of `cordee up`.
    """

    def __init__(self, fill: Callable[[Path], None] | None = None, **options: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="cordee-machines-"))
        self.home = self.folder / "home"
        if fill is not None:
            self.home.mkdir(mode=0o700)
            fill(self.home)
        start_server(self.home, on="none", listen="127.0.0.1:0", **options)
        facts = json.loads((self.home / "server.json").read_text())
        self.pid, self.url = int(facts["pid"]), str(facts["agents"])
        self.secret = Home(self.home).token()
        self.client = Client(self.home)
        self._agents: list[subprocess.Popen[bytes]] = []

    def start_agent(self, node: str, slots: int) -> subprocess.Popen[bytes]:
        """Start the real agent of a node, with a folder and logs of its own."""
        folder = self.folder / node
        token = DerivedTokens(self.secret).issue(node)
        AgentSettings(node=node, token=token, servers=(self.url,), slots=slots).write(folder)
        with (folder / "agent.log").open("ab") as log:
            agent = subprocess.Popen(
                [sys.executable, "-m", "cordee.agent", "--folder", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._agents.append(agent)
        until(lambda: (state := AgentState.read(folder)) is not None and state.state == "welcomed")
        until(lambda: any(each.name == node and each.up for each in self.client.nodes()))
        return agent

    def submit(self, run: list[str], gpus: int) -> str:
        """Submit a job, and return its id."""
        spec = {"run": run, "gpus": gpus, "name": "bench", "cwd": str(self.folder), "launch": "rank"}
        return self.client.submit(spec, unprotected=True).job.job_id

    def until_state(self, job_id: str, *states: str) -> None:
        """Wait until the job has one of these states."""
        until(lambda: self.client.job(job_id).state in states)

    def close(self) -> None:
        """End the server and its agents, and delete their files."""
        self.client.close()
        os.kill(self.pid, signal.SIGTERM)
        for agent in self._agents:
            agent.send_signal(signal.SIGCONT)
            agent.terminate()
        for agent in self._agents:
            agent.wait()
        until(lambda: not Path(f"/proc/{self.pid}").exists() or _is_zombie(self.pid))
        shutil.rmtree(self.folder, ignore_errors=True)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True
