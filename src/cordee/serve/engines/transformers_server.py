"""The OpenAI API around transformers' continuous batching: `python -m cordee.serve.engines.transformers_server`.

Completions and chats, streamed or whole, with the tokens of each event on request (`return_token_ids`); /tokenize as
vLLM's; /load for the wrapper. A prompt that is too long is refused, and a request whose client is gone is cancelled.
"""

import argparse
import asyncio
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import torch
from aiohttp import web
from transformers import AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

BODY_BYTES_MAX = 64 << 20
PAGE_TOKENS = 32
_UNSUPPORTED = ("tools", "functions", "response_format", "logprobs", "suffix", "echo", "logit_bias")


class RequestError(Exception):
    """A request that is refused with 400."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer: its tokens, their text, and the reason for the end if it is the last one."""

    ids: list[int]
    text: str
    finish: str | None = None


class TextOf:
    """The text of growing tokens: whole characters, and nothing that may become a stop word."""

    def __init__(self, tokenizer: Any, prompt: list[int], stops: list[str]) -> None:
        self._tokenizer, self._stops = tokenizer, stops
        self._ids = prompt[-6:]  # A tokenizer may write the same token differently at the start of a text.
        self._done = len(self._decode())
        self._pending: list[int] = []
        self._held = ""

    def _decode(self) -> str:
        return str(self._tokenizer.decode(self._ids, skip_special_tokens=True))

    def add(self, ids: list[int], *, last: bool) -> Piece:
        """Take tokens, and return those whose text is certain; `finish` is `stop` at a stop word."""
        self._ids += ids
        self._pending += ids
        text = self._decode()
        if text.endswith("\ufffd") and not last:
            return Piece([], "")
        self._held += text[self._done :]
        self._ids, whole = self._ids[-6:], len(text)
        self._done = len(self._decode()) if whole else 0
        found = [self._held.find(stop) for stop in self._stops if stop in self._held]
        if found:
            return Piece(self._pending, self._held[: min(found)], "stop")
        if not last and any(_overlap(self._held, stop) for stop in self._stops):
            return Piece([], "")
        piece = Piece(self._pending, self._held)
        self._pending, self._held = [], ""
        return piece


def _overlap(text: str, stop: str) -> bool:
    """Return whether the text ends with the beginning of a stop word."""
    return any(text.endswith(stop[:size]) for size in range(1, len(stop)))


