"""The answer to a request that is not taken: status, what is wrong with the numbers, a hint, and when to come back."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not taken.

    Attributes:
        status: of HTTP.
        code: in the OpenAI API's error object: `rate_limit_exceeded`, `insufficient_quota`, `overloaded`, ...
        message: what is wrong, with the numbers.
        hint: what the client can do.
        retry_after_s: seconds after which the same request may pass; None: it will not by waiting.
    """

    status: int
    code: str
    message: str
    hint: str
    retry_after_s: float | None = None
