"""The agent's ends of tunnels: sessions that end meanwhile, and clients that stop reading."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cordee import frames
from cordee.agent.shell_host import Host, Idle
from cordee.agent.tunnels import Refusal, Tunnels, _Session
from cordee.telemetry.shells import shell_socket

WAIT_S = 60.0


class _Leaving(_Session):
    """A tunnel that the tunnels' thread takes out just while the agent's looks at it."""

    def __init__(self, tunnels: Tunnels) -> None:
        super().__init__("job.1", Refusal("it is over"))
        self._tunnels = tunnels

    def __getattribute__(self, name: str) -> object:
        if name == "tag":
            self._tunnels._sessions.discard(self)
        return super().__getattribute__(name)


@pytest.mark.parametrize("tell", [lambda each: each.notice("job.1", 9.0), lambda each: each.ended("job.1", "why")])
def test_tunnels_may_end_while_the_agent_tells_them(tell: Callable[[Tunnels], None], tmp_path: Path) -> None:
    tunnels = Tunnels(tmp_path, "n0")
    tunnels._sessions.update(_Leaving(tunnels) for _ in range(3))
    tunnels._loop = asyncio.new_event_loop()
    tell(tunnels)
    assert not tunnels._sessions
    tunnels._loop.run_until_complete(asyncio.sleep(0))
    tunnels._loop.close()


async def _until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def _attached(spool: Path) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    path = shell_socket(spool)
    assert path is not None
    reader, writer = await asyncio.open_unix_connection(str(path))
    writer.write(frames.packed(frames.control(attach=[24, 80])))
    return reader, writer


def _unread(host: Host) -> int:
    return 0 if host._client is None else host._client.transport.get_write_buffer_size()


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_shell_goes_on_when_its_client_has_stopped_reading(
    is_silent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client is there as long as its connection, with more unread than is kept for it."""

    async def scene() -> None:
        host = Host(Idle(600, time.monotonic()), 600, lambda: False)
        spool = tmp_path / "spool"
        spool.mkdir()
        argv = ["sh", "-c", "seq 1 500000; read line; echo got $line"]
        running = asyncio.create_task(host.run(argv, {"PATH": "/usr/bin:/bin"}, spool))
        await _until(lambda: shell_socket(spool) is not None)
        _, stuck = await _attached(spool)
        await _until(lambda: _unread(host) > frames.MESSAGE_BYTES_MAX)
        if is_silent:
            monkeypatch.setattr(frames, "SILENT_S", 0.0)
            monkeypatch.setattr("cordee.agent.shell_host.LOOK_S", 0.05)
            await _until(lambda: host._client is None)
            monkeypatch.undo()
        reader, writer = await _attached(spool)
        writer.write(frames.packed(frames.data(b"here\n")))
        seen, unpacker = b"", frames.Unpacker()
        try:
            async with asyncio.timeout(WAIT_S):
                while b"got here" not in seen:
                    chunk = await reader.read(frames.CHUNK_BYTES)
                    assert chunk, seen[-200:]
                    seen += b"".join(frames.read(each).data for each in unpacker.feed(chunk))
                assert await running == 0
        finally:
            if not running.done():
                os.killpg(host._pid, signal.SIGKILL)
        stuck.close()
        writer.close()

    asyncio.run(scene())
