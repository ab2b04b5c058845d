"""Tunnels from clients to attempts: two WebSockets, the client's and one that the agent dials, joined here.

A client opens one with what it wants: a command, a port, a shell. The agent is told over its link to dial the other one
by a number that nobody else knows. Each side is read only as fast as the other one takes it (docs/design/control.md).
"""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import FastAPI, WebSocket
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.websockets import WebSocketDisconnect

from cordee import frames
from cordee.agent.messages import Dial
from cordee.control.access import Access
from cordee.control.acts import acting, note
from cordee.control.agents.executor import AgentsExecutor
from cordee.control.agents.link import TUNNELS_MAX
from cordee.control.dependencies import bearer_of, check_writes
from cordee.control.members import token_id
from cordee.control.operations import Operations
from cordee.control.roles import Action
from cordee.control.store.audit import DONE, REFUSED
from cordee.errors import CordeeError, InputError, NotFoundError, ServerError, as_body
from cordee.ids import JobId, attempt_name
from cordee.schedule.state.records import Attempt

OPENING_S = 10.0
"""A client that does not say what it wants is dropped after this time; so is an agent that does not dial."""

WATCH_S = 1.0
"""The time between two looks at whether a tunnel's attempt goes on and this server leads."""

FAREWELL_S = 2.0
"""An agent's last words on an attempt that has ended, such as an exit code, may come later than its end."""

OWNERS_MAX = 128
"""The most tunnels of one user at a time."""


class Opening(BaseModel):
    """A client's request: a command in an attempt's environment, a port of its node, its shell."""

    model_config = ConfigDict(extra="forbid", strict=True)

    what: Literal["exec", "port", "shell"]
    rank: Annotated[int, Field(ge=0)] = 0
    argv: Annotated[list[str], Field(max_length=4096)] = []
    env: dict[str, str] = {}
    tty: bool = False
    size: list[int] | None = None
    port: Annotated[int, Field(ge=1, le=65535)] | None = None


@dataclass(frozen=True, slots=True)
class Target:
    """The rank group that a tunnel leads to."""

    job_id: JobId
    epoch: int
    node: str


@dataclass(slots=True)
class Tunnels:
    """The tunnels of this server. Its methods run on the web server's loop, but for `target`.

    Attributes:
        operations: who owns which job, and what runs.
        agents: the links to the agents.
        awaited: the tunnels that an agent was asked to dial, by number, with the node that shall.
        open_by: the number of open tunnels by owner.
    """

    operations: Operations
    agents: AgentsExecutor
    awaited: dict[str, tuple[str, "asyncio.Future[Side]"]] = field(default_factory=dict)
    open_by: Counter[str] = field(default_factory=Counter)

    def target(self, ref: str, by: Access, opening: Opening) -> Target:
        """Return where a tunnel leads.

        Raises:
            NotFoundError: there is no such job or rank, or no attempt of it runs.
            ForbiddenError: the job is another user's.
            InputError: the opening lacks something.
        """
        job_id = by.job(ref, Action.CHANGE, "reach its processes")
        if opening.what == "exec" and not opening.argv:
            raise InputError("no command was given", hint=f"cordee exec {job_id} -- nvidia-smi")
        if opening.what == "port" and opening.port is None:
            raise InputError("no port was given", hint=f"cordee port-forward {job_id} 8888")
        with self.operations.control.changed:
            attempt = self.operations.control.state.attempts.get(JobId(job_id))
        if attempt is None or attempt.started_us is None:
            state = "starting" if attempt is not None else self.operations.row(job_id)["state"]
            raise NotFoundError(f"{job_id} is {state}: none of its processes runs", hint=f"cordee why {job_id}")
        node = _node_of(attempt, opening.rank)
        return Target(JobId(job_id), attempt.epoch, node)

    def why_ended(self, target: Target) -> str | None:
        """Return why a tunnel ends although both of its sides are there; None if it goes on."""
        standby = self.operations.standby
        if self.operations.closing:
            return "the server is ending: open it again when one runs"
        if standby is not None and not standby.leads:
            return "another server leads now: open it again"
        attempt = self.operations.control.state.attempts.get(target.job_id)
        if attempt is None or attempt.epoch != target.epoch:
            return f"{attempt_name(target.job_id, target.epoch)} has ended"
        if all(lease.node != target.node for lease in attempt.held):
            return f"{attempt_name(target.job_id, target.epoch)} has ended on {target.node}"
        return None

    @contextmanager
    def counted(self, owner: str) -> Iterator[None]:
        """Count a tunnel while it is open.

        Raises:
            ServerError: there are too many.
        """
        if self.open_by[owner] >= OWNERS_MAX or self.open_by.total() >= TUNNELS_MAX:
            raise ServerError(
                f"{self.open_by[owner]} tunnels of {owner} are open, {self.open_by.total()} in all",
                hint=f"a user may have {OWNERS_MAX}, the server {TUNNELS_MAX}: close some",
            )
        self.open_by[owner] += 1
        try:
            yield
        finally:
            self.open_by[owner] -= 1

    async def dialled(self, target: Target, opening: Opening) -> "Side":
        """Return the agent's side of a new tunnel.

        Raises:
            ServerError: the agent does not dial.
        """
        number = secrets.token_hex(16)
        arrives: asyncio.Future[Side] = asyncio.get_running_loop().create_future()
        self.awaited[number] = (target.node, arrives)
        dial = Dial(
            tunnel=number, job_id=target.job_id, epoch=target.epoch, opening=opening.model_dump(exclude_defaults=True)
        )
        try:
            if not await asyncio.to_thread(self.agents.dial, target.node, dial):
                raise ServerError(f"the agent of {target.node} is not connected", hint="`cordee nodes` shows its state")
            async with asyncio.timeout(OPENING_S):
                return await arrives
        except TimeoutError:
            raise ServerError(
                f"the agent of {target.node} did not answer within {OPENING_S:g} s",
                hint="`cordee nodes` shows its state",
            ) from None
        finally:
            self.awaited.pop(number, None)


