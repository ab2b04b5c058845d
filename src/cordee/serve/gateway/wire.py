"""HTTP/1.1 to replicas: one request at a time on a connection, its body given to a sink in the callback of the socket.

A stream costs no task switch for a token; that is why this is not a client library. The parser is httptools', as that
of uvicorn.
"""

import asyncio
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from cordee.serve.gateway.attention import Attention

IDLE_S = 3.0
"""Engines close idle connections after 5 s; one that is closed while a request goes out costs a retry."""
IDLE_CONNECTIONS = 128
"""Kept for each address."""
CONNECT_S = 2.0
LET_GO_S = 1.0
"""Time in which a stream's last bytes, after [DONE], may come."""


class UpstreamError(Exception):
    """A replica that could not be reached, cut the connection, or did not speak HTTP."""

    def __init__(self, message: str, *, answered: bool = False, hung: bool = False, detail: str = "") -> None:
        super().__init__(message)
        self.hung = hung
        """Whether it was only silent, and a probe too: it may be back in a moment."""
        self.answered = answered
        """Whether a byte of an answer had come."""
        self.for_client = f"{message}: {detail}" if detail else message
        """With the engine's own words, which may quote the prompt, so they are in no log."""


class Sink(Protocol):
    """Receives one answer; the calls come from the event loop, `head` first, then `data`, then `end` or `lost`."""

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None: ...

    def data(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def lost(self, error: UpstreamError) -> None: ...


@dataclass(slots=True)
class Answer:
    """A whole answer that is collected in memory."""

    status: int = 0
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""


class Collector:
    """The sink of one whole answer."""

    def __init__(self, limit_bytes: int = 1 << 26) -> None:
        self.answer = Answer()
        self.parts: list[bytes] = []
        self.room_bytes = limit_bytes
        self.done: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None:
        self.answer.status, self.answer.headers = status, dict(headers)

    def data(self, data: bytes) -> None:
        self.room_bytes -= len(data)
        if self.room_bytes < 0 and not self.done.done():
            self.done.set_exception(UpstreamError("its answer is larger than 64 MiB", answered=True))
        elif self.room_bytes >= 0:
            self.parts.append(data)

    def end(self) -> None:
        if not self.done.done():
            self.answer.body = b"".join(self.parts)
            self.done.set_result(self.answer)

    def lost(self, error: UpstreamError) -> None:
        if not self.done.done():
            self.done.set_exception(error)


class _Ignored:
    """The sink of what nobody reads."""

    def head(self, status: int, headers: Mapping[bytes, bytes]) -> None: ...

    def data(self, data: bytes) -> None: ...

    def end(self) -> None: ...

    def lost(self, error: UpstreamError) -> None: ...


class Connection(asyncio.Protocol):
    """A connection to a replica."""

    def __init__(self, pool: "Pool", address: str) -> None:
        self._pool = pool
        self.address = address
        self.used_s = 0.0
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._sink: Sink | None = None
        self._headers: dict[bytes, bytes] = {}
        self._answered = False
        self._complete_head = False
        self._paused = False

    def send(self, method: str, path: str, body: bytes, sink: Sink) -> None:
        """Send a request whose answer goes to the sink."""
        assert self._sink is None and self._transport is not None, "one request at a time"
        self._sink, self._headers, self._answered, self._complete_head = sink, {}, False, False
        host = self.address.removeprefix("http://")
        head = f"{method} {path} HTTP/1.1\r\nhost: {host}\r\n"
        if body or method == "POST":
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        self._transport.write(head.encode("latin-1") + b"\r\n" + body)

    def let_go(self, sink: Sink) -> None:
        """Keep the connection for another request if the answer, of which nothing is wanted any more, ends soon."""
        if self._sink is sink:
            self._sink = ignored = _Ignored()
            self.resume()
            asyncio.get_running_loop().call_later(LET_GO_S, self.cut, ignored)

    def cut(self, sink: Sink) -> None:
        """Close at once, unless the sink's answer is complete: the replica sees that nobody waits for it any more."""
        if self._sink is sink:
            self.close()

    def close(self) -> None:
        """Close at once."""
        self._sink = None
        if self._transport is not None:
            self._transport.abort()

    def pause(self) -> None:
        """Read no more, so that the replica has to wait."""
        if self._transport is not None and not self._transport.is_closing() and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read on."""
        if self._transport is not None and not self._transport.is_closing() and self._paused:
            self._paused = False
            self._transport.resume_reading()

    @property
    def reused(self) -> bool:
        """Return whether an earlier request used it, so that its replica may have closed it meanwhile."""
        return self.used_s > 0

    @property
    def closed(self) -> bool:
        """Return whether no further request can be sent."""
        return self._transport is None or self._transport.is_closing()

    # Calls of the event loop.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has its methods and not its type.

    def data_received(self, data: bytes) -> None:
        self._answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"its answer is no HTTP: {error}")
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._pool.forget(self)
        if error is None and self._ends_by_closing():
            sink, self._sink = self._sink, None
            if sink is not None:
                sink.end()
        self._fail(f"cut the connection{f': {error}' if error else ''}")

    def _fail(self, message: str) -> None:
        sink, self._sink = self._sink, None
        if sink is not None:
            sink.lost(UpstreamError(f"{self.address} {message}", answered=self._answered))

    def _ends_by_closing(self) -> bool:
        """Return whether the answer has no length, as that of a server of HTTP/1.0."""
        known = self._headers.keys() & {b"content-length", b"transfer-encoding"}
        return self._answered and self._complete_head and not known

    # Calls of the parser.

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        self._complete_head = True
        if self._sink is not None:
            self._sink.head(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        if self._sink is not None:
            self._sink.data(data)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() < 200:
            return
        sink, self._sink = self._sink, None
        if self._parser.should_keep_alive() and sink is not None:
            self._pool.give_back(self)
        elif self._transport is not None:
            self._transport.close()
        if sink is not None:
            sink.end()


class Pool:
    """Connections to replicas, open ones kept for the next request."""

    def __init__(self, attention: Attention | None = None) -> None:
        self._idle: defaultdict[str, list[Connection]] = defaultdict(list)
        self._attention = attention or Attention(time.monotonic)

    async def connect(self, address: str, *, fresh: bool = False) -> Connection:
        """Return a connection to an address, an idle one unless it has to be fresh.

        Raises:
            UpstreamError: it cannot be reached within 2 s.
        """
        loop = asyncio.get_running_loop()
        idle = self._idle[address]
        while idle and not fresh:
            found = idle.pop()
            if not found.closed and loop.time() - found.used_s < IDLE_S:
                return found
            found.close()
        parts = urlsplit(address)
        try:
            async with self._attention.timeout(CONNECT_S):
                _, made = await loop.create_connection(
                    lambda: Connection(self, address), parts.hostname or "", parts.port or 80
                )
        except TimeoutError:
            raise UpstreamError(f"{address} takes no connection within {CONNECT_S:g} s") from None
        except OSError as error:
            raise UpstreamError(f"{address} takes no connection: {error.strerror or error}") from None
        return made

    async def fetch(
        self, address: str, method: str, path: str, body: bytes = b"", *, deadline_s: float, limit_bytes: int = 1 << 26
    ) -> Answer:
        """Return a whole answer.

        An idle connection may close while the request is on its way; then the request goes out again on a fresh one.

        Raises:
            UpstreamError: no whole answer came within `deadline_s` seconds.
        """
        try:
            async with self._attention.timeout(deadline_s):
                connection = await self.connect(address)
                try:
                    return await self._fetch_once(connection, method, path, body, limit_bytes)
                except UpstreamError as error:
                    if error.answered or not connection.reused:
                        raise
                    connection = await self.connect(address, fresh=True)
                    return await self._fetch_once(connection, method, path, body, limit_bytes)
        except TimeoutError:
            raise UpstreamError(f"{address} did not answer {path} within {deadline_s:g} s") from None

    async def _fetch_once(
        self, connection: Connection, method: str, path: str, body: bytes, limit_bytes: int
    ) -> Answer:
        sink = Collector(limit_bytes)
        connection.send(method, path, body, sink)
        try:
            return await sink.done
        finally:
            connection.cut(sink)

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose answer is complete."""
        idle = self._idle[connection.address]
        connection.used_s = asyncio.get_running_loop().time()
        connection.resume()
        if len(idle) < IDLE_CONNECTIONS and not connection.closed:
            idle.append(connection)
        else:
            connection.close()

    def expire(self) -> None:
        """Close the connections that were idle for long: a replica that drains counts those that are open."""
        before_s = asyncio.get_running_loop().time() - IDLE_S
        for idle in self._idle.values():
            while idle and idle[0].used_s < before_s:
                idle.pop(0).close()

    def forget(self, connection: Connection) -> None:
        """Drop a connection that closed."""
        idle = self._idle.get(connection.address)
        if idle and connection in idle:
            idle.remove(connection)

    def close(self, address: str | None = None) -> None:
        """Close the idle connections to an address, or all."""
        for each in [address] if address is not None else list(self._idle):
            for connection in self._idle.pop(each, []):
                connection.close()
