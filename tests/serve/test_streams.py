"""A stream of llama.cpp, real, that other replicas continue: its client sees one text, one id, one end."""

import json
from collections.abc import Mapping

import pytest
from engines_world import PARSED, RunningEngine, follow, seen, seen_choices

from cordee.serve.engines.command import CommandDialect
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


@pytest.mark.parametrize("cuts", [(0,), (1,), (12, 3, 20)], ids=str)
@pytest.mark.parametrize("kind", PARSED)
def test_an_answer_that_no_replica_can_enter_is_computed_again(
    llama: RunningEngine, kind: str, cuts: tuple[int, ...]
) -> None:
    """Tools, a schema, two choices, log probabilities; drawn by a seed where it is not greedy."""
    path = COMPLETIONS if kind == "texts" else CHAT
    body = {**(TEXT_BODY if kind == "texts" else CHAT_BODY), **COMMON, **PARSED[kind]}
    _, plain = follow(LlamaDialect(), [llama], path, body)
    stream, mended = follow(LlamaDialect(), [llama], path, body, cuts)
    expected, got = seen_choices(plain), seen_choices(mended)
    for each in (*expected.values(), *got.values()):
        for call in each.calls.values():
            assert call.pop("id"), "a call has an id, by chance"
    assert got == expected
    assert len(got) == PARSED[kind].get("n", 1) and all(each.text or each.calls for each in got.values())
    assert stream.usage is not None and stream.usage.output_tokens >= 60
    assert bool(got[0].calls) == (kind == "tools")


def test_a_request_that_leaves_its_draws_to_chance_gets_a_seed(llama: RunningEngine) -> None:
    body = {**CHAT_BODY, **COMMON, "temperature": 1.5, "n": 2}
    first, second = LlamaDialect().open(CHAT, body).first.body, LlamaDialect().open(CHAT, body).first.body
    assert first is not None and second is not None and first["seed"] != second["seed"]
    _, out = follow(LlamaDialect(), [llama], CHAT, body, (30,))
    texts = [each.text for each in seen_choices(out).values()]
    assert texts[0] != texts[1], "a seed does not make the choices alike"


def test_an_answer_that_differs_when_it_is_computed_again_ends(llama: RunningEngine) -> None:
    body = {**CHAT_BODY, **COMMON, **PARSED["schema"]}
    stream = LlamaDialect().open(CHAT, body)
    for data in llama.events(stream.first):
        stream.feed(data)
        if stream.tokens >= 5:
            break
    stream.sent.text[:1] = b"!"
    steps = stream.resume()
    assert steps is not None
    events = llama.events(next(steps))
    while not stream.diverged:
        stream.feed(next(events))
    events.close()
    assert stream.diverged and "another replica's answer differs after" in stream.error
    unknown = CommandDialect().open(CHAT, {**CHAT_BODY, "stream": True, "temperature": 0.7})
    unknown.feed(b'data: {"id":"1","choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n')
    assert unknown.resume() is None, "nobody could give the same answer"


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
