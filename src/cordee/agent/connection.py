"""The agent's connection: a WebSocket to the first server that answers, dialled again for ever by a thread of its own.

The agent's loop never waits for the network: it takes what has arrived, and what it sends goes into a queue.
"""

import asyncio
import contextlib
import json
import logging
import os
import queue
import random
import socket
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple
from urllib.parse import quote, urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus, WebSocketException

from cordee.agent.clock import monotonic_s
from cordee.agent.messages import FromAgent, FromServer, Refused, Welcome, decode, encode
from cordee.agent.settings import AgentSettings, AgentState
from cordee.errors import CordeeError, InputError, from_body
from cordee.servers import check_private, is_of_user
from cordee.tls import client_context

LOCAL_DIAL_S, DIAL_S = 0.1, 0.5
"""The time between two rounds of dialling: a server on this machine, or another."""

REFUSED_S = 2.0
"""The time to the next claim after one was refused."""

CONNECT_S = 5.0
FINISH_S = 1.0
FRAME_BYTES_MAX = 64 * 2**20

_log = logging.getLogger("cordee.agent")


class WebSocketLine:
    """An open connection; usable from any thread.

    Attributes:
        address: this machine's address towards the server.
    """

    def __init__(self, address: str, websocket: ClientConnection) -> None:
        self.address = address
        self._websocket = websocket
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()

    def send(self, message: FromAgent) -> None:
        """Send a message, unless the connection ends before it is sent."""
        self._call(self._texts.put_nowait, encode(message))

    def hang_up(self) -> None:
        """Drop the connection at once, since the server may not read; the thread dials again."""
        self._call(self._websocket.transport.abort)

    def finish(self) -> None:
        """Close the connection after what was sent."""
        self._call(self._texts.put_nowait, None)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._websocket.loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            pass  # the thread has ended

    async def write(self) -> None:
        """Send the queued messages until `finish`."""
        while (text := await self._texts.get()) is not None:
            await self._websocket.send(text)
        await self._websocket.close()


class Opened(NamedTuple):
    """A connection was opened: its server expects a claim."""

    line: WebSocketLine


@dataclass(frozen=True, slots=True)
class Closed:
    """A round of dialling failed, or a connection ended.

    Attributes:
        why: the reason.
        at_s: the monotonic time at which the round began.
        refused: no server runs at any known address: each refused the connection, or the home says so.
    """

    why: str
    at_s: float
    refused: bool


Arrival = Opened | Closed | FromServer


class Connection:
    """The connection to the servers that agent.json names.

    Args:
        folder: the agent's; agent.json is read again before each round, since tokens and servers may change.
        wake: called on the connection's thread when something has arrived.
    """

    def __init__(self, folder: Path, wake: Callable[[], None]) -> None:
        self._folder, self._wake = folder, wake
        self._arrived: queue.SimpleQueue[Arrival] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        self._line: WebSocketLine | None = None
        self._closing = self._refused = False
        self._state: AgentState | None = None
        self._thread = threading.Thread(target=self._run, name="cordee-connection", daemon=True)

    def start(self) -> None:
        """Begin to dial."""
        self._thread.start()

    def close(self) -> None:
        """Dial no more, and hang up after what was sent, or when the server does not take it."""
        self._closing = True
        if self._line is not None:
            self._line.finish()
            self._thread.join(FINISH_S)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._dialling.cancel)
            self._thread.join()

    def arrived(self) -> list[Arrival]:
        """Return what has arrived since the last call, in order."""
        found = []
        while not self._arrived.empty():
            found.append(self._arrived.get())
        return found

    def _put(self, arrival: Arrival) -> None:
        self._note(arrival)
        self._arrived.put(arrival)
        self._wake()

    def _note(self, arrival: Arrival) -> None:
        """Keep what became of dialling; a refusal stays until the next welcome."""
        state = self._state
        if isinstance(arrival, Welcome):
            state = AgentState("welcomed")
        elif isinstance(arrival, Refused):
            state = AgentState("refused", arrival.why, arrival.hint)
        elif isinstance(arrival, Closed) and (state is None or state.state != "refused"):
            state = AgentState("away", arrival.why)
        if state is not None and state != self._state:
            state.write(self._folder)
        self._state = state

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        self._dialling = asyncio.create_task(self._dial_for_ever())
        try:
            await self._dialling
        except asyncio.CancelledError:
            pass

    async def _dial_for_ever(self) -> None:
        while not self._closing:
            began_s, local = monotonic_s(), False
            reasons, refused, self._refused = [], True, False
            try:
                settings = AgentSettings.read(self._folder)
                local = settings.home is not None
                for url in settings.urls():
                    try:
                        await self._talk(url, settings)
                        reasons, refused = ["it was closed"], False
                        break
                    except (CordeeError, OSError, WebSocketException, ValueError) as error:
                        reasons.append(f"{url}: {_reason(error)}")
                        refused = refused and isinstance(error, ConnectionRefusedError)
            except InputError as error:
                reasons, refused = [error.message], False
            self._put(Closed(", ".join(reasons) or "no server runs", began_s, refused))
            wait_s = REFUSED_S if self._refused else LOCAL_DIAL_S if local else DIAL_S
            await asyncio.sleep(wait_s * random.uniform(0.75, 1.25))

    async def _talk(self, url: str, settings: AgentSettings) -> None:
        """Dial a server, and pass messages on until the connection ends.

        Raises:
            ConnectionRefusedError: no server runs there.
            OSError, WebSocketException: there was no connection, or it broke.
            CertificateError: it is another server.
            InputError: others could read the token on its way.
            ValueError: the server speaks another protocol.
        """
        async with websocket_to(url, settings, "link") as (websocket, address):
            self._line = line = WebSocketLine(address, websocket)
            writing = asyncio.create_task(line.write())
            self._put(Opened(line))
            try:
                async for text in websocket:
                    message = decode(text)
                    self._refused = isinstance(message, Refused)
                    self._put(message)
            finally:
                self._line = None
                writing.cancel()


