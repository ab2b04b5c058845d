"""The agents' routes on the server's HTTP API: one WebSocket a node, by its token."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable

from fastapi import APIRouter, WebSocket
from pydantic import TypeAdapter, ValidationError
from starlette.requests import HTTPConnection
from starlette.websockets import WebSocketDisconnect

from cordee.agent.messages import NAMES, PROTOCOL, Beat, Claim, Confirm, FromAgent, FromServer, Records, Refused, encode
from cordee.control.agents.claim_queue import ArrivedClaim
from cordee.control.agents.claims import Session
from cordee.control.agents.executor import AgentsExecutor
from cordee.control.node_tokens import check_node
from cordee.errors import ForbiddenError, NodeLeftError, StoreError, TokenError
from cordee.reports import repair_text

CLAIM_S = 10.0
"""A connection without a claim is closed after this time."""

LOOP_TURNS = 5
"""In one turn of the loop bytes are read from the sockets, in the next ones the tasks that wait for them go on."""

FINISH_S = 1.0
TEXTS_MAX = 10_000
"""The number of messages that may wait for an agent that does not read."""

_ADAPTERS: dict[str, TypeAdapter[FromAgent]] = {
    NAMES[kind]: TypeAdapter(kind) for kind in (Claim, Records, Beat, Confirm)
}

router = APIRouter(prefix="/v1/agents")


async def agents_of(connection: HTTPConnection) -> AgentsExecutor:
    """Return the executor; a dependency of the agents' routes."""
    executor = connection.app.state.agents
    assert isinstance(executor, AgentsExecutor), "whoever made the application put it there"
    return executor


def token_of(connection: HTTPConnection) -> str:
    """Return the bearer token of a request; "" if none was sent."""
    scheme, _, token = connection.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


class LinkSession(Session):
    """The WebSocket of one agent; messages to it are queued from any thread."""

    def __init__(self, websocket: WebSocket) -> None:
        self.peer = websocket.client.host if websocket.client else ""
        self.own_address = (websocket.scope.get("server") or ("", 0))[0]
        self._websocket = websocket
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._task = asyncio.current_task()
        self._texts: asyncio.Queue[str | None] = asyncio.Queue()

    def send(self, message: FromServer) -> None:
        """Send a message, unless the connection ends before it is sent."""
        if self._texts.qsize() >= TEXTS_MAX:
            self.close()  # the agent sends and does not read
            return
        text = encode(message)
        if threading.get_ident() == self._thread:  # the answer to a beat: the loop need not be woken
            self._texts.put_nowait(text)
        else:
            self._call(self._texts.put_nowait, text)

    def close(self) -> None:
        """Close the connection after what was sent, or when the agent does not take it."""
        self._call(self._end)

    def _end(self) -> None:
        self._texts.put_nowait(None)
        if self._task is not None:
            self._loop.call_later(FINISH_S, self._task.cancel)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the web server has ended
            self._loop.call_soon_threadsafe(function, *args)

    async def write(self) -> None:
        """Send the queued messages until `close`."""
        while (text := await self._texts.get()) is not None:
            await self._websocket.send_text(text)
        await self._websocket.close()


def read(text: str) -> FromAgent:
    """Return an agent's message.

    Raises:
        ValueError: it is not a message of this protocol.
    """
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


async def link(websocket: WebSocket) -> None:
    """Serve one agent's connection, from its claim to its end."""
    executor, node = await agents_of(websocket), str(websocket.path_params["node"])
    try:
        await asyncio.to_thread(check_node, node, token_of(websocket), executor.node_of)
    except (TokenError, ForbiddenError, StoreError) as error:
        await websocket.accept()
        final = isinstance(error, NodeLeftError)
        await websocket.send_text(encode(Refused(why=error.message, hint=error.hint or "", final=final)))
        await websocket.close()
        return
    await websocket.accept()
    session = LinkSession(websocket)
    writing = asyncio.create_task(session.write())
    why = "closed by the agent"
    try:
        claim = read(await asyncio.wait_for(websocket.receive_text(), CLAIM_S))
        if not isinstance(claim, Claim):
            raise ValueError("an agent begins with its claim")
        refused = await asyncio.wrap_future(executor.claims.put(ArrivedClaim(node, claim, session)))
        if refused is not None:
            session.send(refused)
            session.close()
            await writing
            return
        while True:
            executor.receive(node, session, read(await websocket.receive_text()))
    except (ValueError, TimeoutError) as error:
        why = str(error) or "it made no claim"
        session.send(Refused(why=why))
        session.close()
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            await writing
    except (WebSocketDisconnect, RuntimeError, asyncio.CancelledError):
        pass  # it has ended, or `close` gave up
    finally:
        writing.cancel()
        executor.closed(node, session, why)


async def read_all(executor: AgentsExecutor) -> None:
    """Return when every message that has arrived by now was taken in, on the web server's loop."""
    for _ in range(2):  # a connection that waits for the check of its token sends its claim only then
        for _ in range(LOOP_TURNS):
            await asyncio.sleep(0)
        await asyncio.to_thread(lambda: None)
        await asyncio.wrap_future(executor.claims.reached())


router.add_websocket_route("/v1/agents/{node}/link", link)  # without FastAPI's dependencies, which cost a claim 0.3 ms
