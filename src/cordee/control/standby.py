"""One server's part in a pair: it stands by until it leads, renews its lease, and learns when it was replaced."""

import threading
import time
from collections.abc import Callable

import structlog
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cordee.control.home import Home
from cordee.control.store.leader import Lead
from cordee.errors import HomeInUseError, ReplacedError, StandbyError, StoreError, as_body

_RENEW_S = 1.0
_RETRY_S = 0.25


class Standby:
    """The threads and the loop around a `Lead`.

    Attributes:
        leads: whether this server has taken over; requests are answered from then on.
        replaced: the error that ended its lead.
    """

    def __init__(self, lead: Lead, home: Home, wake: Callable[[], None]) -> None:
        self._lead, self._home, self._wake = lead, home, wake
        self._log = structlog.get_logger()
        self.leads = False
        self.replaced: ReplacedError | None = None
        self._ended = threading.Event()
        self._announcing = threading.RLock()
        self._facts: dict[str, object] = {}
        self._registered_s = -_RENEW_S
        self._problem = ""
        self._thread = threading.Thread(target=self._renew, name="lease", daemon=True)

    @property
    def servers(self) -> list[str]:
        """Return the addresses of all servers of the database, the leader's first."""
        return self._lead.servers

    def check(self) -> None:
        """Raise StandbyError if this server must not answer: it stands by, or its lease may be over."""
        if self.leads and self._lead.holds:
            return
        first = self._lead.servers[0]
        if first == self._lead.url:
            raise StandbyError("no server leads now", hint="ask again in a moment")
        raise StandbyError(f"this server stands by; {first} leads", hint=f"ask {first}", leader=first)

    def check_alone(self) -> None:
        """Wait for the lead without standing by.

        Raises:
            HomeInUseError: another server leads and renews its lease.
        """
        leader = self._lead.leader()
        while not self._lead.wait(0):
            now = self._lead.leader()
            if now is not None and leader is not None and now.left_us > leader.left_us:
                raise HomeInUseError(
                    f"{now.url} leads on this database, in epoch {now.epoch}",
                    hint="stop it with `cordee down`, or start this one with --standby",
                )
            leader = now

    def wait(self, follow: Callable[[], None], stopped: Callable[[], bool]) -> bool:
        """Stand by and follow the log until this server leads; return False if it is stopped before."""
        while not stopped():
            try:
                self._publish()
                if self._lead.wait(0):
                    return True
                follow()
                self._problem = ""
            except (StoreError, OSError) as error:
                self._say(error)
                self._ended.wait(_RETRY_S)
        return False

    def locate(self, url: str) -> None:
        """Set the address of this server, unless it has one for other machines."""
        self._lead.locate(self._lead.url or url)

    def announce(self, facts: dict[str, object]) -> None:
        """Publish these facts and the addresses of all servers in `server.json`, and keep the latter current."""
        with self._announcing:  # the main thread and that of the lease
            self._facts = facts
            self._home.announce(facts | {"servers": self._lead.servers})

    def begin(self) -> None:
        """Renew the lease from now on."""
        self._registered_s = -_RENEW_S  # so that the others learn at once who leads
        self._thread.start()

    def end(self) -> None:
        """Give up the lead."""
        self.leads = False
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        self._lead.close()

    def _renew(self) -> None:
        while not self._ended.wait(_RENEW_S):
            try:
                self._lead.renew()
                self._publish()
                self._problem = ""
            except ReplacedError as error:
                self.replaced = error
                self._wake()
                return
            except (StoreError, OSError) as error:
                self._say(error)

    def _publish(self) -> None:
        if time.monotonic() - self._registered_s < _RENEW_S:
            return
        known = self._lead.servers
        self._lead.register()
        self._registered_s = time.monotonic()
        if self._lead.servers != known:
            with self._announcing:
                self.announce(self._facts)

    def _say(self, error: Exception) -> None:
        if self._problem != str(error):
            self._log.warning("the lead cannot be kept up now, it is tried again", error=str(error))
            self._problem = str(error)


class LeaderOnly:
    """A layer around the API: while the server stands by it answers health, and for the rest names the leader."""

    def __init__(self, app: ASGIApp, standby: Standby) -> None:
        self._app, self._standby = app, standby

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request or the opening of a WebSocket."""
        if scope["type"] in ("http", "websocket") and scope["path"] != "/v1/health":
            try:
                self._standby.check()
            except StandbyError as error:
                await JSONResponse(as_body(error), status_code=503)(scope, receive, send)
                return
        await self._app(scope, receive, send)
