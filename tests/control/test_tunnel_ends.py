"""Both ends of a tunnel in this process: beats, a client that is silent, what a slow network does to a paste."""

import asyncio
import os
import threading
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI, WebSocket
from starlette.testclient import TestClient
from websockets.asyncio.server import ServerConnection, serve

from cordee import frames
from cordee.cli.tunnels import _send_typed, opened
from cordee.control.agents import link
from cordee.control.tunnels import Side, Target, _join
from cordee.ids import JobId

WAIT_S = 60.0
PASTE_BYTES = 12_000_000


def _client(server: Any) -> Any:
    """Stand for a client of the API: the address and the token are all that a tunnel takes of it."""
    return SimpleNamespace(url=f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", token="t")


def test_a_client_without_a_terminal_beats_and_its_own_errors_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "BEAT_S", 0.01)

    async def scene() -> None:
        heard: asyncio.Queue[bytes | str] = asyncio.Queue()

        async def answer(websocket: ServerConnection) -> None:
            await websocket.send(frames.control(open=True))
            async for message in websocket:
                heard.put_nowait(message)

        async with serve(answer, "127.0.0.1", 0) as server, asyncio.timeout(WAIT_S):
            with pytest.raises(ConnectionResetError):
                async with opened(_client(server), "job", what="port"):
                    assert frames.read(await heard.get()).control == {"what": "port"}
                    assert frames.read(await heard.get()).control == {"beat": True}
                    raise ConnectionResetError("a browser's")

    asyncio.run(scene())


def test_a_paste_waits_for_the_network_and_loses_nothing() -> None:
    async def scene() -> None:
        arrived, reads = 0, asyncio.Event()

        async def answer(websocket: ServerConnection) -> None:
            nonlocal arrived
            await websocket.send(frames.control(open=True))
            await reads.wait()
            async for message in websocket:
                frame = frames.read(message)
                arrived += len(frame.data)

        def paste(fd: int) -> None:
            rest = memoryview(b"x" * PASTE_BYTES)
            while rest:
                rest = rest[os.write(fd, rest) :]
            os.close(fd)

        out, into = os.pipe()
        async with serve(answer, "127.0.0.1", 0) as server, asyncio.timeout(WAIT_S):
            async with opened(_client(server), "job", what="shell") as websocket:
                hung_up: asyncio.Future[str] = asyncio.get_running_loop().create_future()
                threading.Thread(target=paste, args=(into,), daemon=True).start()
                sending = asyncio.create_task(_send_typed(websocket, out, hung_up))
                while not websocket.transport.get_write_buffer_size():
                    await asyncio.sleep(0.01)
                reads.set()
                assert await hung_up == "the terminal is gone"
                await sending
            while arrived < PASTE_BYTES:
                await asyncio.sleep(0.01)
        os.close(out)
        assert arrived == PASTE_BYTES

    asyncio.run(scene())


class _OnceHeard(Side):
    """A client that has sent a beat before its tunnel is joined, and nothing since."""

    def __init__(self, websocket: WebSocket) -> None:
        super().__init__(websocket)
        self._sent = [frames.control(beat=True)]

    async def receive(self) -> bytes:
        return self._sent.pop() if self._sent else await super().receive()


def test_a_tunnel_ends_when_its_client_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """The agent's end stands in this process: joined are two WebSockets, as the server does it."""
    monkeypatch.setattr(frames, "SILENT_S", 0.1)
    app, agents = FastAPI(), list[Side]()
    goes_on: Any = SimpleNamespace(why_ended=lambda target: None)

    async def agent(websocket: WebSocket) -> None:
        await websocket.accept()
        agents.append(Side(websocket))
        await agents[0].done.wait()

    async def client(websocket: WebSocket) -> None:
        await websocket.accept()
        await _join(_OnceHeard(websocket), agents[0], goes_on, Target(JobId("job"), 1, "n0"))

    app.router.add_websocket_route("/agent", agent)
    app.router.add_websocket_route("/client", client)
    with TestClient(app) as http, http.websocket_connect("/agent") as theirs, http.websocket_connect("/client") as own:
        assert theirs.receive_bytes() == frames.control(beat=True)
        assert "nothing was heard" in frames.read(own.receive_bytes()).control["end"]
        assert theirs.receive()["type"] == "websocket.close"


@pytest.mark.parametrize(("files", "links"), [(256, 128), (1024, 512), (65_536, 65_536 - 1280)])
def test_open_files_are_kept_for_all_tunnels(files: int, links: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda _: (files, files))
    unused: Any = None
    assert link.AgentLinks(unused, unused)._links_max == links
