"""The API's description of itself, `/openapi.json`: with examples, and with what holds for every route.

The examples are answers of a server, recorded by `tests/control/api_examples.py`.
"""

import asyncio
import json
from functools import cache
from importlib.resources import files
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi

from cordee.answers.view import ErrorView

_ABOUT = """The API of a Cordee server.

**Versions.** The path has the version, `/v1`. Within a version routes, optional parameters, fields of answers and
values of words are only added; a client leaves out what it does not know. What would break a client is a new version,
and the one before it is answered for at least one further minor release.

**Lists** come in pages of up to 1,000 rows. The header `Link` with `rel="next"` leads to the next page.

**ETags.** A GET whose answer is JSON has one; the same request with `If-None-Match` is answered with 304 and no body
while the answer is the same.

**Idempotency keys.** A request that creates something (201) may carry `Idempotency-Key`, a text of up to 200
characters. Within a day the same request with the same key changes nothing and gets the same answer, with the header
`Idempotency-Replayed`; another request with it gets 409, `KeyReusedError`.

**Bounds.** JSON bodies have at most 8 MiB and brackets 100 deep. Questions that cost (forecasts, sums over all jobs)
are answered one at a time while their clients wait; 64 may wait, others get 429.

**Errors** are `{"error": {"kind", "message", "hint"}}`; `kind` is a class of `cordee.errors`.
"""

_KEY = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "description": "A new text for each request: within a day the same request with it is done once.",
    "schema": {"type": "string", "minLength": 1, "maxLength": 200, "pattern": "^[ -~]+$"},
    "example": "5d3a0f6c-submit-gpt",
}
_IF_NONE_MATCH = {
    "name": "If-None-Match",
    "in": "header",
    "required": False,
    "description": "The ETag of an answer that the client has.",
    "schema": {"type": "string"},
}
_TAG = {"ETag": {"description": "Of this answer.", "schema": {"type": "string"}}}
_LINK = {"Link": {"description": 'The next page, as `<path>; rel="next"`.', "schema": {"type": "string"}}}


@cache
def examples() -> dict[str, dict[str, Any]]:
    """Return the recorded requests and answers by method and path, such as `GET /v1/jobs`."""
    text = (files("cordee.control") / "api_examples.json").read_text(encoding="utf-8")
    return dict(json.loads(text))


def describe(app: FastAPI) -> dict[str, Any]:
    """Return the description, made once."""
    if app.openapi_schema is None:
        found = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
        schemas = found["components"]["schemas"]
        error = ErrorView.model_json_schema(ref_template="#/components/schemas/{model}", mode="serialization")
        schemas.update(error.pop("$defs"), **{ErrorView.__name__: error})
        found["components"]["schemas"] = dict(sorted(schemas.items()))
        for path, methods in found["paths"].items():
            for method, operation in methods.items():
                _complete(operation, method, examples().get(f"{method.upper()} {path}", {}))
        app.openapi_schema = found
    return app.openapi_schema


class Described:
    """The description as an answer: made beside the loop for the first who asks, for which all others wait.

    If it fails, it is made again for the next who asks.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app
        self._body: asyncio.Future[bytes] | None = None

    async def answer(self, _: Request) -> Response:
        """Return the description."""
        if self._body is None or (self._body.done() and (self._body.cancelled() or self._body.exception())):
            self._body = asyncio.ensure_future(asyncio.to_thread(self._make))
        return Response(await asyncio.shield(self._body), media_type="application/json")

    def _make(self) -> bytes:
        return json.dumps(describe(self._app), separators=(",", ":")).encode()


def _complete(operation: dict[str, Any], method: str, example: dict[str, Any]) -> None:
    answers = operation["responses"]
    status = next(code for code in answers if code.startswith("2"))
    body = answers[status].get("content", {}).get("application/json")
    parameters = operation.setdefault("parameters", [])
    if method == "get" and body is not None:
        parameters.append(_IF_NONE_MATCH)
        answers["304"] = {"description": "The client has this answer.", "headers": _TAG}
        pages = any(each["name"] == "cursor" for each in parameters)
        answers[status]["headers"] = _TAG | (_LINK if pages else {})
    if status == "201":
        parameters.append(_KEY)
    if body is not None and "answer" in example:
        body["example"] = example["answer"]
    sent = operation.get("requestBody", {}).get("content", {}).get("application/json")
    if sent is not None and "request" in example:
        sent["example"] = example["request"]
