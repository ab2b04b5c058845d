"""OpenID providers for the tests: one that signs whatever a test says, and a browser that walks through a login."""

import json
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, parse_qsl, urlsplit

import httpx
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

Made = Callable[[dict[str, Any]], str]
KEY = RSAKey.generate_key(2048, {"kid": "one"})  # for all: it takes a while


class Forger:
    """A provider over HTTP whose id tokens are what `made` makes of the claims that would be right."""

    def __init__(self) -> None:
        self.keys = [KEY]
        self.claims: dict[str, Any] = {"email": "yuki@example.com", "groups": ["vision"]}
        self.made: Made = self.signed
        self.discovery: dict[str, Any] = {}
        self.asked: list[str] = []
        self.nonces: dict[str, str] = {}
        self.forms: list[dict[str, str]] = []
        handler = type("Handler", (_Handler,), {"forger": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.issuer = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def signed(self, claims: dict[str, Any]) -> str:
        """Return an honest token."""
        return jwt.encode({"alg": "RS256", "kid": self.keys[-1].kid}, claims, self.keys[-1])

    def answer(self, path: str, form: Mapping[str, str]) -> tuple[int, dict[str, Any]]:
        self.asked.append(path)
        if path == "/.well-known/openid-configuration":
            paths = {"authorization_endpoint": "/authorize", "token_endpoint": "/token", "jwks_uri": "/jwks"}
            found = {name: self.issuer + each for name, each in paths.items()}
            return 200, {"issuer": self.issuer, **found, **self.discovery}
        if path == "/jwks":
            return 200, dict(KeySet(self.keys).as_dict(private=False))
        if path == "/token":
            self.forms.append(dict(form))
            if form["code"] not in self.nonces:
                return 400, {"error": "invalid_grant"}
            now = int(time.time())
            claims = {"iss": self.issuer, "aud": "cordee", "sub": "1", "iat": now, "exp": now + 300}
            claims |= {"nonce": self.nonces.pop(form["code"]), **self.claims}
            return 200, {"id_token": self.made(claims), "access_token": "x", "token_type": "Bearer"}
        return 404, {}


class _Handler(BaseHTTPRequestHandler):
    forger: Forger

    def do_GET(self) -> None:
        self._answer({})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"])).decode()
        self._answer(dict(parse_qsl(body)))

    def _answer(self, form: Mapping[str, str]) -> None:
        status, body = self.forger.answer(urlsplit(self.path).path, form)
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def begun(browser: httpx.Client, to: str = "/queues") -> dict[str, str]:
    """Begin a login; return the parameters that the provider gets."""
    sent = browser.get("/login/with", params={"next": to})
    assert sent.status_code == 303, sent.text
    return {name: values[0] for name, values in parse_qs(urlsplit(sent.headers["location"]).query).items()}


def consented(forger: Forger, wanted: Mapping[str, str], code: str = "code-1") -> dict[str, str]:
    """Return the parameters with which the forger sends the browser back."""
    forger.nonces[code] = wanted["nonce"]
    return {"code": code, "state": wanted["state"]}
