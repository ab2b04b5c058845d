"""What an attacker tries, and what goes wrong around a server: slow clients, used up files, strangers, clocks."""

import asyncio
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import pytest
from api_scene import SPEC, TOKEN, Api
from fastapi import FastAPI
from stage import GPT, JOB, Scene

from cordee.answers.queues import BudgetRules
from cordee.client import Client
from cordee.control import connections
from cordee.control.api_route import UNKNOWN_BYTES_MAX
from cordee.control.spawn import is_owned, start_server
from cordee.errors import BusyError, NoServerError, ServerError, StoreError
from cordee.events import AttemptPlaced, Event, Outcome, Queue, QueuesSet
from stranger import home_at, listening

DEADLINE_S = 60.0
HEALTH = "/v1/health"


def until(true: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def lines_to(url: str, number: int, text: str = "") -> list[socket.socket]:
    address = httpx.URL(url)
    found = []
    for _ in range(number):
        line = socket.create_connection((address.host, address.port or 80), timeout=DEADLINE_S)
        with suppress(ConnectionError):  # it may have been let go by now
            line.sendall(text.encode())
        found.append(line)
    return found


def head_of(method: str, path: str, **headers: object) -> str:
    named = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n{named}"


def is_ended(line: socket.socket) -> bool:
    try:
        return line.recv(65_536) == b""
    except ConnectionError:
        return True


# -- a real server, whose control loop turns ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    home = tmp_path_factory.mktemp("server") / "home"
    start_server(home, slots="2", listen="127.0.0.1:0", log_format="text")
    with Client(home) as client:
        yield client
        client.down()
    until(lambda: not is_owned(home))


def a_job_runs(client: Client) -> None:
    job_id = client.submit({"name": "meanwhile", "run": ["true"], "gpus": 1}).job.job_id
    until(lambda: client.job(job_id).state == "done")


def test_slow_connections_delay_neither_health_nor_decisions(served: Client) -> None:
    body = head_of("POST", "/v1/jobs", Content_Type="application/json", Content_Length=5_000) + '\r\n{"job_id": '
    body = body.replace(TOKEN, served.token)
    with ExitStack() as stack:
        for text in (body, "GET /v1/health HTTP/1.1\r\nHo", ""):
            for line in lines_to(served.url, 50, text):
                stack.enter_context(line)
        assert served.health().problem is None
        a_job_runs(served)


def test_connections_leave_open_files_to_the_server(served: Client) -> None:
    """Twice as many idle connections as it may open files: it closes those that have waited longest."""
    pid = served.health().pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (400, limits[1]))
    try:
        with ExitStack() as stack:
            first, *others = lines_to(served.url, 800)
            for line in (first, *others):
                stack.enter_context(line)
            assert is_ended(first)
            with Client(served.home) as other:
                assert other.health().pid == pid
                a_job_runs(other)
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def test_a_server_that_may_open_no_file_any_more_goes_on_when_it_may(served: Client) -> None:
    pid = served.health().pid
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, limits[1]))
    try:
        for line in lines_to(served.url, 50, f"GET {HEALTH} HTTP/1.1\r\n\r\n"):
            line.close()
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    with Client(served.home) as other:
        assert other.health().pid == pid
        a_job_runs(other)


def test_over_tls_cookies_are_secure_and_browsers_stay_with_tls(served: Client) -> None:
    """They are told so by the port of HTTPS only: it would be for all servers of the host."""
    listens = served.health().listens
    assert listens is not None
    for url, host, secure, stay in (
        (listens, "cordee.example", True, True),
        (listens, "cordee.example:8470", True, False),
        (served.url, "cordee.example", False, False),
    ):
        answer = httpx.post(
            f"{url}/login", data={"token": served.token}, verify=False, headers={"Host": host}, timeout=60
        )
        assert answer.status_code == 303, answer.text
        parts = {part.strip().lower() for part in answer.headers["set-cookie"].split(";")}
        assert {"httponly", "samesite=lax"} <= parts
        assert ("secure" in parts, "strict-transport-security" in answer.headers) == (secure, stay)


