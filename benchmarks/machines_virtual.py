"""Many agents in virtual time, for `machines.py`: the server's own links, leases, log and scheduler, without sockets.

12,500 agents that beat each 2 s in real time need more than the two cores on which server and agents share this
machine. Here a second passes when all that is due in it is done, so a busy machine changes no figure. What it leaves
out is the kernel's and uvicorn's part of a message, which the part `beats` measures with the agents that fit.
"""

import asyncio
import os
import resource
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import cordee
from cordee.agent.clock import MachineClock
from cordee.agent.messages import Claim, Records, encode
from cordee.control.agents.committed import CommittedLog
from cordee.control.agents.executor import AgentsExecutor
from cordee.control.agents.link import AgentLinks
from cordee.control.node_tokens import DerivedTokens
from cordee.control.secret_store import SecretStore
from cordee.control.store.credentials import Credentials
from cordee.control.store.sql import SqlStore
from cordee.control.tick import Control
from cordee.event_json import encode as encode_event
from cordee.events import Node, NodeUnreachable, NodeUp
from cordee.units import US_PER_S

BEAT_S, STEPS_PER_S, AT_ONCE = 2.0, 10, 500
SECRET = "0" * 32

Row = dict[str, object]


@dataclass
class VirtualClock(MachineClock):
    """A clock that the benchmark sets."""

    us: int = 1_800_000_000 * US_PER_S

    def now_us(self) -> int:
        """Return microseconds since the Unix epoch."""
        return self.us

    def now_s(self) -> float:
        """Return monotonic seconds."""
        return self.us / US_PER_S

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        self.us += round(seconds * US_PER_S)


@dataclass
class Answers:
    """The number of the server's messages by kind."""

    welcomed: int = 0
    seen: int = 0
    beats: int = 0
    refused: list[str] = field(default_factory=list)


class VirtualAgent:
    """The agent's end of one WebSocket."""

    def __init__(self, number: int, token: str, answers: Answers) -> None:
        self.node, self._answers = f"sim{number}", answers
        self._sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        headers = [(b"authorization", f"Bearer {token}".encode())]
        self.scope = {"type": "websocket", "path": f"/v1/agents/{self.node}/link", "headers": headers}
        self.scope |= {"client": ("10.0.0.1", 1), "server": ("10.0.0.2", 8470)}
        self._numbers = 0

    def say(self, text: str) -> None:
        """Send a text."""
        self._sent.put_nowait({"type": "websocket.receive", "text": text})

    def connect(self, claim: Claim) -> None:
        """Open the connection, and claim the node."""
        self._sent.put_nowait({"type": "websocket.connect"})
        self.say(encode(claim))

    def beat(self, now_us: int) -> None:
        """Send a beat."""
        self._numbers += 1
        self.say(f'{{"beat":{{"number":{self._numbers},"clock_us":{now_us}}}}}')

    async def receive(self) -> dict[str, Any]:
        """Return what this agent has sent, to the server."""
        return await self._sent.get()

    async def hear(self, message: Any) -> None:
        """Take what the server sends."""
        text = message.get("text") or ""
        if text.startswith('{"beat"'):
            self._answers.beats += 1
        elif text.startswith('{"welcome"'):
            self._answers.welcomed += 1
        elif text.startswith('{"seen"'):
            self._answers.seen += 1
        elif text.startswith('{"refused"'):
            self._answers.refused.append(text)


