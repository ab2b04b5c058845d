"""Errors in the shape of OpenAI's API, and frames of its streams."""

import json
from collections.abc import Mapping

DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"
"""A line of a stream that clients skip; it keeps a connection open while a request waits."""


class ApiError(Exception):
    """An answer to the client that is an error.

    Attributes:
        status: of HTTP.
        kind: OpenAI's `type`.
        code: OpenAI's `code`.
        param: the field of the request that is wrong.
        retry_s: seconds after which the client may try again, as Retry-After.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "",
        code: str | None = None,
        param: str | None = None,
        retry_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind or _kind(status)
        self.code = code
        self.param = param
        self.retry_s = retry_s

    def body(self) -> bytes:
        """Return the error as JSON."""
        error = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return json.dumps({"error": error}).encode()

    def frame(self) -> bytes:
        """Return the error as an event of a stream, after which no [DONE] follows."""
        return b"data: " + self.body() + b"\n\n"

    def headers(self) -> dict[str, str]:
        """Return the headers that belong to it."""
        found = {"Retry-After": str(max(1, round(self.retry_s)))} if self.retry_s is not None else {}
        return found | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def _kind(status: int) -> str:
    kinds = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}
    return kinds.get(status, "invalid_request_error" if status < 500 else "server_error")


def engine_error(status: int, body: bytes) -> ApiError:
    """Return the refusal of an engine, such as an over-long prompt, in the API's shape."""
    message, kind, code = body[:2_000].decode(errors="replace"), "", None
    try:
        found = json.loads(body)
        error = found.get("error", found) if isinstance(found, dict) else {}
        if isinstance(error, Mapping):
            message = str(error.get("message") or error.get("detail") or message)
            kind, code = str(error.get("type") or ""), error.get("code")
        elif isinstance(error, str):
            message = error
    except ValueError:
        pass
    return ApiError(status, message, kind=kind, code=None if code is None else str(code))
