"""The client's end of a tunnel, and its terminal: raw while a tunnel is open, restored on every way out."""

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import termios
import threading
import tty
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote, urlsplit

from cordee import frames
from cordee.client import Client
from cordee.errors import MissingExtraError, NoServerError, ServerError, from_body
from cordee.tls import client_context

try:
    from websockets.asyncio.client import ClientConnection, connect
    from websockets.exceptions import ConnectionClosed, WebSocketException
except ImportError as error:
    raise MissingExtraError("tunnels need websockets", hint="pip install 'cordee[server]'") from error

_EXIT_LOST = 255  # as ssh: the connection broke, so that the command's own exit code is not known
_WAITING_MAX = 64


class TunnelEndedError(ServerError):
    """The node has refused a tunnel: its port, its command, its shell is not there."""


@contextlib.asynccontextmanager
async def opened(client: Client, job_id: str, **opening: Any) -> AsyncIterator[ClientConnection]:
    """Open a tunnel to a job; `client` has asked the server that leads for the job just before.

    Raises:
        TunnelEndedError: nothing is there for it on the node.
        CordeeError: the server refuses it, or does not answer.
    """
    parts = urlsplit(client.url)
    secure = parts.scheme == "https"
    async with contextlib.AsyncExitStack() as stack:
        try:
            websocket = await stack.enter_async_context(
                connect(
                    f"{'wss' if secure else 'ws'}://{parts.netloc}/v1/jobs/{quote(job_id, safe='')}/tunnel",
                    ssl=client_context(client.address.fingerprint) if secure else None,
                    additional_headers={"Authorization": f"Bearer {client.token}"},
                    proxy=None,
                    compression=None,
                    ping_interval=None,  # a tunnel whose reader is slow is not dead
                    close_timeout=1,
                    max_size=2 * frames.MESSAGE_BYTES_MAX,
                )
            )
            await websocket.send(frames.control(**opening))
            first = frames.read(await websocket.recv()).control
        except (OSError, WebSocketException) as error:
            raise _broken(client, error) from error
        if "refused" in first:
            raise from_body(first["refused"]) or ServerError("the server refused the tunnel")
        if "end" in first:
            raise TunnelEndedError(str(first["end"]))
        beating = asyncio.create_task(_beat(websocket))
        try:
            yield websocket
        except WebSocketException as error:  # an OSError is not the tunnel's
            raise _broken(client, error) from error
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)


def _broken(client: Client, error: Exception) -> NoServerError:
    return NoServerError(f"the tunnel to {client.url} broke: {error or type(error).__name__}")


class Screen:
    """This process's standard streams while a command or a shell elsewhere uses them.

    Attributes:
        is_tty: whether input and output are a terminal, which is raw while `raw` is open.
    """

    def __init__(self) -> None:
        self.is_tty = sys.stdin.isatty() and sys.stdout.isatty()
        self._saved: list[Any] | None = None

    @property
    def size(self) -> list[int]:
        """Rows and columns."""
        size = shutil.get_terminal_size()
        return [size.lines, size.columns]

    @contextlib.contextmanager
    def raw(self) -> Iterator[None]:
        """Pass every key on, Ctrl-C too; restore the terminal on each way out."""
        if not self.is_tty:
            yield
            return
        fd = sys.stdin.fileno()
        self._saved = termios.tcgetattr(fd)
        try:
            tty.setraw(fd, termios.TCSADRAIN)  # what was typed ahead is kept
            yield
        finally:
            termios.tcsetattr(fd, termios.TCSADRAIN, self._saved)
            self._saved = None

    def say(self, text: str) -> None:
        """Print a line of Cordee's own to stderr, which may be a raw terminal."""
        end = "\r\n" if self._saved is not None else "\n"
        before = end if self.is_tty else ""
        _write_all(2, f"{before}cordee: {text}{end}".encode())


