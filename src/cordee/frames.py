"""The messages of a tunnel: a byte that names the channel, and what it carries. In a stream their length goes first.

A tunnel joins a client, over the server, with a command, a port or a shell on a node. Control messages are JSON.
"""

import json
from typing import Any, NamedTuple

CONTROL, DATA, ERRORS = 0, 1, 2
"""Channels: control messages; input and output; the standard error of a command without a terminal."""

BEAT_S, SILENT_S = 15.0, 60.0
"""Every so often a client sends a beat, in a tunnel of any kind; after so long without a message it counts as gone."""

CHUNK_BYTES = 64 * 1024
MESSAGE_BYTES_MAX = 1024 * 1024
_LENGTH_BYTES = 4


class Frame(NamedTuple):
    """A message of a tunnel.

    Attributes:
        channel: CONTROL, DATA or ERRORS.
        data: the bytes of the channel.
        control: the fields of a control message; empty for the others.
    """

    channel: int
    data: bytes
    control: dict[str, Any]


def control(**fields: Any) -> bytes:
    """Return a control message: `open`, `resize`, `eof`, `note`, `exit`, `end`.

    >>> control(resize=[24, 80])
    b'\\x00{"resize": [24, 80]}'
    """
    return bytes([CONTROL]) + json.dumps(fields).encode()


def data(chunk: bytes, channel: int = DATA) -> bytes:
    """Return a message of bytes."""
    return bytes([channel]) + chunk


def read(message: bytes | str) -> Frame:
    """Return a message's parts.

    >>> read(control(exit=3)).control, read(data(b"ls")).data
    ({'exit': 3}, b'ls')

    Raises:
        ValueError: it is no message of a tunnel.
    """
    if not isinstance(message, bytes) or not message or message[0] > ERRORS or len(message) > MESSAGE_BYTES_MAX:
        raise ValueError("not a message of a tunnel")
    channel, rest = message[0], message[1:]
    if channel != CONTROL:
        return Frame(channel, rest, {})
    try:
        fields = json.loads(rest)
    except RecursionError:
        raise ValueError("not a message of a tunnel") from None
    if not isinstance(fields, dict):
        raise ValueError("a control message is an object")
    return Frame(channel, b"", fields)


def packed(message: bytes) -> bytes:
    """Return a message with its length before it."""
    return len(message).to_bytes(_LENGTH_BYTES, "big") + message


class Unpacker:
    """Messages out of a stream of bytes."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, chunk: bytes) -> list[bytes]:
        """Return the messages that are whole now.

        >>> unpacker, stream = Unpacker(), packed(b"one") + packed(b"two")
        >>> unpacker.feed(stream[:5]), unpacker.feed(stream[5:])
        ([], [b'one', b'two'])

        Raises:
            ValueError: a message is longer than any may be.
        """
        self._rest += chunk
        found = []
        while len(self._rest) >= _LENGTH_BYTES:
            length = int.from_bytes(self._rest[:_LENGTH_BYTES], "big")
            if length > MESSAGE_BYTES_MAX:
                raise ValueError(f"a message of {length} bytes")
            end = _LENGTH_BYTES + length
            if len(self._rest) < end:
                break
            found.append(self._rest[_LENGTH_BYTES:end])
            self._rest = self._rest[end:]
        return found


def size_of(value: object) -> tuple[int, int] | None:
    """Return rows and columns of a terminal as a message names them; None if they are none.

    >>> size_of([24, 80]), size_of([0, 80]), size_of("wide")
    ((24, 80), None, None)
    """
    if isinstance(value, list) and len(value) == 2 and all(type(each) is int and 0 < each < 10_000 for each in value):
        return value[0], value[1]
    return None
