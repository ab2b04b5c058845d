"""The link to the server: routes by long poll, status and usage as reports. Without it the gateway serves on."""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import aiohttp

from cordee.errors import CordeeError
from cordee.serve.gateway.gateway import Gateway
from cordee.servers import ServerAddress, is_of_user, write_private
from cordee.tls import client_context

POLL_S = 20.0
STATUS_S, HURRY_S = 1.0, 0.1
"""Between two reports of what is open; and while requests wait for what the server has to start."""
ALIVE_S = 5.0
"""A gateway without any change reports this often that it is there."""
RETRY_S = (0.5, 5.0)
FILE_S = 0.2
"""Between two looks at a file of routes."""

log = logging.getLogger(__name__)


class ServerLink:
    """Fetches routes from the server and reports to it, over whichever of its addresses answers."""

    def __init__(self, gateway: Gateway, find: Callable[[], ServerAddress]) -> None:
        """Follow the server that `find` returns; it is asked again when no address answers."""
        self.url = ""
        """Where clients reach the gateway."""
        self._gateway, self._find = gateway, find
        self._urls: list[str] = []
        self._token = ""
        self._user: int | None = None
        self._session: aiohttp.ClientSession | None = None
        self._kept = gateway.settings.spool / "routes.json"
        self._last: list[dict[str, Any]] = []
        self._acknowledged = 0
        self._reported_s = self._status_s = 0.0

    async def run(self) -> None:
        """Follow the server, for ever."""
        address = self._find()
        self._take(address)
        context = client_context(address.fingerprint) if address.url.startswith("https") else None
        connector = aiohttp.TCPConnector(ssl=context) if context else None
        kept = aiohttp.ClientSession(connector=connector, request_class=self._checked())
        async with kept as self._session, asyncio.TaskGroup() as group:
            group.create_task(self._follow())
            group.create_task(self._report())

    def _checked(self) -> type[aiohttp.ClientRequest]:
        """Return a request that is sent only to a process of the server's user, where no certificate says who it is."""

        link = self

        class CheckedRequest(aiohttp.ClientRequest):
            async def send(self, conn: Any) -> aiohttp.ClientResponse:
                line, user = conn.transport.get_extra_info("socket"), link._user
                if self.url.scheme == "http" and user is not None and not is_of_user(line, user):
                    conn.close()
                    raise OSError("a process of another user listens where the server was; it got nothing")
                return await super().send(conn)

        return CheckedRequest

    async def _follow(self) -> None:
        """Keep the routes as the server has them; until it answers, those that it had last."""
        try:
            self._gateway.apply(json.loads(self._kept.read_text()))
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            log.warning("%s cannot be read, so the server's routes are awaited: %r", self._kept, error)
        version, wait_s = None, RETRY_S[0]
        while True:
            which = "" if version is None else f"?after={version}&wait_s={POLL_S:g}"
            routes = await self._ask("GET", f"/v1/gateway/routes{which}", None, POLL_S + 10)
            if routes is None:
                await asyncio.sleep(wait_s)
                wait_s, version = min(RETRY_S[1], 2 * wait_s), None
                continue
            wait_s = RETRY_S[0]
            if routes.get("version") != version:
                version = routes.get("version")
                self._gateway.apply(routes)
                write_private(self._kept, json.dumps(routes).encode())

    async def _report(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(STATUS_S):
                    await self._gateway.unserved.wait()
            self._gateway.unserved.clear()
            await self.report_once()
            await asyncio.sleep(HURRY_S)

    async def report_once(self, *, final: bool = False) -> None:
        """Report the status if something has changed or nothing was said lately, and the usage if it is time."""
        gateway, now = self._gateway, time.monotonic()
        if final or now - self._reported_s >= gateway.settings.report_s:
            self._reported_s = now
            gateway.note_busy()
            gateway.usage.close_journal()
        for number, rows in gateway.usage.unreported():
            if not await self._send(number, rows):
                break  # What is open is reported all the same: it decides how many replicas there are.
            gateway.usage.acknowledge(number)
        # Idle time grows by itself, and matters only while a request waits.
        status = [{name: value for name, value in row.items() if name != "idle_us"} for row in gateway.status()]
        changes = status != self._last or any(row["queued"] or row["running"] for row in status)
        if (changes or now - self._status_s >= ALIVE_S) and await self._send(self._acknowledged, []):
            self._last, self._status_s = status, now

    async def _send(self, number: int, usage: list[dict[str, Any]]) -> bool:
        gateway, at_us = self._gateway, time.time_ns() // 1_000
        body = {"seq": number, "at_us": at_us, "url": self.url, "status": gateway.status(), "usage": usage}
        answer = await self._ask("POST", f"/v1/gateways/{self._gateway.settings.name}/reports", body, 10.0)
        if answer is None or int(answer.get("seq", -1)) < number:
            return False
        self._acknowledged = number
        return True

    async def _ask(
        self, method: str, path: str, body: Mapping[str, Any] | None, deadline_s: float
    ) -> dict[str, Any] | None:
        """Return the answer of the server; None: none came."""
        assert self._session is not None, "it runs"
        for url in list(self._urls):
            headers, timeout = {"Authorization": f"Bearer {self._token}"}, aiohttp.ClientTimeout(total=deadline_s)
            try:
                async with self._session.request(
                    method, url + path, json=body, headers=headers, timeout=timeout
                ) as answer:
                    if answer.status == 200:
                        found = await answer.json()
                        return found if isinstance(found, dict) else None
                    log.warning("%s%s answered with status %d: %.300s", url, path, answer.status, await answer.text())
            except (aiohttp.ClientError, TimeoutError, ValueError, OSError) as error:
                log.warning("%s does not answer: %s", url, error or type(error).__name__)
            self._urls.append(self._urls.pop(0))
        with contextlib.suppress(CordeeError):  # A server that starts again may have another address.
            self._take(self._find())
        return None

    def _take(self, address: ServerAddress) -> None:
        self._urls, self._token, self._user = [address.url, *address.others], address.token, address.user


async def follow_file(gateway: Gateway, path: Path) -> None:
    """Keep the routes as they are in a file, for ever: a gateway without a server."""
    seen: tuple[int, int] | None = None
    while True:
        try:
            stat = path.stat()
            if (stat.st_mtime_ns, stat.st_size) != seen:
                seen = (stat.st_mtime_ns, stat.st_size)
                gateway.apply(json.loads(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("%s cannot be read: %s", path, error)
        await asyncio.sleep(FILE_S)
