"""The gateway that `cordee up --gateway` starts beside the server: it is started again when it dies.

It outlives a server that is killed or terminated, since it serves on without one; the next server finds it by its pid
file and lets it be. Only `cordee down` ends it.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import psutil
import structlog

from cordee.control.home import Home
from cordee.errors import InputError, MissingExtraError
from cordee.schedule.state.state import State
from cordee.servers import write_private
from cordee.telemetry.host import free_port

OFF, AUTO, PORT = "off", "auto", 8480
_LOOK_S, _SOON_S, _AGAIN_S = 0.2, 5.0, 10.0
_MODULE = "cordee.serve.gateway"


def listen_address(home: Home, wanted: str | None) -> str | None:
    """Return HOST:PORT of the gateway, or None if there is none; remember it for the next `up`.

    Args:
        home: the server's folder.
        wanted: a port, HOST:PORT, `auto` (8480, or another one if that is taken) or `off`; None: as the last time.

    Raises:
        InputError: it is none of these.
        MissingExtraError: the gateway's libraries are not installed.
    """
    written = home.settings().get("gateway", OFF) if wanted is None else wanted
    if written == OFF:
        home.keep_settings({"gateway": OFF})
        return None
    if written == AUTO:
        written = f"127.0.0.1:{_auto_port()}"
    host, _, port = written.rpartition(":")
    if not port.isdecimal() or not 0 < int(port) < 65_536:
        raise InputError(f"{written!r} is not an address for a gateway", hint="write --gateway 8480, or HOST:PORT")
    _check_installed()
    address = f"{host or '127.0.0.1'}:{port}"
    home.keep_settings({"gateway": address})
    return address


def _check_installed() -> None:
    try:
        import aiohttp  # noqa: F401
    except ImportError:
        raise MissingExtraError("a gateway needs aiohttp: not installed", hint="pip install 'cordee[serve]'") from None


def _auto_port() -> int:
    with suppress(OSError), socket.create_server(("127.0.0.1", PORT)):
        return PORT
    return free_port("127.0.0.1")


class GatewayProcess:
    """The gateway of one home, kept running by a thread."""

    def __init__(self, home: Home, address: str) -> None:
        self._home, self._address = home.path, address
        self._pid_file = home.path / "gateway.pid"
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="gateway", daemon=True)
        self._child: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start it, and again whenever it dies; the server must be there to be found."""
        if not self._thread.is_alive():
            self._thread.start()

    def end(self, *, stop: bool) -> None:
        """Look after it no longer; with `stop` let it answer its open requests and end."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()
        running = self._running()
        if stop and running is not None:
            with suppress(psutil.NoSuchProcess):
                running.send_signal(signal.SIGTERM)
            self._pid_file.unlink(missing_ok=True)

    def _running(self) -> psutil.Process | None:
        """Return the gateway of this home, whichever server started it."""
        if self._child is not None and self._child.poll() is not None:
            self._child = None
        try:
            pid, started = self._pid_file.read_text().split()
            process = psutil.Process(int(pid))
            same = abs(process.create_time() - float(started)) < 1 and process.status() != psutil.STATUS_ZOMBIE
            return process if same else None
        except (OSError, ValueError, psutil.Error):
            return None

    def _keep(self) -> None:
        log = structlog.get_logger()
        while not self._ended.is_set():
            if self._running() is not None:
                self._ended.wait(_LOOK_S)
                continue
            began_s = time.monotonic()
            try:
                self._start()
            except OSError as error:
                log.error("the gateway cannot be started", error=str(error))
            while self._running() is not None and not self._ended.is_set():
                self._ended.wait(_LOOK_S)
            if self._ended.is_set():
                return
            soon = time.monotonic() - began_s < _SOON_S
            log.warning("the gateway ended and is started again", after_s=round(time.monotonic() - began_s, 1))
            self._ended.wait(_AGAIN_S if soon else 0)

    def _start(self) -> None:
        argv = [sys.executable, "-m", _MODULE, "--listen", self._address, "--home", str(self._home)]
        with (self._home / "gateway.log").open("ab") as log:
            self._child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True, cwd="/", env=_environ()
            )
        started = psutil.Process(self._child.pid).create_time()
        write_private(self._pid_file, f"{self._child.pid} {started}".encode())


@contextmanager
def gateway_beside(
    state: State, home: Home, address: str | None, on_ready: Callable[[str], None]
) -> Iterator[Callable[[str], None]]:
    """Keep a gateway beside a server from the call of the yielded function on, which calls `on_ready` as well.

    It is let be when the server ends, and ends when the server shuts down for good.

    Args:
        state: the server's.
        home: its folder.
        address: HOST:PORT of the gateway; None: there is none.
        on_ready: called with the server's URL.
    """
    gateway = None if address is None else GatewayProcess(home, address)

    def ready(url: str) -> None:
        if gateway is not None:
            gateway.begin()
        on_ready(url)

    try:
        yield ready
    finally:
        if gateway is not None:
            gateway.end(stop=state.shutting_down)


def _environ() -> dict[str, str]:
    """Return the server's environment without what would lead the gateway to another server."""
    return {name: value for name, value in os.environ.items() if name not in ("CORDEE_URL", "CORDEE_TOKEN")}
