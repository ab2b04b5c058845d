"""The agents' links on the server's port: one WebSocket a node, by its token.

They are served in front of the API's routing and middlewares, which would cost a beat as much again as all else here.
"""

import asyncio
import contextlib
import json
import logging
import re
import resource
import threading
from collections import deque
from collections.abc import Callable

from pydantic import TypeAdapter, ValidationError
from starlette.types import ASGIApp, Receive, Scope, Send

from cordee.agent.messages import (
    NAMES,
    PROTOCOL,
    Beat,
    Claim,
    Confirm,
    FromAgent,
    FromServer,
    Records,
    Refused,
    encode,
    read_beat,
)
from cordee.control.agents.claim_queue import ArrivedClaim, ArrivedToken
from cordee.control.agents.claims import Session
from cordee.control.agents.executor import AgentsExecutor
from cordee.reports import repair_text

CLAIM_S = 10.0
"""A connection without a claim is closed after this time."""

LOOP_TURNS = 5
"""In one turn of the loop bytes are read from the sockets, in the next ones the tasks that wait for them go on."""

FINISH_S = 1.0
TUNNELS_MAX = 512
"""The most tunnels of all users at a time; each takes two open files."""

OTHER_FILES = 256 + 2 * TUNNELS_MAX
"""The open files that are kept for clients, the database, logs, gateways and tunnels; at most half of all."""

TEXTS_MAX = 10_000
"""The number of messages that may wait for an agent that does not read."""

_ADAPTERS: dict[str, TypeAdapter[FromAgent]] = {
    NAMES[kind]: TypeAdapter(kind) for kind in (Claim, Records, Beat, Confirm)
}

_log = logging.getLogger("cordee.control")
_PATH = re.compile(r"/v1/agents/([^/]+)/link")


class LinkEndedError(Exception):
    """The agent's end of a connection is closed."""


