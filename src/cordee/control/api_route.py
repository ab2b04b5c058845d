"""Rules that hold for every route of the API: bounded bodies, ETags, idempotency keys, lists in pages."""

import asyncio
import base64
import hashlib
import json
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response, Security
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from fastapi.security import HTTPBearer

from cordee.control.acts import note
from cordee.control.dependencies import REFUSALS, access_of, bearer_of, body_of, known_query, operations_of, shown_by
from cordee.control.roles import Bearer
from cordee.control.store.answered import AnsweredRequests
from cordee.errors import BusyError, ForbiddenError, InputError, KeyReusedError, NotFoundError, StoreError, TokenError
from cordee.units import KiB, MiB

JSON_BYTES_MAX = 8 * MiB
UNKNOWN_BYTES_MAX = 64 * KiB
"""A longer body is read only of those whose token is known."""

PAGE_MAX = 1_000
"""Rows of a list in one answer."""

_KEY_CHARS_MAX = 200
_NESTED_MAX = 100
_OTHERS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_Handler = Callable[[Request], Coroutine[Any, Any, Response]]
T = TypeVar("T")


class ApiRoute(APIRoute):
    """A route of the API. One that answers 201 takes an idempotency key; a GET in JSON has an ETag."""

    def get_route_handler(self) -> _Handler:
        """Return the handler."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            if self.body_field is not None:
                request = await _read(request)
            key = request.headers.get("idempotency-key")
            if key is not None and self.status_code == 201:
                return await _once(request, key, handle)
            found = await handle(request)
            return _tagged(request, found) if request.method == "GET" else found

        return answer


async def _read(request: Request) -> Request:
    """Return the request with its JSON body read and checked.

    Raises:
        TokenError: it has many bytes, and the token is unknown.
        BodyTooLargeError: it has too many bytes.
        InputError: its brackets are nested too deeply for the parsers behind.
    """
    if int(request.headers.get("content-length") or JSON_BYTES_MAX) > UNKNOWN_BYTES_MAX:
        with suppress(ForbiddenError):  # a node's
            await _asks(request)
    body = await body_of(request, JSON_BYTES_MAX)
    if await asyncio.to_thread(_depth, body) > _NESTED_MAX:
        raise InputError(f"the brackets of the body are nested more than {_NESTED_MAX} deep", hint="/openapi.json")
    sent = False

    async def receive() -> Any:
        nonlocal sent
        if sent:
            return await request.receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return Request(request.scope, receive)


def _depth(body: bytes) -> int:
    """Return an upper bound of the depth of nested brackets: those in texts count as well.

    >>> _depth(b'[[1], {"a": []}]')
    3
    """
    depth = deepest = 0
    for byte in body.translate(None, delete=_OTHERS):
        depth += 1 if byte in b"[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _tagged(request: Request, answer: Response) -> Response:
    """Return an answer in JSON with its ETag, or 304 if the client has the same."""
    is_json = answer.headers.get("content-type") == "application/json" and not isinstance(answer, StreamingResponse)
    if answer.status_code != 200 or not is_json:
        return answer
    tag = f'"{hashlib.blake2b(bytes(answer.body), digest_size=12).hexdigest()}"'
    headers = {"ETag": tag, "Cache-Control": "private, no-cache", "Vary": "Authorization"}
    known = {each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")}
    if tag in known or "*" in known:
        return Response(status_code=304, headers=headers | _links(answer))
    answer.headers.update(headers)
    return answer


def _links(answer: Response) -> dict[str, str]:
    return {"Link": answer.headers["link"]} if "link" in answer.headers else {}


async def _once(request: Request, key: str, handle: _Handler) -> Response:
    """Answer a request once: when it comes again with its key within a day, its answer is sent again.

    Raises:
        KeyReusedError: the key came with another request.
        BusyError: it came with this one, which has no answer yet, or whose answer was lost with the server.
    """
    if not 0 < len(key) <= _KEY_CHARS_MAX or not (key.isascii() and key.isprintable()):
        raise InputError(f"Idempotency-Key is a text of 1 to {_KEY_CHARS_MAX} printable ASCII characters")
    operations = operations_of(request)
    try:
        asks = (await _asks(request)).name
    except (TokenError, ForbiddenError):
        return await handle(request)  # which refuses it, or knows this token
    answers = AnsweredRequests(operations.store)
    row_key = _hash(asks, key)
    wanted = _hash(request.method, request.url.path, request.url.query, (await request.body()).hex())
    row = await asyncio.to_thread(answers.begin, row_key, request=wanted, now_us=operations.clock.now_us())
    if row is not None:
        if row["request"] != wanted:
            raise KeyReusedError("this Idempotency-Key came with another request", hint="each request has its own")
        if row["status"] is None:
            hint = "ask again in a moment; if this stays, see whether it was done, and use another key"
            raise BusyError("the request with this Idempotency-Key has no answer yet", hint=hint)
        note(recorded=True)  # the audit log has it from the first time
        again = {"Idempotency-Replayed": "true"}
        body = operations.secrets.opened(row["body"])
        return Response(body, status_code=row["status"], media_type="application/json", headers=again)
    try:
        answer = await handle(request)
    except StoreError:
        raise  # it may have been done all the same, and must not be done twice
    except Exception:
        with suppress(StoreError):
            await asyncio.to_thread(answers.drop, row_key)  # refused: nothing was changed
        raise
    body = operations.secrets.sealed(bytes(answer.body).decode())
    with suppress(StoreError):  # done, and the client is to know it; the same request again gets 409
        await asyncio.to_thread(answers.end, row_key, status=answer.status_code, body=body)
    return answer


async def _asks(request: Request) -> Bearer:
    shown = await shown_by(request)
    return await asyncio.to_thread(bearer_of, operations_of(request), shown)


def _hash(*texts: str) -> str:
    return hashlib.sha256(json.dumps(texts).encode()).hexdigest()


class Page(NamedTuple):
    """The page of a list that a request asks for; the answer's header Link leads to the next one."""

    request: Request
    response: Response
    limit: int
    cursor: str

    def of(self, rows: Sequence[T], key: Callable[[T], str]) -> list[T]:
        """Return the rows after those of the page before.

        Args:
            rows: the whole list, in its order.
            key: names a row among all.

        Raises:
            NotFoundError: the row that the page before ended with is not in the list any more.
        """
        first = 0
        if self.cursor:
            last = self.after()
            first = next((at for at, row in enumerate(rows, start=1) if key(row) == last), 0)
            if not first:
                raise NotFoundError("the cursor is of a row that is gone", hint="begin again, without cursor")
        return self.cut(rows[first : first + self.limit + 1], key)

    def after(self) -> str:
        """Return the key of the last row of the page before; "" for the first page.

        Raises:
            NotFoundError: the cursor is not one of this server's.
        """
        try:
            return base64.urlsafe_b64decode(self.cursor.encode()).decode()
        except ValueError:
            raise NotFoundError(
                "there is no such cursor", hint="take it from the header Link of the page before"
            ) from None

    def cut(self, rows: Sequence[T], key: Callable[[T], str]) -> list[T]:
        """Return so many rows as the page has, and name the next page if there are more."""
        page = list(rows[: self.limit])
        if len(rows) > self.limit:
            cursor = base64.urlsafe_b64encode(key(page[-1]).encode()).decode()
            others = {name: value for name, value in self.request.query_params.items() if name != "cursor"}
            query = urlencode(others | {"cursor": cursor})
            self.response.headers["Link"] = f'<{self.request.url.path}?{query}>; rel="next"'
        return page


def _page(
    request: Request,
    response: Response,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX, description="The most rows of this answer.")] = PAGE_MAX,
    cursor: Annotated[str, Query(max_length=500, description="From the header Link of the page before.")] = "",
) -> Page:
    return Page(request, response, limit, cursor)


Paged = Annotated[Page, Depends(_page)]


_bearer = HTTPBearer(auto_error=False, description="A token of the server's home.")


def user_router(prefix: str) -> APIRouter:
    """Return a router for requests of users, by their tokens."""
    needs = [Security(_bearer), Depends(access_of), Depends(known_query)]
    return APIRouter(prefix=prefix, dependencies=needs, responses=REFUSALS, route_class=ApiRoute)
