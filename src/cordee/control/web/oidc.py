"""Logins with an OpenID provider: the code flow with PKCE, state and nonce, and the check of what comes back.

The browser keeps what belongs to a login that is under way, in a cookie that this server signed; nothing is kept here
but the states that were used. What the provider says counts only if a key of its own signed it for this server, this
login and this moment (OpenID Connect Core 1.0, 3.1.3.7).
"""

import base64
import hashlib
import json
import secrets
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from hmac import compare_digest
from typing import Any
from urllib.parse import urlencode, urlsplit

import httpx

from cordee.control.ports import Clock
from cordee.control.roles import Grant
from cordee.control.web.oidc_settings import OidcSettings
from cordee.errors import ForbiddenError, MissingExtraError, ServerError
from cordee.servers import is_loopback
from cordee.units import US_PER_S

try:
    from joserfc import jwt
    from joserfc.errors import JoseError
    from joserfc.jwk import KeySet
except ImportError as error:
    raise MissingExtraError(
        "a login with a provider needs joserfc: not installed", hint="pip install 'cordee[oidc]'"
    ) from error

UNDER_WAY_S = 600
SKEW_S = 60
"""The difference of clocks that is borne."""

_KEPT_S = 3600
_KEYS_AGAIN_S = 30
_TIMEOUT_S = 10.0
_STATES_MAX = 10_000
_NAME_MAX = 100
# Signatures by private keys: with a shared secret, whoever has it could sign as the provider, and `none` is nobody's.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519")


@dataclass(frozen=True, slots=True)
class Begun:
    """A login that is under way."""

    state: str
    nonce: str
    verifier: str
    redirect: str
    to: str
    until_us: int


@dataclass(frozen=True, slots=True)
class LoggedIn:
    """A person whom the provider knows."""

    name: str
    groups: list[str]
    grants: tuple[Grant, ...]
    to: str


