"""The wrappers of a replica on several nodes, one on each: rank 0 leads, and the others start their part as it says.

They meet at MASTER_ADDR:MASTER_PORT, which the agent of rank 0 has picked. Each of the others keeps one connection to
rank 0 as long as the replica lives, so that a node that is gone is noticed at once. Over it go lines of JSON:

    {"attempt": "chat-ab.1", "node_rank": 1, "gpus": 4}               who it is
    {"start": "org/model", "ports": [40001, 40002], "gpus": [4, 4]}   from rank 0: start the engine's part
    {"stop": "it got notice"}                                         from rank 0: end it; {"stopped": true} answers
    {"problem": "exited with 1"}, {"notice": true}                    to rank 0: its part has ended; it got notice
"""

import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from cordee.errors import ReplicaError
from cordee.serve.engines.port import EnginePart
from cordee.units import format_duration

STOP_S = 15.0
"""Time that the other nodes have to end their parts."""
CONNECT_S = 600.0
"""Time in which all nodes of a replica must have come; their agents start them within seconds of each other."""
PORTS = 2
"""Ports of rank 0's node that an engine gets for the rendezvous of its parts."""

_AGAIN_S = 0.1
_LINE_BYTES_MAX = 1 << 16


@dataclass(frozen=True, slots=True)
class Gang:
    """The nodes of a replica as its agent names them in the environment."""

    attempt: str
    rank: int
    nodes: int
    address: str
    port: int
    gpus: int

    @staticmethod
    def of(environ: Mapping[str, str]) -> "Gang | None":
        """Return the nodes; None: the replica is on one."""
        nodes = int(environ.get("NNODES") or 1)
        if nodes == 1:
            return None
        return Gang(
            attempt=f"{environ.get('CORDEE_JOB', '')}.{environ.get('CORDEE_EPOCH', '')}",
            rank=int(environ.get("NODE_RANK") or 0),
            nodes=nodes,
            address=environ.get("MASTER_ADDR") or "127.0.0.1",
            port=int(environ.get("MASTER_PORT") or 0),
            gpus=len(visible_gpus(environ)),
        )


def visible_gpus(environ: Mapping[str, str]) -> list[str]:
    """Return the GPUs that the agent gives on this node; none on CPU slots."""
    return [each for each in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]


@dataclass(slots=True, eq=False)
class _Node:
    """The connection of another node."""

    rank: int
    gpus: int
    sock: socket.socket
    stopped: threading.Event = field(default_factory=threading.Event)


