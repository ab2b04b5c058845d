"""Acts: what a person or a program asks the server to change, from the request to the record in the audit log.

A request's act is in a context variable, which the threads that serve the request share: the store finds it there when
it writes, and the rules of access write into it what the request is about.
"""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

_TEXT_MAX = 200
QUIET = frozenset(
    {
        # They change nothing.
        "POST /v1/dry-run",
        "POST /v1/files/missing",
        "POST /v1/jobs/{job_id}/files",
        "POST /v1/web-tickets",
        # They bring contents or report what happened: what people do with it has its record.
        "PUT /v1/files",
        "POST /v1/gateways/{name}/reports",
        "PUT /v1/agents/{node}/logs/{job_id}/{epoch}/{name}",
        "POST /v1/agents/{node}/files",
        "POST /v1/agents/{node}/artifacts",
        "POST /v1/artifacts/uses",
        "POST /v1/artifacts/pushes/{push}/renew",
        "PUT /v1/artifacts/{kind}/{digest}",
    }
)
"""Operations without a record when they succeed."""


@dataclass(slots=True)
class Act:
    """Something that somebody asks for.

    Attributes:
        at_us: when it began.
        address: of the client.
        agent: the program that the client says it is.
        scope: of the HTTP request, which names the route once it is known; empty if it is none.
        named: the operation, where no route names it.
        who: the person, the program or the node; "" while nobody is known.
        token: the id of the token that was shown.
        session: the id of the browser's session.
        object: what is changed: a job's id, a node's name.
        queue: of the object; "" for what belongs to the whole cluster.
        detail: more in words, such as the roles that were given.
        event: the number that the log had after the act; None if the act wrote no event.
        recorded: whether its record is written.
    """

    at_us: int
    address: str = ""
    agent: str = ""
    scope: MutableMapping[str, Any] = field(default_factory=dict)
    named: str = ""
    who: str = ""
    token: str = ""
    session: str = ""
    object: str = ""
    queue: str = ""
    detail: str = ""
    event: int | None = None
    recorded: bool = False

    @property
    def operation(self) -> str:
        """Return the method and the path of its route, such as `POST /v1/jobs/{ref}/stop`."""
        if self.named:
            return self.named
        path = getattr(self.scope.get("route"), "path", "")
        verb = str(self.scope.get("path_params", {}).get("verb", "{verb}"))
        return plain(f"{self.scope.get('method', '')} {path.replace('{verb}', verb)}")

    @property
    def quiet(self) -> bool:
        """Return whether it leaves no record when it succeeds."""
        return self.operation in QUIET

    @property
    def about(self) -> str:
        """Return its object; by default what the path names."""
        params = self.scope.get("path_params", {})
        return plain(self.object or "/".join(str(each) for name, each in params.items() if name != "verb"))


_CURRENT: ContextVar[Act | None] = ContextVar("act", default=None)


def acting() -> Act | None:
    """Return the act that this thread or task carries out; None: the server acts by itself."""
    return _CURRENT.get()


@contextmanager
def carried_out(act: Act | None) -> Iterator[None]:
    """Carry out an act in this thread or task, and in those that it starts; None: the server acts by itself."""
    before = _CURRENT.set(act)
    try:
        yield
    finally:
        _CURRENT.reset(before)


def note(**facts: str | bool) -> None:
    """Write facts of the current act, such as who it is of or what it is about; without one, do nothing."""
    act = acting()
    if act is not None:
        for name, value in facts.items():
            setattr(act, name, value)


def plain(text: str) -> str:
    """Return a text that any database and terminal takes: printable, and not long."""
    return "".join(
        each if each.isprintable() and not "\ud800" <= each <= "\udfff" else "?" for each in text[:_TEXT_MAX]
    )
