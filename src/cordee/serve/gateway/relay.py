"""The events of one stream on their way from a replica to the client, without a task switch for each of them.

A client that reads slowly stops the reading from the replica: what waits for it here is bounded.
"""

import asyncio
import socket
from collections.abc import Callable, Mapping

from cordee.serve.engines.port import Stream
from cordee.serve.gateway.directory import Endpoint
from cordee.serve.gateway.wire import Connection, UpstreamError

BUFFER_BYTES = 256 << 10
"""Bytes that wait for a client, above which its replica is not read."""
SLOW_CLIENT_S = 120.0
"""Time after which a client that reads nothing at all is cut off."""
ERROR_BYTES = 64 << 10


class _Client:
    """The client's side of a stream, after the head of its answer."""

    def __init__(self, transport: asyncio.Transport, *, chunked: bool) -> None:
        self.transport, self._chunked = transport, chunked
        # Else the system alone would hold megabytes for a client that does not read.
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)

    def write(self, data: bytes) -> int:
        """Write events; return the bytes that wait here for the client."""
        transport = self.transport
        if transport.is_closing():
            return 0
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        return transport.get_write_buffer_size()


class Relay:
    """The sink of a stream's answers, on whichever replica they come from."""

    def __init__(self, clock: Callable[[], float], on_first: Callable[[], None]) -> None:
        self._clock, self._on_first = clock, on_first
        self.stream: Stream | None = None
        self.endpoint: Endpoint | None = None
        self.connection: Connection | None = None
        self.status = 0
        self.last_s = self.first_s = 0.0
        self.pending = bytearray()  # The client has not got the head of its answer yet.
        self.error_body = b""
        self._client: _Client | None = None
        self._paused_s: float | None = None
        self._wake: asyncio.Future[None] | None = None
        self.failure: UpstreamError | None = None
        self.on_stale: Callable[[], None] | None = None
        """Called in place of a failure, if an idle connection closed when the request went out."""

    def begin(self, stream: Stream, endpoint: Endpoint) -> None:
        """Get ready for the answer of a replica."""
        self.stream, self.endpoint = stream, endpoint
        self.status, self.error_body, self.failure, self.connection = 0, b"", None, None
        self.on_stale = None
        self.last_s, self.first_s = self._clock(), 0.0

    def attach(self, client: asyncio.Transport, *, chunked: bool) -> None:
        """Write to the client from now on; its head is written."""
        self._client = _Client(client, chunked=chunked)
        if self.pending:
            self.write(bytes(self.pending))
            self.pending.clear()

    async def wait(self) -> None:
        """Return when there are events for a client without a head, or the answer is over.

        Raises:
            UpstreamError: it broke off.
        """
        while not self.over and not (self.pending and self._client is None):
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if self.failure is not None:
            raise self.failure

    @property
    def over(self) -> bool:
        """Return whether nothing more comes from this replica."""
        return self.failure is not None or (self.stream is not None and self.stream.done)

    @property
    def refusal(self) -> bytes | None:
        """Return the body of an answer that is an error, once it is there."""
        return self.error_body if self.status not in (0, 200) and self.failure is not None else None

    def silent_since(self) -> float:
        """Return when the last byte came, or now if none is due."""
        return self._clock() if self._paused_s is not None or not self.first_s else self.last_s

    def fail(self, error: UpstreamError) -> None:
        """End the answer of this replica."""
        connection, self.connection, self.on_stale = self.connection, None, None
        if connection is not None:
            connection.cut(self)
        self.lost(error)

    def let_go(self) -> None:
        """Give up the connection to the replica: for the next request if the answer is complete."""
        connection, self.connection = self.connection, None
        if connection is None:
            return
        if self.failure is None and self.stream is not None and self.stream.done:
            connection.let_go(self)
        else:
            connection.cut(self)

    def look_at_client(self, now_s: float) -> None:
        """Read on once a slow client has caught up; cut off one that does not read."""
        if self._paused_s is None or self._client is None:
            return
        if self._client.transport.get_write_buffer_size() < BUFFER_BYTES // 4:
            self._paused_s = None
            self.last_s = now_s
            if self.connection is not None:
                self.connection.resume()
        elif now_s - self._paused_s > SLOW_CLIENT_S:
            self._client.transport.abort()

    def write(self, data: bytes) -> None:
        """Write events to the client."""
        client = self._client
        if client is None:
            self.pending += data
            self._notify()
            return
        if client.write(data) > BUFFER_BYTES and self._paused_s is None:
            self._paused_s = self._clock()
            if self.connection is not None:
                self.connection.pause()

    # Calls of the connection.

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.status = status

    def data(self, data: bytes) -> None:
        stream, endpoint = self.stream, self.endpoint
        if stream is None or endpoint is None or stream.done or self.failure is not None:
            return
        if self.status != 200:
            self.error_body = (self.error_body + data)[:ERROR_BYTES]
            return
        now = self._clock()
        if self.first_s:
            endpoint.pace.add(now - self.last_s, now)
        endpoint.heard_s = self.last_s = now
        out = stream.feed(data)
        if out:
            self.write(out)
        if not self.first_s and not stream.error:
            self.first_s = now
            self._on_first()
        self._look_at_end(stream, endpoint)

    def _look_at_end(self, stream: Stream, endpoint: Endpoint) -> None:
        if stream.error:
            self.fail(UpstreamError(f"{endpoint.address} says an error", answered=True, detail=stream.error[:500]))
        elif stream.done:
            self._notify()

    def end(self) -> None:
        if self.status == 200:
            self.lost(UpstreamError("ended its answer before it was complete", answered=True))
        else:
            self.lost(UpstreamError(f"answered with status {self.status}", answered=True))

    def lost(self, error: UpstreamError) -> None:
        again, self.on_stale = self.on_stale, None
        if again is not None and not error.answered and not self.over:
            again()
        elif not self.over:
            self.failure = error
            self._notify()

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


def count(stream: Stream | None) -> int:
    """Return the output tokens that a stream has passed on."""
    return stream.tokens if stream is not None else 0
