"""The base of all answers, the server's health, and errors."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field


class View(BaseModel):
    """An answer of the API. Times are microseconds since the Unix epoch, money is integer micro-dollars."""

    model_config = ConfigDict(extra="forbid", frozen=True, from_attributes=True)

    @classmethod
    def of(cls, record: object, **others: object) -> Self:
        """Return the view of a record: the fields that `others` does not name are its attributes of the same name."""
        names = cls.model_fields.keys() - others.keys()
        return cls.model_validate({name: getattr(record, name) for name in names} | others)


class HealthView(View):
    """The server itself.

    `problem` is the error that keeps it from working, such as a full disk; `listens` is the URL for other machines, and
    `fingerprint` that of its certificate unless an authority signed it. `servers` are the URLs of all servers of its
    database, the leader's first; empty if it is the only one.
    """

    version: str
    pid: int
    home: str
    shutting_down: bool
    live_attempts: int
    log_number: int
    problem: str | None = None
    role: Literal["leader", "standby"] = "leader"
    servers: list[str] = Field([])
    listens: str | None = None
    fingerprint: str | None = None


class ErrorFacts(View):
    """An error: the name of its class in `cordee.errors`, its message, and a hint; a standby names the leader's URL."""

    kind: str
    message: str
    hint: str | None
    leader: str | None = None


class ErrorView(View):
    """The API's answer to a request that it refuses or fails."""

    error: ErrorFacts
