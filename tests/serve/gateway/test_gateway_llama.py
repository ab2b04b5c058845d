"""Streams over real replicas, llama.cpp with the tiny model: greedy text is that of one undisturbed replica."""

import asyncio
import json
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from engines_world import PARSED, SLOTS, RunningEngine, running_llama, seen_choices
from gateway_rig import Answer, Rig, chat, get, rig, run, stream, until

from cordee.serve.engines.port import Upstream

PROMPTS = ["Tell me about argparse.", "def parse_args(self):", "import sys"]
LIMIT = 800


@dataclass
class Replicas:
    """Three servers of llama.cpp behind a gateway; each test ends the life of at most one."""

    rig: Rig
    engines: list[RunningEngine]

    async def working(self, session: aiohttp.ClientSession, slots: int = 1) -> RunningEngine | None:
        """Return the engine that works in so many slots; None: none does, or no longer."""
        for engine in self.engines:
            if engine.process.poll() is None:
                found = await get(session, f"http://127.0.0.1:{engine.port}/slots")
                if sum(slot["is_processing"] for slot in found) >= slots:
                    return engine
        return None


@pytest.fixture(scope="module")
def replicas(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replicas]:
    model = tiny_folder / "tiny.gguf"
    with ExitStack() as stack:
        made = stack.enter_context(rig(tmp_path_factory.mktemp("llama")))
        engines = [stack.enter_context(running_llama(model, tmp_path_factory.mktemp("slots"))) for _ in range(3)]
        for i, engine in enumerate(engines):
            made.routes.endpoint(f"r{i}.1", f"http://127.0.0.1:{engine.port}", kv_tokens=8_192, slots=4)
        made.routes.services["chat"]["context"] = 2_048
        made.start()
        yield Replicas(made, engines)


def undisturbed(
    engine: RunningEngine, body: dict[str, Any], path: str = "/v1/chat/completions"
) -> tuple[str, Any, Any]:
    """Return text, finish reason and usage of an engine itself."""
    status, raw = engine.ask(path, {**body, "stream": False, "stream_options": None})
    answer = json.loads(raw)
    assert status == 200, answer
    choice = answer["choices"][0]
    return choice.get("text") or choice["message"]["content"], choice["finish_reason"], answer["usage"]


def check(answer: Answer, good: tuple[str, Any, Any]) -> None:
    text, finish, usage = good
    assert answer.error is None and answer.done, answer.error
    assert answer.text == text
    assert answer.finish == finish and len(answer.ids) == 1
    assert answer.usage is not None
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer.usage[key] == usage[key], key


def test_an_undisturbed_stream_is_that_of_the_engine(replicas: Replicas) -> None:
    body = chat(PROMPTS[0], 100)
    check(run(lambda session: stream(session, replicas.rig.url, body)), undisturbed(replicas.engines[0], body))


def test_streams_of_a_killed_a_frozen_and_a_drained_replica(replicas: Replicas) -> None:
    """One after the other, with three streams open each time: chats and a completion."""
    engines, made = replicas.engines, replicas.rig
    bodies: list[tuple[str, dict[str, Any]]] = [("/v1/chat/completions", chat(each, LIMIT)) for each in PROMPTS[:2]]
    plain = {"model": "tiny", "prompt": PROMPTS[2], "max_tokens": LIMIT, "temperature": 0, "stream": True}
    bodies.append(("/v1/completions", plain | {"stream_options": {"include_usage": True}}))
    good = [undisturbed(engines[0], body, path) for path, body in bodies]

    async def disturbed(session: aiohttp.ClientSession, disturb: Any) -> list[Answer]:
        hit: list[RunningEngine] = []
        turn = asyncio.Lock()

        async def at(answer: Answer) -> None:
            if answer.events == 40:
                async with turn:
                    if not hit and (engine := await replicas.working(session)) is not None:
                        hit.append(engine)
                        disturb(engine)

        while not hit:  # once more if this process was slower than the engines
            asked = [stream(session, made.url, body, path=path, on_event=at) for path, body in bodies]
            answers = await asyncio.gather(*asked)
        return answers

    def drain(engine: RunningEngine) -> None:
        index = engines.index(engine)
        address = f"http://127.0.0.1:{engine.port}"
        made.routes.endpoint(f"r{index}.1", address, kv_tokens=8_192, slots=4, state="draining")
        made.routes.write()

    frozen: list[RunningEngine] = []

    def freeze(engine: RunningEngine) -> None:
        frozen.append(engine)
        engine.process.send_signal(signal.SIGSTOP)

    async def work(session: aiohttp.ClientSession) -> None:
        for disturb in (drain, freeze, lambda engine: engine.process.kill()):
            for answer, each in zip(await disturbed(session, disturb), good, strict=True):
                check(answer, each)
            for engine in frozen:
                engine.process.send_signal(signal.SIGCONT)
            for index, engine in enumerate(engines):
                address = f"http://127.0.0.1:{engine.port}"
                made.routes.endpoint(f"r{index}.1", address, kv_tokens=8_192, slots=4)
            made.routes.write()

    run(work)

    async def moved(session: aiohttp.ClientSession) -> int:
        async with session.get(made.url + "/metrics") as response:
            lines = [each for each in (await response.text()).splitlines() if "requests_moved_total{" in each]
        return sum(int(each.split()[-1]) for each in lines)

    assert run(moved) >= 3, "each disturbance has hit a stream at least"


def test_a_killed_replica_of_answers_that_no_other_can_enter(replicas: Replicas) -> None:
    """A tool call, a text under a schema and two choices, at once on one replica that is killed: computed again."""
    kinds = ("tools", "schema", "choices")
    bodies = [chat(PROMPTS[0], 200) | PARSED[kind] for kind in kinds]
    session_id = {"X-Session-Id": "one"}
    got = [bytearray() for _ in bodies]

    async def read(session: aiohttp.ClientSession, body: dict[str, Any], into: bytearray) -> None:
        async with session.post(replicas.rig.url + "/v1/chat/completions", json=body, headers=session_id) as response:
            async for data in response.content.iter_any():
                into += data

    async def work(session: aiohttp.ClientSession) -> None:
        async def begun() -> bool:
            return all(each.count(b"\n\n") >= 10 for each in got)

        engine = None
        while engine is None:  # once more if one of them has ended by now
            for each in got:
                each.clear()
            reading = [asyncio.create_task(read(session, *each)) for each in zip(bodies, got, strict=True)]
            await until(begun, "ten events of each")
            if (engine := await replicas.working(session, slots=SLOTS)) is not None:
                engine.process.kill()
            await asyncio.gather(*reading)

    left = next(each for each in replicas.engines if each.process.poll() is None)
    good = [b"".join(left.events(Upstream("/v1/chat/completions", body, stream=True))) for body in bodies]
    before = sum(1 for row in replicas.rig.usage() if not row.get("requests"))
    run(work)
    assert sum(1 for row in replicas.rig.usage() if not row.get("requests")) == before + 3, "each one has moved"
    for kind, mended, whole in zip(kinds, got, good, strict=True):
        choices, expected = seen_choices(bytes(mended)), seen_choices(whole)
        for each in (*choices.values(), *expected.values()):
            for call in each.calls.values():
                assert call.pop("id")
        assert choices == expected, kind
        assert bool(choices[0].calls) == (kind == "tools")


def test_a_prompt_that_is_too_long_is_refused_by_the_engine(replicas: Replicas) -> None:
    answer = run(lambda session: stream(session, replicas.rig.url, chat("word " * 4_000, 10)))
    assert answer.status == 400 and answer.error is not None
    assert answer.error["type"] == "exceed_context_size_error"