class VirtualServer:
    """The parts of a server behind its sockets, over SQLite in a scratch folder."""

    def __init__(self, folder: Path) -> None:
        self.clock = VirtualClock()
        self._store = SqlStore(f"sqlite:///{folder / 'cordee.db'}")
        self._credentials = Credentials(self._store)
        self._log = CommittedLog(self._store, SecretStore(folder, self._credentials, SECRET))
        self._tokens, self.answers = DerivedTokens(SECRET), Answers()
        self._executor = AgentsExecutor(log=self._log, node_of=self._tokens.node_of, clock=self.clock)
        self.control = Control(clock=self.clock, store=self._store, executor=self._executor)
        self._log.control = self.control
        self._app = AgentLinks(_no_app, self._executor, links_max=1 << 20)
        self.agents: list[VirtualAgent] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._looked_s = self.clock.now_s()

    def begin(self) -> None:
        """Accept jobs and claims."""
        self.control.up()
        self._executor.begin()
        self._executor.claims.start()

    async def connect(self, number: int) -> None:
        """Connect further agents, until there are so many and the log has their nodes."""
        while len(self.agents) < number:
            fresh = []
            for each in range(len(self.agents), min(number, len(self.agents) + AT_ONCE)):
                agent = VirtualAgent(each, self._tokens.issue(f"sim{each}"), self.answers)
                self._tasks.append(asyncio.create_task(self._app(agent.scope, agent.receive, agent.hear)))
                agent.connect(self._claim(agent.node))
                fresh.append(agent)
            self.agents += fresh
            await self._until(lambda: self.answers.welcomed + len(self.answers.refused) >= len(self.agents))
            for agent in fresh:
                node = Node(name=agent.node, epoch=1, gpu_name="NVIDIA H100 80GB HBM3", gpus=8)
                up = encode_event(NodeUp(at_us=self.clock.now_us(), node=node))
                agent.say(encode(Records(source=f"node/{agent.node}/1", seqs=[1], events=[up])))
            await self._until(lambda fresh=fresh: len(self._executor.reports()) >= len(fresh))  # type: ignore[misc]
            await asyncio.to_thread(self.control.tick)
            await self._until(lambda: self.answers.seen >= len(self.agents))
            self._executor.nodes.renew_leases()  # connecting takes no time here

    def _claim(self, node: str) -> Claim:
        machine, now_us = f"simulated/{node}", self.clock.now_us()
        return Claim(
            incarnation=node, machine=machine, epoch=0, epoch_min=1, sources=[], clock_us=now_us,
            cordee=cordee.__version__, python="3.11",
        )  # fmt: skip

    async def pass_time(self, seconds: int) -> int:
        """Let all agents beat for so long, spread evenly, and look at the leases each second; return the beats."""
        before, due = self.answers.beats, 0.0
        for step in range(seconds * STEPS_PER_S):
            self.clock.sleep(1 / STEPS_PER_S)
            last, due = round(due), due + len(self.agents) / BEAT_S / STEPS_PER_S
            for each in range(last, round(due)):
                self.agents[each % len(self.agents)].beat(self.clock.now_us())
            expected = before + round(due)
            await self._until(lambda expected=expected: self.answers.beats >= expected)  # type: ignore[misc]
            if (step + 1) % STEPS_PER_S == 0:
                self._executor.watch.look(self._looked_s)
                self._looked_s = self.clock.now_s()
                await asyncio.to_thread(self.control.tick)
        return self.answers.beats - before

    def unreachable(self) -> int:
        """Return how many nodes were taken to be silent."""
        return sum(isinstance(event, NodeUnreachable) for _, event in self._store.events())

    async def _until(self, true: Any) -> None:
        deadline_s = time.monotonic() + 120
        while not true():
            assert time.monotonic() < deadline_s, self.answers
            await asyncio.sleep(0)

    async def close(self) -> None:
        """End all connections."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._executor.claims.stop()


async def _no_app(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("agents use the link only")


def virtual(sizes: Sequence[int], seconds: int) -> list[Row]:
    """Measure the server's part of claims and beats by the number of agents, in virtual time."""

    async def measure(folder: Path) -> list[Row]:
        rows: list[Row] = []
        server = VirtualServer(folder)
        server.begin()
        empty_bytes = _resident_bytes()
        for size in sizes:
            more, used_s = size - len(server.agents), time.process_time()
            await server.connect(size)
            claims_cpu_s, used_s = time.process_time() - used_s, time.process_time()
            beats = await server.pass_time(seconds)
            used_s = time.process_time() - used_s
            rows.append(
                {
                    "agents": size,
                    "beats": beats,
                    "virtual_s": seconds,
                    "cpu_us_per_beat": round(used_s / beats * 1e6, 1),
                    "cpu_s_per_virtual_s": round(used_s / seconds, 3),
                    "claim_cpu_ms": round(claims_cpu_s / more * 1e3, 2),
                    "memory_bytes_per_agent": (_resident_bytes() - empty_bytes) // size,
                    "unreachable": server.unreachable(),
                    "refused": len(server.answers.refused),
                    "load": round(os.getloadavg()[0], 1),
                }
            )
        await server.close()
        return rows

    with tempfile.TemporaryDirectory(prefix="cordee-virtual-") as folder:
        return asyncio.run(measure(Path(folder)))


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
