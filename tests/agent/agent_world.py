"""A server without a scheduler: real agents and ranks, a log in memory, commands given by the test."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

from fastapi import FastAPI

from cordee.agent.settings import AgentSettings
from cordee.control.agents import link
from cordee.control.agents.claims import Member
from cordee.control.agents.executor import AgentsExecutor
from cordee.control.engines.local import LocalEngine, NodeConfig
from cordee.control.http import WebServer
from cordee.control.node_tokens import DerivedTokens
from cordee.control.ports import Pending
from cordee.events import (
    AttemptPlaced,
    KillOrdered,
    Lease,
    NodeDown,
    NodeUp,
    NoticeGiven,
    NoticeReason,
    RanksEnded,
    RanksStarted,
)
from cordee.ids import JobId

DEADLINE_S = 120.0
JOB = f"job-{os.getpid()}"  # two runs of these tests at once must not end each other's processes
TAG = f"{JOB}.1"


class World:
    """One home, and the server that comes and goes on it."""

    def __init__(self, home: Path, *, nodes=(NodeConfig(name="local", slots=4),), terms=None):
        self.home, self.nodes, self.terms, self.port, self.joined = home, nodes, terms, 0, []
        home.mkdir(exist_ok=True)
        (home / "token").write_text("secret-token\n")
        self.log, self.committed, self.ordered, self.pending, self.number = [], {}, [], [], 0
        self.executor = None
        self.up()

    def up(self):
        tokens = DerivedTokens((self.home / "token").read_text())
        engine = LocalEngine(self.home, self.nodes, tokens)
        self.executor = AgentsExecutor(
            log=self, node_of=tokens.node_of, engines=[engine], terms=self.terms, confirm_s=5.0
        )
        app = link.AgentLinks(FastAPI(), self.executor)
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self.web = WebServer(app, listener)
        self.executor.nodes.know(self.members())
        self.web.begin()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        (self.home / "server.json").write_text(json.dumps({"pid": os.getpid(), "agents": url}))
        self.executor.start()

    def down(self):
        """End the server as `kill -9` does, without any message."""
        self.executor.close()
        self.web.end()
        self.executor = None

    def close(self):
        if self.executor is None:
            self.up()
            self.until(lambda: len(self.connected()) == len(self.nodes))
        self.executor.close(kill_agents=True)
        for agent in self.joined:
            agent.terminate()
        for agent in self.joined:
            agent.wait(DEADLINE_S)
        self.web.end()

    def join(self, name, folder, *, port=None, code=None, path=None):
        """Start an agent with a folder of its own that dials a port of this machine; wait until it is up."""
        token = DerivedTokens((self.home / "token").read_text()).issue(name)
        url = f"http://127.0.0.1:{port or self.port}"
        AgentSettings(node=name, token=token, servers=(url,), slots=2).write(folder)
        how = ["-m", "cordee.agent"] if code is None else ["-c", code]
        with (folder / "agent.log").open("ab") as log:
            argv = [sys.executable, *how, "--folder", str(folder)]
            env = os.environ if path is None else os.environ | {"PATH": f"{path}:{os.environ['PATH']}"}
            self.joined.append(subprocess.Popen(argv, env=env, stdout=log, stderr=log, start_new_session=True))
        return self.joined[-1]

    def connected(self):
        return {name for name, member in self.executor.nodes.members.items() if member.session}

    # -- what the executor reads of the log ------------------------------------------------------------------

    def marks(self, sources):
        return {source: self.committed.get(source, 0) for source in sources}

    def leased(self, job_id, epoch):
        commands = [each.command for each in self.ordered]
        placed = [each for each in commands if isinstance(each, AttemptPlaced)]
        leases = [each.leases for each in placed if (each.job_id, each.epoch) == (job_id, epoch)]
        return [lease.node for lease in leases[0]] if leases else []

    def held(self, job_id, epoch):
        ended = {event.node for event in self.of(RanksEnded, job_id, epoch)}
        nodes = self.leased(job_id, epoch)
        return [node for node in nodes or [each.name for each in self.nodes] if node not in ended]

    def held_on(self, node):
        placed = {(each.command.job_id, each.command.epoch) for each in self.ordered}
        return [attempt for attempt in sorted(placed) if node in self.held(*attempt)]

    def secrets(self, job_id, names):
        paths = {name: self.home / "secrets" / name for name in names}
        return {name: path.read_text().rstrip() for name, path in paths.items() if path.exists()}

    def members(self):
        newest = {}
        for event in self.log:
            if isinstance(event, NodeUp):
                newest[event.node.name] = Member(event.node.name, epoch=event.node.epoch, up=True)
            elif isinstance(event, NodeDown) and newest[event.node].epoch == event.epoch:
                newest[event.node].up = False
        return list(newest.values())

    def tick(self):
        for report in self.executor.reports():
            if report.seq > self.committed.get(report.source, 0):
                self.committed[report.source] = report.seq
                self.log.append(report.event)
            self.executor.acknowledge(report.source, self.committed[report.source])
        self.pending = [each for each in self.pending if not self.executor.carry_out(each)]

    def until(self, condition, what="the condition"):
        """Run the server until a condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            if self.executor is not None:
                self.tick()
            if result := condition():
                return result
            assert time.monotonic() < deadline, f"{what} did not come: {self.log}"
            if self.executor is not None:
                self.executor.wait(0.02)

    def order(self, command, spec="{}"):
        self.number += 1
        self.ordered.append(Pending(number=self.number, command=command, spec=spec))
        self.pending.append(self.ordered[-1])

    def start(self, run, *, job=JOB, epoch=1, gpus=1, leases=None, **spec):
        leases = leases or (Lease(node=self.nodes[0].name, gpus=tuple(range(gpus))),)
        spec = {"run": run, "cwd": str(self.home), **spec}
        self.order(AttemptPlaced(at_us=1, job_id=JobId(job), epoch=epoch, leases=leases), json.dumps(spec))

    def notice(self, grace_s, *, job=JOB, epoch=1):
        deadline_us = time.time_ns() // 1000 + int(grace_s * 1e6)
        self.order(
            NoticeGiven(at_us=1, job_id=JobId(job), epoch=epoch, reason=NoticeReason.PREEMPT, deadline_us=deadline_us)
        )

    def kill(self, *, job=JOB, epoch=1):
        self.order(KillOrdered(at_us=1, job_id=JobId(job), epoch=epoch, why="the test said so"))

    def of(self, kind, job=JOB, epoch=1):
        return [e for e in self.log if isinstance(e, kind) and (e.job_id, e.epoch) == (job, epoch)]

    def started(self, job=JOB, epoch=1):
        return self.until(lambda: self.of(RanksStarted, job, epoch), "RanksStarted")[0]

    def ended(self, job=JOB, epoch=1, groups=1):
        found = self.until(
            lambda: len(self.of(RanksEnded, job, epoch)) >= groups and self.of(RanksEnded, job, epoch), "RanksEnded"
        )
        return found[0] if groups == 1 else found

    def folder(self, job=JOB, epoch=1, node=None):
        return self.home / "attempts" / job / str(epoch) / (node or self.nodes[0].name)

    def log_text(self, name, job=JOB, epoch=1):
        path = self.folder(job, epoch) / "logs" / name
        return path.read_text() if path.exists() else ""

    def logged(self, text, name="rank0.log", job=JOB, epoch=1):
        self.until(lambda: text in self.log_text(name, job, epoch), f"{text!r} in {name}")

    def agent_pid(self, node="local"):
        """Return the pid of the process that holds the node's lock."""
        wanted = f"--folder\0{self.home}/nodes/{node}\0".encode()
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if wanted in path.read_bytes() and b"cordee.agent\0" in path.read_bytes():
                    return int(path.parent.name)
            except OSError:
                continue
        return None


def python(code: str) -> list[str]:
    """Return the command of a rank that runs this Python code."""
    return [sys.executable, "-c", code]
