"""A client's request to the API, checked as far as the gateway needs it; the engine checks the rest."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from cordee.serve.engines.openai import choices_of
from cordee.serve.gateway.replies import ApiError

PATHS = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/embeddings": "input",
}
"""The paths that replicas answer, each with the field that holds its prompt."""
PRIORITIES = range(-100, 101)
BYTES_PER_TOKEN = 4.0
"""Of prompts of which nothing was measured yet."""


@dataclass(frozen=True, slots=True)
class Call:
    """A request.

    Attributes:
        path: of the API, one of PATHS.
        body: as the client sent it.
        raw: its bytes.
        model: the name of a service or of its model.
        stream: the answer is a stream of events.
        prompt: the bytes of its prompt, as JSON: for routing and for the estimate of its tokens.
        limit_tokens: of its answer; None: the client gave none.
        session: requests with the same name continue one another.
        priority: of the tenant's requests, those with a negative one go last.
        deadline_s: seconds within which the first token has to come; None: none is asked for.
    """

    path: str
    body: dict[str, Any]
    raw: bytes
    model: str
    stream: bool
    prompt: bytes
    limit_tokens: int | None
    session: str
    priority: int
    deadline_s: float | None

    def bytes_for(self, model: str) -> bytes:
        """Return the body with the name that an engine has for its model; "" keeps the client's."""
        return self.raw if model in ("", self.model) else msgspec.json.encode({**self.body, "model": model})

    @property
    def choices(self) -> int:
        """Return the number of answers that it asks for."""
        return choices_of(self.body)

    def expected_tokens(self, bytes_per_token: float = BYTES_PER_TOKEN) -> int:
        """Return the tokens of its prompt, estimated from its bytes."""
        return max(1, round(len(self.prompt) / bytes_per_token))


def read_call(path: str, raw: bytes, headers: Mapping[str, str]) -> Call:
    """Return the request in a body.

    Raises:
        ApiError: it is malformed.
    """
    field = PATHS[path]
    try:
        body = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {_name(body)}, not an object", code="invalid_json")
    model = body.get("model")
    if not isinstance(model, str) or not model:
        raise ApiError(400, "`model` is missing: it names a service; hint: GET /v1/models lists them", param="model")
    prompt = body.get(field)
    if not isinstance(prompt, list | str) or not prompt:
        raise ApiError(400, f"`{field}` is missing or empty", param=field)
    if path == "/v1/chat/completions" and not (
        isinstance(prompt, list) and all(isinstance(each, dict) and "role" in each for each in prompt)
    ):
        raise ApiError(400, "`messages` has to be a list of objects with a `role`", param="messages")
    stream = body.get("stream", False)
    if stream is not None and not isinstance(stream, bool):
        raise ApiError(400, f"`stream` has to be true or false, not {stream!r}", param="stream")
    limit = body.get("max_completion_tokens", body.get("max_tokens"))
    _check_count(limit, "max_completion_tokens" if "max_completion_tokens" in body else "max_tokens")
    _check_count(body.get("n"), "n")
    return Call(
        path, body, raw, model, bool(stream), _prompt_bytes(prompt), limit, _session(body, headers),
        _priority(body.get("priority"), headers), _deadline(headers),
    )  # fmt: skip


def _prompt_bytes(prompt: list[Any] | str) -> bytes:
    """Return the prompt as bytes of which a longer one of the same session is a continuation."""
    if isinstance(prompt, str):
        return prompt.encode(errors="replace")
    return msgspec.json.encode(prompt)[:-1]


def _session(body: Mapping[str, Any], headers: Mapping[str, str]) -> str:
    found = headers.get("x-session-id") or body.get("prompt_cache_key") or body.get("session_id") or ""
    return str(found)[:200]


def _check_count(value: object, param: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ApiError(400, f"`{param}` has to be a whole number of at least 1, not {value!r}", param=param)


def _priority(value: object, headers: Mapping[str, str]) -> int:
    text = headers.get("x-priority")
    try:
        found = int(text) if text is not None else 0 if value is None else int(str(value))
    except ValueError:
        raise ApiError(400, f"the priority {text or value!r} is not a whole number", param="priority") from None
    if found not in PRIORITIES:
        raise ApiError(400, f"the priority {found} is not between -100 and 100", param="priority")
    return found


def _deadline(headers: Mapping[str, str]) -> float | None:
    text = headers.get("x-deadline-ms")
    if text is None:
        return None
    try:
        found = float(text) / 1e3
    except ValueError:
        found = 0.0
    if not 0 < found < 1e6:
        raise ApiError(400, f"x-deadline-ms has to be a positive number of milliseconds, not {text!r}")
    return found


def _name(value: object) -> str:
    names = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}
    return names.get(type(value), "value")