class Lead:
    """Rank 0's side: all other nodes, each heard by a thread.

    Attributes:
        problem: what ended on another node; "": nothing. The replica is over then.
        notice: a node got notice.
    """

    def __init__(self, gang: Gang, notice: threading.Event) -> None:
        """Listen for the other nodes.

        Raises:
            ReplicaError: the port is taken.
        """
        self.problem, self.notice = "", notice
        self._gang, self._nodes = gang, dict[int, _Node]()
        self._changed = threading.Condition()
        self._closed = False
        family = socket.AF_INET6 if ":" in gang.address else socket.AF_INET
        try:
            self._listener = socket.create_server((gang.address, gang.port), family=family)
        except OSError as error:
            raise ReplicaError(
                f"rank 0 cannot listen at {gang.address}:{gang.port} for the other nodes: {error}"
            ) from None
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def missing(self) -> list[int]:
        """Return the ranks of nodes that have not come."""
        with self._changed:
            return [rank for rank in range(1, self._gang.nodes) if rank not in self._nodes]

    def start(self, model: str | None, ports: tuple[int, ...]) -> EnginePart:
        """Have all others start their parts of the engine, and return the part of this node."""
        with self._changed:
            gpus = (self._gang.gpus, *(self._nodes[rank].gpus for rank in sorted(self._nodes)))
            for node in self._nodes.values():
                node.stopped.clear()
        self._send({"start": model, "ports": ports, "gpus": gpus})
        return EnginePart(rank=0, gpus=gpus, master=self._gang.address, ports=ports)

    def stop(self, why: str) -> None:
        """Have all others end their parts."""
        self._send({"stop": why})

    def wait_stopped(self, limit_s: float) -> None:
        """Wait until all others have ended their parts."""
        until_s = time.monotonic() + limit_s
        with self._changed:
            nodes = list(self._nodes.values())
        for node in nodes:
            node.stopped.wait(max(0.0, until_s - time.monotonic()))

    def close(self) -> None:
        """Let the others go."""
        with self._changed:
            self._closed = True
            nodes = list(self._nodes.values())
        for sock in (self._listener, *(node.sock for node in nodes)):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _send(self, order: Mapping[str, Any]) -> None:
        with self._changed:
            nodes = list(self._nodes.values())
        for node in nodes:
            try:
                _write(node.sock, order)
            except OSError as error:
                self._lose(node, f"is gone: {error}")

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._hear, args=(sock,), daemon=True).start()

    def _hear(self, sock: socket.socket) -> None:
        lines = _lines(sock)
        hello = next(lines, {})
        rank = int(hello.get("node_rank", 0))
        if hello.get("attempt") != self._gang.attempt or not 0 < rank < self._gang.nodes:
            sock.close()  # It is none of this attempt.
            return
        node = _Node(rank, int(hello.get("gpus", 0)), sock)
        with self._changed:
            if self._closed or rank in self._nodes:
                sock.close()
                return
            self._nodes[rank] = node
        for message in lines:
            if "problem" in message:
                self._lose(node, str(message["problem"]))
            if message.get("notice"):
                self.notice.set()
            if message.get("stopped"):
                node.stopped.set()
        self._lose(node, "is gone: its connection has ended")

    def _lose(self, node: _Node, how: str) -> None:
        with self._changed:
            if not self._closed and not self.problem:
                self.problem = f"node {node.rank} of {self._gang.nodes} {how}"
        node.stopped.set()


class Follower:
    """The side of another node: the orders of rank 0, as they come.

    Attributes:
        order: the last order, `start` or `stop`; {}: none yet.
        gone: rank 0 has closed the connection, or is gone.
        host: this node's address, from which it reaches rank 0.
    """

    def __init__(self, gang: Gang, sock: socket.socket) -> None:
        self.order: dict[str, Any] = {}
        self.gone = False
        self._sock = sock
        self.host = str(sock.getsockname()[0])
        self.say(attempt=gang.attempt, node_rank=gang.rank, gpus=gang.gpus)
        threading.Thread(target=self._hear, daemon=True).start()

    @staticmethod
    def of(gang: Gang, notice: threading.Event) -> "Follower | None":
        """Return the connection to rank 0 once that is there; None: a notice came first.

        Raises:
            ReplicaError: it is not there in time.
        """
        until_s, why = time.monotonic() + CONNECT_S, ""
        while time.monotonic() < until_s:
            try:
                sock = socket.create_connection((gang.address, gang.port), timeout=10.0)
            except OSError as error:
                why = str(error)
                if notice.wait(_AGAIN_S):
                    return None
                continue
            sock.settimeout(None)
            return Follower(gang, sock)
        waited = format_duration(CONNECT_S)
        raise ReplicaError(f"rank 0 is not there at {gang.address}:{gang.port} after {waited}: {why}")

    def say(self, **message: object) -> None:
        """Tell rank 0 something, if it is there."""
        with suppress(OSError):
            _write(self._sock, message)

    def _hear(self) -> None:
        for order in _lines(self._sock):
            self.order = order
        self.gone = True


def _write(sock: socket.socket, message: Mapping[str, object]) -> None:
    sock.sendall(json.dumps(message).encode() + b"\n")


def _lines(sock: socket.socket) -> Iterator[dict[str, Any]]:
    """Yield the messages of a connection until it ends or says something else."""
    with suppress(OSError, ValueError), sock.makefile("rb") as reader:
        while line := reader.readline(_LINE_BYTES_MAX):
            message = json.loads(line)
            if not isinstance(message, dict):
                return
            yield message