async def use(websocket: ClientConnection, terminal: Screen) -> tuple[int | None, str]:
    """Join the terminal and a tunnel to a command or a shell until one ends; return the exit code, and why it ended.

    The exit code is None if the tunnel ended and the command may go on.
    """
    loop = asyncio.get_running_loop()
    hung_up: asyncio.Future[str] = loop.create_future()
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, _set, hung_up, f"{signal.Signals(number).name} came")
    if not terminal.is_tty:
        tasks = [asyncio.create_task(_send_input(websocket))]
    else:
        tasks = [asyncio.create_task(_send_typed(websocket, sys.stdin.fileno(), hung_up))]
        resized = asyncio.Event()
        loop.add_signal_handler(signal.SIGWINCH, resized.set)
        tasks.append(asyncio.create_task(_send_sizes(websocket, terminal, resized)))
    showing = asyncio.create_task(_show(websocket, terminal))
    try:
        ends: set[asyncio.Future[Any]] = {showing, hung_up}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        return showing.result() if showing.done() else (None, hung_up.result())
    finally:
        for task in (*tasks, showing):
            task.cancel()
        await asyncio.gather(*tasks, showing, return_exceptions=True)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGWINCH):
            loop.remove_signal_handler(number)


def exit_code(code: int | None, why: str, terminal: Screen) -> int:
    """Return this process's exit code after `use`, and say why a command was ended."""
    if why:
        terminal.say(why)
    return _EXIT_LOST if code is None else code


async def _show(websocket: ClientConnection, terminal: Screen) -> tuple[int | None, str]:
    """Write what comes to stdout and stderr, until the last message."""
    try:
        async for message in websocket:
            frame = frames.read(message)
            if frame.channel != frames.CONTROL:
                await asyncio.to_thread(_write_all, 2 if frame.channel == frames.ERRORS else 1, frame.data)
            elif "note" in frame.control:
                terminal.say(str(frame.control["note"]))
            elif "exit" in frame.control:
                return int(frame.control["exit"]), str(frame.control.get("why") or "")
            elif "end" in frame.control:
                return None, str(frame.control["end"])
    except (ConnectionClosed, ValueError, OSError) as error:
        return None, f"the tunnel broke: {error}"
    return None, "the server closed the tunnel"


async def _send_typed(websocket: ClientConnection, fd: int, hung_up: "asyncio.Future[str]") -> None:
    """Send what is typed, as fast as the network takes it, until the terminal is gone: a raw one has no other end."""
    loop = asyncio.get_running_loop()
    chunk = b"-"
    while chunk:
        ready: asyncio.Future[str] = loop.create_future()
        loop.add_reader(fd, _set, ready, "")
        try:
            await ready
        finally:
            loop.remove_reader(fd)
        try:
            chunk = os.read(fd, frames.CHUNK_BYTES)
        except OSError:
            chunk = b""
        if chunk:
            await websocket.send(frames.data(chunk))
    _set(hung_up, "the terminal is gone")


async def _send_input(websocket: ClientConnection) -> None:
    """Send what a pipe or a file holds, then its end."""
    waiting: asyncio.Queue[bytes] = asyncio.Queue(_WAITING_MAX)
    loop = asyncio.get_running_loop()

    def pump() -> None:
        chunk = b"-"
        while chunk:
            try:
                chunk = os.read(0, frames.CHUNK_BYTES)
            except OSError:
                chunk = b""
            try:
                asyncio.run_coroutine_threadsafe(waiting.put(chunk), loop).result()
            except (RuntimeError, asyncio.CancelledError):
                return  # the loop has ended

    threading.Thread(target=pump, name="stdin", daemon=True).start()
    while chunk := await waiting.get():
        await websocket.send(frames.data(chunk))
    await websocket.send(frames.control(eof=True))


async def _send_sizes(websocket: ClientConnection, terminal: Screen, resized: asyncio.Event) -> None:
    while True:
        await resized.wait()
        resized.clear()
        await websocket.send(frames.control(resize=terminal.size))


async def _beat(websocket: ClientConnection) -> None:
    """Let the other end know that this one is there: a machine that sleeps closes no connection."""
    while True:
        await asyncio.sleep(frames.BEAT_S)
        await websocket.send(frames.control(beat=True))


def _set(future: "asyncio.Future[str]", value: str) -> None:
    if not future.done():
        future.set_result(value)


def _write_all(fd: int, chunk: bytes) -> None:
    rest = memoryview(chunk)
    while rest:
        rest = rest[os.write(fd, rest) :]
