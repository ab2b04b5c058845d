"""The API against clients that are wrong, slow, gone or many. The engines here are `fake_engine.py`."""

import asyncio
import hashlib
import io
import json
import socket
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_engine import expected, template
from gateway_rig import FakeEngine, Rig, chat, get, post, rig, run, stream, until

GOOD = json.dumps(chat("hi", 4, stream=False)).encode()
CHAT = "/v1/chat/completions"
BAD: list[tuple[str, str, bytes, int, str]] = [
    ("POST", CHAT, b"{", 400, "the body is not JSON"),
    ("POST", CHAT, b"[" * 100_000, 400, "the body is not JSON"),
    ("POST", CHAT, b"[]", 400, "not an object"),
    ("POST", CHAT, b"\xff\xfe", 400, "the body is not JSON"),
    ("POST", CHAT, b"{}", 400, "`model` is missing"),
    ("POST", CHAT, b'{"model":"tiny"}', 400, "`messages` is missing"),
    ("POST", CHAT, b'{"model":"tiny","messages":["x"]}', 400, "list of objects with a `role`"),
    (
        "POST",
        CHAT,
        GOOD.replace(b'"max_tokens": 4', b'"max_tokens": "many"'),
        400,
        "`max_tokens` has to be a whole number",
    ),
    ("POST", CHAT, GOOD.replace(b'"max_tokens": 4', b'"n": 0'), 400, "`n` has to be a whole number"),
    ("POST", CHAT, GOOD.replace(b'"max_tokens": 4', b'"stream": "yes"'), 400, "`stream` has to be true or false"),
    ("POST", CHAT, GOOD.replace(b'"max_tokens": 4', b'"priority": 1000'), 400, "not between -100 and 100"),
    ("POST", CHAT, GOOD.replace(b'"tiny"', b'"gpt-9"'), 404, "services: chat"),
    ("POST", "/v1/completions", b'{"model":"tiny"}', 400, "`prompt` is missing"),
    ("GET", CHAT, b"", 405, "takes POST"),
    ("GET", "/v1/nothing", b"", 404, "there is no /v1/nothing"),
    ("POST", "/v1/nothing", b"{}", 404, "there is no POST /v1/nothing"),
    ("GET", "/v1/models/gpt-9", b"", 404, "services: chat"),
    ("POST", "/v1/completions", b'{"model":"tiny","prompt":"a","max_tokens":40000}', 400, "exceed the context"),
]


@pytest.mark.parametrize(("method", "path", "body", "status", "message"), BAD)
def test_a_wrong_request_is_refused_in_openai_shape(
    two: Rig, method: str, path: str, body: bytes, status: int, message: str
) -> None:
    async def work(session: aiohttp.ClientSession) -> tuple[int, Any]:
        async with session.request(method, two.url + path, data=body or None) as response:
            return response.status, await response.json()

    found, answer = run(work)
    assert found == status, answer
    assert message in answer["error"]["message"]
    assert answer["error"].keys() == {"message", "type", "param", "code"} and answer["error"]["type"]


def test_a_body_has_a_largest_size(two: Rig) -> None:
    async def work(session: aiohttp.ClientSession) -> list[int]:
        async def parts() -> Any:
            for _ in range(11):
                yield b" " * 1_000_000

        statuses = []
        for data in (io.BytesIO(b" " * 10_000_001), parts()):
            async with session.post(two.url + CHAT, data=data) as response:
                statuses.append(response.status)
                assert "10,000,000" in (await response.json())["error"]["message"]
        body = chat("x" * 9_900_000, 1, stream=False)
        async with session.post(two.url + CHAT, data=io.BytesIO(json.dumps(body).encode())) as response:
            statuses.append(response.status)
        return statuses

    assert run(work) == [413, 413, 400], "the last one is the engine's own answer to a prompt of 9.9 M tokens"


def test_headers_have_a_largest_size_and_number(two: Rig) -> None:
    async def work(session: aiohttp.ClientSession) -> list[int]:
        found = []
        for headers in ({"X-Long": "x" * 20_000}, {f"X-{i}": "x" for i in range(100)}):
            async with session.get(two.url + "/v1/models", headers=headers) as response:
                found.append(response.status)
        return found

    assert run(work) == [400, 400]


