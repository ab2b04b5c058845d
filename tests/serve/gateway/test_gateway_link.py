"""The link to the server: routes, reports, usage that is counted once. The server here is a stand-in."""

import asyncio
import json
import os
import resource
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from fake_engine import expected, template
from gateway_rig import FakeEngine, Process, chat, run, stream, until

from cordee.answers.services import GatewayReport
from cordee.errors import HomeInUseError
from cordee.serve.gateway.__main__ import main
from cordee.serve.gateway.usage import UsageSpool
from stranger import home_at, listening

ROW = {"service": "chat", "job_id": "chat-a", "epoch": 1, "tenant": "t", "key": "k", "model": "tiny", "from_us": 5}
TOKEN = "token-of-the-gateway"


class Server:
    """Answers as the server's API does, and remembers what it was told."""

    def __init__(self, routes: dict[str, Any]) -> None:
        self.routes = routes
        self.reports: list[GatewayReport] = []
        self.counted: dict[int, GatewayReport] = {}
        self.loses_answers = 0
        self.refuses_usage = False

    async def handle(self, request: web.BaseRequest) -> web.Response:
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        if request.path == "/v1/gateway/routes":
            while request.query.get("after") == str(self.routes["version"]):
                await asyncio.sleep(0.02)
            return _json(self.routes)
        assert request.path == "/v1/gateways/g/reports"
        report = GatewayReport.model_validate(await request.json())
        self.reports.append(report)
        if report.usage and self.refuses_usage:
            return web.Response(status=422, text="a line is not valid")
        if report.usage and report.seq not in self.counted:
            self.counted[report.seq] = report
        if report.usage and self.loses_answers:
            self.loses_answers -= 1
            raise ConnectionResetError
        return _json({"seq": max([report.seq, *self.counted])})

    @asynccontextmanager
    async def running(self, port: int = 0) -> AsyncIterator[str]:
        protocol = web.Server(self.handle)
        server = await asyncio.get_running_loop().create_server(protocol, "127.0.0.1", port)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            await protocol.shutdown(0.1)

    def tokens(self) -> int:
        """Return the output tokens of all usage, each batch counted once."""
        return sum(row.output_tokens for report in self.counted.values() for row in report.usage)


def _json(document: Any) -> web.Response:
    return web.Response(body=json.dumps(document).encode(), content_type="application/json")


class Gateway(Process):
    """A gateway that follows a server."""

    def __init__(self, folder: Path, url: str) -> None:
        words = ["--server", url, "--name", "g", "--spool", str(folder / "spool"), "--report-every", "0.2"]
        os.environ["CORDEE_TOKEN"] = TOKEN
        try:
            super().__init__(
                [sys.executable, "-m", "cordee.serve.gateway", "--listen", "127.0.0.1:0", *words], folder / "log"
            )
        finally:
            del os.environ["CORDEE_TOKEN"]


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_another_user_at_the_servers_old_port_gets_no_token(tmp_path: Path) -> None:
    with listening() as (port, read):
        words = ["--home", str(home_at(tmp_path, port)), "--spool", str(tmp_path / "spool")]
        log = tmp_path / "log"
        gateway = Process([sys.executable, "-m", "cordee.serve.gateway", "--listen", "127.0.0.1:0", *words], log)
        try:
            assert [read(), read()] == [0, 0], "it asks for routes and reports, hangs up, and sends no token"
            assert "a process of another user listens where the server was" in log.read_text()
        finally:
            gateway.kill()


