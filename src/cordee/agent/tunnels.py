"""The agent's ends of tunnels: commands beside an attempt's ranks, ports of the node, and shells.

The server asks over the link; the agent dials a WebSocket for each tunnel. All of them live on one thread and one loop
of their own, so that neither the agent's loop nor its heartbeat waits for them. Only processes are started, and reaped,
on the agent's own thread.
"""

import asyncio
import contextlib
import logging
import os
import signal
import threading
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Collection, Coroutine
from pathlib import Path
from typing import Any

from websockets.asyncio.client import ClientConnection
from websockets.exceptions import WebSocketException

from cordee import frames
from cordee.agent.connection import websocket_to
from cordee.agent.launch import RankGroupLaunch
from cordee.agent.messages import Dial
from cordee.agent.settings import AgentSettings
from cordee.agent.terminals import (
    beside_ranks,
    exit_code_of,
    resize,
    spawn_in_terminal,
    spawn_with_pipes,
)
from cordee.errors import CordeeError
from cordee.telemetry.shells import shell_socket
from cordee.units import format_duration

CONNECT_S = 5.0
SHELL_S = 20.0  # a shell's process may still be starting
LINGER_S = 0.5  # a process that a command left behind may keep its terminal or its pipes open
HANG_UP_S = 5.0  # from SIGHUP to SIGKILL of a command whose client is gone
_EOF = frames.control(eof=True)
QUEUE_MAX = 16  # chunks of output that wait for the network

_log = logging.getLogger("cordee.agent")


class Peer(ABC):
    """The end of a tunnel on the node. Its methods run on the loop of the tunnels."""

    @abstractmethod
    def messages(self) -> AsyncIterator[bytes]:
        """Yield the messages for the client, to the end."""

    @abstractmethod
    async def take(self, message: bytes) -> None:
        """Take a message of the client.

        Raises:
            ValueError: it is none.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go: the client, the attempt or the peer itself is gone."""


