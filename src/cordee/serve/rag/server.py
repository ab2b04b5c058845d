"""The OpenAI API of a knowledge base: chats and completions with citations, as streams and as documents.

It is an engine like any other to the gateway before it, which has keys, tenants, limits and the account.
"""

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any

from aiohttp import web

from cordee.errors import InputError
from cordee.serve.engines.openai import CHAT, COMPLETIONS, DONE
from cordee.serve.rag.answer import Asked, Rag, citations
from cordee.serve.rag.engine import EngineFailed, EngineRefused

TOP, TOP_MAX = 5, 100
BODY_BYTES = 10_000_000
COMMENT, COMMENT_S = b": searching\n\n", 2.0
"""What a stream says while its passages are searched, so that its connection stays open."""


class RagApp:
    """Answers requests."""

    def __init__(self, rag: Rag, name: str, top: int = TOP) -> None:
        self._rag, self._name, self._top = rag, f"rag/{name}", top
        self._requests = self._failed = 0
        self._seconds = {"wait": 0.0, "retrieval": 0.0, "generation": 0.0}

    def app(self) -> web.Application:
        """Return the application."""
        app = web.Application(client_max_size=BODY_BYTES)
        app.router.add_post(CHAT, self._answer)
        app.router.add_post(COMPLETIONS, self._answer)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        return app

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        try:
            asked = self._read(request.path, await request.read())
        except ValueError as error:
            return _refusal(400, str(error), "invalid_request_error")
        self._requests += 1
        try:
            if asked.body.get("stream"):
                return await self._stream(request, asked)
            await self._rag.look_up(asked)
            answer = await self._rag.whole(asked)
            answer |= {"model": self._name, **self._sources(asked)}
            answer["usage"] = {**answer.get("usage", {}), **_times(asked)}
            return web.json_response(answer)
        except EngineRefused as error:
            return web.Response(body=error.body, status=error.status, content_type="application/json")
        except (EngineFailed, InputError) as error:
            self._failed += 1
            what = "the engine failed" if isinstance(error, EngineFailed) else "the question has no vector"
            return _refusal(502, f"{what}: {error}", "server_error")
        finally:
            self._count(asked)

    def _read(self, path: str, raw: bytes) -> Asked:
        """Return a request.

        Raises:
            ValueError: it is malformed.
        """
        body = json.loads(raw)
        if not isinstance(body, dict):
            raise ValueError("the body is not a JSON object")
        if path == CHAT:
            messages = body.get("messages")
            if not isinstance(messages, list) or not all(
                isinstance(each, dict) and "role" in each for each in messages
            ):
                raise ValueError("`messages` has to be a list of objects with a `role`")
            if not any(each["role"] == "user" for each in messages):
                raise ValueError("`messages` has no message of the user, whose text is searched for")
        elif not isinstance(body.get("prompt"), str):
            raise ValueError("`prompt` has to be a text, since it is searched for")
        given = body.get("rag") or {}
        top = given.get("top", self._top) if isinstance(given, dict) else None
        if not isinstance(top, int) or isinstance(top, bool) or not 0 <= top <= TOP_MAX:
            raise ValueError(f"`rag` has to be an object whose `top` is between 0 and {TOP_MAX}, not {given!r}")
        return Asked(path, body, top)

    async def _stream(self, request: web.Request, asked: Asked) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        looking = asyncio.create_task(self._rag.look_up(asked))
        try:
            # The head of the answer is sent at once, so a refusal by the engine comes as an event.
            await response.prepare(request)
            while not looking.done():
                await asyncio.wait((looking,), timeout=COMMENT_S)
                if not looking.done():
                    await response.write(COMMENT)
            looking.result()
            async for event in self._events(asked):
                await response.write(event)
        except (EngineFailed, EngineRefused, InputError) as error:
            self._failed += 1
            said = {"error": {"message": str(error), "type": "server_error", "code": "engine_failed"}}
            await response.write(_event(said))
        finally:
            looking.cancel()
        await response.write_eof()
        return response

    async def _events(self, asked: Asked) -> AsyncIterator[bytes]:
        """Yield the engine's events under our name: sources in the first one, what was used in the last one."""
        same = {"id": f"rag-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._name}
        options = asked.body.get("stream_options")
        asked.body = {**asked.body, "stream_options": {"include_usage": True}}
        last: dict[str, Any] | None = None
        usage: dict[str, Any] = {}
        first, rest = True, b""
        async for data in self._rag.stream(asked):
            *events, rest = (rest + data).split(b"\n\n")
            for event in events:
                if not event.startswith(b"data: {"):
                    continue
                chunk = json.loads(event[6:]) | same
                usage = chunk.pop("usage", None) or usage
                if first:
                    chunk, first = chunk | self._sources(asked), False
                choices = chunk.get("choices") or []
                if any(choice.get("finish_reason") for choice in choices):
                    if last is not None:
                        yield _event(last)
                    last = chunk
                elif choices:
                    yield _event(chunk)
        if last is not None:
            # In the event that ends the text, and not in one without a choice, which few clients expect unasked.
            used = {**usage, **_times(asked)}
            yield _event({**last, "usage": used})
            if isinstance(options, dict) and options.get("include_usage"):
                yield _event({**last, "choices": [], "usage": used})
        yield DONE

    def _sources(self, asked: Asked) -> dict[str, Any]:
        assert asked.found is not None, "it was retrieved"
        missing = [{"name": each.name, "why": each.why} for each in asked.found.not_searched]
        return {"citations": citations(asked.passages), **({"not_searched": missing} if missing else {})}

    def _count(self, asked: Asked) -> None:
        if asked.found is not None:
            for name, seconds in (
                ("wait", asked.wait_s), ("retrieval", asked.found.retrieval_s), ("generation", asked.generation_s)
            ):  # fmt: skip
                self._seconds[name] += seconds

    async def _models(self, request: web.Request) -> web.Response:
        documents, chunks = await asyncio.to_thread(self._rag.index.catalog.counts)
        model = {"id": self._name, "object": "model", "created": 0, "owned_by": "cordee"}
        return web.json_response({"object": "list", "data": [model | {"documents": documents, "chunks": chunks}]})

    async def _health(self, request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        retrieval, turnstile = self._rag.retrieval, self._rag.generator.turnstile
        memory = retrieval.memory
        counters = {"requests": self._requests, "requests_failed": self._failed, "partition_loads": memory.loads,
                    "partition_load_bytes": memory.load_bytes}  # fmt: skip
        gauges = {"retrieval_backlog": retrieval.backlog, "generation_backlog": turnstile.waiting,
                  "generation_running": turnstile.running, "generation_at_once": turnstile.limit,
                  "partition_bytes": memory.held_bytes, "partition_limit_bytes": memory.limit_bytes,
                  "partitions_damaged": len(memory.damaged)}  # fmt: skip
        lines = [
            f"# TYPE cordee_rag_{name}_total counter\ncordee_rag_{name}_total {value}"
            for name, value in counters.items()
        ]
        lines += [f"# TYPE cordee_rag_{name} gauge\ncordee_rag_{name} {value}" for name, value in gauges.items()]
        lines.append("# TYPE cordee_rag_seconds_total counter")
        lines += [f'cordee_rag_seconds_total{{part="{name}"}} {value:.6f}' for name, value in self._seconds.items()]
        return web.Response(text="\n".join(lines) + "\n", content_type="text/plain")


def _times(asked: Asked) -> dict[str, int]:
    """Return what the account has beside the tokens."""
    assert asked.found is not None, "it was retrieved"
    return {
        "retrieval_us": round(asked.found.retrieval_s * 1e6),
        "generation_us": round(asked.generation_s * 1e6),
        "wait_us": round(asked.wait_s * 1e6),
    }


def _event(chunk: Mapping[str, Any]) -> bytes:
    return b"data: " + json.dumps(chunk, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


def _refusal(status: int, message: str, kind: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": kind, "code": None, "param": None}}, status=status)