class Server:
    """The model, its batches, and the requests that are open."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.names: list[str] = given.names.split(",") if given.names else [given.model]
        self.tokenizer = AutoTokenizer.from_pretrained(given.model)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        is_part = device == "cuda" and given.memory_fraction < 1
        if is_part:  # The other parts of the GPU are other replicas'.
            torch.cuda.set_per_process_memory_fraction(given.memory_fraction)
        model = AutoModelForCausalLM.from_pretrained(given.model, dtype=given.dtype).to(device)
        self.context = given.context or int(model.config.max_position_embeddings)
        self.vocab, self.slots = int(model.config.vocab_size), given.slots
        tokens = given.kv_tokens or (None if device == "cuda" else given.slots * self.context)
        sizes: dict[str, Any] = {"max_requests_per_batch": given.slots}
        if device == "cpu":
            sizes |= {"page_size": PAGE_TOKENS, "max_batch_tokens": 512}
        if is_part:
            sizes["max_memory_percent"] = _cache_fraction(given.memory_fraction)
        if tokens is not None:
            page = sizes.setdefault("page_size", PAGE_TOKENS)
            sizes["num_blocks"] = -(-tokens // page)
        eos = model.generation_config.eos_token_id
        # Values other than these make no processor, and a request could not set its own.
        sampling = GenerationConfig(do_sample=True, temperature=0.7, top_k=50, top_p=0.9, eos_token_id=eos)
        self.eos = {eos} if isinstance(eos, int) else set(eos or ())
        config = ContinuousBatchingConfig(per_request_processors=True, **sizes)
        self.manager = model.init_continuous_batching(generation_config=sampling, continuous_batching_config=config)
        self.open = self.tokens = 0

    # -- requests ------------------------------------------------------------------------------------------

    def prompt_ids(self, body: dict[str, Any], *, special: bool = True) -> list[int]:
        """Return the tokens of a request's prompt or messages."""
        if "messages" in body:
            if not isinstance(body["messages"], list):
                raise RequestError("messages must be a list")
            options = body.get("chat_template_kwargs") or {}
            found = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, **options)
            return [int(each) for each in (found if isinstance(found, list) else found["input_ids"])]
        prompt = body.get("prompt")
        if isinstance(prompt, list) and all(type(each) is int and 0 <= each < self.vocab for each in prompt):
            return prompt
        if not isinstance(prompt, str):
            raise RequestError("prompt must be a text or a list of tokens")
        return [int(each) for each in self.tokenizer(prompt, add_special_tokens=special)["input_ids"]]

    async def pieces(self, body: dict[str, Any], prompt: list[int], limit: int) -> AsyncIterator[Piece]:
        """Yield the pieces of an answer; the request is cancelled when the iterator is closed."""
        queue: asyncio.Queue[Any] = asyncio.Queue()
        name = uuid.uuid4().hex
        self.manager.register_result_handler(name, queue.put_nowait)
        stop = body.get("stop") or []
        text = TextOf(self.tokenizer, prompt, [stop] if isinstance(stop, str) else list(stop))
        self.open, seen = self.open + 1, 0
        try:
            self.manager.add_request(prompt, name, limit, streaming=True, **self._sampling(body))
            while True:
                output = await queue.get()
                if output.error:
                    raise RuntimeError(output.error)
                made, last = output.generated_tokens[seen:], output.is_finished()
                seen += len(made)
                self.tokens += len(made)
                piece = text.add(made, last=last)
                if last and piece.finish is None:
                    ends = bool(made) and made[-1] in self.eos
                    piece = Piece(piece.ids, piece.text, "stop" if ends else "length")
                if piece.ids or piece.finish:
                    yield piece
                if piece.finish is not None:
                    return
        finally:
            self.open -= 1
            self.manager.cancel_request(name)

    def _sampling(self, body: dict[str, Any]) -> dict[str, Any]:
        temperature = body.get("temperature", 1.0)
        if temperature is None or temperature > 0:
            top_k = body.get("top_k") or self.vocab
            top_k = top_k if 0 < top_k <= self.vocab else self.vocab
            return {"temperature": float(temperature or 1.0), "top_k": top_k, "top_p": float(body.get("top_p") or 1.0)}
        return {"temperature": 1.0, "top_k": 1, "top_p": 1.0}

    # -- routes --------------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        """Answer 200 while the batches run."""
        running = self.manager.is_running() and self.manager.background_thread_status.fatal_error is None
        return web.json_response({"status": "ok" if running else "failed"}, status=200 if running else 503)

    async def load(self, request: web.Request) -> web.Response:
        """Answer with open requests, tokens made so far, and sizes."""
        config = self.manager.continuous_batching_config
        kv_tokens = config.num_blocks * config.page_size if config.num_blocks else None
        sizes = {"kv_tokens": kv_tokens, "slots": self.slots, "context": self.context}
        return web.json_response({"open": self.open, "tokens": self.tokens, **sizes})

    async def models(self, request: web.Request) -> web.Response:
        """Answer with the names of the model."""
        data = [{"id": name, "object": "model", "owned_by": "transformers"} for name in self.names]
        return web.json_response({"object": "list", "data": data})

    async def tokenize(self, request: web.Request) -> web.Response:
        """Answer with the tokens of a prompt or of messages."""
        body = await _body(request)
        ids = self.prompt_ids(body, special=bool(body.get("add_special_tokens", True)))
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": self.context})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer a completion or a chat."""
        body = await _body(request)
        given = [key for key in _UNSUPPORTED if body.get(key)] + (["n"] if body.get("n") not in (None, 1) else [])
        if given:
            raise RequestError(f"{', '.join(given)}: this engine has no such thing; hint: use engine: vllm")
        prompt = self.prompt_ids(body)
        left = self.context - len(prompt)
        if left < 1 or not prompt:
            raise RequestError(f"the prompt has {len(prompt)} tokens, and the context is of {self.context}")
        default = left if request.path.endswith("chat/completions") else 16
        wanted = body.get("max_completion_tokens") or body.get("max_tokens") or default
        answer = _Answer(request.path, body, self.names[0], prompt)
        pieces = self.pieces(body, prompt, min(int(wanted), left))
        if not body.get("stream"):
            return web.json_response(answer.whole([piece async for piece in pieces]))
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for chunk in answer.opening():
            await response.write(chunk)
        async for piece in pieces:
            await response.write(answer.event(piece))
        for chunk in answer.closing():
            await response.write(chunk)
        return response


