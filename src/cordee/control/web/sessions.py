"""Sessions of browsers: who logged in and until when, in a cookie that this server signed.

A session names the token, or the login elsewhere, that it came from: when that is void, so is the session. Nothing is
kept of it here, so a restart and a standby that takes over log nobody out.
"""

import base64
import hashlib
import hmac
import json
import secrets
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass

from cordee.control.members import hash_of
from cordee.control.ports import Clock
from cordee.control.roles import Bearer, Grant, Role
from cordee.units import US_PER_S

LASTS_S = 12 * 3600
TICKET_S = 120
_TICKETS_MAX = 1_000


@dataclass(frozen=True, slots=True)
class BrowserSession:
    """A person who logged in.

    Attributes:
        name: the person.
        by: the id of the token that was shown, or of the identity provider's settings.
        expires_us: when the person has to log in again.
        grants: the roles of one who logged in elsewhere; those of a token are the token's.
    """

    name: str
    by: str
    expires_us: int
    grants: tuple[Grant, ...] = ()


class Sessions:
    """The sessions of one server.

    Attributes:
        cookie: the name of the cookie. Ports do not separate cookies, so each home has a name of its own.
    """

    def __init__(self, secret: str, clock: Clock, bearer_of: Callable[["BrowserSession"], Bearer | None]) -> None:
        """Sign with a key that follows from the home's secret; `bearer_of` says for whom a session's token stands."""
        self._key = hmac.digest(secret.encode(), b"sessions of browsers", "sha256")
        self._clock, self._bearer_of = clock, bearer_of
        self.cookie = f"cordee_{hashlib.sha256(self._key).hexdigest()[:8]}"
        self._tickets: dict[str, BrowserSession] = {}
        self._lock = threading.Lock()

    def begin(self, name: str, by: str, grants: tuple[Grant, ...] = ()) -> str:
        """Return the cookie of a new session."""
        session = BrowserSession(name, by, self._clock.now_us() + LASTS_S * US_PER_S, grants)
        body = base64.urlsafe_b64encode(json.dumps(asdict(session)).encode()).decode()
        return f"{body}.{self._signature('session', body)}"

    def of(self, cookie: str) -> Bearer | None:
        """Return for whom a cookie stands; None if its session is over, void, or not signed by this server."""
        body, _, signature = cookie.rpartition(".")
        if not hmac.compare_digest(signature.encode(), self._signature("session", body).encode()):
            return None
        fields = json.loads(base64.urlsafe_b64decode(body))
        grants = tuple(Grant(queue, Role(role)) for queue, role in fields.get("grants", ()))
        session = BrowserSession(fields["name"], fields["by"], fields["expires_us"], grants)
        bearer, now_us = self._bearer_of(session), self._clock.now_us()
        if bearer is None or min(session.expires_us, bearer.until_us or session.expires_us) <= now_us:
            return None
        return bearer

    def form_token(self, cookie: str) -> str:
        """Return what each form of this session carries, so that no other site can send one."""
        return self._signature("form", cookie)

    def is_form_token(self, cookie: str, shown: str) -> bool:
        """Return whether a form carries the token of its session."""
        return hmac.compare_digest(shown.encode(), self.form_token(cookie).encode())

    def ticket(self, name: str, by: str) -> str:
        """Return a ticket with which a browser begins a session once, within two minutes."""
        now_us, ticket = self._clock.now_us(), secrets.token_urlsafe(24)
        with self._lock:
            self._tickets = {key: each for key, each in self._tickets.items() if each.expires_us > now_us}
            while len(self._tickets) >= _TICKETS_MAX:
                del self._tickets[next(iter(self._tickets))]
            self._tickets[hash_of(ticket)] = BrowserSession(name, by, now_us + TICKET_S * US_PER_S)
        return ticket

    def redeem(self, ticket: str) -> BrowserSession | None:
        """Return who asked for a ticket, which is void from now on; None if it is unknown, used or too old."""
        with self._lock:
            found = self._tickets.pop(hash_of(ticket), None)
        return None if found is None or found.expires_us <= self._clock.now_us() else found

    def _signature(self, purpose: str, text: str) -> str:
        return hmac.digest(self._key, f"{purpose}/{text}".encode(), "sha256").hex()


def session_id(cookie: str) -> str:
    """Return the id of a session, by which the audit log remembers it."""
    return hash_of(cookie)[:16]
