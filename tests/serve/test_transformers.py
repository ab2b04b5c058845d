"""Our server around transformers' continuous batching, and its dialect, against llama.cpp's text of the same model."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from engines_world import RunningEngine, follow, running, seen, until

from cordee.serve.engines.llama_cpp import LlamaDialect
from cordee.serve.engines.openai import CHAT, COMPLETIONS
from cordee.serve.engines.port import EngineCapacity, EngineLaunch, Upstream
from cordee.serve.engines.token_ids import TokenIdDialect
from cordee.serve.engines.transformers import Transformers
from cordee.telemetry.host import free_port

ENGINE, DIALECT = Transformers(), TokenIdDialect("transformers")
COMMON = {
    "model": "tiny",
    "stream": True,
    "temperature": 0,
    "max_tokens": 40,
    "stream_options": {"include_usage": True},
}
REQUESTS: Mapping[str, Mapping[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello world"}], **COMMON},
    COMPLETIONS: {"prompt": "def main", **COMMON},
}
pytestmark = pytest.mark.gang


@pytest.fixture(scope="module")
def engine(tiny_folder: Path) -> Iterator[RunningEngine]:
    port = free_port()
    launch = EngineLaunch(
        model=str(tiny_folder), served_names=("tiny",), host="127.0.0.1", port=port, context=256, flags={"--slots": 4}
    )
    with running(ENGINE.command(launch), port, wait_s=250) as found:
        yield found


def load(engine: RunningEngine) -> int:
    found = ENGINE.load(engine.ask("/load")[1])
    assert found is not None
    return found.open


@pytest.mark.parametrize("path", REQUESTS)
def test_its_greedy_text_is_llama_cpps_however_often_the_replica_changes(
    engine: RunningEngine, llama: RunningEngine, path: str
) -> None:
    body = REQUESTS[path]
    expected = seen(follow(LlamaDialect(), [llama], path, body)[1])
    for cuts in ((), (0,), (1, 20, 3), (39,), (40,)):
        stream, out = follow(DIALECT, [engine], path, body, cuts)
        got = seen(out)
        assert (got.text, got.finish, len(got.ids), got.ends) == (expected.text, "length", 1, 1)
        assert got.usage is not None and expected.usage is not None
        assert got.usage["total_tokens"] == expected.usage["total_tokens"]
        assert b"prompt_token_ids" not in out and stream.tokens == 40


def test_it_stops_at_words_and_draws_at_random(engine: RunningEngine) -> None:
    text = seen(follow(DIALECT, [engine], COMPLETIONS, REQUESTS[COMPLETIONS])[1]).text
    body = {**REQUESTS[COMPLETIONS], "stop": [text[40:50]]}
    stopped = seen(follow(DIALECT, [engine], COMPLETIONS, body)[1])
    assert (stopped.text, stopped.finish) == (text[: text.index(text[40:50])], "stop")
    hot = {**REQUESTS[COMPLETIONS], "temperature": 3.0, "top_p": 0.99, "max_tokens": 20}
    assert len({seen(follow(DIALECT, [engine], COMPLETIONS, hot)[1]).text for _ in range(3)}) > 1


def test_it_refuses_what_it_cannot_and_frees_what_is_cancelled(engine: RunningEngine) -> None:
    assert ENGINE.capacity(engine.ask("/load")[1]) == EngineCapacity(kv_tokens=4 * 256, slots=4, context=256)
    status, answer = engine.ask(COMPLETIONS, {"prompt": "hello " * 200, "max_tokens": 1})
    assert status == 400 and b"and the context is of 256" in answer
    for body in ({"prompt": "a", "n": 2}, {"prompt": 3}, {"prompt": "a", "tools": [{}]}, {"messages": 1}):
        assert engine.ask(COMPLETIONS, body)[0] == 400
    events = engine.events(Upstream(COMPLETIONS, {**REQUESTS[COMPLETIONS], "max_tokens": 200}, stream=True))
    next(events)
    assert load(engine) == 1
    events.close()
    until(lambda: load(engine) == 0, "the cancelled request is closed")
