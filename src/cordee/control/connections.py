"""Connections of HTTP: each must complete its requests, and together they leave open files to the server.

uvicorn bounds neither the time nor the bytes of a request's head, nor the number of connections.
"""

import asyncio
import resource
from typing import Any, ClassVar

from uvicorn.protocols.http.auto import AutoHTTPProtocol

from cordee.units import KiB

SLOW_S = 20.0
"""The head of a request must come within this time, and so must each further part of its body."""

HEAD_BYTES_MAX = 64 * KiB
OWN_FILES = 256
"""Open files that connections leave to the database, logs and files of jobs; at most a quarter of all."""


class BoundedConnection(AutoHTTPProtocol):  # type: ignore[misc,valid-type]  # uvicorn chooses by what is installed
    """A connection that is closed when its client is slow, or when it idles while there are too many."""

    waiting: ClassVar[dict["BoundedConnection", None]]
    """Those that wait for their clients, the one that has waited longest first."""

    _late: asyncio.TimerHandle | None = None
    _in_head = False
    _head_bytes = 0

    def connection_made(self, transport: Any) -> None:
        """Wait for a request; when there are too many connections, close the one that has waited longest."""
        super().connection_made(transport)
        self._wait()
        if len(self.connections) > open_max():
            next(iter(self.waiting)).transport.abort()

    def data_received(self, data: bytes) -> None:
        """Take a part of a request."""
        super().data_received(data)
        self._head_bytes += len(data)
        if self not in self.connections:  # it is a WebSocket from now on
            self._serve()
        elif self.cycle is None or self.cycle.response_complete:
            if self._in_head and self._head_bytes > HEAD_BYTES_MAX:
                self.transport.abort()
            if self._late is None:
                self._wait()
        elif self.cycle.more_body:
            self._wait()
        else:
            self._serve()

    def on_message_begin(self) -> None:
        """Count the bytes of a head; h11, which calls this never, has a bound of its own."""
        self._in_head, self._head_bytes = True, 0
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Begin to answer."""
        self._in_head = False
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the connection."""
        self._serve()
        super().connection_lost(exc)

    def _wait(self) -> None:
        """Wait for the client from now on."""
        self._serve()
        self.waiting[self] = None
        self._late = self.loop.call_later(SLOW_S, self._end)

    def _serve(self) -> None:
        """Wait for the client no longer."""
        self.waiting.pop(self, None)
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _end(self) -> None:
        if self.flow.read_paused:  # it is not the client that is slow
            self._wait()
        else:
            self.transport.abort()


def connections() -> type[BoundedConnection]:
    """Return the class of one server's connections."""

    class ServedConnection(BoundedConnection):
        waiting: ClassVar[dict[BoundedConnection, None]] = {}

    return ServedConnection


def open_max() -> int:
    """Return the number of connections that the limit of open files leaves room for now."""
    files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return files_max - min(OWN_FILES, files_max // 4)
