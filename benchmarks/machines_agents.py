"""Many agents in one thread, for `machines.py`: the real messages over real WebSockets, with no ranks behind them.

A thousand agents as processes would measure the machine they run on. These claim their nodes, beat, confirm orders and
report, each over a connection of its own; of WebSocket (RFC 6455) they know what a client needs.
"""

import asyncio
import base64
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import cordee
from cordee.agent.messages import Claim, Confirm, Meeting, Records, encode
from cordee.control.node_tokens import DerivedTokens
from cordee.event_json import encode as encode_event
from cordee.events import Event, Measured, Node, NodeUp, Outcome, RanksEnded, RanksStarted
from cordee.ids import JobId

DIAL_S, CLAIM_S = 60.0, 0.5
REPORTS_IN_FLIGHT, REPORTS_A_FRAME = 100, 10


def now_us() -> int:
    """Return microseconds since the Unix epoch."""
    return time.time_ns() // 1000


@dataclass
class Counts:
    """What the agents saw.

    Attributes:
        welcomed: agents whose claim was accepted.
        up: agents whose NodeUp is committed.
        lost: connections that ended.
        refused: reasons of refusals.
        answers_s: round trips of beats.
        orders: arrival times by (job, epoch), in microseconds.
        committed: reports of ranks that were acknowledged.
    """

    welcomed: int = 0
    up: int = 0
    lost: int = 0
    refused: list[str] = field(default_factory=list)
    answers_s: list[float] = field(default_factory=list)
    orders: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    committed: int = 0


class SimulatedAgent(asyncio.Protocol):
    """The agent of one node of a slot."""

    def __init__(self, node: str, token: str, host: str, counts: Counts, *, usable: bool, ends: bool) -> None:
        self.node, self._token, self._host, self._counts = node, token, host, counts
        self._usable, self._ends = usable, ends
        self._bytes = bytearray()
        self._open, self._source = False, ""
        self._transport: asyncio.Transport | None = None
        self._beats, self._seqs = count(1), count(1)
        self._sent_s: dict[int, float] = {}
        self.attempt: tuple[str, int, int] | None = None  # job, epoch and rank that runs here
        self._reported = self._committed = 0
        self._reports = False

    # -- the connection -----------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        key = base64.b64encode(os.urandom(16)).decode()
        lines = [f"GET /v1/agents/{self.node}/link HTTP/1.1", f"Host: {self._host}", "Upgrade: websocket"]
        lines += ["Connection: Upgrade", f"Sec-WebSocket-Key: {key}", "Sec-WebSocket-Version: 13"]
        lines += [f"Authorization: Bearer {self._token}", "", ""]
        transport.write("\r\n".join(lines).encode())

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._counts.lost += 1

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        self._bytes += data
        if not self._open:
            head, end, rest = self._bytes.partition(b"\r\n\r\n")
            if not end:
                return
            assert b" 101 " in head[:20], head
            self._open, self._bytes = True, rest
            self._send(encode(self._claim()))
        while (text := self._text()) is not None:
            self._take(text)

    def _text(self) -> bytes | None:
        """Return the next text that has arrived; None if it is not complete."""
        while len(self._bytes) >= 2:
            kind, length, begin = self._bytes[0] & 15, self._bytes[1] & 127, 2
            if length >= 126:
                begin, layout = (4, ">H") if length == 126 else (10, ">Q")
                if len(self._bytes) < begin:
                    return None
                (length,) = struct.unpack_from(layout, self._bytes, 2)
            if len(self._bytes) < begin + length:
                return None
            body = bytes(self._bytes[begin : begin + length])
            del self._bytes[: begin + length]
            if kind == 1:
                return body
        return None

    def _send(self, text: str) -> None:
        """Send a text in one frame, masked by zeros."""
        if self._transport is None:
            return
        body = text.encode()
        size = len(body)
        if size < 126:
            head = struct.pack(">BBI", 0x81, 0x80 | size, 0)
        elif size < 1 << 16:
            head = struct.pack(">BBHI", 0x81, 0x80 | 126, size, 0)
        else:
            head = struct.pack(">BBQI", 0x81, 0x80 | 127, size, 0)
        self._transport.write(head + body)

    # -- what an agent does -------------------------------------------------------------------------------------

    def _claim(self) -> Claim:
        return Claim(
            incarnation=os.urandom(8).hex(),
            machine=f"simulated/{self.node}",
            epoch=0,
            epoch_min=1,
            sources=[],
            clock_us=now_us(),
            cordee=cordee.__version__,
            python="3.11",
        )

    def beat(self) -> None:
        """Send a beat, unless the claim is not accepted yet."""
        if not self._source:
            return
        number = next(self._beats)
        self._sent_s[number] = time.perf_counter()
        self._send(f'{{"beat":{{"number":{number},"clock_us":{now_us()}}}}}')

    def _take(self, text: bytes) -> None:
        ((name, fields),) = json.loads(text).items()
        if name == "beat":
            self._counts.answers_s.append(time.perf_counter() - self._sent_s.pop(fields["number"]))
        elif name == "welcome":
            self._counts.welcomed += 1
            self._source = f"node/{self.node}/{fields['epoch']}"
            unusable = () if self._usable else (0,)
            node = Node(name=self.node, epoch=fields["epoch"], gpu_name="slot", gpus=1, unavailable=unusable)
            self._report(NodeUp(at_us=now_us(), node=node))
        elif name == "order":
            self._obey(fields)
        elif name == "seen" and fields["source"] == self._source:
            self._counts.up += fields["seq"] == 1
        elif name == "seen":
            self._counts.committed += fields["seq"] - self._committed
            self._committed = fields["seq"]
            if self._reports:
                self.report_much()
        elif name == "refused":
            self._counts.refused.append(fields["why"])

    def _report(self, *events: Event) -> None:
        seqs = [next(self._seqs) for _ in events]
        self._send(encode(Records(source=self._source, seqs=seqs, events=[encode_event(each) for each in events])))

    def _obey(self, order: dict[str, Any]) -> None:
        event, at_us = order["event"], now_us()
        if event["kind"] == "AttemptPlaced":
            job_id, epoch = JobId(event["job_id"]), event["epoch"]
            self._counts.orders.setdefault((job_id, epoch), []).append(at_us)
            nodes = [lease["node"] for lease in event["leases"]]
            meeting = Meeting(address="127.0.0.1", port=29500) if nodes[0] == self.node else None
            self._send(encode(Confirm(number=order["number"], meeting=meeting)))
            started = RanksStarted(at_us=at_us, job_id=job_id, epoch=epoch, node=self.node)
            if self._ends:
                self._report(started, _ended(self.node, job_id, epoch))
            else:
                self._report(started)
                self.attempt = (job_id, epoch, nodes.index(self.node))
        else:
            self._send(encode(Confirm(number=order["number"])))
            if event["kind"] == "KillOrdered" and self.attempt is not None:
                self._report(_ended(self.node, self.attempt[0], self.attempt[1]))
                self.attempt = None

    def report_much(self) -> None:
        """Report on the rank that runs here as fast as the server commits it, until `report_no_more`."""
        assert self.attempt is not None, "a rank runs here"
        job_id, epoch, rank = self.attempt
        self._reports = True
        while self._reported + REPORTS_A_FRAME - self._committed <= REPORTS_IN_FLIGHT:
            seqs = list(range(self._reported + 1, self._reported + 1 + REPORTS_A_FRAME))
            self._reported = seqs[-1]
            measured = [
                Measured(at_us=now_us(), job_id=JobId(job_id), epoch=epoch, rank=rank, step=seq, peak_bytes=1 << 30)
                for seq in seqs
            ]
            events = [encode_event(each) for each in measured]
            self._send(encode(Records(source=f"{job_id}.{epoch}/rank{rank}", seqs=seqs, events=events)))

    def report_no_more(self) -> None:
        """End what `report_much` began."""
        self._reports = False