def test_a_gateway_outlives_its_server_and_loses_no_usage(tmp_path: Path) -> None:
    """Answers of the server get lost, the gateway is killed, the server is away: each token is counted once."""
    engine = FakeEngine(tmp_path, "a")
    endpoint = {"id": "chat-a.1", "address": engine.address, "engine": "llama.cpp", "model": "tiny", "state": "ready"}
    endpoint |= {"kv_tokens": None, "slots": 8, "revision": 1}
    service = {"name": "chat", "models": ["tiny"], "context": 4_096, "ttft_us": None, "tpot_us": None}
    service |= {"drain_us": 30_000_000, "wanted": 1, "endpoints": [endpoint]}
    server = Server({"version": 1, "services": [service], "tenants": [], "keys": [], "prices": {}})
    gateways: list[Process] = []
    limit, good = 40, expected(template([{"role": "user", "content": "hi"}]), 40)

    async def ask(session: aiohttp.ClientSession, gateway: Process) -> None:
        async def served() -> bool:
            answer = await stream(session, gateway.address, chat("hi", limit))
            assert answer.status in (200, 404), answer.error
            return answer.text == good[0]

        await until(served, "an answer")

    async def work(session: aiohttp.ClientSession) -> None:
        async with server.running() as url:
            server.loses_answers = 2
            gateways.append(Gateway(tmp_path, url))
            await ask(session, gateways[0])

            async def counted(number: int) -> bool:
                return server.tokens() >= number * good[2]

            await until(lambda: counted(1), "the first usage")
            assert any(status.service == "chat" for report in server.reports for status in report.status)
            assert server.reports[-1].url == gateways[0].address
        await ask(session, gateways[0])  # The server is away.
        gateways[0].kill()
        async with server.running() as url:
            gateways.append(Gateway(tmp_path, url))
            await until(lambda: counted(2), "the usage of the killed gateway")
            await ask(session, gateways[1])
            server.routes = server.routes | {"version": 2, "services": [service | {"models": ["tiny", "new"]}]}

            async def renamed() -> bool:
                return (await stream(session, gateways[1].address, chat("hi", limit) | {"model": "new"})).status == 200

            await until(renamed, "the new routes")
            gateways[1].process.terminate()
            while gateways[1].process.poll() is None:
                await asyncio.sleep(0.02)

    try:
        run(work)
    finally:
        for each in (*gateways, engine):
            each.stop()
    assert server.tokens() == 4 * good[2]
    busy = [row for report in server.counted.values() for row in report.usage if not row.tenant]
    assert busy and all(row.busy_us > 0 and not row.requests for row in busy)
    assert TOKEN not in (tmp_path / "log").read_text()


def test_refused_usage_keeps_no_status_back_and_is_kept(tmp_path: Path) -> None:
    """Of a gateway whose kept routes are not whole, and whose last number was lost with the power."""
    engine = FakeEngine(tmp_path, "a")
    endpoint = {"id": "chat-a.1", "address": engine.address, "engine": "llama.cpp", "model": "tiny", "state": "ready"}
    service = {"name": "chat", "models": ["tiny"], "context": 4_096, "endpoints": [endpoint]}
    server = Server({"version": 1, "services": [service], "tenants": [], "keys": [], "prices": {}})
    server.refuses_usage = True
    (tmp_path / "spool").mkdir(mode=0o700)
    (tmp_path / "spool" / "routes.json").write_text("")
    (tmp_path / "spool" / "last").write_text("")
    gateways: list[Process] = []

    async def work(session: aiohttp.ClientSession) -> None:
        async with server.running() as url:
            gateways.append(Gateway(tmp_path, url))

            async def served() -> bool:
                return (await stream(session, gateways[0].address, chat("hi", 4))).status == 200

            await until(served, "an answer")

            async def refused() -> bool:
                return any(report.usage for report in server.reports)

            await until(refused, "usage that is refused")
            number = len(server.reports)

            async def reported() -> bool:
                return any(not report.usage for report in server.reports[number:])

            await until(reported, "the status after it")
            server.refuses_usage = False

            async def counted() -> bool:
                return server.tokens() >= 4

            await until(counted, "the usage that was kept")

    try:
        run(work)
    finally:
        for each in (*gateways, engine):
            each.stop()


