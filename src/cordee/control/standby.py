"""One server's part in a pair: it stands by until it leads, renews its lease, and learns when it was replaced."""

import threading
import time
from collections.abc import Callable

import structlog
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from cordee.control.home import Home
from cordee.control.store.leader import Lead
from cordee.errors import HomeInUseError, HomeUnsuitableError, ReplacedError, StandbyError, StoreError, as_body

LOOPBACK = "none"  # of the keys, the certificate of a server that other machines do not reach
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

    def check_keys(self) -> None:
        """Check that this server has the keys of the one that leads, by which agents and clients know it.

        Raises:
            HomeUnsuitableError: it has not, and would be of no use when it takes over.
        """
        leader, own = self._lead.leader(), self._lead.known_by
        if leader is None or leader.left_us <= 0 or leader.holder == self._lead.holder:
            return
        other = [name for name, value in own.items() if leader.known_by.get(name, value) != value]
        if not other:
            return
        if "certificate" in other and own["certificate"] == LOOPBACK:
            why, hint = "other machines do not reach it", "give --listen here too, such as --listen 0.0.0.0:8470"
        elif "certificate" in other and leader.known_by["certificate"] == LOOPBACK:
            why, hint = "other machines reach this one only", "start that one with --listen too, or this one without"
        else:
            why = f"its {' and its '.join(other)} differ{'' if len(other) > 1 else 's'}"
            hint = "copy token, certificate.pem and certificate.key from that server's home, or give both servers the "
            hint += "same --certificate; to change them for both, end that server first"
        raise HomeUnsuitableError(
            f"{self._home.path} cannot stand by for {leader.url}, whose agents and clients would not know it: {why}",
            hint=hint,
        )

    def wait(self, follow: Callable[[], None], stopped: Callable[[], bool]) -> bool:
        """Stand by and follow the log until this server leads; return False if it is stopped before."""
        while not stopped():
            try:
                if self._publish():
                    self.check_keys()
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

    def _publish(self) -> bool:
        """List this server's address, unless that was done a moment ago; return whether it was done."""
        if time.monotonic() - self._registered_s < _RENEW_S:
            return False
        known = self._lead.servers
        self._lead.register()
        self._registered_s = time.monotonic()
        if self._lead.servers != known:
            with self._announcing:
                self.announce(self._facts)
        return True

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
