"""A stream of llama.cpp, real, that other replicas continue: its client sees one text, one id, one end."""

import json
from collections.abc import Mapping

import pytest
from engines_world import RunningEngine, follow, seen

from cordee.serve.engines.llama_cpp import LlamaDialect
from cordee.serve.engines.openai import CHAT, COMPLETIONS
from cordee.serve.engines.port import Usage

CHAT_BODY = {"messages": [{"role": "user", "content": "hello world"}]}
TEXT_BODY = {"prompt": "def main"}
COMMON = {
    "model": "tiny",
    "stream": True,
    "temperature": 0,
    "max_tokens": 60,
    "stream_options": {"include_usage": True},
}


@pytest.mark.parametrize(("path", "body"), [(CHAT, CHAT_BODY), (COMPLETIONS, TEXT_BODY)], ids=["chat", "text"])
@pytest.mark.parametrize("cuts", [(0,), (1,), (20, 3, 20), (59,), (60,), (2,) * 20], ids=str)
def test_greedy_text_is_the_same_however_often_the_replica_changes(
    llama: RunningEngine, path: str, body: Mapping[str, object], cuts: tuple[int, ...]
) -> None:
    body = {**body, **COMMON}
    _, plain = follow(LlamaDialect(), [llama], path, body)
    stream, mended = follow(LlamaDialect(), [llama], path, body, cuts)
    expected, got = seen(plain), seen(mended)
    assert got.text == expected.text
    assert len(got.ids) == 1
    assert (got.finish, got.ends) == ("length", 1) == (expected.finish, expected.ends)
    assert got.usage is not None and expected.usage is not None
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert got.usage[name] == expected.usage[name]
    assert stream.tokens == 60 and stream.usage is not None and stream.usage.output_tokens == 60


def test_the_client_gets_only_what_it_asked_for(llama: RunningEngine) -> None:
    body = {**TEXT_BODY, **COMMON, "stream_options": None}
    stream, out = follow(LlamaDialect(), [llama], COMPLETIONS, body)
    assert b'logprobs":{' not in out and b"timings" not in out and b"usage" not in out
    assert stream.usage == Usage(stream.usage.input_tokens if stream.usage else 0, stream.usage.cached_tokens, 60)
    body = {**CHAT_BODY, **COMMON, "logprobs": True, "top_logprobs": 2, "max_tokens": 3}
    asked = LlamaDialect().open(CHAT, body)
    out = b"".join(asked.feed(data) for data in llama.events(asked.first))
    tokens = [json.loads(each[6:]) for each in out.split(b"\n\n") if b'"logprobs":{' in each]
    assert [len(each["choices"][0]["logprobs"]["content"][0]["top_logprobs"]) for each in tokens] == [2, 2, 2]
    assert asked.resume() is None, "its log probabilities cannot be continued"


def test_a_text_that_stops_at_a_word_stops_there_on_another_replica(llama: RunningEngine) -> None:
    _, plain = follow(LlamaDialect(), [llama], COMPLETIONS, {**TEXT_BODY, **COMMON})
    word = seen(plain).text[40:48]
    body = {**TEXT_BODY, **COMMON, "stop": [word]}
    _, out = follow(LlamaDialect(), [llama], COMPLETIONS, body, (5, 2, 1))
    assert seen(out).finish == "stop"
    assert seen(out).text == seen(plain).text[: seen(plain).text.index(word)]


def test_bytes_may_be_cut_anywhere(llama: RunningEngine) -> None:
    asked = LlamaDialect().open(CHAT, {**CHAT_BODY, **COMMON, "max_tokens": 5})
    whole = b"".join(llama.events(asked.first))
    expected = LlamaDialect().open(CHAT, {**CHAT_BODY, **COMMON})
    assert b"".join(asked.feed(whole[at : at + 1]) for at in range(len(whole))) == expected.feed(whole)
    assert asked.tokens == expected.tokens == 5


def test_a_request_whose_text_is_parsed_from_its_start_begins_again_or_not_at_all(llama: RunningEngine) -> None:
    schema = {"type": "json_schema", "json_schema": {"schema": {"type": "object", "required": ["a"]}}}
    body = {**CHAT_BODY, **COMMON, "response_format": schema, "max_tokens": 20}
    _, out = follow(LlamaDialect(), [llama], CHAT, body, (0,))
    assert len(seen(out).ids) == 1 and seen(out).text.startswith("{")
    asked = LlamaDialect().open(CHAT, body)
    for data in llama.events(asked.first):
        asked.feed(data)
        if asked.tokens:
            break
    assert asked.resume() is None


def test_held_back_characters_are_tokenised_again(llama: RunningEngine) -> None:
    """An emoji is four tokens here: the engine sends it as one event that names the last of them."""
    asked = LlamaDialect().open(COMPLETIONS, {**TEXT_BODY, **COMMON})
    made = 1
    for token, text in ((312, " in"), (130, "🙂"), (324, "ul")):
        made += 4 if text == "🙂" else 1
        probs = {"content": [{"id": token, "token": text, "bytes": [], "prob": 1.0, "top_probs": []}]}
        choice = {"text": text, "index": 0, "logprobs": probs, "finish_reason": None}
        chunk = {
            "choices": [choice],
            "created": 1,
            "model": "tiny",
            "id": "a",
            "timings": {"predicted_n": made - 1, "x": 1},
        }
        event = b"data: " + json.dumps(chunk, separators=(",", ":"), ensure_ascii=False).encode() + b"\n\n"
        assert seen(asked.feed(event)).text == text
    steps = asked.resume()
    assert steps is not None
    upstream = next(steps)
    while not upstream.stream:
        upstream = steps.send(llama.call(upstream))
    assert upstream.body is not None
    prompt = json.loads(llama.ask("/tokenize", {"content": "def main in🙂ul"})[1])["tokens"]
    assert upstream.body["prompt"] == prompt and upstream.body["n_predict"] == 60 - 6
    assert asked.tokens == 6