def test_journals_are_summed_and_kept_until_they_are_acknowledged(tmp_path: Path) -> None:
    spool = UsageSpool(tmp_path / "spool")
    first = spool.number
    spool.add(ROW | {"until_us": 9, "requests": 1, "input_tokens": 3, "output_tokens": 2})
    spool.add(ROW | {"until_us": 8, "from_us": 4, "requests": 1, "input_tokens": 1, "output_tokens": 5})
    spool.add(ROW | {"until_us": 8, "tenant": "u", "requests": 1})
    spool.close_journal()
    spool.close_journal()
    ((number, rows),) = spool.unreported()
    assert number == first
    assert rows[0] == ROW | {
        "from_us": 4, "until_us": 9, "requests": 2, "failed": 0, "busy_us": 0, "input_tokens": 4, "cached_tokens": 0,
        "output_tokens": 7,
    }  # fmt: skip
    assert [row["tenant"] for row in rows] == ["t", "u"]
    spool.close()
    again = UsageSpool(tmp_path / "spool")
    assert [each for each, _ in again.unreported()] == [first] and again.number > first
    again.acknowledge(first)
    assert not list(again.unreported())
    again.close()


def test_a_torn_line_of_a_killed_gateway_is_left_out(tmp_path: Path) -> None:
    spool = UsageSpool(tmp_path)
    spool.add(ROW | {"until_us": 9, "requests": 1})
    path = next(tmp_path.glob("*.jsonl"))
    with path.open("ab") as file:
        file.write(b'{"service":"chat","job')
    spool.close()
    again = UsageSpool(tmp_path)
    ((_, rows),) = again.unreported()
    assert len(rows) == 1 and rows[0]["requests"] == 1
    again.close()


def test_usage_waits_in_memory_while_the_disk_is_full(tmp_path: Path) -> None:
    spool = UsageSpool(tmp_path)
    spool.add(ROW | {"until_us": 9, "requests": 1})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = next(tmp_path.glob("*.jsonl")).stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, hard))  # room for a part of a line
    try:
        spool.add(ROW | {"until_us": 9, "requests": 2})
        spool.add(ROW | {"until_us": 9, "requests": 4})
        spool.close_journal()
        assert next(tmp_path.glob("*.jsonl")).stat().st_size == size
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    spool.close_journal()
    ((_, [row]),) = spool.unreported()
    assert row["requests"] == 7
    spool.close()


def test_two_gateways_do_not_share_a_spool(tmp_path: Path) -> None:
    spool = UsageSpool(tmp_path)
    with pytest.raises(HomeInUseError, match="another gateway uses"):
        UsageSpool(tmp_path)
    spool.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--listen", "8480"], "'8480' is not an address"),
        (["--server", "http://10.0.0.1:1"], "would get your token unencrypted"),
        (["--home", "/nonexistent"], "no server runs on /nonexistent"),
    ],
)
def test_a_wrong_command_says_what_is_wrong(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CORDEE_URL", raising=False)
    assert main(words) > 1
    said = capsys.readouterr().err
    assert message in said and "hint: " in said


def test_the_verb_runs_a_gateway_until_it_is_terminated(tmp_path: Path) -> None:
    routes = {"version": 1, "services": [{"name": "chat", "models": ["tiny"], "context": 64, "endpoints": []}]}
    (tmp_path / "routes.json").write_text(json.dumps(routes))
    words = ["--listen", "127.0.0.1:0", "--routes", str(tmp_path / "routes.json"), "--spool", str(tmp_path / "spool")]
    gateway = Process([sys.executable, "-m", "cordee", "serve", "gateway", *words], tmp_path / "log")
    try:

        async def work(session: aiohttp.ClientSession) -> None:
            async def listed() -> bool:
                async with session.get(f"{gateway.address}/models") as answer:
                    return {"chat", "tiny"} <= {each["id"] for each in (await answer.json())["data"]}

            await until(listed, "the models of the routes")

        run(work)
        gateway.process.terminate()
        assert gateway.process.wait(30) == 0
    finally:
        gateway.stop()
    assert gateway.address.endswith("/v1")
    assert "Ctrl-C ends it when its open requests are answered" in (tmp_path / "log").read_text()
