"""A fake engine: fast, deterministic, with faults on command. It stands in for llama.cpp where only its HTTP matters.

The next token is a pure function of all tokens before it, so an answer that lost, doubled or changed one differs in all
that follows. It speaks llama.cpp's dialect: chat, completions, embeddings, /apply-template, /tokenize, /completion.

    python fake_engine.py PORT [--interval-ms 10] [--slots N]

`POST /fault {...}` sets faults, `GET /stats` tells what is open and how many clients went away.
"""

import argparse
import asyncio
import json
import re
import zlib
from array import array

import httptools
import uvloop

VOCABULARY = 10_000
STOP = 7
"""The token that ends an answer, one in 2,000."""
_WORDS = re.compile(r" w(\d+)|(.)", re.DOTALL)


def tokenize(text: str) -> list[int]:
    return [int(word) if word else VOCABULARY + ord(char) for word, char in _WORDS.findall(text)]


def state_of(ids: list[int]) -> int:
    return zlib.crc32(array("q", ids).tobytes())


def next_state(state: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(8, "little"), state)


def token_of(state: int) -> int:
    return STOP if state % 2_003 == 0 else 10 + state % (VOCABULARY - 10)


def template(messages: list[dict[str, str]]) -> str:
    return "".join(f"<{each['role']}>{each['content']}" for each in messages) + "<assistant>"


def expected(prompt: str, limit: int) -> tuple[str, str, int]:
    """Return text, finish reason and number of tokens of the answer to a prompt."""
    state, words = state_of(tokenize(prompt)), []
    while len(words) < limit:
        token = token_of(state)
        if token == STOP:
            return "".join(words), "stop", len(words)
        words.append(f" w{token}")
        state = next_state(state, token)
    return "".join(words), "length", len(words)


class Engine:
    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.fault: dict[str, float | bool] = {}
        self.open: set[Connection] = set()
        self.requests = self.cancelled = self.written = 0
        self.number = 0


