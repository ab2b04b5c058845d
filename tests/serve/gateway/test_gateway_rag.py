"""A knowledge base behind the gateway: model rag/NAME, citations, and the times of both its parts in the account."""

import asyncio
import hashlib
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from engines_world import FLAGS
from gateway_rig import Rig, chat, rig, stream, until

sys.path.insert(0, str(Path(__file__).parents[1] / "rag"))

from rag_world import numbered

from cordee.serve.policy.rag_forecast import MemoryPlan
from cordee.serve.rag.server import RagApp
from cordee.serve.rag.setup import RagOptions, running

KEY = "sk-rag"


@asynccontextmanager
async def knowledge_base(folder: Path, model: Path) -> AsyncIterator[str]:
    index = numbered(folder)
    options = RagOptions(str(model), slots=2, context=1024, flags=dict(FLAGS), enforce=False)
    size = max(each.size_bytes for each in index.catalog.partitions())
    async with running(index, options, MemoryPlan(2, 0, 3 * size, 0, 0.0, ()), None, "kb", lambda *change: None) as rag:
        runner = web.AppRunner(RagApp(rag, "kb", top=2).app(), shutdown_timeout=1.0)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()


def start(made: Rig, address: str) -> str:
    del made.routes.services["chat"]
    made.routes.service("kb", models=["rag/kb"], context=1_024)
    made.routes.endpoint("kb-a.1", address, "kb", engine="command", model="rag/kb", slots=8)
    key = {"hash": hashlib.sha256(KEY.encode()).hexdigest(), "id": "k1", "tenant": "acme", "models": ["kb"]}
    made.routes.more = {"tenants": [{"name": "acme"}], "keys": [key]}
    return made.start()


def test_a_tenant_asks_a_knowledge_base_through_the_gateway(tmp_path: Path, tiny_folder: Path) -> None:
    who = {"Authorization": f"Bearer {KEY}"}

    async def work(made: Rig) -> tuple[Any, Any, Any]:
        async with knowledge_base(tmp_path, tiny_folder / "tiny.gguf") as address, aiohttp.ClientSession() as session:
            url = await asyncio.to_thread(start, made, address)

            async def listed() -> bool:
                async with session.get(f"{url}/v1/models", headers=who) as answer:
                    return any(each["id"] == "rag/kb" for each in (await answer.json()).get("data", ()))

            await until(listed, "the model rag/kb")
            body = chat("v 7", 8, stream=False, model="rag/kb")
            async with session.post(f"{url}/v1/chat/completions", json=body, headers=who) as answer:
                whole = await answer.json()
            streamed = await stream(session, url, chat("v 7", 8, model="rag/kb"), headers=who)
            async with session.post(f"{url}/v1/chat/completions", json=body) as answer:
                stranger = answer.status
            return whole, streamed, stranger

    with rig(tmp_path) as made:
        whole, streamed, stranger = asyncio.run(work(made))
        rows = [each for each in made.usage() if each["tenant"]]
    assert whole["citations"][0]["text"] == "passage v 7" and stranger == 401
    assert streamed.done and streamed.text == whole["choices"][0]["message"]["content"]
    assert streamed.usage is not None and streamed.usage["completion_tokens"] == 8
    assert [(each["tenant"], each["model"], each["output_tokens"]) for each in rows] == [("acme", "rag/kb", 8)] * 2
    for row, usage in zip(rows, (whole["usage"], streamed.usage), strict=True):
        assert row["retrieval_us"] == usage["retrieval_us"] > 0 and row["generation_us"] == usage["generation_us"] > 0


def test_another_name_is_no_model(tmp_path: Path) -> None:
    with rig(tmp_path) as made:
        url = start(made, "http://127.0.0.1:9")

        async def work() -> int:
            async with aiohttp.ClientSession() as session:
                headers = {"Authorization": f"Bearer {KEY}"}

                async def routed() -> bool:
                    async with session.get(f"{url}/health") as answer:
                        return answer.status == 200

                await until(routed, "the routes")
                return (await stream(session, url, chat("a", model="rag/none"), headers=headers)).status

        assert asyncio.run(work()) == 404
