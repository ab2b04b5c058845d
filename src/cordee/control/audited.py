"""The ASGI layer that makes an act of each request, and records those that no change has recorded.

A change is recorded by the store, with what it writes. Here come the others: refusals, logins, and changes outside the
database.
"""

import asyncio
from collections.abc import Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cordee.control.acts import Act, carried_out
from cordee.control.members import token_id
from cordee.control.operations import Operations
from cordee.control.roles import EVERYWHERE, Bearer, Grant
from cordee.control.store.audit import DONE, FAILED, REFUSED, AuditFilter
from cordee.control.store.sql import SqlStore

_READS = ("GET", "HEAD", "OPTIONS", "TRACE")
_MADE, _CHANGED, _REVOKED = "token made", "token changed", "token revoked"


class Audited:
    """The application, whose requests are acts."""

    def __init__(self, app: ASGIApp, operations: Operations) -> None:
        self._app, self._operations = app, operations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a request."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        client, headers = scope.get("client"), dict(scope["headers"])
        agent = headers.get(b"user-agent", b"").decode("latin-1")
        now_us = self._operations.clock.now_us()
        act = Act(now_us, address=client[0] if client else "", agent=agent, scope=scope)

        async def answered(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._conclude(act, message["status"])
            await send(message)

        with carried_out(act):
            try:
                await self._app(scope, receive, answered)
            except Exception:
                await self._conclude(act, 500)
                raise

    async def _conclude(self, act: Act, status: int) -> None:
        """Record a request, before its answer is sent, unless a change has done it or it needs no record."""
        outcome = _outcome(act, status)
        if outcome is not None and not act.recorded:
            act.recorded = True
            await asyncio.to_thread(self._operations.store.audit.record, act, outcome)


def _outcome(act: Act, status: int) -> str | None:
    """Return how a request ended, as the log has it; None: it is not for the log."""
    if status in (401, 403):
        return REFUSED
    left = status == 499  # nothing was refused; a change that was made all the same has its record
    if left or act.scope.get("method", "GET") in _READS or "route" not in act.scope:
        return None
    if status >= 400:
        return FAILED if status >= 500 else REFUSED
    return None if act.quiet else DONE


def record_tokens(store: SqlStore, owners: Mapping[str, Bearer], now_us: int) -> None:
    """Record the tokens that were made, changed or revoked since the last start, with their roles.

    Raises:
        StoreError: the database refuses.
    """
    known: dict[str, tuple[str, str]] = {}
    for record in store.audit.records(AuditFilter(operations=(_MADE, _CHANGED, _REVOKED))):
        known[record.object] = (record.who, record.detail)
        if record.operation == _REVOKED:
            del known[record.object]
    found = {token_id(token): (bearer.name, terms_of(bearer)) for token, bearer in owners.items()}
    acts = []
    for name in known.keys() | found.keys():
        if known.get(name) != found.get(name):
            what = _REVOKED if name not in found else _CHANGED if name in known else _MADE
            who, detail = found.get(name) or known[name]
            acts.append(Act(now_us, named=what, who=who, object=name, detail=detail))
    store.audit.add([(act, DONE, 1) for act in sorted(acts, key=lambda each: (each.who, each.object))])


def terms_of(bearer: Bearer) -> str:
    """Return the terms of a token, as the file `tokens` has them.

    >>> from cordee.control.roles import ADMIN, Role
    >>> terms_of(Bearer("ada", grants=ADMIN)), terms_of(Bearer("bob", True, grants=(Grant("vision", Role.USER),)))
    ('admin', 'read user=vision')
    """
    until = [] if bearer.until_us is None else [f"until_us={bearer.until_us}"]
    return " ".join([*(["read"] if bearer.reads_only else []), *until, *map(_term, bearer.grants)])


def _term(grant: Grant) -> str:
    role = grant.role.name.lower()
    return role if grant.queue == EVERYWHERE else f"{role}={grant.queue}"