class Side:
    """One WebSocket of a tunnel.

    Attributes:
        done: set when nobody uses it any more.
    """

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket
        self.done = asyncio.Event()

    async def receive(self) -> bytes:
        """Return the next message.

        Raises:
            WebSocketDisconnect: the other end has closed it, or is gone.
            ValueError: it is no message of a tunnel.
        """
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1000))
        found = message.get("bytes")
        if not found or len(found) > frames.MESSAGE_BYTES_MAX:
            raise ValueError("not a message of a tunnel")
        return bytes(found)

    async def send(self, message: bytes) -> None:
        """Send a message; wait while the other end does not read."""
        await self._websocket.send_bytes(message)

    async def close(self, last: bytes | None = None) -> None:
        """Close it, after a last message."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError, OSError):
            async with asyncio.timeout(FAREWELL_S):
                if last is not None:
                    await self.send(last)
                await self._websocket.close()
        self.done.set()


def _node_of(attempt: Attempt, rank: int) -> str:
    """Return the node of a rank.

    Raises:
        NotFoundError: the attempt has no such rank.
    """
    first = 0
    for lease in attempt.leases:
        first += max(1, len(lease.gpus))
        if rank < first:
            return lease.node
    name = attempt_name(attempt.job.job_id, attempt.epoch)
    raise NotFoundError(f"{name} has no rank {rank}", hint=f"its ranks are 0 to {first - 1}")


async def open_tunnel(websocket: WebSocket) -> None:
    """Serve a client's tunnel to a job, from its opening to its end."""
    tunnels: Tunnels = websocket.app.state.tunnels
    await websocket.accept()
    client = Side(websocket)
    try:
        bearer = await asyncio.to_thread(bearer_of, tunnels.operations, _token_of(websocket))
        note(who=bearer.name, token=token_id(_token_of(websocket)), named="tunnel")
        check_writes(bearer)
        by = Access(bearer, tunnels.operations)
        async with asyncio.timeout(OPENING_S):
            opening = _read(await client.receive())
        note(named=f"tunnel {opening.what}")
        ref = str(websocket.path_params["ref"])
        target = await asyncio.to_thread(tunnels.target, ref, by, opening)
        await asyncio.to_thread(_record, tunnels, DONE)
        with tunnels.counted(by.name):
            agent = await tunnels.dialled(target, opening)
            await _join(client, agent, tunnels, target)
    except CordeeError as error:
        await asyncio.to_thread(_record, tunnels, REFUSED)
        await client.close(frames.control(refused=as_body(error)))
    except (TimeoutError, ValueError):
        await client.close(frames.control(end="the client does not speak as one"))
    except (WebSocketDisconnect, RuntimeError):
        pass  # it has gone


