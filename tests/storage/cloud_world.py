"""Google's and Azure's object stores, as near as they come to a test: behind the proxy that loses and tears.

Azure is Azurite, Microsoft's own emulator (`npm install --global azurite`; without it these tests are skipped). Google
publishes none that speaks the XML API, which our client speaks. It is S3's but for a few headers, so moto serves it and
the proxy translates two: who asks, and the conditional create. No test here talks to Google itself.
"""

import base64
import hashlib
import hmac
import http.client
import json
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import pytest

from s3_world import Headers, Proxy, empty

ACCOUNT = "devstoreaccount1"
# Azurite's own, from its README: the same for everybody.
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
START_S = 30.0


def _translate(headers: Headers) -> Headers:
    told = {name.lower(): value for name, value in headers.items()}
    told["authorization"] = (
        "AWS4-HMAC-SHA256 Credential=key/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"
    )
    generation = told.pop("x-goog-if-generation-match", None)
    assert generation in (None, "0"), "we only ever ask that there be none"
    return told | ({"if-none-match": "*"} if generation else {})


@pytest.fixture(scope="session")
def google_server(s3_server: Proxy) -> Iterator[Proxy]:
    with Proxy(s3_server.behind, _translate).serving() as proxy:
        yield proxy


@pytest.fixture
def google(google_server: Proxy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Proxy:
    """The proxy, with credentials that lead to it and an empty bucket named `bucket`."""
    url = f"http://127.0.0.1:{google_server.server_port}"
    account = {"gcs_base_url": url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    (tmp_path / "account.json").write_text(json.dumps(account))
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT", str(tmp_path / "account.json"))
    empty(google_server)
    return google_server


@pytest.fixture(scope="session")
def azure_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    program = shutil.which("azurite-blob")
    if program is None:
        pytest.skip("Azurite is not there: npm install --global azurite")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = [
        "--silent",
        "--inMemoryPersistence",
        "--disableTelemetry",
        "--skipApiVersionCheck",
        "--blobPort",
        str(port),
    ]
    process = subprocess.Popen([program, *options], stdout=subprocess.DEVNULL, cwd=tmp_path_factory.mktemp("azurite"))
    try:
        for _ in range(round(START_S / 0.1)):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "Azurite has ended"
            threading.Event().wait(0.1)
        with Proxy(port).serving() as proxy:
            yield proxy
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def azure(azure_server: Proxy, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """The proxy, with credentials that lead to it and an empty container named `bucket`."""
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{azure_server.server_port}/{ACCOUNT}")
    for method in ("DELETE", "PUT"):
        _ask(azure_server, method)
    azure_server.seen.clear()
    return azure_server


def _ask(proxy: Proxy, method: str) -> None:
    """Make the container, or remove it: a request signed as Azure's documentation says under Shared Key."""
    date = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
    headers = {"x-ms-date": date, "x-ms-version": "2021-08-06"}
    named = "".join(f"{name}:{value}\n" for name, value in headers.items())
    words = f"{method}{chr(10) * 12}{named}/{ACCOUNT}/{ACCOUNT}/bucket\nrestype:container"
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), words.encode(), hashlib.sha256).digest()).decode()
    direct = http.client.HTTPConnection("127.0.0.1", proxy.behind)
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"}
    direct.request(method, f"/{ACCOUNT}/bucket?restype=container", headers=headers)
    answer = direct.getresponse()
    assert answer.status in (201, 202, 404), answer.read()
    direct.close()
