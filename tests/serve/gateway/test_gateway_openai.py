"""The gateway under OpenAI's own Python package, a client that we did not write, with llama.cpp behind it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from engines_world import PARSED, RunningEngine
from gateway_rig import rig

from cordee.serve.gateway.keys import hash_key

SAY: list[Any] = [{"role": "user", "content": "hello world"}]
CITY = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 20}}, "required": ["city"]}
GREEDY: dict[str, Any] = {"model": "chat", "messages": SAY, "temperature": 0, "max_tokens": 40}


@pytest.fixture(scope="module")
def openai() -> Any:
    """The package takes a second to import: only the worker that runs these tests does."""
    return pytest.importorskip("openai")


@pytest.fixture(scope="module")
def client(openai: Any, llama: RunningEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    with rig(tmp_path_factory.mktemp("openai")) as made:
        made.routes.endpoint("r.1", f"http://127.0.0.1:{llama.port}", kv_tokens=8_192, slots=4)
        made.routes.services["chat"]["context"] = 2_048
        secret = "sk-outside"
        key = {"hash": hash_key(secret), "id": "k", "tenant": "t", "models": ["chat"]}
        made.routes.more = {"keys": [key]}
        made.start()
        with openai.OpenAI(base_url=f"{made.url}/v1", api_key=secret, max_retries=0, timeout=60) as found:
            yield found


def test_documents_and_streams(client: Any) -> None:
    whole = client.chat.completions.create(**GREEDY)
    assert whole.choices[0].finish_reason == "length" and whole.usage.completion_tokens == 40
    chunks = list(client.chat.completions.create(**GREEDY, stream=True, stream_options={"include_usage": True}))
    assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == (
        whole.choices[0].message.content
    )
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    assert {each.object for each in chunks} == {"chat.completion.chunk"} and len({each.id for each in chunks}) == 1
    text = client.completions.create(model="chat", prompt="def main", max_tokens=8, temperature=0)
    parts = client.completions.create(model="chat", prompt="def main", max_tokens=8, temperature=0, stream=True)
    assert "".join(each.choices[0].text for each in parts) == text.choices[0].text
    assert [each.id for each in client.models.list()] == ["chat", "tiny"]
    assert client.models.retrieve("chat").owned_by == "chat"


def test_a_call_of_a_tool_and_a_schema(client: Any) -> None:
    with client.chat.completions.stream(**GREEDY, **PARSED["tools"]) as stream:
        parts = [each for each in stream if each.type == "tool_calls.function.arguments.delta"]
        calls = stream.current_completion_snapshot.choices[0].message.tool_calls
    assert calls[0].id and {each.function.name for each in calls} == {each.name for each in parts} == {"forecast"}
    assert "".join(each.arguments_delta for each in parts if each.index == 0) == calls[0].function.arguments
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": CITY}}
    answer = client.chat.completions.create(**GREEDY | {"max_tokens": 200}, response_format=wanted)
    assert set(json.loads(answer.choices[0].message.content)) == {"city"}
    both = list(client.chat.completions.create(**GREEDY | {"temperature": 1}, n=2, logprobs=True, stream=True))
    assert {choice.index for each in both for choice in each.choices} == {0, 1}


def test_errors_are_those_of_the_package(openai: Any, client: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(**GREEDY | {"model": "gpt-9"})
    assert missing.value.code == "model_not_found" and missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(**GREEDY | {"messages": [{"role": "user", "content": "word " * 4_000}]})
    assert too_long.value.type == "exceed_context_size_error"
    with pytest.raises(openai.AuthenticationError) as unknown:
        client.with_options(api_key="sk-wrong").chat.completions.create(**GREEDY)
    assert unknown.value.code == "invalid_api_key"
    with pytest.raises(openai.BadRequestError):
        list(client.chat.completions.create(**GREEDY | {"max_tokens": -1}, stream=True))
    assert client.chat.completions.with_raw_response.create(**GREEDY).parse()._request_id, "a request has a name"