class _Answer:
    """The JSON of an answer, whole or in events."""

    def __init__(self, path: str, body: dict[str, Any], model: str, prompt: list[int]) -> None:
        self._chat = path.endswith("chat/completions")
        self._prompt, self._made, self._body = prompt, 0, body
        self._same = {
            "id": f"{'chatcmpl' if self._chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.get("model") or model,
        }

    def _usage(self) -> dict[str, int]:
        prompt = len(self._prompt)
        return {"prompt_tokens": prompt, "completion_tokens": self._made, "total_tokens": prompt + self._made}

    def whole(self, pieces: list[Piece]) -> dict[str, Any]:
        """Return the answer to a request that is not streamed."""
        self._made = sum(len(piece.ids) for piece in pieces)
        text = "".join(piece.text for piece in pieces)
        choice: dict[str, Any] = {"index": 0, "finish_reason": pieces[-1].finish}
        choice |= {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
        if self._body.get("return_token_ids"):
            choice["token_ids"] = [each for piece in pieces for each in piece.ids]
        kind = "chat.completion" if self._chat else "text_completion"
        return {**self._same, "object": kind, "choices": [choice], "usage": self._usage()}

    def opening(self) -> list[bytes]:
        """Return the events before the first token."""
        first: dict[str, Any] = {"prompt_token_ids": self._prompt} if self._body.get("return_token_ids") else {}
        empty: dict[str, Any] = {"index": 0, "finish_reason": None}
        if self._chat:
            return [self._chunk([{**empty, "delta": {"role": "assistant", "content": ""}}], **first)]
        return [self._chunk([{**empty, "text": ""}], **first)] if first else []

    def event(self, piece: Piece) -> bytes:
        """Return the event of a piece."""
        self._made += len(piece.ids)
        delta = {"delta": {"content": piece.text} if piece.text else {}} if self._chat else {"text": piece.text}
        choice: dict[str, Any] = {"index": 0, **delta, "logprobs": None, "finish_reason": piece.finish}
        if self._body.get("return_token_ids"):
            choice["token_ids"] = piece.ids
        return self._chunk([choice])

    def closing(self) -> list[bytes]:
        """Return the events after the last token."""
        wants = (self._body.get("stream_options") or {}).get("include_usage")
        return [*([self._chunk([], usage=self._usage())] if wants else []), b"data: [DONE]\n\n"]

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._chat else "text_completion"
        chunk = {**self._same, "object": kind, "choices": choices, **more}
        return b"data: " + json.dumps(chunk, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise RequestError("the body is not a JSON object")
    return body


def _cache_fraction(part: float) -> float:
    """Return the fraction of the memory that this process does not hold that makes a cache within its part."""
    total, held = torch.cuda.get_device_properties(0).total_memory, torch.cuda.memory_reserved()
    return float(max(0.0, 0.8 * (part * total - held) / (total - held)))


@web.middleware
async def _errors(request: web.Request, handler: Any) -> web.StreamResponse:
    try:
        response: web.StreamResponse = await handler(request)
        return response
    except (RequestError, TypeError) as error:
        facts = {"message": str(error), "type": "invalid_request_error", "code": 400}
        return web.json_response({"error": facts}, status=400)


def main(argv: list[str]) -> None:
    """Serve until SIGTERM."""
    parser = argparse.ArgumentParser(prog="transformers_server", allow_abbrev=False)
    for name, kind, default in (
        ("model", str, None),
        ("names", str, ""),
        ("host", str, "127.0.0.1"),
        ("port", int, 8000),
        ("context", int, 0),
        ("slots", int, 16),
        ("kv-tokens", int, 0),
        ("memory-fraction", float, 1.0),
        ("dtype", str, "auto"),
    ):
        parser.add_argument(f"--{name}", type=kind, default=default, required=name == "model")
    given = parser.parse_args(argv)
    server = Server(given)
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_errors])
    app.add_routes(
        [
            web.get("/health", server.health),
            web.get("/load", server.load),
            web.get("/v1/models", server.models),
            web.post("/tokenize", server.tokenize),
            web.post("/v1/completions", server.generate),
            web.post("/v1/chat/completions", server.generate),
        ]
    )
    server.manager.start()
    web.run_app(app, host=given.host, port=given.port, print=None, handler_cancellation=True, shutdown_timeout=0.5)
    server.manager.stop(block=False)


if __name__ == "__main__":
    main(sys.argv[1:])
