"""The messages between an agent and its server: one JSON line each.

A line is an object with one key, the message's name, and its fields as the value: `{"confirm": {"number": 7}}`.
"""

import dataclasses
import hmac
import json
import selectors
import socket
from dataclasses import dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from cordee.reports import COUNT_MAX, is_storable

VERSION = 1
LINE_BYTES_MAX = 16 * 2**20


class WireError(Exception):
    """The other side does not speak this protocol."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Challenge:
    """The server's first message. No side sends the token: another program may have taken a dead server's port."""

    nonce: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """An agent's claim of a node; `sources` are the streams with records that it still holds."""

    node: str
    epoch: int
    sources: list[str]
    nonce: str
    proof: str
    version: int = VERSION


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome:
    """Acceptance of a claim; `marks` are the committed seqs by stream."""

    marks: dict[str, int]
    proof: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Refusal of a claim. With `final` a newer agent owns the node: end the ranks and exit."""

    why: str
    final: bool
    proof: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One record of a stream, sent to the server."""

    source: str
    seq: int
    event: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Acknowledgement that a stream is committed up to `seq`."""

    source: str
    seq: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A command: its event, encoded, the JobSpec as JSON, and the gang's rendezvous address.

    `estimate` is an `events.Estimate` as a dict, for an attempt whose job was planned.
    """

    number: int
    event: dict[str, object]
    spec: str
    estimate: dict[str, object] | None = None
    master_addr: str = "127.0.0.1"
    master_port: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Confirm:
    """Confirmation that an order is on the agent's disk."""

    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """Request to exit when no rank group runs; with `now`, after ending the rank groups."""

    now: bool = False


Message = Challenge | Hello | Welcome | Refused | Record | Seen | Order | Confirm | Shutdown

_BY_NAME: dict[str, type[Any]] = {
    "challenge": Challenge,
    "hello": Hello,
    "welcome": Welcome,
    "refused": Refused,
    "report": Record,
    "seen": Seen,
    "command": Order,
    "confirm": Confirm,
    "shutdown": Shutdown,
}
_NAMES = {cls: name for name, cls in _BY_NAME.items()}
_HINTS = {cls: get_type_hints(cls) for cls in _BY_NAME.values()}


def prove(token: str, side: str, challenge: str, nonce: str) -> str:
    """Return the proof that `side` (agent or server) knows the token, valid in this conversation only."""
    return hmac.digest(token.encode(), f"{side} {challenge} {nonce}".encode(), "sha256").hex()


def is_proof(proof: str, token: str, side: str, challenge: str, nonce: str) -> bool:
    """Return whether `prove` made the proof."""
    return hmac.compare_digest(proof.encode(), prove(token, side, challenge, nonce).encode())


def encode(message: Message) -> bytes:
    """Return the message as one line.

    >>> encode(Confirm(number=7))
    b'{"confirm":{"number":7}}\\n'
    """
    fields = {field.name: getattr(message, field.name) for field in dataclasses.fields(message)}
    # An older agent does not know every field.
    fields = {name: value for name, value in fields.items() if value is not None}
    return json.dumps({_NAMES[type(message)]: fields}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message in one line.

    >>> decode(b'{"confirm": {"number": 7}}')
    Confirm(number=7)

    Raises:
        WireError: the line is not a message of this protocol.
    """
    try:
        ((name, fields),) = json.loads(line).items()
        message: Message = _BY_NAME[name](**fields)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise WireError(f"not a message: {line[:200]!r}") from error
    for name, hint in _HINTS[type(message)].items():
        if not _is_a(hint, getattr(message, name)):
            raise WireError(f"not a message: {name} has the wrong type: {line[:200]!r}")
    return message


def _is_a(hint: object, value: object) -> bool:
    """Return whether a value has its field's type; text must encode as UTF-8, and integers fit a database."""
    if hint is int:
        return type(value) is int and 0 <= value <= COUNT_MAX
    if hint is str:
        return isinstance(value, str) and is_storable(value)
    if isinstance(hint, UnionType):
        return any(_is_a(each, value) for each in get_args(hint))
    if get_origin(hint) is list:
        return isinstance(value, list) and all(_is_a(get_args(hint)[0], each) for each in value)
    if get_origin(hint) is dict:
        of_key, of_value = get_args(hint)
        return isinstance(value, dict) and all(_is_a(of_key, k) and _is_a(of_value, v) for k, v in value.items())
    return hint is object or (isinstance(hint, type) and isinstance(value, hint))


class Channel:
    """Messages over a connected, non-blocking socket; bytes that do not fit the socket wait in `pending`."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.pending = bytearray()
        self._received = bytearray()

    def fileno(self) -> int:
        """Return the socket's file descriptor, for selectors."""
        return self.sock.fileno()

    def watch(self, selector: selectors.BaseSelector) -> None:
        """Select for writing only while messages wait to be sent; the socket is registered already."""
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self.pending else 0)
        key = selector.get_key(self.sock)
        if key.events != wanted:
            selector.modify(self.sock, wanted, key.data)

    def send(self, message: Message) -> None:
        """Send a message; bytes that the socket does not take wait for `flush`.

        Raises:
            ConnectionError: the other side is gone.
        """
        self.pending += encode(message)
        self.flush()

    def flush(self) -> None:
        """Send as much of `pending` as the socket takes.

        Raises:
            ConnectionError: the other side is gone.
        """
        while self.pending:
            try:
                sent = self.sock.send(self.pending)
            except BlockingIOError:
                return
            except OSError as error:
                raise ConnectionError(str(error)) from error
            del self.pending[:sent]

    def receive(self) -> list[Message]:
        """Return the messages that have arrived.

        Raises:
            ConnectionError: the other side is gone; all earlier messages were returned.
            WireError: the other side speaks another protocol.
        """
        closed = False
        while True:
            try:
                chunk = self.sock.recv(1 << 16)
            except BlockingIOError:
                break
            except OSError as error:
                raise ConnectionError(str(error)) from error
            if not chunk:
                closed = True
                break
            self._received += chunk
            if len(self._received) > LINE_BYTES_MAX:
                break
        *lines, rest = self._received.split(b"\n")
        if closed and not lines:
            raise ConnectionError("closed by the other side")
        if len(rest) > LINE_BYTES_MAX:
            raise WireError(f"a line of more than {LINE_BYTES_MAX} bytes")
        self._received = rest
        return [decode(bytes(line)) for line in lines]

    def close(self) -> None:
        """Close the socket and discard pending bytes."""
        self.sock.close()