class AgentLinks:
    """The layer around the API that serves the links.

    Args:
        app: gets all other requests.
        executor: of the agents.
        links_max: the number of links at once; by default what the limit of open files leaves for them.
    """

    def __init__(self, app: ASGIApp, executor: AgentsExecutor, links_max: int | None = None) -> None:
        self._app, self._executor = app, executor
        self._files_max, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        self._links_max = (
            max(1, self._files_max - min(OTHER_FILES, self._files_max // 2)) if links_max is None else links_max
        )
        self._links, self._was_full = 0, False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a link, or pass a request on."""
        if scope["type"] != "websocket" or (found := _PATH.fullmatch(scope["path"])) is None:
            await self._app(scope, receive, send)
            return
        self._links += 1
        try:
            refused = self._full() if self._links > self._links_max else None
            await _link(self._executor, found[1], LinkSession(scope, receive, send), _token_of(scope), refused)
        finally:
            self._links -= 1

    def _full(self) -> Refused:
        """Return the refusal of one link too many: an open file each, it would take those of clients and database."""
        why = f"this server has {self._links_max:,} agents' links, and may open {self._files_max:,} files"
        hint = "raise the server's limit of open files: `ulimit -Hn`, or LimitNOFILE= of its unit, and start it again"
        if not self._was_full:
            _log.error("further agents are refused: %s; %s", why, hint)
            self._was_full = True
        return Refused(why=why, hint=hint)


class LinkSession(Session):
    """The WebSocket of one agent; messages to it are queued from any thread.

    What the loop's own thread queues goes out with the next `flush`, so that the answer to a beat wakes nobody.
    """

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.peer = (scope.get("client") or ("", 0))[0]
        self.own_address = (scope.get("server") or ("", 0))[0]
        self._receive, self._send = receive, send
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._task = asyncio.current_task()
        self._writer: asyncio.Task[None] | None = None
        self._texts: deque[str] = deque()
        self._writes = self._ends = False

    def send(self, message: FromServer) -> None:
        """Send a message, unless the connection ends before it is sent."""
        if len(self._texts) >= TEXTS_MAX:
            self.close()  # the agent sends and does not read
            return
        text = encode(message)
        if threading.get_ident() == self._thread:
            self._texts.append(text)
        else:
            self._call(self._queue, text)

    def close(self) -> None:
        """Close the connection after what was sent, or when the agent does not take it."""
        self._call(self._end)

    def _queue(self, text: str) -> None:
        self._texts.append(text)
        self._begin_to_write()

    def _end(self) -> None:
        self._ends = True
        self._begin_to_write()
        if self._task is not None:
            self._loop.call_later(FINISH_S, self._task.cancel)

    def _begin_to_write(self) -> None:
        if not self._writes and (self._writer is None or self._writer.done()):
            self._writer = self._loop.create_task(self.flush())

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the web server has ended
            self._loop.call_soon_threadsafe(function, *args)

    async def accept(self) -> None:
        """Accept the connection."""
        await self._receive()  # websocket.connect
        await self._send({"type": "websocket.accept"})

    async def text(self) -> str:
        """Return the next text of the agent.

        Raises:
            LinkEndedError: there is none.
            ValueError: the agent sent bytes.
        """
        message = await self._receive()
        if message["type"] != "websocket.receive":
            raise LinkEndedError
        text = message.get("text")
        if text is None:
            raise ValueError("not a message: bytes in place of text")
        return str(text)

    async def flush(self) -> None:
        """Send the queued messages, unless another task is at it, and then close the connection if it shall end."""
        if self._writes:
            return
        self._writes = True
        with contextlib.suppress(OSError, RuntimeError):  # it has ended, as its reader is told
            while self._texts:
                await self._send({"type": "websocket.send", "text": self._texts.popleft()})
            if self._ends:
                await self._send({"type": "websocket.close", "code": 1000})
        self._writes = False

    def abandon(self) -> None:
        """Send nothing more."""
        if self._writer is not None:
            self._writer.cancel()

    async def refuse(self, refused: Refused) -> None:
        """Send a refusal, and close the connection."""
        self._texts.append(encode(refused))
        self._ends = True
        await self.flush()


def read(text: str) -> FromAgent:
    """Return an agent's message.

    Raises:
        ValueError: it is not a message of this protocol.
    """
    beat = read_beat(text)
    if beat is not None:
        return beat
    try:
        ((name, fields),) = json.loads(text).items()
        adapter = _ADAPTERS[name]
        if name == NAMES[Claim] and fields.get("protocol") != PROTOCOL:
            # An agent of another version: its claim may have other fields.
            words = {
                key: str(repair_text(fields.get(key, "?"))) for key in ("cordee", "python", "machine", "incarnation")
            }
            protocol = fields.get("protocol")
            known = protocol if type(protocol) is int and 0 <= protocol < 1 << 31 else 0
            return Claim(epoch=0, epoch_min=0, sources=[], clock_us=0, protocol=known, **words)
        return adapter.validate_python(fields)
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError, ValidationError) as error:
        raise ValueError(f"not a message: {text[:200]!r}") from error


async def _link(executor: AgentsExecutor, node: str, session: LinkSession, token: str, refused: Refused | None) -> None:
    """Serve one agent's connection, from its claim to its end; `refused` says why it is one too many."""
    why = "closed by the agent"
    try:
        if refused is None:
            refused = await executor.claims.put(ArrivedToken(node, token))
        await session.accept()
        if refused is None:
            async with asyncio.timeout(CLAIM_S):
                claim = read(await session.text())
            if not isinstance(claim, Claim):
                raise ValueError("an agent begins with its claim")
            refused = await executor.claims.put(ArrivedClaim(node, claim, session))
        if refused is not None:
            await session.refuse(refused)
            return
        await session.flush()
        while True:
            executor.receive(node, session, read(await session.text()))
            await session.flush()
    except (ValueError, TimeoutError) as error:
        why = str(error) or "it made no claim"
        await session.refuse(Refused(why=why))
    except (LinkEndedError, OSError, asyncio.CancelledError):
        pass  # it has ended, or `close` gave up
    finally:
        session.abandon()
        executor.closed(node, session, why)


def _token_of(scope: Scope) -> str:
    """Return the bearer token of a request; "" if none was sent."""
    for name, value in scope["headers"]:
        if name == b"authorization":
            scheme, _, token = value.decode("latin-1").partition(" ")
            return str(token) if scheme.lower() == "bearer" else ""
    return ""


async def read_all(executor: AgentsExecutor) -> None:
    """Return when every message that has arrived by now was taken in, on the web server's loop."""
    for _ in range(3):  # a connection sends its claim when its token is checked, and the rest when the claim is judged
        for _ in range(LOOP_TURNS):
            await asyncio.sleep(0)
        await executor.claims.reached()
