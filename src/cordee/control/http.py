"""uvicorn in a thread of its own: the main thread turns the tick and handles signals."""

import asyncio
import logging
import socket
import sys
import threading
from collections.abc import Coroutine
from concurrent.futures import Future

import uvicorn
from anyio import to_thread
from starlette.types import ASGIApp

from cordee.control.connections import connections
from cordee.control.listen import Listener
from cordee.control.precedence import TURN_S

FRAME_BYTES_MAX = 64 * 2**20
BACKLOG = 16_384
"""The number of connections that may wait to be accepted: all agents dial a server that comes back. Linux has a limit
of its own, net.core.somaxconn."""

THREADS = 8
"""Requests that are worked for at a time. Their threads take turns at the interpreter's lock (precedence.py)."""

_LET_GO_S = 1


def _is_loggable(record: logging.LogRecord) -> bool:
    """Return whether a line of uvicorn's log says more than that an agent is still sent to another server."""
    text = record.getMessage()
    return not any(part in text for part in ("completing handshake", "connection rejected", '/link" 503'))


class WebServer(uvicorn.Server):
    """A web server on loopback and, over TLS, on the port for other machines."""

    def __init__(self, app: ASGIApp, listener: socket.socket, public: Listener | None = None) -> None:
        config = uvicorn.Config(
            app,
            log_config=None,
            log_level=logging.WARNING,  # it has three lines for each agent that connects; `AgentsExecutor` has one
            access_log=False,  # clients that watch send many requests a second
            lifespan="off",
            http=connections(),
            timeout_graceful_shutdown=_LET_GO_S,
            backlog=BACKLOG,
            ws="websockets-sansio",
            ws_max_size=FRAME_BYTES_MAX,
            ws_ping_interval=None,  # the agents' beats do that
            ws_per_message_deflate=False,
        )
        super().__init__(config)
        logging.getLogger("uvicorn.error").addFilter(_is_loggable)
        self._public = public
        self.answers = threading.Event()
        self._thread = threading.Thread(target=self.run, args=([listener],), name="http", daemon=True)

    def submit(self, work: Coroutine[object, object, None]) -> "Future[None]":
        """Run a coroutine on the server's loop, behind what waits there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        to_thread.current_default_thread_limiter().total_tokens = THREADS
        sys.setswitchinterval(TURN_S)
        await super().startup(sockets)
        if self._public is not None:
            loopback, self.config.ssl = self.servers, self._public.context
            await super().startup([self._public.socket])
            self.servers += loopback
        self.answers.set()

    def begin(self) -> None:
        """Serve until `end` is called."""
        self._thread.start()
        self.answers.wait()

    def end(self) -> None:
        """Disconnect the followers and stop answering."""
        self.should_exit = True
        if self._thread.is_alive():
            self._thread.join()
