"""Sessions of browsers: who logged in, and until when. A cookie is a random number; the database has its hash.

A session names the token, or the identity provider's settings, that it came from: when that is void, so is the session.
"""

import hashlib
import hmac
import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cordee.control.members import hash_of
from cordee.control.ports import Clock
from cordee.control.roles import Bearer
from cordee.control.store.sessions import SessionRows
from cordee.errors import StoreError
from cordee.units import US_PER_S

LASTS_S = 12 * 3600
IDLE_S = 4 * 3600
"""A session ends when it was not used for so long; following a page is no use."""

TICKET_S = 120
_TICKETS_MAX = 1_000
_SEEN_EVERY_S = 60
_KEPT_S = 2.0  # so that pages that are followed do not ask the database each time
_KEPT_MAX = 1_000


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """A person who logged in.

    Attributes:
        name: the person.
        by: the id of the token that was shown, or of the identity provider's settings.
        groups: of one who logged in elsewhere, which give the roles; those of a token are the token's.
    """

    name: str
    by: str
    groups: tuple[str, ...] = ()


class Sessions:
    """The sessions of one server.

    Attributes:
        cookie: the name of the cookie. Ports do not separate cookies, so each home has a name of its own.
    """

    def __init__(
        self, secret: str, clock: Clock, rows: SessionRows, bearer_of: Callable[[BrowserSession], Bearer | None]
    ) -> None:
        """Sign forms with a key that follows from the home's secret; `bearer_of` says for whom a session stands now."""
        self._key = hmac.digest(secret.encode(), b"sessions of browsers", "sha256")
        self._clock, self._rows, self._bearer_of = clock, rows, bearer_of
        self.cookie = f"cordee_{hashlib.sha256(self._key).hexdigest()[:8]}"
        self._tickets: dict[str, tuple[BrowserSession, int]] = {}
        self._kept: dict[str, tuple[dict[str, Any] | None, int]] = {}
        self._lock = threading.Lock()

    def begin(self, session: BrowserSession, cookie: str) -> None:
        """Begin a session with a cookie of `new_cookie`.

        Raises:
            StoreError: the database refuses.
        """
        now_us = self._clock.now_us()
        over_us = now_us - LASTS_S * US_PER_S
        self._rows.add(hash_of(cookie), session.name, session.by, session.groups, now_us=now_us, over_us=over_us)

    def of(self, cookie: str, *, follows: bool = False) -> Bearer | None:
        """Return for whom a cookie stands; None if its session is over, void, or none.

        Args:
            cookie: the browser's.
            follows: whether it only follows a page: that does not keep the session from ending.

        Raises:
            StoreError: the database cannot be read.
        """
        key, now_us = hash_of(cookie), self._clock.now_us()
        row = self._row(key, now_us)
        if row is None or min(row["begun_us"] + LASTS_S * US_PER_S, row["seen_us"] + IDLE_S * US_PER_S) <= now_us:
            return None
        bearer = self._bearer_of(BrowserSession(row["name"], row["by"], tuple(json.loads(row["groups"]))))
        if bearer is None or (bearer.until_us is not None and bearer.until_us <= now_us):
            return None
        if not follows and row["seen_us"] + _SEEN_EVERY_S * US_PER_S <= now_us:
            self._rows.see(key, now_us)
            self._forget(key)
        return bearer

    def end(self, cookie: str) -> None:
        """End a session for good: a copy of its cookie is void as well.

        Raises:
            StoreError: the database refuses.
        """
        self._rows.end(hash_of(cookie))
        self._forget(hash_of(cookie))

    def _row(self, key: str, now_us: int) -> dict[str, Any] | None:
        with self._lock:
            row, read_us = self._kept.get(key, (None, -(2**62)))
        if now_us - read_us < _KEPT_S * US_PER_S:
            return row
        try:
            row = self._rows.get(key)
        except StoreError:
            if row is None:
                raise
            return row  # the database is away, and so is what a logout would have to reach
        with self._lock:
            if len(self._kept) >= _KEPT_MAX:
                self._kept.clear()
            self._kept[key] = (row, now_us)
        return row

    def _forget(self, key: str) -> None:
        with self._lock:
            self._kept.pop(key, None)

    def form_token(self, cookie: str) -> str:
        """Return what each form of this session carries, so that no other site can send one."""
        return self.signature("form", cookie)

    def is_form_token(self, cookie: str, shown: str) -> bool:
        """Return whether a form carries the token of its session."""
        return hmac.compare_digest(shown.encode(), self.form_token(cookie).encode())

    def ticket(self, name: str, by: str) -> str:
        """Return a ticket with which a browser begins a session once, within two minutes."""
        now_us, ticket = self._clock.now_us(), secrets.token_urlsafe(24)
        with self._lock:
            self._tickets = {key: each for key, each in self._tickets.items() if each[1] > now_us}
            while len(self._tickets) >= _TICKETS_MAX:
                del self._tickets[next(iter(self._tickets))]
            self._tickets[hash_of(ticket)] = (BrowserSession(name, by), now_us + TICKET_S * US_PER_S)
        return ticket

    def redeem(self, ticket: str) -> BrowserSession | None:
        """Return who asked for a ticket, which is void from now on; None if it is unknown, used or too old."""
        with self._lock:
            session, until_us = self._tickets.pop(hash_of(ticket), (None, 0))
        return session if until_us > self._clock.now_us() else None

    def signature(self, purpose: str, text: str) -> str:
        """Return this server's signature of a text for a purpose."""
        return hmac.digest(self._key, f"{purpose}/{text}".encode(), "sha256").hex()


def new_cookie() -> str:
    """Return a cookie that nobody can guess."""
    return secrets.token_urlsafe(32)


def session_id(cookie: str) -> str:
    """Return the id of a session, by which the audit log remembers it."""
    return hash_of(cookie)[:16]
