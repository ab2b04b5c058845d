"""An executor whose agents are WebSockets of the test, so that each message can be chosen."""

import contextlib
import json
import socket
import threading
import time

from fastapi import FastAPI
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from cordee.agent import messages
from cordee.agent.messages import (
    Claim,
    Records,
    encode,
)
from cordee.control.agents import link
from cordee.control.agents.executor import AgentsExecutor
from cordee.control.http import WebServer
from cordee.control.node_tokens import DerivedTokens
from cordee.control.ports import Pending
from cordee.errors import StandbyError, StoreError
from cordee.event_json import encode as encode_event
from cordee.events import (
    AttemptPlaced,
    Lease,
    Node,
    NodeUp,
)

DEADLINE_S = 60.0
TOKENS = DerivedTokens("right")


class FakeAgent:
    """Says what the test wants."""

    def __init__(self, url, node="a", token=None, claim=True, **fields):
        headers = {"Authorization": f"Bearer {TOKENS.issue(node) if token is None else token}"}
        self.stack = contextlib.ExitStack()
        self.socket = self.stack.enter_context(
            connect(f"{url}/v1/agents/{node}/link", additional_headers=headers, compression=None, close_timeout=1)
        )
        if claim:
            known = {"incarnation": "i", "machine": "host/1", "epoch": 0, "epoch_min": 1, "sources": ["node/a/1"]}
            self.say(Claim(**known | {"clock_us": time.time_ns() // 1000, "cordee": "0", "python": "3"} | fields))

    def say(self, message):
        self.socket.send(encode(message))

    def hear(self):
        """Return the next message; None if the server has closed the connection."""
        try:
            return messages.decode(self.socket.recv(DEADLINE_S))
        except ConnectionClosed:
            return None

    def report(self, seq, event, source="node/a/1"):
        self.say(Records(source=source, seqs=[seq], events=[encode_event(event)]))

    def close(self):
        self.stack.close()


class Bench:
    """An executor whose agents are played by the test, and the log that it reads."""

    def __init__(self, home, engines=(), links_max=None):
        self.home, self.engines, self.links_max = home, engines, links_max
        self.committed, self.known, self.agents, self.woken = {}, [], [], threading.Event()
        self.attempts = {("j", 1): ["a"]}
        self.urls, self.replaced = ["https://a"], False
        self.up()

    def up(self, confirm_s=DEADLINE_S, terms=None, clock=None):
        self.executor = AgentsExecutor(
            log=self,
            node_of=TOKENS.node_of,
            engines=self.engines,
            terms=terms,
            wake=self.woken.set,
            confirm_s=confirm_s,
            servers=self.servers,
            clock=clock,
        )
        app = link.AgentLinks(FastAPI(), self.executor, self.links_max)
        listener = socket.create_server(("127.0.0.1", 0))
        self.web = WebServer(app, listener)
        self.executor.nodes.know(self.known)
        self.web.begin()
        port = listener.getsockname()[1]
        (self.home / "server.json").write_text(json.dumps({"agents": f"http://127.0.0.1:{port}"}))
        self.url = f"ws://127.0.0.1:{port}"
        if clock is None:
            self.executor.start(self.reads)
        else:  # the test looks by itself
            self.executor.claims.start()
            self.executor.watch.count_silence_by(self.reads)

    def reads(self):
        return self.web.submit(link.read_all(self.executor))

    def servers(self):
        if self.replaced:
            raise StandbyError("this server stands by; https://b leads")
        return self.urls

    def marks(self, sources):
        if self.committed is None:
            raise StoreError("the disk is full")
        return {source: self.committed.get(source, 0) for source in sources}

    def leased(self, job_id, epoch):
        self.marks([])
        return self.attempts.get((job_id, epoch), [])

    def held(self, job_id, epoch):
        return self.attempts.get((job_id, epoch), [])

    def held_on(self, node):
        return [attempt for attempt, nodes in self.attempts.items() if node in nodes]

    def secrets(self, job_id, names):
        return dict.fromkeys(names, "hush")

    def agent(self, **fields):
        self.agents.append(FakeAgent(self.url, **fields))
        return self.agents[-1]

    def reports(self, n):
        deadline = time.monotonic() + DEADLINE_S
        while len(got := self.executor.reports()) < n:
            assert time.monotonic() < deadline, f"{got} is all that came"
            self.executor.wait(0.05)
        return [(report.source, report.seq, report.event) for report in got]

    def down(self):
        self.executor.close()
        self.web.end()

    def close(self):
        for agent in self.agents:
            agent.close()
        self.down()


def up(epoch=1, name="a"):
    return NodeUp(at_us=1, node=Node(name=name, epoch=epoch, gpu_name="slot", gpus=1))


def placed(*nodes, spec='{"run": "x"}'):
    leases = tuple(Lease(node=node, gpus=(0,)) for node in nodes)
    return Pending(number=5, command=AttemptPlaced(at_us=1, job_id="j", epoch=1, leases=leases), spec=spec)


def in_thread(call):
    """Its result, once it has one."""
    box = []
    thread = threading.Thread(target=lambda: box.append(call()), daemon=True)
    thread.start()

    def result():
        thread.join(DEADLINE_S)
        assert box, "it did not return"
        return box[0]

    return result