class Connection(asyncio.Protocol):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.parser = httptools.HttpRequestParser(self)
        self.task: asyncio.Task[None] | None = None
        self.body = b""
        self.url = b""
        self.room = asyncio.Event()
        self.room.set()

    def pause_writing(self) -> None:
        self.room.clear()

    def resume_writing(self) -> None:
        self.room.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        self.engine.open.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.engine.open.discard(self)
        if self.task is not None and not self.task.done():
            self.engine.cancelled += 1
            self.task.cancel()

    def data_received(self, data: bytes) -> None:
        self.parser.feed_data(data)

    def on_message_begin(self) -> None:
        self.body = self.url = b""

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.task = asyncio.get_running_loop().create_task(self.answer(self.url.decode(), self.body))

    def send(self, status: int, document: object) -> None:
        body = json.dumps(document, separators=(",", ":")).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self.transport.write(head.encode() + body)

    async def answer(self, path: str, raw: bytes) -> None:
        engine, fault = self.engine, self.engine.fault
        if path == "/fault":
            engine.fault = json.loads(raw)
            if engine.fault.get("cut"):
                for each in engine.open - {self}:
                    each.transport.abort()
            return self.send(200, {})
        if path == "/stats":
            busy = [each for each in engine.open - {self} if each.task is not None and not each.task.done()]
            counts = {"requests": engine.requests, "cancelled": engine.cancelled, "written": engine.written}
            return self.send(200, {"open": len(busy), **counts})
        if fault.get("silent"):
            await asyncio.sleep(3600)
        if path == "/health":
            status = int(fault.get("health", 200))
            return self.send(status, {"status": "ok" if status == 200 else "error"})
        if fault.get("garbage"):
            self.transport.write(b"\x00\x01 this is not HTTP\r\n\r\n")
            return None
        if fault.get("lie"):
            return self.send(500, {"error": {"message": "out of memory", "type": "server_error", "code": 500}})
        body = json.loads(raw or b"{}")
        if path == "/apply-template":
            return self.send(200, {"prompt": template(body["messages"])})
        if path == "/tokenize":
            return self.send(200, {"tokens": tokenize(body["content"])})
        if path == "/v1/models":
            return self.send(200, {"object": "list", "data": [{"id": "tiny", "object": "model"}]})
        if path not in ("/v1/embeddings", "/v1/chat/completions", "/v1/completions", "/completion"):
            return self.send(404, {"error": {"message": f"there is no {path}", "type": "not_found", "code": 404}})
        engine.requests += 1
        if path == "/v1/embeddings":
            return self.send(200, self.embedding(body))
        prompt = template(body["messages"]) if "messages" in body else body.get("prompt", "")
        ids = prompt if isinstance(prompt, list) else tokenize(prompt[:40_000])
        limit = body.get("max_tokens") or body.get("n_predict") or 64
        if len(ids) + limit > 32_768:
            error = {
                "message": f"{len(ids)} tokens exceed the context",
                "type": "exceed_context_size_error",
                "code": 400,
            }
            return self.send(400, {"error": error})
        return await self.generate(path, body, ids, limit)

    def embedding(self, body: dict[str, object]) -> object:
        inputs = body["input"] if isinstance(body["input"], list) else [body["input"]]
        data = [
            {"object": "embedding", "index": i, "embedding": [len(str(each)), 1.0]} for i, each in enumerate(inputs)
        ]
        usage = {"prompt_tokens": sum(len(tokenize(str(each))) for each in inputs), "total_tokens": 0}
        return {"object": "list", "model": "fake", "data": data, "usage": usage}

    async def generate(self, path: str, body: dict[str, object], ids: list[int], limit: int) -> None:
        engine = self.engine
        engine.number += 1
        frame = f'"created":1,"id":"chatcmpl-{engine.number}","model":"{body.get("model", "")}"'
        shape = {"/v1/chat/completions": Chat, "/v1/completions": Text, "/completion": Own}[path](frame, body, ids)
        state, count, finish = state_of(ids), 0, "length"
        loop = asyncio.get_running_loop()
        at = loop.time()
        stream = bool(body.get("stream"))
        text = ""
        if stream:
            self.transport.write(
                b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
            )
            self.event(shape.begin())
        while count < limit:
            token = token_of(state)
            if token == STOP:
                finish = "stop"
                break
            fault = engine.fault
            at += fault.get("interval_ms", engine.interval_s * 1e3) / 1e3
            if engine.interval_s or fault:
                await asyncio.sleep(max(0.0, at - loop.time()))
            if engine.fault.get("stuck"):
                await asyncio.sleep(3600)
            while count and (engine.fault.get("pause") or engine.fault.get("hold_at") == count):
                await asyncio.sleep(0.02)
            await self.room.wait()
            engine.written += 1
            count += 1
            state = next_state(state, token)
            if stream:
                self.event(shape.token(token, count))
            else:
                text += f" w{token}"
            if count == engine.fault.get("cut_after"):
                self.transport.abort()
                return
            if count == engine.fault.get("done_after"):
                self.transport.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
                return
            if count == engine.fault.get("error_after"):
                message = json.dumps(engine.fault.get("error_text", "out of memory"))
                self.event(f'data: {{"error":{{"code":500,"message":{message},"type":"server_error"}}}}\n\n')
                self.transport.write(b"0\r\n\r\n")
                return
        usage = {"completion_tokens": count, "prompt_tokens": len(ids), "total_tokens": len(ids) + count,
                 "prompt_tokens_details": {"cached_tokens": 0}}  # fmt: skip
        if stream:
            self.event(shape.end(finish, usage))
            self.transport.write(b"0\r\n\r\n")
        else:
            self.send(200, shape.whole(text, finish, usage))

    def event(self, text: str) -> None:
        data = text.encode()
        if data:
            self.transport.write(b"%x\r\n%b\r\n" % (len(data), data))


def _logprobs(token: int) -> str:
    letters = ",".join(str(byte) for byte in f" w{token}".encode())
    one = f'{{"id":{token},"token":" w{token}","bytes":[{letters}],"prob":1.0'
    return f'{one},"top_probs":[{one}}}]}}'


