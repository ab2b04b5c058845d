"""Dependencies of the routes: the operations, the owner or node of a request's token, its parameters and its body."""

import asyncio
import hmac
from collections.abc import Mapping
from typing import Annotated

from fastapi import Depends, Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from cordee.answers.view import ErrorView
from cordee.control.access import Access
from cordee.control.acts import note
from cordee.control.members import token_id
from cordee.control.operations import Operations
from cordee.control.roles import Bearer, writes
from cordee.errors import BodyTooLargeError, ForbiddenError, InputError, TokenError
from cordee.near import meant
from cordee.servers import is_loopback


def operations_of(request: Request) -> Operations:
    """Return the operations of the application that serves a request."""
    operations = request.app.state.operations
    assert isinstance(operations, Operations), "create_app put it there"
    return operations


async def _operations(request: Request) -> Operations:
    return operations_of(request)


Asked = Annotated[Operations, Depends(_operations)]


async def shown_by(request: Request) -> str:
    """Return the token of a request; "" if none was sent."""
    scheme, _, shown = request.headers.get("authorization", "").partition(" ")
    return shown if scheme.lower() == "bearer" else ""


Shown = Annotated[str, Depends(shown_by)]


def bearer_of(operations: Operations, shown: str) -> Bearer:
    """Return who a token stands for.

    Raises:
        TokenError: it is unknown, or void by now.
        ForbiddenError: it is a node's.
    """
    for token, bearer in operations.owners.items():
        if hmac.compare_digest(shown.encode(), token.encode()):
            if bearer.until_us is not None and bearer.until_us <= operations.clock.now_us():
                raise TokenError(
                    f"this token of {bearer.name} has expired", hint="ask the server's operator for another"
                )
            return bearer
    node = operations.members.node_of(shown) if shown else None
    if node is not None:
        raise ForbiddenError(
            f"this token is node {node}'s, no user's", hint=f"a user's is in {operations.home / 'token'}"
        )
    why = "the token is wrong" if shown else "no token was sent"
    raise TokenError(why, hint="the server's operator has it: in `token` and `tokens` of the server's home")


async def _bearer(operations: Asked, shown: Shown) -> Bearer:
    """Return the same, in none of the threads that work for requests: all of them may be taken."""
    return await asyncio.to_thread(bearer_of, operations, shown)


async def access_of(
    request: Request, operations: Asked, shown: Shown, bearer: "Annotated[Bearer, Depends(_bearer)]"
) -> Access:
    """Return who asks, and what that one may see and do.

    Raises:
        ForbiddenError: the request changes something, and its token is read-only.
    """
    note(who=bearer.name, token=token_id(shown))
    if request.method not in _READS and request.url.path != "/v1/web-tickets":
        check_writes(bearer)
    return Access(bearer, operations)


def check_writes(bearer: Bearer) -> None:
    """Raise ForbiddenError for a token that is read-only."""
    if not writes(bearer):
        hint = "the server's operator has given it the term `read`, or viewers' roles only"
        raise ForbiddenError(f"this token of {bearer.name} is read-only", hint=hint)


_READS = ("GET", "HEAD")


def _join_token(operations: Asked, shown: Shown) -> str:
    note(who="a joining node", token=token_id(shown))
    operations.members.check_join_token(shown)
    return shown


def _node(node: str, operations: Asked, shown: Shown) -> str:
    """Return the node of the path, whose token this must be."""
    operations.members.check_node(node, shown)
    note(who=f"node {node}", token=token_id(shown))
    return node


By = Annotated[Access, Depends(access_of)]


async def _owner(by: By) -> str:
    return by.name


Owner = Annotated[str, Depends(_owner)]
MayJoin = Annotated[str, Depends(_join_token)]
Itself = Annotated[str, Depends(_node)]
# By reference: with a model, each code of each route would get a validator that nobody uses, a seventh of a start.
_ERROR = {"application/json": {"schema": {"$ref": f"#/components/schemas/{ErrorView.__name__}"}}}
REFUSALS: dict[int | str, dict[str, object]] = {
    code: {"description": description, "content": _ERROR}
    for code, description in (
        (400, "The body is not JSON."),
        (401, "The token is missing or wrong."),
        (403, "The token is good for something else."),
        (404, "There is no such job, attempt, rank or node."),
        (405, "The path has no such method."),
        (409, "The job was refused: nothing was queued; or something else that goes on must end first."),
        (413, "The body has more bytes than the server reads."),
        (422, "The request cannot be read, or asks for what cannot be."),
        (429, "More such questions wait than the server answers."),
        (503, "The log cannot be read or written now, or another server leads."),
    )
}


async def known_query(request: Request) -> None:
    """Refuse a query parameter that the operation does not have: a misspelt one would have no effect."""
    route = request.scope["route"]
    assert isinstance(route, APIRoute), "no other route has dependencies"
    known = _query_names(route.dependant)
    for name in request.query_params:
        if name not in known:
            hint = meant(name, known) + "/openapi.json describes every request"
            raise InputError(f"{request.url.path} has no parameter {name!r}", hint=hint)


def _query_names(dependant: Dependant) -> list[str]:
    """Return the query parameters of a route and of what it depends on."""
    own = [parameter.alias for parameter in dependant.query_params]
    return own + [name for each in dependant.dependencies for name in _query_names(each)]


async def body_of(request: Request, bytes_max: int) -> bytes:
    """Return the body of a request.

    Raises:
        BodyTooLargeError: it has more bytes.
    """
    refusal = BodyTooLargeError(f"the body has more than {bytes_max:,} bytes", hint="send it in parts")
    if int(request.headers.get("content-length") or 0) > bytes_max:
        raise refusal
    parts, length = [], 0
    async for part in request.stream():
        parts.append(part)
        length += len(part)
        if length > bytes_max:
            raise refusal
    return b"".join(parts)


def refuse_exposed_secrets(request: Request, secrets: Mapping[str, str]) -> None:
    """Refuse secrets that came unencrypted from another machine.

    Raises:
        InputError: they did.
    """
    peer = "" if request.client is None else request.client.host
    if secrets and request.url.scheme != "https" and not is_loopback(peer):
        raise InputError(
            f"the secrets of this job came unencrypted from {peer}: anyone in between has them",
            hint="replace them, and use the server's https URL",
        )
