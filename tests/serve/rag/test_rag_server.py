"""A knowledge base served with real and with failing engines: citations, streams, and answers that are not lost."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from engines_world import FLAGS
from rag_world import numbered

from cordee.serve.engines.port import EngineLaunch
from cordee.serve.policy.rag_forecast import MemoryPlan
from cordee.serve.rag.answer import Rag
from cordee.serve.rag.engine import EngineAddress, Generator, OwnEngine, Turnstile
from cordee.serve.rag.index import RagIndex
from cordee.serve.rag.retrieval import Retrieval, RetrievalSettings
from cordee.serve.rag.server import RagApp
from cordee.serve.rag.setup import RagOptions, running

Said = list[tuple[str, int | None, int | None, str]]
CHAT = "/v1/chat/completions"


@asynccontextmanager
async def listening(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def served(index: RagIndex, generator: Generator, said: Said) -> AsyncIterator[str]:
    size = 3 * max(each.size_bytes for each in index.catalog.partitions())
    say = lambda *change: said.append(change)  # noqa: E731
    rag = Rag(index, Retrieval(index, RetrievalSettings(size), say), generator)
    await rag.open()
    try:
        async with listening(RagApp(rag, "kb", top=2).app()) as url:
            yield url
    finally:
        await rag.close()


@asynccontextmanager
async def with_llama(
    index: RagIndex, model: Path, said: Said, slots: int = 2, context: int = 1024
) -> AsyncIterator[tuple[str, OwnEngine]]:
    launch = EngineLaunch(
        model=str(model), served_names=("tiny",), host="127.0.0.1", port=0, context=context, flags=dict(FLAGS)
    )
    own = OwnEngine(launch, slots, None, lambda *change: said.append(change))
    await own.start()
    try:
        generator = Generator(lambda: own.address, own, slots, lambda *change: said.append(change))
        async with served(index, generator, said) as url:
            yield url, own
    finally:
        await asyncio.to_thread(own.end)


def chat(question: str, **more: Any) -> dict[str, Any]:
    return {"model": "rag/kb", "messages": [{"role": "user", "content": question}], "temperature": 0, **more}


async def post(url: str, body: dict[str, Any], path: str = CHAT) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session, session.post(url + path, json=body) as answer:
        raw = await answer.read()
        return answer.status, raw if body.get("stream") else json.loads(raw)


def events(raw: bytes) -> list[dict[str, Any]]:
    assert raw.endswith(b"data: [DONE]\n\n"), raw[-300:]
    return [json.loads(each[6:]) for each in raw.split(b"\n\n") if each.startswith(b"data: {")]


def text_of(found: list[dict[str, Any]]) -> str:
    return "".join(each["choices"][0].get("delta", {}).get("content") or "" for each in found if each["choices"])


def test_a_chat_cites_what_it_was_given(tmp_path: Path, tiny_folder: Path) -> None:
    async def work() -> None:
        said: Said = []
        async with with_llama(numbered(tmp_path), tiny_folder / "tiny.gguf", said) as (url, _):
            status, whole = await post(url, chat("v 7", max_tokens=12))
            assert status == 200 and whole["model"] == "rag/kb", whole
            assert whole["citations"][0]["text"] == "passage v 7" and len(whole["citations"]) == 2
            assert whole["citations"][0]["score"] == pytest.approx(1, abs=1e-4) and "not_searched" not in whole
            usage = whole["usage"]
            assert usage["completion_tokens"] == 12 and usage["retrieval_us"] > 0 and usage["generation_us"] > 0
            _, raw = await post(url, chat("v 7", max_tokens=12, stream=True))
            found = events(raw)
            assert text_of(found) == whole["choices"][0]["message"]["content"]
            assert found[0]["citations"] == whole["citations"] and {each["id"] for each in found} == {found[0]["id"]}
            last = found[-1]
            assert last["choices"][0]["finish_reason"] == "length" and last["usage"]["completion_tokens"] == 12
            assert last["usage"]["retrieval_us"] > 0
            _, plain = await post(url, {"prompt": "v 3", "max_tokens": 3}, "/v1/completions")
            assert plain["citations"][0]["text"] == "passage v 3"
            _, none = await post(url, chat("v 7", max_tokens=2, rag={"top": 0}))
            assert none["citations"] == []
            for bad, says in (
                ({"messages": []}, "no message"),
                ({"messages": 3}, "a list"),
                (chat("a", rag=3), "`rag`"),
            ):
                status, refusal = await post(url, bad)
                assert status == 400 and says in refusal["error"]["message"]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"{url}/v1/models") as answer:
                    assert (await answer.json())["data"][0]["id"] == "rag/kb"
                async with session.get(f"{url}/metrics") as answer:
                    assert "\ncordee_rag_requests_total 4\n" in await answer.text()

    asyncio.run(work())


def test_passages_that_do_not_fit_are_left_out(tmp_path: Path, tiny_folder: Path) -> None:
    async def work() -> None:
        index = numbered(tmp_path)
        long = tmp_path / "long.txt"
        long.write_text(" ".join(f"word{number}" for number in range(90)) + " v 99")
        index.add([long])
        async with with_llama(index, tiny_folder / "tiny.gguf", []) as (url, _):
            status, found = await post(url, chat("v 99", max_tokens=4, rag={"top": 30}))
            assert status == 200 and 0 < len(found["citations"]) < 30, found
            status, refusal = await post(url, chat("long " * 2000 + "v 1", max_tokens=4))
            assert status == 400 and "context" in json.dumps(refusal)

    asyncio.run(work())


def test_a_killed_engine_is_started_again_and_its_answers_go_on(tmp_path: Path, tiny_folder: Path) -> None:
    async def work() -> None:
        said: Said = []
        async with with_llama(numbered(tmp_path), tiny_folder / "tiny.gguf", said, context=4096) as (url, own):
            _, undisturbed = await post(url, chat("v 5", max_tokens=3000, stream=True))
            async with (
                aiohttp.ClientSession() as session,
                session.post(url + CHAT, json=chat("v 5", max_tokens=3000, stream=True)) as answer,
            ):
                raw = b""
                while raw.count(b"data: ") < 20:
                    raw += await answer.content.readany()
                os.kill(own.pid, signal.SIGKILL)
                raw += await answer.read()
            assert text_of(events(raw)) == text_of(events(undisturbed))
        assert any(what == "slots" and (before, after) == (2, 1) for what, before, after, _ in said), said

    asyncio.run(work())


@pytest.mark.skipif(sys.platform != "linux", reason="RLIMIT_DATA counts mappings on Linux only")
def test_an_engine_that_may_not_have_its_cache_starts_with_fewer_slots(tmp_path: Path, tiny_folder: Path) -> None:
    async def work() -> None:
        said: Said = []
        launch = EngineLaunch(
            model=str(tiny_folder / "tiny.gguf"), served_names=("tiny",), host="127.0.0.1", port=0, context=32_768,
            flags=dict(FLAGS),
        )  # fmt: skip
        # A slot's cache of 32 bits: 2 x 2 layers x 2 heads x 16 x 4 B x 32,768 tokens = 16.8 MB.
        own = OwnEngine(launch, 64, 900_000_000, lambda *change: said.append(change))
        await own.start()
        try:
            assert 1 <= own.slots < 64 and said[0][:3] == ("slots", 64, 32), said
        finally:
            await asyncio.to_thread(own.end)

    asyncio.run(work())


class Fragile:
    """An engine that has no memory for more than so many answers at once, and says so."""

    def __init__(self, most: int) -> None:
        self.most, self.running, self.refused, self.answered = most, 0, 0, 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_post(CHAT, self.answer)
        return app

    async def answer(self, request: web.Request) -> web.Response:
        await request.read()
        if self.running >= self.most:
            self.refused += 1
            return web.json_response({"error": {"message": "failed to allocate: out of memory"}}, status=500)
        self.running += 1
        try:
            for _ in range(20):
                await asyncio.sleep(0)
        finally:
            self.running -= 1
        self.answered += 1
        choice = {"index": 0, "message": {"role": "assistant", "content": "yes"}, "finish_reason": "stop"}
        return web.json_response(
            {"id": "a", "choices": [choice], "usage": {"prompt_tokens": 5, "completion_tokens": 1}}
        )


def test_a_burst_meets_an_engine_without_memory_and_loses_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        said: Said = []
        engine = Fragile(3)
        async with listening(engine.app()) as address:
            generator = Generator(lambda: EngineAddress(address, "tiny"), None, 16, lambda *change: said.append(change))
            async with served(numbered(tmp_path), generator, said) as url:
                found = await asyncio.gather(*(post(url, chat(f"v {number % 40}")) for number in range(100)))
        assert [status for status, _ in found] == [200] * 100
        assert all(each["citations"][0]["text"] == f"passage v {at % 40}" for at, (_, each) in enumerate(found))
        assert engine.answered == 100 and engine.refused > 0
        steps = [(before, after) for what, before, after, _ in said if what == "at_once"]
        assert steps and all(after == before // 2 for before, after in steps if before and after)
        assert generator.turnstile.limit <= 16 // 4 and generator.turnstile.running == 0

    asyncio.run(work())


def test_a_turnstile_keeps_its_order_and_its_limit() -> None:
    async def work() -> None:
        turnstile, order, most = Turnstile(2), list[int](), 0

        async def one(number: int) -> None:
            nonlocal most
            async with turnstile.turn():
                most = max(most, turnstile.running)
                order.append(number)
                await asyncio.sleep(0)

        works = [asyncio.create_task(one(number)) for number in range(10)]
        await asyncio.sleep(0)
        works[5].cancel()
        turnstile.allow(1)
        await asyncio.gather(*works, return_exceptions=True)
        assert order == [0, 1, 2, 3, 4, 6, 7, 8, 9] and most == 2 and turnstile.running == 0

    asyncio.run(work())


def test_an_engine_is_run_from_options(tmp_path: Path, tiny_folder: Path) -> None:
    async def work() -> None:
        index, said = numbered(tmp_path), list[Any]()
        options = RagOptions(str(tiny_folder), slots=1, context=512, flags=dict(FLAGS), enforce=False)
        size = max(each.size_bytes for each in index.catalog.partitions())
        plan = MemoryPlan(1, 0, 3 * size, 0, 0.0, ())
        async with (
            running(index, options, plan, None, "kb", lambda *change: said.append(change)) as rag,
            listening(RagApp(rag, "kb").app()) as url,
        ):
            status, found = await post(url, chat("v 1", max_tokens=3))
            assert status == 200 and found["citations"]

    asyncio.run(work())