def test_models_health_and_metrics(two: Rig) -> None:
    async def work(session: aiohttp.ClientSession) -> tuple[Any, Any, Any, str]:
        await stream(session, two.url, chat("hi", 4))
        async with session.get(two.url + "/metrics") as response:
            text = await response.text()
        return (
            await get(session, two.url + "/v1/models"),
            await get(session, two.url + "/v1/models/tiny"),
            await get(session, two.url + "/health"),
            text,
        )

    models, model, health, metrics = run(work)
    assert [each["id"] for each in models["data"]] == ["chat", "tiny"]
    assert model["max_model_len"] == 32_768 and health == {"status": "ok"}
    for name in (
        "gen_ai_server_time_to_first_token_seconds_count",
        "gen_ai_server_time_per_output_token_seconds_count",
    ):
        assert f'{name}{{service="chat",model="tiny"}}' in metrics
    assert 'cordee_gateway_num_requests_waiting{service="chat"} 0' in metrics


def test_the_other_kinds_of_answers(two: Rig) -> None:
    async def work(session: aiohttp.ClientSession) -> tuple[Any, Any, Any]:
        embedded = await post(session, f"{two.url}/v1/embeddings", {"model": "tiny", "input": ["a", "bcd"]})
        text = await post(session, f"{two.url}/v1/completions", {"model": "tiny", "prompt": "abc", "max_tokens": 5})
        said = await post(session, f"{two.url}{CHAT}", chat("abc", 5, stream=False))
        return embedded, text, said

    embedded, text, said = run(work)
    assert [each["embedding"][0] for each in embedded["data"]] == [1, 3]
    assert text["choices"][0]["text"] == expected("abc", 5)[0]
    assert said["choices"][0]["message"]["content"] == expected(template([{"role": "user", "content": "abc"}]), 5)[0]
    assert said["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("kind", [True, False], ids=["stream", "json"])
def test_a_client_that_leaves_ends_the_work_of_the_engine(two: Rig, kind: bool) -> None:
    """It takes less than 0.2 s on an idle machine; here it is waited for."""
    engines = [each for each in two.processes if isinstance(each, FakeEngine)]

    async def work(session: aiohttp.ClientSession) -> None:
        async def stats() -> tuple[int, int]:
            found = [await get(session, f"{each.address}/stats") for each in engines]
            return sum(each["open"] for each in found), sum(each["cancelled"] for each in found)

        _, before = await stats()
        asked = asyncio.create_task(post(session, two.url + CHAT, chat("bye", 5_000, stream=kind)))

        async def begun() -> bool:
            return (await stats())[0] == 1

        async def ended() -> bool:
            return await stats() == (0, before + 1)

        await until(begun, "a request at an engine")
        asked.cancel()
        await until(ended, "the end of the request at the engine")

    run(work)


def test_keys(two: Rig) -> None:
    keys = [
        {"hash": hashlib.sha256(secret.encode()).hexdigest(), "id": name, "tenant": tenant, "models": models}
        for secret, name, tenant, models in (
            ("sk-open", "k1", "red", []), ("sk-else", "k2", "blue", ["other"]), ("sk-slow", "k3", "slow", []),
            ("sk-poor", "k4", "poor", []),
        )
    ]  # fmt: skip
    two.routes.more = {
        "keys": keys,
        "tenants": [{"name": "slow", "rate_per_s": 0.005}, {"name": "poor", "budget_micro_usd": 1}],
    }
    two.routes.write()

    async def work(session: aiohttp.ClientSession) -> dict[str, tuple[int, str | None, str]]:
        async def ask(secret: str | None) -> tuple[int, str | None, str]:
            headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
            async with session.post(two.url + CHAT, json=chat("hi", 4, stream=False), headers=headers) as response:
                error = (await response.json()).get("error", {})
                return response.status, response.headers.get("Retry-After"), error.get("code") or error.get("type", "")

        async def locked() -> bool:
            return (await ask(None))[0] == 401

        await until(locked, "the keys")
        found = {str(each): await ask(each) for each in (None, "sk-wrong", "sk-open", "sk-else", "sk-slow", "sk-poor")}
        found["again"] = await ask("sk-slow")
        async with session.get(two.url + "/v1/models/chat", headers={"Authorization": "Bearer sk-else"}) as response:
            found["model"] = (response.status, None, (await response.json()).get("error", {}).get("type", ""))
        for secret in ("sk-open", "sk-else"):
            headers = {"Authorization": f"Bearer {secret}"}
            async with session.post(two.url + CHAT, json=chat("hi") | {"model": "no"}, headers=headers) as response:
                found[f"{secret} no"] = (response.status, None, (await response.json())["error"]["message"])
        two.routes.more["keys"] = keys[1:]
        two.routes.write()

        async def revoked() -> bool:
            return (await ask("sk-open"))[1:] == (None, "invalid_api_key")

        await until(revoked, "the end of a key")
        return found

    found = run(work)
    assert found["None"] == (401, None, "missing_api_key")
    assert found["sk-wrong"] == (401, None, "invalid_api_key")
    assert found["sk-open"][0] == 200
    assert found["sk-else"] == found["model"] == (403, None, "permission_error")
    assert found["sk-slow"][0] == 200
    status, retry_s, code = found["again"]
    assert (status, code) == (429, "rate_limit_exceeded") and retry_s is not None and 100 < int(retry_s) <= 200
    assert found["sk-poor"] == (429, None, "insufficient_quota")
    assert found["sk-open no"] == (404, None, "there is no model 'no'; services: chat")
    assert found["sk-else no"] == (404, None, "there is no model 'no'; services: none of this key")
    tenants = {(row["tenant"], row["key"]) for row in two.usage() if row["requests"]}
    assert {("red", "k1"), ("slow", "k3")} <= tenants
    assert "sk-" not in two.log() and "sk-" not in json.dumps(two.usage())


def test_the_first_request_of_a_service_without_replicas_is_held(tmp_path: Path) -> None:
    async def work(session: aiohttp.ClientSession) -> Any:
        asked = asyncio.create_task(stream(session, made.url, chat("wake up", 8)))

        async def queued() -> bool:
            async with session.get(made.url + "/metrics") as response:
                return 'num_requests_waiting{service="chat"} 1' in await response.text()

        await until(queued, "the request in the queue")
        made.fake("late")
        made.routes.write()
        return await asked

    with rig(tmp_path) as made:
        made.start()
        answer = run(work)
    assert answer.text == expected(template([{"role": "user", "content": "wake up"}]), 8)[0] and answer.done


def test_a_request_that_waits_for_a_service_that_ends_is_refused_at_once(tmp_path: Path) -> None:
    async def work(session: aiohttp.ClientSession) -> Any:
        asked = asyncio.create_task(stream(session, made.url, chat("wake up", 8)))

        async def queued() -> bool:
            async with session.get(made.url + "/metrics") as response:
                return 'num_requests_waiting{service="chat"} 1' in await response.text()

        await until(queued, "the request in the queue")
        made.routes.services.clear()
        made.routes.write()
        async with asyncio.timeout(60):  # It would be held for 600 s.
            return await asked

    with rig(tmp_path) as made:
        made.start()
        answer = run(work)
    assert answer.status == 404 and answer.error["code"] == "model_not_found"
    assert "has ended" in answer.error["message"]


def test_a_deadline_that_passes_in_the_queue(tmp_path: Path) -> None:
    async def work(session: aiohttp.ClientSession) -> Any:
        return await stream(session, made.url, chat("now", 8), headers={"X-Deadline-Ms": "50"})

    with rig(tmp_path) as made:
        made.start()
        answer = run(work)
    assert answer.status == 503 and answer.error["code"] == "deadline_exceeded"


def test_a_slow_client_does_not_fill_the_memory(tmp_path: Path) -> None:
    """A client that reads nothing of a long answer: the engine has to wait, and the gateway stays small."""
    with rig(tmp_path) as made:
        engine = made.fake("a")
        made.start()
        body = json.dumps(chat("long", 30_000)).encode()
        host, port = made.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65_536)
            client.sendall(
                b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)
            )
            before = made.gateway.rss_bytes() if made.gateway else 0

            async def work(session: aiohttp.ClientSession) -> int:
                last, same = -1, 0
                while same < 5:  # The engine has written all that it may.
                    found = (await get(session, f"{engine.address}/stats"))["written"]
                    same = same + 1 if found == last else 0
                    last = found
                    await asyncio.sleep(0.05)
                return last

            written = run(work)
            grown = (made.gateway.rss_bytes() if made.gateway else 0) - before
            assert written < 30_000, "the engine waits for the client"
            assert grown < 20e6, f"the gateway grew by {grown / 1e6:.0f} MB"
            client.settimeout(60)
            tail = b""
            while b"0\r\n\r\n" not in tail[-5:]:
                tail = tail[-64:] + client.recv(1 << 20)
        assert b"data: [DONE]" in tail


