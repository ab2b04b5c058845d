"""The server process where no agent is needed: a store that fails, options that are kept, and refusals."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from cordee.client import Client
from cordee.control.home import Home
from cordee.control.server import Server, SystemClock
from cordee.control.start_options import Offer
from cordee.errors import CatalogueError, CordeeError, HomeUnsuitableError, InputError, NoServerError, StoreError
from cordee.events import ServerUp
from cordee.ids import JobId
from cordee.schedule import Policy
from interrupts import interruptible


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(Home(tmp_path), Offer(slots=2, price_as=None))
    yield server
    server._executor.close()
    server._store.close()


def test_a_store_that_fails_is_tried_again_and_said_in_health(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise StoreError("the disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(server.control, "tick", fail)
        before_us = SystemClock().now_us()
        wake_at_us = server._tick()
        assert wake_at_us is not None and wake_at_us - before_us >= 1_000_000
        assert server.operations.health().problem == "the disk is full"
    assert server._tick() is None
    assert server.operations.health().problem is None


def test_an_error_on_one_job_is_logged_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    monkeypatch.setattr(server._log, "error", lambda text, job_id, exc_info: logged.append(f"{job_id}: {exc_info}"))
    monkeypatch.setattr(server.control, "tick", lambda: None)
    for failure in ("a bug", "a bug", "another"):
        server.control.errors = ((JobId("gpt-abcdef"), ValueError(failure)),)
        server._tick()
    assert logged == ["gpt-abcdef: a bug", "gpt-abcdef: another"]


def test_nobody_finds_a_server_that_has_no_node_yet(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []

    def look() -> None:
        with pytest.raises(NoServerError, match="is starting") as refused:
            Client(tmp_path)
        said.append(refused.value.message)
        server._signal = signal.SIGTERM

    def ask(_: str) -> None:
        with Client(tmp_path) as client:
            said.append(client.health().home)

    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(server._executor, "start", lambda *_: None)
    monkeypatch.setattr(server, "_wait_for_node", look)
    server.run(ask)
    assert said[1:] == [str(tmp_path)]


def test_the_options_of_up_hold_for_the_next_one(tmp_path: Path) -> None:
    home = Home(tmp_path)
    assert Offer.of(home, None, None) == Offer(None, None)
    assert Offer.of(home, "8", "H100") == Offer(8, "H100")
    assert Offer.of(home, None, None) == Offer(8, "H100")
    assert Offer.of(home, "auto", None) == Offer(None, "H100")
    assert Offer.of(home, None, "none") == Offer(None, None)
    assert Offer.of(home, None, None, patience="2") == Offer(None, None, patience=2.0)
    assert Offer.of(home, None, None) == Offer(None, None, patience=2.0)
    assert Offer.of(home, None, None, patience="default") == Offer(None, None)


@pytest.mark.parametrize(
    ("slots", "price_as", "error"),
    [("0", None, InputError), ("-1", None, InputError), ("x", None, InputError), (None, "H1000", CatalogueError)],
)
def test_a_wrong_offer_is_refused_and_not_remembered(
    tmp_path: Path, slots: str | None, price_as: str | None, error: type[CordeeError]
) -> None:
    home = Home(tmp_path)
    with pytest.raises(error):
        Offer.of(home, slots, price_as)
    for patience in ("0", "-1", "nan", "long"):
        with pytest.raises(InputError, match="is no patience"):
            Offer.of(home, None, None, patience=patience)
    assert home.settings() == {}
    (tmp_path / "settings.json").write_text("{")
    with pytest.raises(HomeUnsuitableError, match=r"settings\.json cannot be read"):
        home.settings()


def test_a_server_in_the_foreground_ends_by_ctrl_c(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "cordee", "up", "--foreground", "--slots", "1", "--home", str(tmp_path)]
    with interruptible():
        server = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline().startswith("the server runs at http://127.0.0.1:")
        again = subprocess.run(argv, capture_output=True, text=True, check=False)
        assert again.returncode == 33
        assert "a server already runs on" in again.stderr
        facts = json.loads((tmp_path / "server.json").read_text())
        assert facts["agents"] == facts["url"]
        os.kill(server.pid, signal.SIGINT)
        server.wait(60)
    finally:
        server.kill()
        with server:
            pass
    assert server.returncode == 0
    logged = [json.loads(line) for line in (tmp_path / "server.log").read_text().splitlines()]
    assert {"ready", "ended"} <= {line["event"] for line in logged}
    down = [sys.executable, "-m", "cordee"]
    subprocess.run([*down, "up", "--home", str(tmp_path)], check=True, capture_output=True)
    subprocess.run([*down, "down", "--home", str(tmp_path)], check=True, capture_output=True)


def test_up_is_written_down(server: Server) -> None:
    server.control.up()
    assert [type(event) for _, event in server._store.events()] == [ServerUp]


def test_a_server_decides_by_the_patience_of_its_options(tmp_path: Path) -> None:
    server = Server(Home(tmp_path), Offer(slots=2, price_as=None, patience=2.0))
    server.control.up()
    assert server.control.state.policy == replace(Policy(), patience=2.0)
    server._executor.close()
    server._store.close()