class Provider:
    """An OpenID provider. Its methods ask it over the network, but for `cookie_of`."""

    def __init__(self, settings: OidcSettings, clock: Clock, sign: Callable[[str, str], str]) -> None:
        """Ask nobody yet; `sign` returns the signature of this server for a purpose and a text."""
        self.settings, self._clock, self._sign = settings, clock, sign
        self._secret = settings.secret()
        self._http = httpx.Client(timeout=_TIMEOUT_S, follow_redirects=False)
        self._lock = threading.Lock()
        self._metadata: tuple[int, dict[str, Any]] | None = None
        self._keys: tuple[int, KeySet] | None = None
        self._used: dict[str, int] = {}

    # -- the way there ------------------------------------------------------------------------------------------------

    def begin(self, redirect: str, to: str) -> tuple[str, str]:
        """Return the provider's address to which a browser goes, and the cookie that it keeps meanwhile.

        Raises:
            ServerError: the provider does not answer as one.
        """
        endpoint = self._endpoint("authorization_endpoint")
        until_us = self._clock.now_us() + UNDER_WAY_S * US_PER_S
        state, nonce, verifier = (secrets.token_urlsafe(32) for _ in range(3))
        begun = Begun(state, nonce, verifier, redirect, to, until_us)
        challenge = base64.urlsafe_b64encode(hashlib.sha256(begun.verifier.encode()).digest()).rstrip(b"=").decode()
        query = {
            "response_type": "code",
            "client_id": self.settings.client_id,
            "redirect_uri": redirect,
            "scope": " ".join(self.settings.scopes),
            "state": begun.state,
            "nonce": begun.nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        body = base64.urlsafe_b64encode(json.dumps(asdict(begun)).encode()).decode()
        joined = "&" if urlsplit(endpoint).query else "?"
        return f"{endpoint}{joined}{urlencode(query)}", f"{body}.{self._sign('login', body)}"

    def leave(self, back: str) -> str | None:
        """Return the provider's address at which people log out there too; None if it has none."""
        endpoint = self._about().get("end_session_endpoint")
        if not endpoint:
            return None
        query = {"client_id": self.settings.client_id, "post_logout_redirect_uri": back}
        return f"{endpoint}{'&' if urlsplit(endpoint).query else '?'}{urlencode(query)}"

    # -- the way back -------------------------------------------------------------------------------------------------

    def finish(self, cookie: str, answer: Mapping[str, str]) -> LoggedIn:
        """Return who has logged in, by the cookie of `begin` and the parameters with which the browser came back.

        Raises:
            ForbiddenError: it is another browser's login, too late, a second time, refused there, or not the
                provider's word; or the person may not log in here.
            ServerError: the provider does not answer as one.
        """
        begun = self._begun(cookie, answer.get("state", ""))
        if answer.get("iss", self.settings.issuer).rstrip("/") != self.settings.issuer:
            raise _refused("the answer is of another provider")
        if "error" in answer:
            raise _refused(f"{self.settings.name} says {answer['error'][:80]!r}")
        tokens = self._exchanged(answer.get("code", ""), begun)
        claims = self._verified(str(tokens.get("id_token", "")), begun.nonce)
        return self._person(self._with_userinfo(claims, str(tokens.get("access_token", ""))), begun.to)

    def _begun(self, cookie: str, state: str) -> Begun:
        body, _, signature = cookie.rpartition(".")
        if not compare_digest(signature.encode(), self._sign("login", body).encode()):
            raise _refused("this browser has not begun a login, or it takes no cookies")
        begun, now_us = Begun(**json.loads(base64.urlsafe_b64decode(body))), self._clock.now_us()
        if not compare_digest(state.encode(), begun.state.encode()):
            raise _refused("the answer belongs to a login that was begun elsewhere, or to an earlier one")
        if begun.until_us <= now_us:
            raise _refused(f"the login took longer than {UNDER_WAY_S // 60} minutes")
        with self._lock:
            self._used = {each: until for each, until in self._used.items() if until > now_us}
            if state in self._used or len(self._used) >= _STATES_MAX:
                raise _refused("this login is used already")
            self._used[state] = begun.until_us
        return begun

    def _exchanged(self, code: str, begun: Begun) -> dict[str, Any]:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": begun.redirect,
            "code_verifier": begun.verifier,
            "client_id": self.settings.client_id,
        }
        basic = None
        if self._secret is not None:
            methods = self._about().get("token_endpoint_auth_methods_supported", ["client_secret_basic"])
            if "client_secret_basic" in methods:
                basic = httpx.BasicAuth(self.settings.client_id, self._secret)
            else:
                form["client_secret"] = self._secret
        endpoint = self._endpoint("token_endpoint")
        return self._asked("POST", endpoint, data=form, auth=basic, refused="the code is not good")

    def _verified(self, token: str, nonce: str) -> dict[str, Any]:
        """Return the claims of an id token."""
        try:
            try:
                found = jwt.decode(token, self._key_set(), algorithms=ALGORITHMS)
            except JoseError:
                # The provider may have changed its keys since they were read.
                found = jwt.decode(token, self._key_set(again=True), algorithms=ALGORITHMS)
            now_s = self._clock.now_us() // US_PER_S
            rules = jwt.JWTClaimsRegistry(
                now=now_s,
                leeway=SKEW_S,
                iss={"essential": True, "values": [self.settings.issuer, self.settings.issuer + "/"]},
                aud={"essential": True, "value": self.settings.client_id},
                exp={"essential": True},
                iat={"essential": True},
                sub={"essential": True},
                nonce={"essential": True, "value": nonce},
            )
            rules.validate(found.claims)
        except (JoseError, ValueError) as error:
            raise _refused(f"the token of {self.settings.name} is not good: {error}") from error
        several = isinstance(found.claims["aud"], list) and len(found.claims["aud"]) > 1
        if found.claims.get("azp", None if several else self.settings.client_id) != self.settings.client_id:
            raise _refused(f"the token of {self.settings.name} is for another program")
        return dict(found.claims)

    def _with_userinfo(self, claims: dict[str, Any], access_token: str) -> dict[str, Any]:
        """Return the claims, with those of the provider's userinfo where the token lacks one that is needed."""
        endpoint = self._about().get("userinfo_endpoint")
        if not endpoint or not access_token or {self.settings.user, self.settings.groups} <= claims.keys():
            return claims
        headers = {"Authorization": f"Bearer {access_token}"}
        found = self._asked("GET", self._endpoint("userinfo_endpoint"), headers=headers)
        if found.get("sub") != claims["sub"]:
            raise _refused(f"{self.settings.name} tells of another person")
        return found | claims

    def _person(self, claims: Mapping[str, Any], to: str) -> LoggedIn:
        settings, name = self.settings, str(claims.get(self.settings.user) or "")
        if not name or len(name) > _NAME_MAX or not name.isprintable() or " " in name:
            raise _refused(f"{settings.name} does not say {settings.user!r}, which names people here")
        if settings.user == "email":
            if claims.get("email_verified", True) in (False, "false"):
                raise _refused(f"the address {name} is not verified")
            short, _, domain = name.rpartition("@")
            if settings.domains and (not short or domain.lower() not in map(str.lower, settings.domains)):
                raise _refused(f"{name} is of no domain that may log in here")
            name = short if settings.short_names else name
        listed = claims.get(settings.groups, [])
        groups = [str(each) for each in listed] if isinstance(listed, list) else [str(listed)]
        known = [each for each in groups if each in settings.roles]
        grants = settings.grants(known)
        if not grants:
            raise _refused(f"{name} is in no group that has a role here")
        return LoggedIn(name, known, grants, to)

    # -- the provider -------------------------------------------------------------------------------------------------

    def _about(self) -> dict[str, Any]:
        now_us = self._clock.now_us()
        with self._lock:
            if self._metadata is not None and now_us - self._metadata[0] < _KEPT_S * US_PER_S:
                return self._metadata[1]
        found = self._asked("GET", f"{self.settings.issuer}/.well-known/openid-configuration")
        if str(found.get("issuer", "")).rstrip("/") != self.settings.issuer:
            raise ServerError(
                f"{self.settings.issuer} says that it is {found.get('issuer')!r}",
                hint="write the issuer in oidc.toml as the provider does",
            )
        with self._lock:
            self._metadata = (now_us, found)
        return found

    def _endpoint(self, name: str) -> str:
        found = str(self._about().get(name, ""))
        parts = urlsplit(found)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
            raise ServerError(f"{self.settings.issuer} has no {name} over https")
        return found

    def _key_set(self, *, again: bool = False) -> KeySet:
        now_us = self._clock.now_us()
        with self._lock:
            if self._keys is not None:
                age_us = now_us - self._keys[0]
                if age_us < (_KEYS_AGAIN_S if again else _KEPT_S) * US_PER_S:
                    return self._keys[1]
        found = self._asked("GET", self._endpoint("jwks_uri"))
        try:
            keys = KeySet.import_key_set({"keys": [each for each in found["keys"] if each.get("use", "sig") == "sig"]})
        except (JoseError, KeyError, TypeError, ValueError) as error:
            raise ServerError(f"the keys of {self.settings.issuer} cannot be read: {error}") from error
        with self._lock:
            self._keys = (now_us, keys)
        return keys

    def _asked(self, method: str, url: str, *, refused: str = "", **more: Any) -> dict[str, Any]:
        try:
            answer = self._http.request(method, url, **more)
            found = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ServerError(
                f"{self.settings.name} does not answer at {url}: {str(error) or type(error).__name__}",
                hint="try again later, or show a token",
            ) from error
        if answer.is_error and refused:
            raise _refused(f"{self.settings.name} says that {refused}: {str(found.get('error', ''))[:80]}")
        if answer.is_error or not isinstance(found, dict):
            raise ServerError(f"{self.settings.name} answers {answer.status_code} at {url}")
        return found


def _refused(why: str) -> ForbiddenError:
    return ForbiddenError(f"you are not logged in: {why}", hint="log in again, or ask the server's operator")
