"""A network that fails, between the real `NodeAgent` and the real `AgentsExecutor`: dialling, wires, sessions.

A wire keeps the order of its messages, as TCP does. A message may be late or doubled; a lost one takes all that follow
it in its direction along, until the connection ends. What a cut holds back arrives when the network is whole again,
unless the connection has ended. Where no server runs the connection is refused; behind a cut it times out.
"""

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from cordee.agent.connection import CONNECT_S, Arrival, Closed, Opened
from cordee.agent.messages import Claim, FromAgent, FromServer, decode, encode
from cordee.control.agents.claim_queue import ArrivedClaim
from cordee.control.agents.claims import Session
from cordee.control.agents.executor import AgentsExecutor
from cordee.control.agents.link import read
from cordee.errors import StoreError
from cordee.simulate.engine import Engine
from cordee.units import US_PER_S

DIAL_US = 2 * US_PER_S
LATENCY_US = 2_000

UP, DOWN = "up", "down"
"""Directions: to the server, and to the agent."""


@dataclass(slots=True, kw_only=True)
class MessageFaults:
    """The probabilities of faults of a message, each independent; all zero is a network that works."""

    lost: float = 0.0
    late: float = 0.0
    doubled: float = 0.0
    late_us_max: int = 8 * US_PER_S


@dataclass(slots=True)
class Server:
    """A server's process as the network sees it."""

    executor: AgentsExecutor
    alive: bool = True
    frozen: bool = False


class Network:
    """The wires of all nodes.

    Attributes:
        server: the newest one; None before the first.
        cuts: the directions that are cut, by node.
        dial_us: the time between two rounds of dialling.
        troubled: called with a node's name when a message of it is held back or lost.
    """

    def __init__(self, engine: Engine, rng: random.Random, faults: MessageFaults) -> None:
        self.engine, self.rng, self.faults = engine, rng, faults
        self.server: Server | None = None
        self.cuts: dict[str, set[str]] = {}
        self.dial_us = DIAL_US
        self.troubled: Callable[[str], None] = lambda node: None
        self._wires: list[Wire] = []

    def is_held(self, node: str, direction: str, server: Server) -> bool:
        """Return whether messages wait."""
        return direction in self.cuts.get(node, ()) or (server.frozen and server.alive and direction == UP)

    def dial(self, connection: "Connection") -> None:
        """Try to connect an agent to the server."""
        if connection.closing:
            return
        node, server, now_us = connection.node, self.server, self.engine.now_us()
        if self.cuts.get(node) or (server is not None and server.alive and server.frozen):
            self.troubled(node)
            after_us, closed = round(CONNECT_S * US_PER_S), Closed("timed out", now_us / US_PER_S, False)
        elif server is None or not server.alive:
            after_us, closed = LATENCY_US, Closed("refused", now_us / US_PER_S, True)
        else:
            self._wires = [wire for wire in self._wires if not wire.over]
            wire = Wire(self, connection, server)
            self._wires.append(wire)
            self.engine.at(now_us + LATENCY_US, connection.opened, wire)
            return
        self.engine.at(now_us + after_us, connection.broken, closed)

    def heal(self, node: str) -> None:
        """Let everything through again."""
        self.cuts.pop(node, None)
        self.flush(node)

    def flush(self, node: str | None = None) -> None:
        """Deliver what was held back and is no more."""
        for wire in self._wires:
            if node in (None, wire.connection.node):
                wire.flush()

    def server_ended(self, server: Server) -> None:
        """Close every connection of a server that has died."""
        for wire in self._wires:
            if wire.server is server:
                wire.put(DOWN, None)


