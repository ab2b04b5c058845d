"""`python -m cordee.agent.shell_host`: the process of an interactive job, which keeps its shell without a client too.

The shell runs in a terminal of its own. A client comes over a tunnel to the socket that the spool names; one at a time,
and a later one takes the place of an earlier one. The shell ends by itself, when it has been idle for too long, when no
client has come back in time, or at the deadline of a notice, when the agent kills it.
"""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from cordee import frames
from cordee.agent.process import PROC, TAG, find, worked
from cordee.agent.terminals import beside_ranks, exit_code_of, resize, spawn_in_terminal
from cordee.telemetry.shells import write_shell_socket
from cordee.units import format_duration

SCROLLBACK_BYTES = 64 * 1024
LOOK_S = 5.0
WARNING_S = 60.0
BUSY_FRACTION = 0.02  # of one core: a prompt that waits uses less, a program that computes more
ENDED_S = 5.0


@dataclass(slots=True)
class Idle:
    """The idle time of a shell: without input, and without work of its GPUs or, if it has none, its processes.

    Attributes:
        limit_s: the longest time; then it ends.
        since_s: the time since which it is idle.
        warned: whether its end was announced.
    """

    limit_s: float
    since_s: float
    warned: bool = False

    @property
    def warning_s(self) -> float:
        """Return how long before the end the warning comes.

        >>> Idle(1800, 0.0).warning_s, Idle(60, 0.0).warning_s
        (60.0, 30.0)
        """
        return min(WARNING_S, self.limit_s / 2)

    def active(self, now_s: float) -> None:
        """Begin anew."""
        self.since_s, self.warned = now_s, False

    def look(self, now_s: float) -> str:
        """Return `end` when it has been idle for too long, `warn` once before that, else "".

        >>> idle = Idle(1800, 100.0)
        >>> [idle.look(at) for at in (1800, 1841, 1850, 1900)]
        ['', 'warn', '', 'end']
        """
        left_s = self.since_s + self.limit_s - now_s
        if left_s <= 0:
            return "end"
        if left_s <= self.warning_s and not self.warned:
            self.warned = True
            return "warn"
        return ""

    def next_s(self, now_s: float) -> float:
        """Return the seconds to the next look at what is due."""
        left_s = self.since_s + self.limit_s - now_s
        return max(0.0, left_s if self.warned else left_s - self.warning_s)