def _ended(node: str, job_id: str, epoch: int) -> RanksEnded:
    return RanksEnded(at_us=now_us(), job_id=JobId(job_id), epoch=epoch, node=node, outcome=Outcome.FINISHED)


class Fleet:
    """Agents of nodes `sim0`, `sim1`, ..., in a thread of their own.

    Args:
        url: the server's, on loopback.
        secret: the home's token, from which those of nodes are derived.
        usable: jobs may run on the nodes.
        ends: ranks end as soon as they have started.
    """

    def __init__(self, url: str, secret: str, *, usable: bool = True, ends: bool = True) -> None:
        parts = urlsplit(url)
        self.counts = Counts()
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._tokens, self._kind = DerivedTokens(secret), {"usable": usable, "ends": ends}
        self.agents: list[SimulatedAgent] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine to its end on the agents' thread."""
        asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def connect(self, number: int, *, at_once: int = 50) -> None:
        """Dial until there are so many agents, `at_once` at a time."""

        async def dial() -> None:
            while len(self.agents) < number:
                numbers = range(len(self.agents), min(number, len(self.agents) + at_once))
                found = await asyncio.gather(*(self._dial(f"sim{each}") for each in numbers))
                self.agents += found
                began_s = time.monotonic()
                until_s = began_s + DIAL_S + CLAIM_S * at_once
                while self.counts.welcomed + len(self.counts.refused) + self.counts.lost < len(self.agents):
                    known = f"{self.counts.welcomed} of {len(self.agents)} agents are welcome"
                    assert time.monotonic() < until_s, f"{known} {until_s - began_s:.0f} s after they dialled"
                    await asyncio.sleep(0.001)

        self.run(dial())

    async def _dial(self, node: str) -> SimulatedAgent:
        host = f"{self._host}:{self._port}"

        def agent() -> SimulatedAgent:
            return SimulatedAgent(node, self._tokens.issue(node), host, self.counts, **self._kind)

        _, protocol = await self._loop.create_connection(agent, self._host, self._port)
        return protocol

    def beat(self, every_s: float) -> None:
        """Let all agents beat from now on, spread evenly over the interval."""

        async def begin() -> None:
            self._beating = asyncio.create_task(self._beat_for_ever(every_s))

        self.run(begin())

    async def _beat_for_ever(self, every_s: float) -> None:
        began_s, done = time.monotonic(), 0
        while True:
            number = len(self.agents)
            due = int((time.monotonic() - began_s) / every_s * number)
            for each in range(done, min(due, done + number)):
                self.agents[each % number].beat()
            done = due
            await asyncio.sleep(0.005)

    def each(self, action: Callable[[SimulatedAgent], None]) -> None:
        """Do this with each agent."""

        async def all_of_them() -> None:
            for agent in self.agents:
                action(agent)

        self.run(all_of_them())

    def wait(self, condition: Callable[[Counts], bool], timeout_s: float = 100) -> None:
        """Wait until this holds of the counts."""
        deadline = time.monotonic() + timeout_s
        while not condition(self.counts):
            assert time.monotonic() < deadline, f"{timeout_s} s have passed: {self.counts.refused[:3]}"
            time.sleep(0.001)

    def close(self) -> None:
        """Drop all connections."""
        self._loop.call_soon_threadsafe(self._beating.cancel)
        self.each(SimulatedAgent.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()


def percentile(values: Sequence[float], part: float) -> float:
    """Return a percentile of measured values."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))]
