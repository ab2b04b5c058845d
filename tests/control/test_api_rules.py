"""Rules for all routes: idempotency keys, ETags, pages, bounded bodies, questions that end when their clients leave."""

import asyncio
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
from api_examples import missing
from api_scene import OTHER, SPEC, TOKEN, Api
from stage import Scene
from starlette.requests import ClientDisconnect, Request

from cordee.client import Client
from cordee.control.questions import WAITING_MAX, Asking, Questions
from cordee.control.roles import Bearer
from cordee.errors import BodyTooLargeError, BusyError, InputError, KeyReusedError, OverloadedError
from cordee.events import Node, NodeUp
from cordee.ids import job_id

ORDER = {"from_us": 2 * 10**15, "until_us": 2 * 10**15 + 3_600_000_000, "nodes": ["a1"], "why": "a deadline"}
DAY_US = 86_400_000_000
ELSEWHERE = "/artifacts|/agents|/join-tokens|/leave|PUT /v1/files"
"""Operations without an example: they need a registry, another machine, or a body that is not JSON."""


def ask(api: Api, method: str, path: str, token: str = TOKEN, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"} | more.pop("headers", {})
    return httpx.request(method, api.url + path, headers=headers, timeout=60, verify=False, **more)


def reserve(api: Api, key: str, token: str = TOKEN, **order: Any) -> httpx.Response:
    node = api.operations.nodes()[0].name
    order = ORDER | {"nodes": [node]} | order
    return ask(api, "POST", "/v1/reservations", token, json=order, headers={"Idempotency-Key": key})


def kind_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["kind"]


# -- idempotency keys --------------------------------------------------------------------------------------------------


def test_a_request_with_a_key_is_done_once_and_answered_twice(api: Api) -> None:
    first, again = reserve(api, "k1"), reserve(api, "k1")
    assert first.status_code == again.status_code == 201
    assert again.content == first.content
    assert (first.headers.get("idempotency-replayed"), again.headers["idempotency-replayed"]) == (None, "true")
    assert len(api.client.reservations()) == 1


def test_another_request_with_the_same_key_is_refused_by_name(api: Api) -> None:
    reserve(api, "k1")
    assert kind_of(reserve(api, "k1", why="another reason")) == (409, KeyReusedError.__name__)
    assert kind_of(reserve(api, "k" * 201)) == (422, InputError.__name__)
    assert len(api.client.reservations()) == 1


def test_a_key_is_one_users_and_is_forgotten_after_a_day(api: Api) -> None:
    reserve(api, "k1")
    other = {"job_id": "gpt-abcdef", "spec": SPEC}
    theirs = ask(api, "POST", "/v1/jobs", OTHER, json=other, headers={"Idempotency-Key": "k1"})
    assert (theirs.status_code, theirs.json()["job"]["owner"]) == (201, "bob")
    api.scene.time.us += DAY_US + 1
    later = reserve(api, "k1", from_us=3 * 10**15, until_us=3 * 10**15 + 1)
    assert (later.status_code, later.headers.get("idempotency-replayed")) == (201, None)


def test_a_refused_request_leaves_its_key_free(api: Api) -> None:
    assert reserve(api, "k1", nodes=["nowhere"]).status_code == 404
    assert reserve(api, "k1").status_code == 201


def test_a_request_whose_answer_was_lost_with_the_server_is_not_done_again(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cordee.control.api_route.AnsweredRequests.end", lambda *_, **__: None)
    assert reserve(api, "k1").status_code == 201
    assert kind_of(reserve(api, "k1")) == (409, BusyError.__name__)
    assert len(api.client.reservations()) == 1


def test_the_secret_of_a_replayed_answer_is_sealed_in_the_database(api: Api) -> None:
    headers = {"Idempotency-Key": "k1"}
    api.client.set_tenant("support")
    made, again = (ask(api, "POST", "/v1/keys", json={"tenant": "support"}, headers=headers) for _ in range(2))
    assert made.json()["secret"] == again.json()["secret"]
    assert len(api.client.keys()) == 1
    database = next(api.operations.home.rglob("*.db*"))
    assert made.json()["secret"].encode() not in b"".join(
        path.read_bytes() for path in database.parent.glob(database.stem + "*")
    )


def test_the_client_sends_again_what_was_cut_off(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    request = httpx.Client.request

    def cut(self: httpx.Client, method: str, url: str, **more: Any) -> httpx.Response:
        answer = request(self, method, url, **more)
        sent.append(more["headers"]["Idempotency-Key"])
        if len(sent) == 1:
            raise httpx.RemoteProtocolError("the connection was cut")
        return answer

    node = api.operations.nodes()[0].name
    with Client(url=api.url, token=TOKEN) as client, monkeypatch.context() as patch:
        patch.setattr(httpx.Client, "request", cut)
        client.reserve(**ORDER | {"nodes": [node]})
    assert sent[0] == sent[1]
    assert len(api.client.reservations()) == 1


# -- ETags and pages ---------------------------------------------------------------------------------------------------


def test_an_answer_that_the_client_has_is_not_sent_again(api: Api) -> None:
    first = ask(api, "GET", "/v1/queues", headers={})
    tag = ask(api, "GET", "/v1/jobs").headers["etag"]
    again = ask(api, "GET", "/v1/jobs", headers={"If-None-Match": f'"other", W/{tag}'})
    assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tag)
    api.client.submit(SPEC)
    changed = ask(api, "GET", "/v1/jobs", headers={"If-None-Match": tag})
    assert changed.status_code == 200
    assert changed.headers["etag"] != tag
    assert first.headers["etag"] != tag


def test_the_client_reads_what_it_has_from_its_own_memory(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    statuses: list[int] = []
    request = httpx.Client.request

    def seen(self: httpx.Client, *asked: Any, **more: Any) -> httpx.Response:
        answer = request(self, *asked, **more)
        statuses.append(answer.status_code)
        return answer

    monkeypatch.setattr(httpx.Client, "request", seen)
    with Client(url=api.url, token=TOKEN) as client:
        assert client.nodes() == client.nodes()
    assert statuses == [200, 304]


def test_lists_come_in_pages_that_a_client_reads_through(api: Api) -> None:
    for number in range(5):
        api.client.submit(SPEC | {"gpus": 1}, job_id=job_id("gpt", bytes([number] * 6)))
    whole = [job.job_id for job in api.client.jobs()]
    found, path = [], "/v1/jobs?limit=2"
    while path:
        answer = ask(api, "GET", path)
        found.append([job["job_id"] for job in answer.json()])
        path = answer.links.get("next", {}).get("url", "")
    assert found == [whole[:2], whole[2:4], whole[4:]]
    assert kind_of(ask(api, "GET", "/v1/jobs?cursor=nonsense")) == (404, "NotFoundError")
    assert ask(api, "GET", "/v1/jobs?limit=1001").status_code == 422


def test_a_page_is_filled_with_the_jobs_that_may_be_seen(api: Api) -> None:
    mine = {"job_id": "gpt-abcdef", "spec": SPEC | {"gpus": 1}}
    assert ask(api, "POST", "/v1/jobs", OTHER, json=mine).status_code == 201
    for number in range(3):
        api.client.submit(SPEC | {"gpus": 1}, job_id=job_id("gpt", bytes([number] * 6)))
    api.operations.owners[OTHER] = Bearer("bob", grants=())
    answer = ask(api, "GET", "/v1/jobs?limit=1", OTHER)
    assert [job["job_id"] for job in answer.json()] == ["gpt-abcdef"]
    assert "next" not in answer.links


def test_a_page_begins_after_the_row_that_the_last_one_ended_with(tmp_path: Path) -> None:
    api = Api(tmp_path, scene=Scene(tmp_path))
    try:
        known = api.operations.nodes()[0]
        for name in ("b", "c", "d"):
            node = Node(name=name, epoch=1, gpu_name=known.gpu_name, gpus=1, micro_usd_per_gpu_hour=1, price_source="x")
            api.scene.agents.report(NodeUp(at_us=api.scene.time.us, node=node), source=f"node/{name}/1")
        api.scene.control.tick()
        answer = ask(api, "GET", "/v1/nodes?limit=3")
        rest = ask(api, "GET", answer.links["next"]["url"])
        names = [node["name"] for node in answer.json() + rest.json()]
        assert names == [node.name for node in api.operations.nodes()]
        assert "next" not in rest.links
    finally:
        api.close()


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_a_body_of_hundreds_of_megabytes_is_refused_before_it_is_read(api: Api) -> None:
    url = httpx.URL(api.url)
    with socket.create_connection((url.host, url.port or 80)) as line:
        head = (
            f"POST /v1/jobs HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nContent-Length: 500000000\r\n\r\n"
        )
        line.sendall(head.encode())
        assert line.makefile("rb").readline().startswith(b"HTTP/1.1 413")


def test_a_body_without_a_length_is_refused_once_it_is_too_long(api: Api) -> None:
    def parts() -> Iterator[bytes]:
        for _ in range(40):
            yield b" " * 2**20

    try:
        assert kind_of(ask(api, "POST", "/v1/dry-run", content=parts())) == (413, BodyTooLargeError.__name__)
    except httpx.WriteError:
        pass  # the server ended the connection with the answer while the client was writing


@pytest.mark.parametrize("deep", [101, 900, 100_000])
@pytest.mark.parametrize("brackets", [("[", "]"), ('{"a":', "}")])
def test_nested_brackets_are_refused(api: Api, deep: int, brackets: tuple[str, str]) -> None:
    opened, closed = brackets
    body = '{"job_id": "gpt-abcdef", "spec": {"run": ' + opened * deep + "1" + closed * deep + "}}"
    answer = ask(api, "POST", "/v1/jobs", content=body, headers={"Content-Type": "application/json"})
    assert kind_of(answer) == (422, "InputError")
    assert api.client.jobs() == []


# -- questions that cost -----------------------------------------------------------------------------------------------


def request_of(leaves: asyncio.Event) -> Request:
    async def receive() -> dict[str, str]:
        await leaves.wait()
        return {"type": "http.disconnect"}

    return Request({"type": "http"}, receive)


def test_a_question_ends_when_its_client_leaves_and_one_that_waits_never_begins() -> None:
    begun: list[str] = []

    async def play() -> None:
        questions, running = Questions(), threading.Event()
        first, second = asyncio.Event(), asyncio.Event()

        def work(asking: Asking) -> str:
            begun.append("first")
            running.set()
            while asking.cpu_s() != float("inf"):
                pass
            asking.check()
            return "not reached"

        def other(_: Asking) -> str:
            begun.append("second")
            return "answered"

        asked = asyncio.ensure_future(questions.answer(request_of(first), work))
        await asyncio.to_thread(running.wait)
        waits = asyncio.ensure_future(questions.answer(request_of(second), other))
        third = asyncio.ensure_future(questions.answer(request_of(asyncio.Event()), lambda _: "third"))
        await asyncio.sleep(0)
        second.set()
        await asyncio.sleep(0)
        first.set()
        with pytest.raises(ClientDisconnect):
            await asked
        with pytest.raises(ClientDisconnect):
            await waits
        assert await third == "third"
        assert questions.waiting == 0

    asyncio.run(play())
    assert begun == ["first"]


def test_more_questions_than_may_wait_are_refused() -> None:
    async def play() -> None:
        questions, go = Questions(), threading.Event()
        asked = [
            asyncio.ensure_future(questions.answer(request_of(asyncio.Event()), lambda _: go.wait()))
            for _ in range(WAITING_MAX)
        ]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError):
            await questions.answer(request_of(asyncio.Event()), lambda _: None)
        go.set()
        assert all(await asyncio.gather(*asked))

    asyncio.run(play())


def test_clients_that_ask_for_forecasts_and_leave_do_not_keep_health_waiting(api: Api) -> None:
    """Forty-two clients ask `why?draws=1000` and leave; not one of them holds a thread that others need."""
    job = api.client.submit(SPEC).job
    url = httpx.URL(api.url)
    lines = [socket.create_connection((url.host, url.port or 80)) for _ in range(42)]
    ask_why = f"GET /v1/jobs/{job.job_id}/why?draws=1000 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n"
    with api.operations.forecasting:  # as if a forecast took for ever
        for line in lines:
            line.sendall(ask_why.encode())
        assert api.client.health().pid
        assert [each.job_id for each in api.client.jobs()] == [job.job_id]
        for line in lines:
            line.close()
    assert api.client.why(job.job_id, draws=1).job_id == job.job_id


# -- the description ---------------------------------------------------------------------------------------------------


def test_every_answer_in_json_has_an_example_that_its_schema_allows(api: Api) -> None:
    described = httpx.get(f"{api.url}/openapi.json", timeout=60).json()
    assert [name for name in missing() if not re.search(ELSEWHERE, name)] == []
    for path, methods in described["paths"].items():
        for method, operation in methods.items():
            bodies = [each.get("content", {}) for each in operation["responses"].values()]
            bodies.append(operation.get("requestBody", {}).get("content", {}))
            for body in (each["application/json"] for each in bodies if "application/json" in each):
                if "example" in body:
                    schema = body["schema"] | {"components": described["components"]}
                    jsonschema.validate(body["example"], schema)
            if "201" in operation["responses"] and "/agents" not in path:
                assert any(each["name"] == "Idempotency-Key" for each in operation["parameters"]), (method, path)