def test_metrics_say_how_long_ticks_take(served: Client) -> None:
    text = httpx.get(f"{served.url}/metrics", headers={"Authorization": f"Bearer {served.token}"}, timeout=60).text
    found = dict(line.rsplit(" ", 1) for line in text.splitlines() if "control_loop_tick_seconds" in line[:40])
    name = "cordee_control_loop_tick_seconds"
    counts = [int(value) for key, value in found.items() if key.startswith(f"{name}_bucket")]
    assert counts == sorted(counts)
    assert counts[-1] == int(found[f"{name}_count"]) > 0
    assert float(found[f"{name}_sum"]) > 0


def test_the_servers_log_as_text(served: Client) -> None:
    assert served.home is not None
    assert any("[info     ] ready" in line for line in (served.home / "server.log").read_text().splitlines())


# -- clients that are slow, or send too much ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["", "GET /v1/hea", head_of("POST", "/v1/jobs", Content_Type="application/json", Content_Length=99) + "\r\n{"],
    ids=["nothing", "head", "body"],
)
def test_a_client_that_does_not_complete_its_request_is_let_go(
    api: Api, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SLOW_S", 0.1)
    [line] = lines_to(api.url, 1, text)
    with line:
        assert is_ended(line)


def test_a_client_whose_answer_takes_long_is_kept(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SLOW_S", 0.1)
    head = head_of("GET", f"/v1/events?follow=true&after={api.scene.control.number}") + "\r\n"
    with ExitStack() as opened:

        def dialled() -> BinaryIO | None:
            [line] = lines_to(api.url, 1, head)
            answer = opened.enter_context(opened.enter_context(line).makefile("rb"))
            with suppress(ConnectionError):
                return answer if answer.readline().startswith(b"HTTP/1.1 200") else None
            return None  # this process was slower than a client may be

        while (answer := dialled()) is None:
            pass
        for slow in lines_to(api.url, 2):
            with slow:
                assert is_ended(slow), "its time is over"
        monkeypatch.undo()
        api.client.submit(SPEC)
        until(lambda: b"JobSubmitted" in answer.readline())


def test_a_head_without_an_end_is_not_kept_in_memory(api: Api) -> None:
    [line] = lines_to(api.url, 1, f"GET {HEALTH} HTTP/1.1\r\nHost: x\r\n")
    header, sent = b"X-More: " + b"a" * 1_000 + b"\r\n", 0
    with line:
        with suppress(ConnectionError):
            while sent < 64 * connections.HEAD_BYTES_MAX:
                line.sendall(header)
                sent += len(header)
        assert sent < 64 * connections.HEAD_BYTES_MAX, "it was let go"
    assert api.client.health().problem is None


def test_the_long_body_of_a_stranger_is_refused_before_it_is_read(api: Api) -> None:
    head = head_of("POST", "/v1/jobs", Content_Length=UNKNOWN_BYTES_MAX + 1) + "\r\n"
    [line] = lines_to(api.url, 1, head.replace(TOKEN, "nobodys-token"))
    with line, line.makefile("rb") as answer:
        assert answer.readline().startswith(b"HTTP/1.1 401")


# -- questions that cost -----------------------------------------------------------------------------------------------


def app_of(api: Api) -> FastAPI:
    app = api._http.config.app
    assert isinstance(app, FastAPI)
    return app


def test_a_tick_does_not_wait_for_questions_that_cost(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forty-two clients ask for a forecast that takes for ever; the next tick starts a job all the same."""
    begun, go = threading.Event(), threading.Event()

    def forecast(*_: object) -> None:
        begun.set()
        go.wait()

    job_id = api.client.submit(SPEC).job.job_id
    monkeypatch.setattr("cordee.control.operations.forecast_of", forecast)
    lines = lines_to(api.url, 42, head_of("GET", f"/v1/jobs/{job_id}/why?draws=1000") + "\r\n")
    try:
        begun.wait()
        until(lambda: app_of(api).state.questions.waiting == 42)
        api.scene.control.tick()
        assert [event.job_id for event in api.scene.of(AttemptPlaced)] == [job_id]  # type: ignore[attr-defined]
    finally:
        for line in lines:
            line.close()
        go.set()


def test_a_dry_run_whose_client_leaves_is_not_recorded_as_refused(api: Api) -> None:
    body = json.dumps({"job_id": "gpt-abcdef", "spec": SPEC}).encode()
    headers = [(b"authorization", f"Bearer {TOKEN}".encode()), (b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/dry-run", "query_string": b"draws=9", "headers": headers}
    scope |= {"client": None, "http_version": "1.1"}
    received: list[str] = []
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        received.append("http.disconnect" if received else "http.request")
        return {"type": received[-1], "body": body, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    async def ask() -> None:
        async with app_of(api).state.questions._turn:  # the question in front
            asked = asyncio.ensure_future(app_of(api)(scope, receive, send))
            while "http.disconnect" not in received:
                await asyncio.sleep(0)
        await asked

    asyncio.run(ask())
    assert sent[0]["status"] == 499
    assert list(api.scene.store.audit.records()) == []


def test_the_description_is_made_once_and_beside_the_loop(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go, made = threading.Event(), threading.Event(), []

    def get_openapi(**_: object) -> dict[str, Any]:
        made.append(1)
        begun.set()
        go.wait()
        return {"paths": {}, "components": {"schemas": {}}}

    monkeypatch.setattr("cordee.control.api_description.get_openapi", get_openapi)
    with ThreadPoolExecutor(60) as pool:
        try:
            asked = [pool.submit(httpx.get, f"{api.url}/openapi.json", timeout=DEADLINE_S) for _ in range(60)]
            begun.wait()
            assert api.client.health().problem is None
            assert api.client.jobs() == []
        finally:
            go.set()
        [text] = {each.result().text for each in asked}
        assert json.loads(text)["paths"] == {}
    assert made == [1]


# -- requests that are sent again --------------------------------------------------------------------------------------


def reserve(api: Api, key: str = "k1") -> httpx.Response:
    order = {"from_us": 2 * 10**15, "until_us": 2 * 10**15 + 10**9, "nodes": ["local"], "why": "a deadline"}
    headers = {"Authorization": f"Bearer {TOKEN}", "Idempotency-Key": key}
    return httpx.post(f"{api.url}/v1/reservations", json=order, headers=headers, timeout=DEADLINE_S)


def test_what_may_have_been_done_is_not_done_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The database commits, and its answer is lost: the request gets 503, and must not be done twice."""
    commit = api.scene.store.commit

    def lose(*events: Any, **more: Any) -> None:
        commit(*events, **more)
        raise StoreError("the connection broke")

    with monkeypatch.context() as patch:
        patch.setattr(api.scene.store, "commit", lose)
        assert reserve(api).status_code == 503
    again = reserve(api)
    assert (again.status_code, again.json()["error"]["kind"]) == (409, BusyError.__name__)
    api.scene.control.tick()  # finds in the log what was committed
    assert len(api.client.reservations()) == 1


def test_a_key_whose_answer_cannot_be_kept_does_not_hide_the_answer(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr("cordee.control.api_route.AnsweredRequests.end", refuse)
    assert reserve(api).status_code == 201
    assert reserve(api).status_code == 409
    assert len(api.client.reservations()) == 1


def test_a_request_that_creates_nothing_may_be_sent_again_with_any_key(api: Api) -> None:
    job_id = api.client.submit(SPEC).job.job_id
    headers = {"Authorization": f"Bearer {TOKEN}", "Idempotency-Key": "k1"}
    for path in (f"/v1/jobs/{job_id}/hold", f"/v1/jobs/{job_id}/resume", f"/v1/jobs/{job_id}/hold"):
        answer = httpx.post(api.url + path, headers=headers, timeout=60)
        assert (answer.status_code, answer.headers.get("idempotency-replayed")) == (200, None), answer.text


def test_queues_and_their_budgets_are_set_together_or_not_at_all(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = api.scene.store.commit
    tree, budgets = [Queue(name="vision", quota_gpus=4)], [BudgetRules(queue="vision", micro_usd=5)]

    def refuse(events: list[Event], **more: Any) -> None:
        if any(not isinstance(event, QueuesSet) for event in events):
            raise StoreError("the disk is full")
        commit(events, **more)

    with monkeypatch.context() as patch:
        patch.setattr(api.scene.store, "commit", refuse)
        with pytest.raises(StoreError):
            api.client.set_queues(tree, budgets)
    assert [queue.name for queue in api.client.queues().queues] == ["default"]
    assert api.scene.of(QueuesSet) == []
    number = api.scene.control.number
    api.client.set_queues(tree, budgets)
    assert api.scene.control.number == number + 2
    assert [each.queue for each in api.client.money.budgets()] == ["vision"]


# -- strangers ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start another user's process")
def test_another_user_at_the_servers_old_port_gets_no_token(tmp_path: Path) -> None:
    with listening() as (port, read), Client(home_at(tmp_path, port)) as client:
        for ask in (client.health, client.jobs, lambda: list(client.logs("gpt-abcdef"))):
            with pytest.raises(NoServerError, match="a process of another user listens at"):
                ask()
            assert read() == 0, "it hangs up and sends no token"


@pytest.mark.parametrize(
    ("says", "error"),
    [
        ("HTTP/1.1 200 OK\r\nContent-Length: 14\r\n\r\n<h1>hello</h1>", ServerError),
        ('HTTP/1.1 200 OK\r\nContent-Length: 12\r\n\r\n{"pid": "x"}', ServerError),
        ("HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nnone", ServerError),
        ("SSH-2.0-OpenSSH_9.6\r\n", NoServerError),
        ("", NoServerError),
    ],
    ids=["page", "json", "absent", "ssh", "nothing"],
)
def test_another_program_at_the_servers_old_port_is_no_server(
    tmp_path: Path, says: str, error: type[ServerError]
) -> None:
    def answer() -> None:
        with suppress(OSError):
            while True:
                line, _ = stranger.accept()
                with line:
                    line.recv(65_536)
                    line.sendall(says.encode())

    stranger = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=answer)
    thread.start()
    try:
        with Client(home_at(tmp_path, stranger.getsockname()[1])) as client:
            for ask in (client.health, client.jobs):
                with pytest.raises(error):
                    ask()
    finally:
        stranger.shutdown(socket.SHUT_RDWR)
        stranger.close()
        thread.join()


# -- clocks ------------------------------------------------------------------------------------------------------------


def test_a_clock_that_jumps_back_stops_neither_jobs_nor_requests(tmp_path: Path) -> None:
    api = Api(tmp_path, scene=Scene(tmp_path, at_us=10**15))
    scene = api.scene
    try:
        scene.control.submit(JOB, "{}")
        scene.control.tick()
        scene.time.us -= 3_600_000_000
        assert api.client.submit(SPEC | {"name": "next"}).job.state == "queued"
        scene.ended(GPT, 1, Outcome.FINISHED)
        scene.control.tick()
        times = [event.at_us for event in scene.log()]
        assert times == sorted(times)
        assert len(scene.of(AttemptPlaced)) == 2, "the next job has begun"
        assert api.client.health().problem is None
        assert all(row.gpu_us.held >= 0 for row in scene.control.ledger.rows(scene.time.us))
        scene.restart()
        assert len(scene.control.state.attempts) == 1
    finally:
        api.close()