class Refusal(Peer):
    """A tunnel that leads nowhere."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def messages(self) -> AsyncIterator[bytes]:
        """Say why."""
        yield frames.control(end=self._why)

    async def take(self, message: bytes) -> None:
        """Ignore it."""

    def close(self) -> None:
        """Hold nothing."""


class Command(Peer):
    """A command beside the ranks, in a terminal or between pipes. Made on the agent's thread, which reaps it.

    Attributes:
        tag: the attempt's.
        pid: of its process.
    """

    def __init__(self, tag: str, launch: RankGroupLaunch, opening: dict[str, Any]) -> None:
        """Start it.

        Raises:
            OSError, ValueError: it cannot be started.
        """
        argv = [str(word) for word in opening.get("argv") or ()]
        size = frames.size_of(opening.get("size")) or (24, 80)
        named = {name: str(value) for name, value in (opening.get("env") or {}).items()}
        beside = next((each for each in launch.processes if each.rank == opening.get("rank")), launch.processes[0])
        env = beside_ranks(beside.env, named)
        self.tag = tag
        self._master: int | None = None
        if opening.get("tty"):
            self._popen, self._master = spawn_in_terminal(argv, env=env, cwd=launch.cwd, size=size)
            self._input, self._outputs = self._master, [(self._master, frames.DATA)]
        else:
            self._popen, (self._input, out, errors) = spawn_with_pipes(argv, env=env, cwd=launch.cwd)
            self._outputs = [(out, frames.DATA), (errors, frames.ERRORS)]
        self.pid = self._popen.pid
        self._exited = asyncio.Event()
        self._why = ""
        self._open = {self._input, *(fd for fd, _ in self._outputs)}

    def exited(self, code: int, why: str) -> None:
        """Note that its process has ended."""
        self._popen.returncode, self._why = code, why
        self._exited.set()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield its output, then its exit code."""
        yield frames.control(open=True)
        waiting: asyncio.Queue[bytes | None] = asyncio.Queue(QUEUE_MAX)
        pumps = [asyncio.create_task(self._pump(fd, channel, waiting)) for fd, channel in self._outputs]
        ending = asyncio.create_task(self._end(pumps, waiting))
        try:
            while (message := await waiting.get()) is not None:
                yield message
        finally:
            for task in (*pumps, ending):
                task.cancel()
        yield frames.control(exit=exit_code_of(self._popen.returncode or 0), why=self._why)

    @staticmethod
    async def _pump(fd: int, channel: int, waiting: "asyncio.Queue[bytes | None]") -> None:
        while chunk := await _read(fd):
            await waiting.put(frames.data(chunk, channel))

    async def _end(self, pumps: "list[asyncio.Task[None]]", waiting: "asyncio.Queue[bytes | None]") -> None:
        await self._exited.wait()
        await asyncio.wait(pumps, timeout=LINGER_S)
        await waiting.put(None)

    async def take(self, message: bytes) -> None:
        """Pass input, the end of input, and sizes of the window on."""
        frame = frames.read(message)
        if frame.channel == frames.DATA:
            await _write(self._input, frame.data)
        elif frame.control.get("eof"):
            if self._master is None:
                self._shut(self._input)
            else:
                await _write(self._master, b"\x04")
        elif self._master is not None and (size := frames.size_of(frame.control.get("resize"))):
            with contextlib.suppress(OSError):
                resize(self._master, size)

    def close(self) -> None:
        """Hang up on a command that still runs, and kill it if it goes on."""
        for fd in list(self._open):
            self._shut(fd)
        if not self._exited.is_set():
            self._signal(signal.SIGHUP)
            asyncio.get_running_loop().call_later(HANG_UP_S, self._signal, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if not self._exited.is_set():  # then its pid is its own
            with contextlib.suppress(OSError):
                os.killpg(self.pid, number)

    def _shut(self, fd: int) -> None:
        if fd in self._open:
            self._open.discard(fd)
            loop = asyncio.get_running_loop()
            loop.remove_reader(fd)
            loop.remove_writer(fd)
            os.close(fd)


class Stream(Peer):
    """A connection to a socket of the node."""

    def __init__(self) -> None:
        self._connected: asyncio.Future[asyncio.StreamWriter] | None = None
        self._finished = asyncio.Event()  # the client sends no more

    @abstractmethod
    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect.

        Raises:
            OSError: nothing listens there; the message is for the user.
        """

    @abstractmethod
    def decoded(self, chunk: bytes) -> list[bytes]:
        """Return the messages in bytes of the socket."""

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield what the socket sends, until both sides have ended."""
        connected = self._connected = asyncio.get_running_loop().create_future()
        try:
            reader, writer = await self.connect()
        except OSError as error:
            yield frames.control(end=str(error))
            return
        connected.set_result(writer)
        yield frames.control(open=True)
        with contextlib.suppress(OSError):
            while chunk := await reader.read(frames.CHUNK_BYTES):
                for message in self.decoded(chunk):
                    yield message
        yield _EOF
        await self._finished.wait()

    async def writer(self) -> asyncio.StreamWriter:
        """Return the writer, when there is a connection."""
        while self._connected is None:
            await asyncio.sleep(0)
        return await asyncio.shield(self._connected)

    def close(self) -> None:
        """Close the connection."""
        if self._connected is not None and self._connected.done() and not self._connected.cancelled():
            self._connected.result().close()

    def finish(self) -> None:
        """Note that the client sends no more."""
        self._finished.set()


class Port(Stream):
    """A connection to a port at 127.0.0.1 of the node."""

    def __init__(self, node: str, port: int) -> None:
        super().__init__()
        self._node, self._port = node, port

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the port."""
        try:
            return await asyncio.wait_for(asyncio.open_connection("127.0.0.1", self._port), CONNECT_S)
        except OSError as error:  # a TimeoutError is one
            raise OSError(f"nothing listens on port {self._port} at 127.0.0.1 of node {self._node}") from error

    def decoded(self, chunk: bytes) -> list[bytes]:
        """Return the bytes as one message."""
        return [frames.data(chunk)]

    async def take(self, message: bytes) -> None:
        """Write the client's bytes; pass on that it sends no more."""
        frame, writer = frames.read(message), await self.writer()
        with contextlib.suppress(OSError):
            if frame.channel == frames.DATA:
                writer.write(frame.data)
                await writer.drain()
            elif frame.control.get("eof"):
                writer.write_eof()
        if frame.control.get("eof"):
            self.finish()


class Shell(Stream):
    """A connection to the process of an interactive job (`shell_host.py`)."""

    def __init__(self, spool: Path, name: str, opening: dict[str, Any]) -> None:
        super().__init__()
        self._spool, self._name, self._opening = spool, name, opening
        self._unpacker = frames.Unpacker()

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect to the shell, which may still be starting, and attach the client."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + SHELL_S
        while True:
            path = shell_socket(self._spool)
            try:
                if path is not None:
                    reader, writer = await asyncio.open_unix_connection(str(path))
                    break
            except OSError:
                pass
            if loop.time() >= until_s:
                raise OSError(f"{self._name} has no shell: it was not started by `cordee shell`")
            await asyncio.sleep(0.05)
        writer.write(frames.packed(frames.control(attach=self._opening.get("size"))))
        return reader, writer

    def decoded(self, chunk: bytes) -> list[bytes]:
        """Return the messages of the shell that are whole now."""
        return self._unpacker.feed(chunk)

    async def take(self, message: bytes) -> None:
        """Pass the client's message on."""
        frames.read(message)
        writer = await self.writer()
        with contextlib.suppress(OSError):
            writer.write(frames.packed(message))
            await writer.drain()

    async def messages(self) -> AsyncIterator[bytes]:
        """Yield the messages of the shell; its end is the end."""
        self.finish()
        async for message in super().messages():
            yield frames.control(end=f"the shell of {self._name} is gone") if message == _EOF else message


class _Session:
    """One tunnel: the attempt it belongs to, its peer, and the reason for which it ends early."""

    def __init__(self, tag: str, peer: Peer) -> None:
        self.tag, self.peer = tag, peer
        self.websocket: ClientConnection | None = None
        self.ended: asyncio.Queue[str] = asyncio.Queue()


class Tunnels:
    """The tunnels of one node. Its methods run on the agent's thread."""

    def __init__(self, folder: Path, node: str) -> None:
        self._folder, self._node = folder, node
        self._loop: asyncio.AbstractEventLoop | None = None
        self._sessions: set[_Session] = set()
        self._commands: dict[int, Command] = {}
        self._noticed: set[str] = set()

    def open(self, dial: Dial, launch: RankGroupLaunch | None, spool: Path) -> None:
        """Dial a tunnel to an attempt; `launch` is None if its ranks do not run here."""
        name = f"{dial.job_id}.{dial.epoch}"
        session = _Session(name, self._peer(dial, launch, spool, name))
        self._sessions.add(session)
        self._run(self._serve(dial.tunnel, session))

    def _peer(self, dial: Dial, launch: RankGroupLaunch | None, spool: Path, name: str) -> Peer:
        what = dial.opening.get("what")
        if launch is None:
            return Refusal(f"no process of {name} runs on {self._node} now")
        if what == "port":
            return Port(self._node, int(str(dial.opening.get("port"))))
        if what == "shell":
            return Shell(spool, name, dial.opening)
        try:
            command = Command(name, launch, dial.opening)
        except (OSError, ValueError) as error:
            return Refusal(f"it cannot be started on {self._node}: {error}")
        self._commands[command.pid] = command
        return command

    def reaped(self, pid: int, code: int, live: Collection[str]) -> None:
        """Note that a child has exited that is no rank; `live` are the tags of the attempts that go on."""
        command = self._commands.pop(pid, None)
        if command is not None and self._loop is not None:
            why = "" if command.tag in live else f"{command.tag} has ended"
            self._loop.call_soon_threadsafe(command.exited, code, why)

    def notice(self, tag: str, left_s: float) -> None:
        """Tell the clients of an attempt, once, that it has notice."""
        if tag not in self._noticed:
            self._noticed.add(tag)
            text = f"{tag} got notice: it has {format_duration(left_s)} left, and this ends with it"
            for session in self._of(tag):
                self._run(_send(session, frames.control(note=text)))

    def ended(self, tag: str, why: str) -> None:
        """End the tunnels of an attempt, except commands, which end with their processes."""
        self._noticed.discard(tag)
        for session in self._of(tag):
            if self._loop is not None and not isinstance(session.peer, Command):
                self._loop.call_soon_threadsafe(session.ended.put_nowait, why)

    def _of(self, tag: str) -> list[_Session]:
        """Return the tunnels of an attempt, of a copy made at once: their own thread takes out what has ended."""
        return [each for each in list(self._sessions) if each.tag == tag]

    def close(self) -> None:
        """End the thread; its connections break."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="cordee-tunnels", daemon=True).start()
        asyncio.run_coroutine_threadsafe(work, self._loop)

    # -- the thread of the tunnels -----------------------------------------------------------------------------

    async def _serve(self, number: str, session: _Session) -> None:
        try:
            async with self._dialled(number) as websocket:
                session.websocket = websocket
                await _splice(websocket, session)
        except (CordeeError, OSError, WebSocketException, ValueError) as error:
            _log.info("a tunnel of %s ended: %s", session.tag, error)
        finally:
            session.peer.close()
            self._sessions.discard(session)

    @contextlib.asynccontextmanager
    async def _dialled(self, number: str) -> AsyncIterator[ClientConnection]:
        """Dial the server that has asked for a tunnel: of several only that one knows its number."""
        settings = AgentSettings.read(self._folder)
        path = f"tunnels/{number}"
        async with contextlib.AsyncExitStack() as stack:
            error: Exception = OSError("no server runs")
            for url in settings.urls():
                try:
                    websocket, _ = await stack.enter_async_context(
                        websocket_to(url, settings, path, max_bytes=2 * frames.MESSAGE_BYTES_MAX)
                    )
                except (CordeeError, OSError, WebSocketException) as refused:
                    error = refused
                    continue
                yield websocket
                return
            raise error


async def _splice(websocket: ClientConnection, session: _Session) -> None:
    """Carry messages both ways until the peer has ended, the client has gone, or the attempt is over."""
    up = asyncio.create_task(_up(websocket, session.peer))
    down = asyncio.create_task(_down(websocket, session.peer))
    ended = asyncio.create_task(session.ended.get())
    try:
        await asyncio.wait({up, down, ended}, return_when=asyncio.FIRST_COMPLETED)
        if ended.done() and not up.done():
            await websocket.send(frames.control(end=ended.result()))
    finally:
        for task in (up, down, ended):
            task.cancel()
        await asyncio.gather(up, down, ended, return_exceptions=True)


async def _up(websocket: ClientConnection, peer: Peer) -> None:
    async for message in peer.messages():
        await websocket.send(message)


async def _down(websocket: ClientConnection, peer: Peer) -> None:
    async for message in websocket:
        await peer.take(message if isinstance(message, bytes) else b"")


async def _send(session: _Session, message: bytes) -> None:
    if session.websocket is not None:
        with contextlib.suppress(WebSocketException, OSError):
            await session.websocket.send(message)


async def _ready(fd: int, *, to_write: bool) -> None:
    """Wait until a file can be read or written."""
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()
    add, remove = (loop.add_writer, loop.remove_writer) if to_write else (loop.add_reader, loop.remove_reader)

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    add(fd, wake)
    try:
        await ready
    finally:
        remove(fd)


async def _read(fd: int) -> bytes:
    """Return the next bytes; empty at the end, and when no process has the terminal any more."""
    while True:
        try:
            return os.read(fd, frames.CHUNK_BYTES)
        except BlockingIOError:
            await _ready(fd, to_write=False)
        except OSError:
            return b""


async def _write(fd: int, chunk: bytes) -> None:
    """Write bytes, as fast as they are read; what nobody reads any more is dropped."""
    rest = memoryview(chunk)
    while rest:
        try:
            rest = rest[os.write(fd, rest) :]
        except BlockingIOError:
            await _ready(fd, to_write=True)
        except OSError:
            return