def connected(url: str, source: str = "127.0.0.1") -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), 60, (source, 0))


def end_of(each: socket.socket) -> bytes:
    got = b""
    with each, suppress(ConnectionError):  # it is reset if what it sent came too late
        while data := each.recv(65_536):
            got += data
    return got


def test_a_client_has_so_many_connections_and_bytes(tmp_path: Path) -> None:
    with rig(tmp_path) as made, ExitStack() as silent:
        made.start("--client-connections", "3", "--open-bytes", "100000")
        for _ in range(3):
            silent.enter_context(connected(made.url, "127.0.0.2"))
        refused = end_of(connected(made.url, "127.0.0.2"))
        assert refused.startswith(b"HTTP/1.1 503 ") and b"too_many_connections" in refused and b"Retry-After" in refused

        async def work(session: aiohttp.ClientSession) -> tuple[int, str]:
            async with session.post(made.url + CHAT, data=io.BytesIO(b"x" * 200_000)) as response:
                return response.status, (await response.json())["error"]["code"]

        assert run(work) == (503, "overloaded"), "the bodies of open requests have a largest size in all"


def test_no_client_stays_silent(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        made.start("--idle", "0.5")
        silent = [connected(made.url), connected(made.url)]
        with suppress(ConnectionError):  # its time may be over
            silent[0].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nX-Half: a hea")
        assert [end_of(each) for each in silent] == [b"", b""], "each is closed without an answer"


def test_a_thousand_streams_wait_for_their_next_token(tmp_path: Path) -> None:
    async def work(session: aiohttp.ClientSession) -> tuple[list[Any], float]:
        for each in made.processes[1:]:
            await post(session, f"{each.address}/fault", {"pause": True})
        asked = [asyncio.create_task(stream(session, made.url, chat(f"{i}", 3))) for i in range(1_000)]

        async def all_open() -> bool:
            found = [await get(session, f"{each.address}/stats") for each in made.processes[1:]]
            return sum(each["open"] for each in found) == 1_000

        await until(all_open, "1,000 open streams")
        assert made.gateway is not None
        cpu_s, began = made.gateway.cpu_s(), time.monotonic()
        await asyncio.sleep(0.5)
        idle = (made.gateway.cpu_s() - cpu_s) / (time.monotonic() - began)
        for each in made.processes[1:]:
            await post(session, f"{each.address}/fault", {})
        return await asyncio.gather(*asked), idle

    with rig(tmp_path) as made:
        made.fake("a")
        made.fake("b")
        made.start()
        answers, idle = run(work)
    for i, answer in enumerate(answers):
        assert answer.done and answer.text == expected(template([{"role": "user", "content": f"{i}"}]), 3)[0]
    assert idle < 0.5, "streams that wait cost no polling"


def test_no_prompt_is_in_the_log_unless_asked_for(tmp_path: Path) -> None:
    async def work(session: aiohttp.ClientSession) -> None:
        await stream(session, made.url, chat("a secret", 2))
        await stream(session, made.url, chat("a secret", 2) | {"n": "a secret"})

    for words, there in ((["--log-requests"], False), (["--log-prompts"], True)):
        folder = tmp_path / words[0]
        folder.mkdir()
        with rig(folder) as made:
            made.fake("a")
            made.start(*words)
            run(work)
        assert "tenant=default" in made.log()
        assert ("a secret" in made.log()) is there


def test_an_engine_that_quotes_a_prompt_puts_it_into_no_log(tmp_path: Path) -> None:
    async def work(session: aiohttp.ClientSession) -> Any:
        fault = {"error_after": 1, "error_text": "cannot parse: a secret"}
        async with session.post(engine.address + "/fault", json=fault):
            return await stream(session, made.url, chat("a secret", 8))

    with rig(tmp_path) as made:
        engine = made.fake("a")
        made.start("--resume", "0.05")
        answer = run(work)
    assert "cannot parse: a secret" in answer.error["message"]
    assert "says an error" in made.log() and "secret" not in made.log()
