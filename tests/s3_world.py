"""An S3 server (moto, a process of its own) behind a proxy that does what networks do, as a test or a seed says."""

import http.client
import os
import random
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

# Keys in one page of a listing; S3 has 1,000.
PAGE = 10
Headers = dict[str, str]
FAULTS = ("500", "503", "lost answer", "lost request", "torn")
_SERVE = """
import sys
from werkzeug.serving import make_server
from moto.server import DomainDispatcherApplication, create_backend_app
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


class Proxy(ThreadingHTTPServer):
    """Forwards to the server. `fault(method, path)` says what happens to a request; None: nothing."""

    daemon_threads = True

    def __init__(self, port: int, translate: Callable[[Headers], Headers] = dict) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behind = port
        self.translate = translate  # From what the client says to what the server behind understands.
        self.fault: Callable[[str, str], str | None] = lambda method, path: None
        self.seen: list[tuple[str, str]] = []
        # One request at a time reaches the server: moto does not look and create in one step, as S3 does.
        self.turn = threading.Lock()

    def handle_error(self, request, client_address) -> None:
        """A client that hangs up is what some tests are about."""

    @contextmanager
    def failing(self, fault: Callable[[str, str], str | None]) -> Iterator[None]:
        """With these faults."""
        self.fault = fault
        try:
            yield
        finally:
            self.fault = lambda method, path: None

    @contextmanager
    def serving(self) -> Iterator["Proxy"]:
        """On a thread of its own."""
        thread = threading.Thread(target=self.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield self
        finally:
            self.shutdown()
            thread.join()
            self.server_close()

    def by_chance(self, seed: int, share: float) -> Callable[[str, str], str | None]:
        """Any fault, in this share of the requests."""
        rng = random.Random(seed)
        return lambda method, path: rng.choice(FAULTS) if rng.random() < share else None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def log_message(self, *args) -> None:
        """Silent."""

    def _serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.server.fault(self.command, self.path)
        self.server.seen.append((self.command, self.path))
        if fault in ("500", "503", "403"):
            code = {"500": "InternalError", "503": "SlowDown", "403": "AccessDenied"}[fault]
            self._answer(int(fault), {}, f"<Error><Code>{code}</Code></Error>".encode())
            return
        if fault == "lost request":
            self._hang_up()
            return
        with self.server.turn:
            behind = http.client.HTTPConnection("127.0.0.1", self.server.behind)
            behind.request(self.command, self.path, body, self.server.translate(dict(self.headers)))
            found = behind.getresponse()
            data, headers = found.read(), {k: v for k, v in found.getheaders() if k.lower() != "transfer-encoding"}
            behind.close()
        if fault == "lost answer":
            self._hang_up()
        elif fault == "hangs":
            select.select([self.connection], [], [])  # Until the client gives up.
            self._hang_up()
        elif fault == "torn" and len(data) > 1:
            self._answer(found.status, headers, data[: len(data) // 2], len(data))
            self._hang_up()
        else:
            self._answer(found.status, headers, data)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = _serve

    def _answer(self, status: int, headers: dict[str, str], data: bytes, length: int | None = None) -> None:
        self.send_response_only(status)
        if self.command != "HEAD":
            headers = {k: v for k, v in headers.items() if k.lower() != "content-length"}
            headers["Content-Length"] = str(len(data) if length is None else length)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def _hang_up(self) -> None:
        self.close_connection = True
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[Proxy]:
    """The server and its proxy, for the whole session; the environment that leads to it is the test's to set."""
    process = subprocess.Popen(
        [sys.executable, "-c", _SERVE],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MOTO_S3_DEFAULT_MAX_KEYS": str(PAGE)},
    )
    try:
        with Proxy(int(process.stdout.readline())).serving() as proxy:
            yield proxy
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.fixture
def s3(s3_server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """The proxy, with an environment for it and an empty bucket named `bucket`."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{s3_server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    empty(s3_server)
    return s3_server


def empty(proxy: Proxy) -> None:
    """Leave nothing in moto but an empty bucket named `bucket`."""
    direct = http.client.HTTPConnection("127.0.0.1", proxy.behind)
    for method, path in (("POST", "/moto-api/reset"), ("PUT", "/bucket")):
        direct.request(method, path)
        direct.getresponse().read()
    direct.close()
    proxy.seen.clear()
