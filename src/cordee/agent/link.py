"""The agent's end of the wire: dials the server of this home until it answers, and forwards streams to it.

Rank streams go before the node's own streams, so that a RanksEnded never overtakes the reports of its ranks.
"""

import json
import logging
import os
import selectors
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cordee.agent import wire
from cordee.telemetry.stream import StreamReader, StreamRecord

IN_FLIGHT_MAX = 1000  # records sent and not yet committed; bounds memory on both sides
CHECKED_MAX = 1000  # records of one stream read per call: refused ones do not count against the window
_CONNECT_TIMEOUT_S = 1.0

Convert = Callable[[StreamRecord], dict[str, object] | None]
"""Return the event to forward, or None to leave the record out."""

_log = logging.getLogger("cordee.agent")


@dataclass(slots=True)
class _Source:
    path: Path
    reader: StreamReader
    convert: Convert
    sent: int = 0
    seen: int = 0
    complete: bool = False  # no more records will be written


class Link:
    """The streams for the server, and the connection over which they are sent.

    Attributes:
        channel: the connection; None while there is none.
        welcomed: whether the server accepted the claim.
    """

    def __init__(self, home: Path, node: str, epoch: int, selector: selectors.BaseSelector) -> None:
        self.channel: wire.Channel | None = None
        self.welcomed = False
        self._home, self._node, self._epoch = home, node, epoch
        self._selector = selector
        self._token = self._challenge = self._nonce = ""
        self._ranks: dict[str, _Source] = {}
        self._nodes: dict[str, _Source] = {}

    def add_rank_source(self, name: str, path: Path, convert: Convert) -> None:
        """Forward a rank's spool, except records for which `convert` returns None."""
        self._ranks[name] = _Source(path, StreamReader(path), convert)

    def add_node_source(self, name: str, path: Path) -> None:
        """Forward a stream of this node's agents, after those added before it."""
        self._nodes[name] = _Source(path, StreamReader(path), lambda record: record.event)

    def drop(self, name: str) -> None:
        """Stop forwarding a stream, since the server has all of it."""
        source = self._ranks.pop(name, None) or self._nodes.pop(name, None)
        if source is not None:
            source.reader.close()

    def complete(self, prefix: str) -> None:
        """Forward the rank streams of this prefix to their end before anything more of the node's own streams."""
        for name, source in self._ranks.items():
            source.complete = source.complete or name.startswith(prefix)

    def dial(self, on_ready: Callable[[], None]) -> bool:
        """Try to connect; return False if there is no answer. The selector's key then holds `on_ready`."""
        try:
            where = json.loads((self._home / "server.json").read_text())["agents"]
            self._token = (self._home / "token").read_text().strip()
            sock = socket.create_connection((where["host"], where["port"]), timeout=_CONNECT_TIMEOUT_S)
        except (OSError, ValueError, KeyError, TypeError):
            return False
        self.channel, self.welcomed = wire.Channel(sock), False
        self._selector.register(sock, selectors.EVENT_READ, on_ready)
        return True

    def hello(self, challenge: str) -> None:
        """Claim the node."""
        self._challenge, self._nonce = challenge, os.urandom(16).hex()
        proof = wire.prove(self._token, "agent", challenge, self._nonce)
        sources = [*self._ranks, *self._nodes]
        self.send(wire.Hello(node=self._node, epoch=self._epoch, sources=sources, nonce=self._nonce, proof=proof))

    def is_server(self, proof: str) -> bool:
        """Return whether the other side of the hello knows the token."""
        return wire.is_proof(proof, self._token, "server", self._challenge, self._nonce)

    def hang_up(self) -> None:
        """Forget the connection; the next dial starts from the server's marks."""
        if self.channel is not None:
            self._selector.unregister(self.channel.sock)
            self.channel.close()
        self.channel, self.welcomed = None, False

    def send(self, message: wire.Message) -> bool:
        """Send a message, or hang up if that is not possible."""
        if self.channel is None:
            return False
        try:
            self.channel.send(message)
        except ConnectionError:
            self.hang_up()
            return False
        self.channel.watch(self._selector)
        return True

    def receive(self) -> list[wire.Message]:
        """Return the messages that have arrived, and send those that waited; hang up when the server is gone."""
        if self.channel is None:
            return []
        try:
            self.channel.flush()
            messages = self.channel.receive()
        except (ConnectionError, wire.WireError) as error:
            _log.info("the connection to the server ended: %s", error)
            self.hang_up()
            return []
        self.channel.watch(self._selector)
        return messages

    def welcome(self, marks: dict[str, int]) -> None:
        """Continue each stream after the server's mark."""
        for name, source in (self._ranks | self._nodes).items():
            source.reader.close()
            source.sent = source.seen = marks.get(name, 0)
            source.reader = StreamReader(source.path, after=source.seen)
        self.welcomed = True

    def seen(self, name: str, seq: int) -> None:
        """Note that the server has committed a stream up to `seq`."""
        source = self._ranks.get(name) or self._nodes.get(name)
        if source is not None:
            source.seen = max(source.seen, seq)

    def forward(self) -> None:
        """Send as many records of the streams as their windows allow.

        Each rank's stream has an equal part of one window, so that a rank that floods its spool does not block the
        others. The node's own streams wait only for spools that are complete.
        """
        if not self.welcomed:
            return
        window = max(1, IN_FLIGHT_MAX // max(1, len(self._ranks)))
        waits = False
        for name, source in list(self._ranks.items()):
            at_end = self._send_records(name, source, window)
            waits = waits or (source.complete and not at_end)
        for name, source in list(self._nodes.items()) if not waits else ():
            if not self._send_records(name, source, IN_FLIGHT_MAX):
                return

    def _send_records(self, name: str, source: _Source, window: int) -> bool:
        """Send the records of a stream that its window allows; return whether its end was reached."""
        checked = 0
        while checked < CHECKED_MAX and source.sent - source.seen < window:
            records = source.reader.read(window - (source.sent - source.seen))
            if not records:
                return True
            for record in records:
                checked += 1
                event = source.convert(record)
                if event is None:
                    continue
                source.sent = record.seq
                if not self.send(wire.Record(source=name, seq=record.seq, event=event)):
                    return False
        return False