class Wire(Session):
    """One connection: the agent's line and the server's session in one object, with two directions."""

    def __init__(self, network: Network, connection: "Connection", server: Server) -> None:
        self.connection, self.server = connection, server
        self.peer, self.own_address, self.address = "10.0.0.1", "10.0.0.2", "10.0.0.1"
        self.claimed = False
        self.ended = {UP: False, DOWN: False}  # nobody takes anything in any more at the end of this direction
        self._network = network
        self._last_us = {UP: 0, DOWN: 0}
        self._held: dict[str, deque[str | None]] = {UP: deque(), DOWN: deque()}
        self._swallowed = {UP: False, DOWN: False}
        self._closing = False

    @property
    def over(self) -> bool:
        """Return whether both ends have gone."""
        return self.ended[UP] and self.ended[DOWN]

    # -- the agent's line, and the server's session ----------------------------------------------------------

    @property
    def line(self) -> "Line":
        """The agent's end."""
        return Line(self.address, self)

    def send(self, message: FromServer) -> None:
        """Send a message of the server."""
        if self.server.alive and not self._closing:
            self.put(DOWN, encode(message))

    def close(self) -> None:
        """Close the server's end after what was sent."""
        if self.server.alive and not self._closing:
            self._closing = True
            self.ended[UP] = True
            self.put(DOWN, None)

    def hang_up(self) -> None:
        """Close the agent's end at once."""
        if not self.ended[DOWN]:
            self.ended[DOWN] = True
            self.put(UP, None)
            self.connection.broken(Closed("hung up", self.connection.now_s(), False))

    def vanish(self) -> None:
        """Take the agent's end away without a word, as a machine that loses its power does."""
        self.ended[DOWN] = True

    # -- on the way ------------------------------------------------------------------------------------------

    def put(self, direction: str, text: str | None) -> None:
        """Send a text, or the end of the connection."""
        network, faults = self._network, self._network.faults
        self._swallowed[direction] |= text is not None and network.rng.random() < faults.lost
        if self._swallowed[direction]:
            network.troubled(self.connection.node)
            return
        at_us = network.engine.now_us() + LATENCY_US
        if network.rng.random() < faults.late:
            at_us += network.rng.randint(0, faults.late_us_max)
        self._last_us[direction] = at_us = max(at_us, self._last_us[direction])
        for _ in range(2 if text is not None and self.claimed and network.rng.random() < faults.doubled else 1):
            network.engine.at(at_us, self._arrive, direction, text)

    def _arrive(self, direction: str, text: str | None) -> None:
        if self._held[direction] or self._network.is_held(self.connection.node, direction, self.server):
            self._network.troubled(self.connection.node)
            self._held[direction].append(text)
        elif direction == UP:
            self._to_server(text)
        else:
            self._to_agent(text)

    def flush(self) -> None:
        """Deliver what was held back."""
        for direction, held in self._held.items():
            while held and not self._network.is_held(self.connection.node, direction, self.server):
                text = held.popleft()
                if direction == UP:
                    self._to_server(text)
                else:
                    self._to_agent(text)

    def _to_agent(self, text: str | None) -> None:
        if self.ended[DOWN]:
            return
        if text is None:
            self.ended[DOWN] = True
            self.connection.broken(Closed("it was closed", self.connection.now_s(), False))
        else:
            self.connection.put(decode(text))

    def _to_server(self, text: str | None) -> None:
        """Do what the route of the link does (`control/agents/link.py`)."""
        if not self.server.alive or self.ended[UP]:
            return
        node, executor = self.connection.node, self.server.executor
        if text is None:
            self.ended[UP] = True
            executor.closed(node, self, "closed by the agent")
            return
        message = read(text)
        try:
            if isinstance(message, Claim):
                self.claimed = True
                (refused,) = executor.claim([ArrivedClaim(node, message, self)])
                if refused is not None:
                    self.send(refused)
                    self.close()
            else:
                executor.receive(node, self, message)
        except StoreError:  # the web server ends the connection
            executor.closed(node, self, "an error")
            self.close()


@dataclass(frozen=True, slots=True)
class Line:
    """The agent's end of a wire."""

    address: str
    wire: Wire

    def send(self, message: FromAgent) -> None:
        """Send a message."""
        if not self.wire.ended[DOWN]:
            self.wire.put(UP, encode(message))

    def hang_up(self) -> None:
        """Drop the connection at once."""
        self.wire.hang_up()


@dataclass(slots=True)
class Connection:
    """The agent's connection: dials for ever."""

    node: str
    network: Network
    wake: Callable[[], None]
    closing: bool = False
    wire: Wire | None = None
    arrivals: list[Arrival] = field(default_factory=list)

    def now_s(self) -> float:
        """Return monotonic seconds."""
        return self.network.engine.now_us() / US_PER_S

    def start(self) -> None:
        """Begin to dial."""
        self.network.dial(self)

    def arrived(self) -> list[Arrival]:
        """Return what has arrived since the last call."""
        found, self.arrivals = self.arrivals, []
        return found

    def close(self) -> None:
        """Dial no more, and close the connection."""
        self.closing = True
        if self.wire is not None and not self.wire.ended[DOWN]:
            self.wire.ended[DOWN] = True
            self.wire.put(UP, None)

    def vanish(self) -> None:
        """End without a word."""
        self.closing = True
        if self.wire is not None:
            self.wire.vanish()

    def opened(self, wire: Wire) -> None:
        """Take a connection that the server's machine has accepted."""
        if self.closing:
            wire.ended[DOWN] = True
            return
        self.wire = wire
        self.put(Opened(wire.line))  # type: ignore[arg-type]  # A line of this network.
        if not wire.server.alive:
            wire.put(DOWN, None)

    def broken(self, closed: Closed) -> None:
        """Dial again, since the connection ended or there was none."""
        if not self.closing:
            self.wire = None
            self.put(closed)
            self.network.engine.at(self.network.engine.now_us() + self.network.dial_us, self.network.dial, self)

    def put(self, arrival: Arrival) -> None:
        """Pass something on to the agent."""
        if not self.closing:
            self.arrivals.append(arrival)
            self.wake()
