"""Connections of clients: how many one address may have, and how long one may stay without a request."""

import asyncio
import resource
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, cast

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from cordee.serve.gateway.replies import ApiError

FILES_SPARE = 256
"""Files that are no connections: journals, probes, the link to the server."""


class ClientConnection(RequestHandler):
    """A connection of a client; aiohttp itself would wait for ever for its first request."""

    __slots__ = ("_address", "_first", "_server")

    def __init__(self, server: "ClientServer", **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._server = server
        self._address: str | None = None
        self._first: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count it, or refuse it."""
        super().connection_made(transport)
        address = str((transport.get_extra_info("peername") or ("",))[0])
        refusal = self._server.enter(address)
        if refusal is not None:
            cast(asyncio.Transport, transport).write(_refusal(refusal))  # uvloop's has its methods and not its type.
            transport.close()
            return
        self._address = address
        self._first = asyncio.get_running_loop().call_later(self._server.idle_s, transport.close)

    def begun(self) -> None:
        """Note its first request: from now on aiohttp looks after its pauses."""
        if self._first is not None:
            self._first.cancel()
            self._first = None

    def connection_lost(self, exc: BaseException | None) -> None:
        """Count it no longer."""
        self.begun()
        if self._address is not None:
            self._server.leave(self._address)
            self._address = None
        super().connection_lost(exc)


class ClientServer(web.Server):
    """The protocol factory for `create_server`, with limits.

    Attributes:
        idle_s: time without a request after which a connection is closed.
    """

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        *,
        idle_s: float,
        client_connections: int | None,
        request_factory: Any,
        **options: Any,
    ) -> None:
        super().__init__(handler, request_factory=request_factory, handler_cancellation=True)
        self.idle_s = idle_s
        self._options = {**options, "keepalive_timeout": idle_s}
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        # A stream has a connection to its replica too.
        self._most = max(1, (files - FILES_SPARE) // 2)
        self._of_client = client_connections or max(1, self._most // 2)
        self._open = Counter[str]()

    def __call__(self) -> ClientConnection:
        """Return the protocol of a new connection."""
        return ClientConnection(self, **self._options)

    def enter(self, address: str) -> ApiError | None:
        """Count a connection of a client, or return its refusal."""
        own, everybody = self._open[address], self._open.total()
        if own < self._of_client and everybody < self._most:
            self._open[address] += 1
            return None
        return ApiError(
            503,
            f"{own:,} connections of {address} are open, and {self._of_client:,} are taken; {everybody:,} of all "
            f"clients, and {self._most:,} are taken; hint: use one connection for several requests",
            code="too_many_connections",
            retry_s=1.0,
        )

    def leave(self, address: str) -> None:
        """Count the end of a connection."""
        self._open[address] -= 1
        if not self._open[address]:
            del self._open[address]


def _refusal(error: ApiError) -> bytes:
    """Return a whole HTTP answer."""
    body = error.body()
    headers = error.headers() | {"Content-Type": "application/json", "Content-Length": str(len(body))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {error.status} Refused\r\n{lines}Connection: close\r\n\r\n".encode() + body
