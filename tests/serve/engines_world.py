"""Real engines for tests: start one, ask it, and follow a stream that goes from replica to replica."""

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import psutil

from cordee.demo import tiny_model
from cordee.serve.engines.llama_cpp import LlamaCpp
from cordee.serve.engines.port import Dialect, EngineCommand, EngineLaunch, Stream, Upstream
from cordee.telemetry.host import free_port

CONTEXT, SLOTS = 2048, 4
FLAGS = tiny_model.FLAGS
TOOL = {
    "type": "function",
    "function": {
        "name": "forecast",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 300}},
            "required": ["city"],
        },
    },
}
CALLS_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{% if message['content'] %}{{ message['content'] }}{% endif %}"
    "{% for call in message['tool_calls'] or [] %}"
    '#{"name": "{{ call["function"]["name"] }}", "arguments": {{ call["function"]["arguments"] | tojson }}}#'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The tiny model's template with calls of tools: one begins with a `#`, which a logit bias makes it write."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "string", "minLength": 200}}, "required": ["a"]}
PARSED: dict[str, dict[str, Any]] = {
    "tools": {"tools": [TOOL], "tool_choice": "required", "logit_bias": [["#", 100.0]]},
    "schema": {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
    "choices": {"n": 2, "temperature": 1.0, "seed": 7},
    "texts": {"n": 2, "temperature": 1.0, "seed": 7},
    "logprobs": {"logprobs": True, "top_logprobs": 2},
}
"""Requests whose answer no engine enters in its middle."""


@dataclass(frozen=True)
class RunningEngine:
    """An engine's process and its port."""

    process: subprocess.Popen[bytes]
    port: int

    def ask(self, path: str, body: Mapping[str, object] | None = None) -> tuple[int, bytes]:
        """Return status and body of an answer: of a POST with a body, of a GET without."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def call(self, upstream: Upstream) -> bytes:
        """Return the answer of a request that must succeed."""
        status, answer = self.ask(upstream.path, upstream.body)
        assert status == 200, answer
        return answer

    def events(self, upstream: Upstream) -> Iterator[bytes]:
        """Yield the bytes of a streamed answer as they come; the request is cancelled when the iterator is closed."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("POST", upstream.path, json.dumps(upstream.body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            while data := answer.read1(65_536):
                yield data
        finally:
            connection.close()

    @property
    def is_healthy(self) -> bool:
        """Return whether it accepts requests."""
        assert self.process.poll() is None, f"the engine exited with {self.process.returncode}"
        try:
            return self.ask("/health")[0] == 200
        except OSError:
            return False


def until(holds: Callable[[], object], what: str, limit_s: float = 60) -> None:
    """Wait until something holds."""
    end_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end_s, f"not within {limit_s:g} s: {what}"
        time.sleep(0.02)


def until_ended(home: Path) -> None:
    """Wait until no process of a home is left: its server ends before its gateway does."""

    def ended() -> bool:
        running = psutil.process_iter(["cmdline"])
        return not any(str(home) in word for each in running for word in each.info["cmdline"] or ())

    until(ended, f"what {home} started has ended")


@contextmanager
def running(command: EngineCommand, port: int, *, wait_s: float = 60) -> Iterator[RunningEngine]:
    """Run an engine until the block ends; it accepts requests when the block begins."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **command.env}
    process = subprocess.Popen(command.argv, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        engine = RunningEngine(process, port)
        until(lambda: engine.is_healthy, "the engine accepts requests", wait_s)
        yield engine
    finally:
        process.kill()
        process.wait()


@contextmanager
def running_llama(model: Path, slots: Path) -> Iterator[RunningEngine]:
    """Run llama.cpp with settings under which its greedy text is that of transformers."""
    launch = EngineLaunch(
        model=str(model),
        served_names=("tiny",),
        host="127.0.0.1",
        port=free_port(),
        context=CONTEXT,
        session_folder=str(slots),
        flags={"--parallel": SLOTS, "--chat-template": CALLS_TEMPLATE, **FLAGS},
    )
    with running(LlamaCpp().command(launch), launch.port) as engine:
        yield engine


@dataclass
class Seen:
    """What a client saw of a stream."""

    text: str = ""
    ids: tuple[str, ...] = ()  # of its events, each once
    finish: str | None = None
    usage: Mapping[str, object] | None = None
    ends: int = 0  # events [DONE]


def seen(events: bytes) -> Seen:
    """Return what a client sees in these bytes, which must be whole events."""
    found = Seen(ends=events.count(b"data: [DONE]\n\n"))
    ids = dict[str, None]()
    assert events.endswith(b"\n\n")
    for event in events.split(b"\n\n"):
        if not event.startswith(b"data: {"):
            continue
        chunk = json.loads(event[6:])
        assert "error" not in chunk, chunk
        ids[chunk["id"]] = None
        found.usage = chunk.get("usage") or found.usage
        for choice in chunk["choices"]:
            assert choice.get("logprobs") is None and "token_ids" not in choice, choice
            found.text += (choice.get("text") or choice.get("delta", {}).get("content")) or ""
            found.finish = choice["finish_reason"] or found.finish
    found.ids = tuple(ids)
    return found


@dataclass
class SeenChoice:
    """One choice of an answer as a client puts it together."""

    text: str = ""
    calls: dict[int, dict[str, str]] = field(default_factory=dict)
    logprobs: list[str] = field(default_factory=list)
    finish: str | None = None


def seen_choices(events: bytes) -> dict[int, SeenChoice]:
    """Return the choices of an answer in these bytes, which must be whole events of one id with one end."""
    found, ids = dict[int, SeenChoice](), set[str]()
    assert events.endswith(b"data: [DONE]\n\n") and events.count(b"[DONE]") == 1, events[-500:]
    for event in events.split(b"\n\n"):
        if not event.startswith(b"data: {"):
            continue
        chunk = json.loads(event[6:])
        assert "error" not in chunk, chunk
        ids.add(chunk["id"])
        for choice in chunk["choices"]:
            into, delta = found.setdefault(choice["index"], SeenChoice()), choice.get("delta", {})
            assert into.finish is None, "nothing follows a finish reason"
            into.text += choice.get("text") or delta.get("content") or ""
            into.finish = choice["finish_reason"]
            into.logprobs += [each["token"] for each in (choice.get("logprobs") or {}).get("content", ())]
            for call in delta.get("tool_calls", ()):
                known = into.calls.setdefault(call["index"], {"id": "", "name": "", "arguments": ""})
                known["id"] += call.get("id", "")
                for key in ("name", "arguments"):
                    known[key] += call.get("function", {}).get(key) or ""
    assert len(ids) == 1
    return found


def follow(
    dialect: Dialect,
    engines: Iterable[RunningEngine],
    path: str,
    body: Mapping[str, object],
    cuts: Iterable[int] = (),
) -> tuple[Stream, bytes]:
    """Return a stream at its end and what the client got; after each number of tokens in `cuts` the replica changes."""
    stream, left, replicas = dialect.open(path, body), list(cuts), list(engines)
    upstream, out = stream.first, b""
    while True:
        cut, before = (left.pop(0) if left else None), stream.tokens
        events = replicas[0].events(upstream)
        for data in events:
            out += stream.feed(data)
            if cut is not None and stream.tokens - before >= cut:
                break
        events.close()
        replicas.append(replicas.pop(0))
        if (rest := stream.closing()) is not None:
            return stream, out + rest
        steps = stream.resume()
        assert steps is not None, "it can be resumed"
        try:
            upstream = next(steps)
            while not upstream.stream:
                upstream = steps.send(replicas[0].call(upstream))
        except StopIteration:
            rest = stream.closing()
            assert rest is not None
            return stream, out + rest