def _read(message: bytes) -> Opening:
    """Return what a client asks for.

    Raises:
        InputError: it cannot be read.
    """
    try:
        return Opening.model_validate(frames.read(message).control)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise InputError(
            f"a tunnel cannot be opened: {where}: {first['msg']}", hint="install the same version"
        ) from None


async def _join(client: Side, agent: Side, tunnels: Tunnels, target: Target) -> None:
    """Carry messages both ways until one side ends, or the attempt does."""
    carrying = [
        asyncio.create_task(_carry(client, agent, frames.SILENT_S)),
        asyncio.create_task(_carry(agent, client, None)),
    ]
    watching = asyncio.create_task(_watch(tunnels, target))
    last: bytes | None = None
    try:
        await asyncio.wait({*carrying, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not any(task.done() for task in carrying):
            last = frames.control(end=watching.result())
        elif carrying[0].done() and carrying[0].exception() is not None:
            last = frames.control(end="nothing was heard of this client for a minute")
        elif carrying[1].done() and not carrying[1].result():
            last = frames.control(end=f"the agent of {target.node} is gone: `cordee nodes` shows its state")
    finally:
        for task in (*carrying, watching):
            task.cancel()
        await asyncio.gather(*carrying, watching, return_exceptions=True)
        await asyncio.gather(client.close(last), agent.close())


async def _carry(source: Side, sink: Side, silent_s: float | None) -> bool:
    """Carry messages to the end of one side; return whether a last one, with an exit code or a reason, was carried.

    Raises:
        TimeoutError: the source has sent nothing, not even a beat, for `silent_s` seconds.
    """
    said = False
    try:
        while True:
            async with asyncio.timeout(silent_s):
                message = await source.receive()
            said = said or _is_last(message)
            await sink.send(message)
    except (WebSocketDisconnect, RuntimeError, ValueError):
        return said


def _is_last(message: bytes) -> bool:
    if message[0] != frames.CONTROL:
        return False
    fields: dict[str, Any] = frames.read(message).control
    return "exit" in fields or "end" in fields or "eof" in fields


async def _watch(tunnels: Tunnels, target: Target) -> str:
    """Return why a tunnel has to end, when it has."""
    while True:
        await asyncio.sleep(WATCH_S)
        why = tunnels.why_ended(target)
        if why is not None:
            await asyncio.sleep(0 if tunnels.operations.closing else FAREWELL_S)
            return why


def _record(tunnels: Tunnels, outcome: str) -> None:
    """Record a tunnel that a client opens."""
    act = acting()
    if act is not None and not act.recorded:
        act.recorded = True
        tunnels.operations.store.audit.record(act, outcome)


async def dial_back(websocket: WebSocket) -> None:
    """Serve the agent's side of a tunnel that it was asked to dial."""
    tunnels: Tunnels = websocket.app.state.tunnels
    node, number = str(websocket.path_params["node"]), str(websocket.path_params["number"])
    try:
        await asyncio.to_thread(tunnels.operations.members.check_node, node, _token_of(websocket))
    except CordeeError:
        await websocket.close()
        return
    asked, arrives = tunnels.awaited.get(number, ("", None))
    if arrives is None or asked != node or arrives.done():
        await websocket.close()  # of another server, or too late
        return
    await websocket.accept()
    side = Side(websocket)
    arrives.set_result(side)
    await side.done.wait()


def _token_of(websocket: WebSocket) -> str:
    """Return the bearer token of a connection; "" if none was sent."""
    scheme, _, token = websocket.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" else ""


def add_routes(app: FastAPI, tunnels: Tunnels) -> None:
    """Add the routes of tunnels to the application."""
    app.state.tunnels = tunnels
    app.router.add_websocket_route("/v1/jobs/{ref}/tunnel", open_tunnel)
    app.router.add_websocket_route("/v1/agents/{node}/tunnels/{number}", dial_back)