@asynccontextmanager
async def websocket_to(
    url: str, settings: AgentSettings, path: str, max_bytes: int = FRAME_BYTES_MAX
) -> AsyncIterator[tuple[ClientConnection, str]]:
    """Open a WebSocket to a path of this node at a server; yield it and this machine's address towards the server.

    Raises:
        ConnectionRefusedError: no server runs there.
        OSError, WebSocketException: there was no connection, or it broke.
        CertificateError: it is another server.
        InputError: others could read the token on its way.
    """
    check_private(url)
    parts = urlsplit(url)
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    sock = await _connected(host, port)
    if settings.home is not None and not is_of_user(sock, os.getuid()):
        sock.close()
        raise ConnectionRefusedError(f"{url} belongs to another user, so our server is gone")
    async with connect(
        f"{'wss' if parts.scheme == 'https' else 'ws'}://{parts.netloc}/v1/agents/{quote(settings.node)}/{path}",
        sock=sock,
        ssl=client_context(settings.pinned()) if parts.scheme == "https" else None,
        server_hostname=host if parts.scheme == "https" else None,
        additional_headers={"Authorization": f"Bearer {settings.token}"},
        compression=None,
        open_timeout=CONNECT_S,
        close_timeout=1,
        ping_interval=None,  # the link has beats, which carry the clock; a tunnel whose reader is slow is not dead
        max_size=max_bytes,
    ) as websocket:
        yield websocket, str(sock.getsockname()[0])


async def _connected(host: str, port: int) -> socket.socket:
    """Return a socket that is connected to the first of the host's addresses that answers."""
    loop = asyncio.get_running_loop()
    found = await asyncio.wait_for(loop.getaddrinfo(host, port, type=socket.SOCK_STREAM), CONNECT_S)
    errors: list[OSError] = []
    for family, kind, protocol, _, address in found:
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            await asyncio.wait_for(loop.sock_connect(sock, address), CONNECT_S)
        except OSError as error:  # a TimeoutError is one
            sock.close()
            errors.append(error)
        except asyncio.CancelledError:
            sock.close()
            raise
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return sock
    raise next((error for error in errors if not isinstance(error, ConnectionRefusedError)), errors[0])


def _reason(error: Exception) -> str:
    if isinstance(error, InvalidStatus):
        body = error.response.body or b""
        with contextlib.suppress(ValueError):
            refusal = from_body(json.loads(body))
            if refusal is not None:
                return refusal.message
        return f"HTTP {error.response.status_code}: {body[:300].decode(errors='replace')}"
    return str(error) or type(error).__name__