class Host:
    """One shell, its terminal, and the client that is there.

    Args:
        idle: how long it may be idle.
        keep_s: how long it stays without a client.
        is_busy: tells whether GPUs or processes work.
    """

    def __init__(self, idle: Idle, keep_s: float, is_busy: Callable[[], bool]) -> None:
        self._idle, self._keep_s, self._is_busy = idle, keep_s, is_busy
        self._client: asyncio.StreamWriter | None = None
        self._heard_s = self._alone_s = time.monotonic()  # of the client; since when there is none
        self._screen = b""
        self._ends = ""
        self._pid, self._master = 0, -1
        self._over = asyncio.Event()

    async def run(self, argv: list[str], env: dict[str, str], spool: Path) -> int:
        """Run the shell to its end; return its exit code."""
        popen, self._master = spawn_in_terminal(argv, env=env, cwd=str(Path.cwd()), size=(24, 80))
        self._pid = popen.pid
        loop = asyncio.get_running_loop()
        loop.add_reader(self._master, self._read)
        loop.add_signal_handler(signal.SIGTERM, log, "it got notice")  # the agent tells the client
        folder = Path(tempfile.mkdtemp(prefix="cordee-shell-"))
        try:
            server = await asyncio.start_unix_server(self._serve, str(folder / "s"))
            write_shell_socket(spool, folder / "s")
            watching = asyncio.create_task(self._watch())
            code = exit_code_of(await asyncio.to_thread(popen.wait))
            watching.cancel()
            await self._finish(code)
            server.close()
            return code
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    # -- the client --------------------------------------------------------------------------------------------

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._client is not None:
            self._send(frames.control(end="another client has attached to this shell"))
            _let_go(self._client)
        self._client, unpacker = writer, frames.Unpacker()
        self._listen()
        log("a client has come")
        self._seen()
        try:
            while chunk := await reader.read(frames.CHUNK_BYTES):
                for message in unpacker.feed(chunk):
                    await self._take(frames.read(message))
        except (OSError, ValueError):
            pass
        self._gone(writer)

    async def _take(self, frame: frames.Frame) -> None:
        self._heard_s = time.monotonic()
        if frame.channel == frames.DATA:
            self._seen()
            rest = memoryview(frame.data)
            while rest:
                try:
                    rest = rest[os.write(self._master, rest) :]
                except BlockingIOError:
                    await asyncio.sleep(0.01)
                except OSError:
                    return
        elif frame.control.get("eof"):
            with contextlib.suppress(OSError):
                os.write(self._master, b"\x04")
        elif "attach" in frame.control:
            self._resize(frame.control["attach"])
            if self._screen:
                self._send(frames.data(self._screen))
        elif "resize" in frame.control:
            self._resize(frame.control["resize"])

    def _resize(self, value: object) -> None:
        size = frames.size_of(value)
        if size is not None:
            with contextlib.suppress(OSError):
                resize(self._master, size)

    def _seen(self) -> None:
        self._heard_s = time.monotonic()
        self._idle.active(self._heard_s)

    def _gone(self, writer: asyncio.StreamWriter) -> None:
        _let_go(writer)
        if writer is self._client:
            self._client, self._alone_s = None, time.monotonic()
            self._listen()
            log(f"the client has gone; the shell is kept for {format_duration(self._keep_s)}")

    def _send(self, message: bytes) -> None:
        if self._client is not None:
            self._client.write(frames.packed(message))
            if self._client.transport.get_write_buffer_size() > frames.MESSAGE_BYTES_MAX:
                asyncio.get_running_loop().remove_reader(self._master)  # the client reads slowly: so does the shell
                asyncio.ensure_future(self._read_on(self._client))  # noqa: RUF006  its end is looked at nowhere

    async def _read_on(self, client: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            await client.drain()
        if client is self._client:
            self._listen()

    def _listen(self) -> None:
        """Read the shell's output, for a client that reads it or for none."""
        if not self._over.is_set():
            asyncio.get_running_loop().add_reader(self._master, self._read)

    # -- the shell ---------------------------------------------------------------------------------------------

    def _read(self) -> None:
        try:
            chunk = os.read(self._master, frames.CHUNK_BYTES)
        except BlockingIOError:
            return
        except OSError:
            chunk = b""
        if not chunk:
            asyncio.get_running_loop().remove_reader(self._master)
            self._over.set()
            return
        self._screen = (self._screen + chunk)[-SCROLLBACK_BYTES:]
        self._send(frames.data(chunk))

    async def _finish(self, code: int) -> None:
        """Send the rest of the output and the exit code, and wait until the client has them."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._over.wait(), 0.5)
        log(f"the shell has ended with {code}{f': {self._ends}' if self._ends else ''}")
        if self._client is not None:
            self._send(frames.control(exit=code, why=self._ends))
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(self._client.drain(), ENDED_S)
            self._client.close()
            with contextlib.suppress(OSError, TimeoutError):
                await asyncio.wait_for(self._client.wait_closed(), ENDED_S)

    async def _watch(self) -> None:
        """End the shell when it is idle or alone for too long."""
        while True:
            now_s = time.monotonic()
            alone_s = self._alone_s + self._keep_s - now_s if self._client is None else float("inf")
            await asyncio.sleep(max(0.05, min(LOOK_S, self._idle.next_s(now_s), alone_s)))
            now_s = time.monotonic()
            if self._client is not None and now_s - self._heard_s > frames.SILENT_S:
                log("the client has not been heard of for a minute")
                self._gone(self._client)
            if self._is_busy():
                self._idle.active(now_s)
            state = self._idle.look(now_s)
            limit = format_duration(self._idle.limit_s)
            if state == "warn":
                left = format_duration(self._idle.warning_s)
                self._send(frames.control(note=f"idle: this shell ends in {left} without input (--idle {limit})"))
            elif state == "end":
                self._end(f"it was idle for {limit} (--idle)")
                return
            elif self._client is None and now_s >= self._alone_s + self._keep_s:
                self._end(f"no client came back within {format_duration(self._keep_s)} (--keep)")
                return

    def _end(self, why: str) -> None:
        self._ends = why
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGHUP)
        asyncio.get_running_loop().call_later(ENDED_S, self._kill)

    def _kill(self) -> None:
        with contextlib.suppress(OSError):
            os.killpg(self._pid, signal.SIGKILL)


def _let_go(client: asyncio.StreamWriter) -> None:
    """Close a client's connection without a wait for one that does not read."""
    if client.transport.get_write_buffer_size():
        client.transport.abort()
    else:
        client.close()


def log(text: str) -> None:
    """Write a line to the log of the job."""
    print(f"cordee: {text}", flush=True)


def busy_of(tag: str) -> Callable[[], bool]:
    """Return a function that tells whether the job's GPUs have worked, or without GPUs its processes.

    NVML counts by the second; processor time counts from one call to the next.
    """
    gpus = _gpus()
    before: dict[str, float] = {"at_s": time.monotonic(), "worked": 0.0}
    ticks = os.sysconf("SC_CLK_TCK") if PROC is not None else 1

    def processes() -> bool:
        own = os.getpid()
        total, now_s = sum(worked(each) for each in find(tag) if each.pid != own) / ticks, time.monotonic()
        used_s, passed_s = total - before["worked"], now_s - before["at_s"]
        before.update(at_s=now_s, worked=total)
        return used_s > BUSY_FRACTION * passed_s

    processes()
    return processes if gpus is None else gpus


def _gpus() -> Callable[[], bool] | None:
    """Return a function that tells whether a GPU of the job works; None without NVML or GPUs."""
    visible = [word for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if word.isdecimal()]
    if not visible:
        return None
    try:
        import pynvml

        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(int(index)) for index in visible]
    except Exception:  # no library, no driver, another numbering: the processes tell
        return None

    def work() -> bool:
        try:
            return any(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu > 0 for handle in handles)
        except pynvml.NVMLError:
            return True  # not known, so it is not ended for it

    return work


def main() -> int:
    """Run a shell; the job is done when it has ended, whatever its exit code."""
    parser = argparse.ArgumentParser(prog="python -m cordee.agent.shell_host", description=__doc__)
    parser.add_argument("--idle", type=float, required=True, help="seconds")
    parser.add_argument("--keep", type=float, required=True, help="seconds")
    parser.add_argument("shell", nargs="*", help="the shell; by default bash, else sh")
    given = parser.parse_args()
    wanted = given.shell if given.shell and shutil.which(given.shell[0]) else []  # a node may lack it
    argv = wanted or [shutil.which("bash") or "/bin/sh"]
    host = Host(Idle(given.idle, time.monotonic()), given.keep, busy_of(os.environ[TAG]))
    try:
        asyncio.run(host.run(argv, beside_ranks(os.environ), Path(os.environ["CORDEE_SPOOL"])))
    except OSError as error:
        log(f"{argv[0]} cannot be started: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