class Chat:
    def __init__(self, frame: str, body: dict[str, object], ids: list[int]) -> None:
        self.frame, self.body, self.ids = frame, body, ids
        self.options = body.get("stream_options") or {}

    def begin(self) -> str:
        return self.chunk('"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}')

    def token(self, token: int, count: int) -> str:
        probs = f',"logprobs":{{"content":[{_logprobs(token)}]}}' if self.body.get("logprobs") else ""
        return self.chunk(
            f'"finish_reason":null,"index":0,"delta":{{"content":" w{token}"}}{probs}', self.timings(count)
        )

    def timings(self, count: int) -> str:
        if not self.body.get("timings_per_token"):
            return ""
        return (
            f',"timings":{{"cache_n":0,"prompt_n":{len(self.ids)},"prompt_ms":5.918,"prompt_per_token_ms":0.348117,'
            f'"prompt_per_second":2872.592091922947,"predicted_n":{count},"predicted_ms":1.15,'
            f'"predicted_per_token_ms":0.575,"predicted_per_second":1739.1304347826087}}'
        )

    def chunk(self, choice: str, more: str = "") -> str:
        return f'data: {{"choices":[{{{choice}}}],{self.frame},"object":"chat.completion.chunk"{more}}}\n\n'

    def end(self, finish: str, usage: dict[str, object]) -> str:
        last = self.chunk(f'"finish_reason":"{finish}","index":0,"delta":{{}}')
        if self.options.get("include_usage"):
            usage_text = json.dumps(usage, separators=(",", ":"))
            last += f'data: {{"choices":[],{self.frame},"object":"chat.completion.chunk","usage":{usage_text}}}\n\n'
        return last + "data: [DONE]\n\n"

    def whole(self, text: str, finish: str, usage: dict[str, object]) -> object:
        message = {"role": "assistant", "content": text}
        return {"choices": [{"finish_reason": finish, "index": 0, "message": message}], "id": "chatcmpl-1",
                "object": "chat.completion", "model": "fake", "created": 1, "usage": usage}  # fmt: skip


class Text(Chat):
    def begin(self) -> str:
        return ""

    def token(self, token: int, count: int) -> str:
        probs = f'{{"content":[{_logprobs(token)}]}}' if self.body.get("logprobs") else "null"
        text = f'"text":" w{token}","index":0,"logprobs":{probs},"finish_reason":null'
        return self.chunk(text, self.timings(count))

    def chunk(self, choice: str, more: str = "") -> str:
        return f'data: {{"choices":[{{{choice}}}],{self.frame},"object":"text_completion"{more}}}\n\n'

    def end(self, finish: str, usage: dict[str, object]) -> str:
        usage_text = json.dumps(usage, separators=(",", ":"))
        choice = f'"text":"","index":0,"logprobs":null,"finish_reason":"{finish}"'
        return f'data: {{"choices":[{{{choice}}}],{self.frame},"usage":{usage_text}}}\n\ndata: [DONE]\n\n'

    def whole(self, text: str, finish: str, usage: dict[str, object]) -> object:
        return {"choices": [{"finish_reason": finish, "index": 0, "text": text}], "id": "cmpl-1",
                "object": "text_completion", "model": "fake", "created": 1, "usage": usage}  # fmt: skip


class Own(Chat):
    """llama.cpp's own /completion."""

    def begin(self) -> str:
        return ""

    def token(self, token: int, count: int) -> str:
        return (
            f'data: {{"index":0,"content":" w{token}","tokens":[{token}],"stop":false,"id_slot":-1,'
            f'"tokens_predicted":{count},"tokens_evaluated":{len(self.ids)}}}\n\n'
        )

    def end(self, finish: str, usage: dict[str, object]) -> str:
        last = {"index": 0, "content": "", "tokens": [], "id_slot": 1, "stop": True,
                "tokens_predicted": usage["completion_tokens"], "tokens_evaluated": len(self.ids),
                "stop_type": "limit" if finish == "length" else "eos", "timings": {"cache_n": 0}}  # fmt: skip
        return f"data: {json.dumps(last, separators=(',', ':'))}\n\n"


async def serve(port: int, interval_s: float) -> None:
    engine = Engine(interval_s)
    server = await asyncio.get_running_loop().create_server(
        lambda: Connection(engine), "127.0.0.1", port, backlog=4096, reuse_address=True
    )
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("port", type=int)
    parser.add_argument("--interval-ms", type=float, default=0.0)
    given = parser.parse_args()
    uvloop.run(serve(given.port, given.interval_ms / 1e3))
