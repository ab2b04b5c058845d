"""The requests of a client: which server they go to, what is sent again, and what need not be sent again.

A request that changes something carries an idempotency key, so that it may be sent again when its answer was lost.
What was read is kept with its ETag: the server answers 304 while it is the same.
"""

import json
import secrets
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from cordee.errors import NoServerError, ServerError, StandbyError
from cordee.servers import ServerAddress, error_of, is_of_user, transport
from cordee.tls import client_context

T = TypeVar("T")

_TIMEOUT_S, _PAIR_TIMEOUT_S = 30.0, 6.0
_TAKEOVER_S = 10.0  # a new leader answers well within this time after the old one is gone
_RETRY_S = 0.1
_LOST_MAX = 2  # how often a request is sent again to a server that is the only one
_KEPT_MAX, _KEPT_BYTES_MAX = 16, 2**20


class _Answer(NamedTuple):
    body: bytes
    following: str  # the path of the next page; "": there is none


class ApiConnection:
    """The connection of a client to the servers of one database."""

    def __init__(self, address: ServerAddress, token: str) -> None:
        """Take an address; nothing is sent yet."""
        import httpx

        self.address = address
        headers = {"Authorization": f"Bearer {token}"}
        # Without TLS no proxy from the environment is wanted, and loading the system's certificates would take longer
        # than most requests.
        tls = any(each.startswith("https:") for each in (address.url, *address.others))
        verify = client_context(address.fingerprint) if tls else False
        # A frozen server accepts connections and never answers: where there is another one, it is asked sooner.
        timeout = _PAIR_TIMEOUT_S if address.others else _TIMEOUT_S
        self._http = httpx.Client(headers=headers, timeout=timeout, trust_env=tls, verify=verify)
        self._kept: OrderedDict[str, tuple[str, _Answer]] = OrderedDict()

    @property
    def token(self) -> str:
        """Return the token by which the server knows the user."""
        return str(self._http.headers["Authorization"]).removeprefix("Bearer ")

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def ask(self, shape: type[T], method: str, path: str, **kwargs: Any) -> T:
        """Return the leader's answer; what it has beyond the shape, from a newer server, is left out."""
        return _read(shape, self._asked(method, path, **kwargs).body)

    def ask_here(self, shape: type[T], method: str, path: str, **kwargs: Any) -> T:
        """Return this server's answer, whether it leads or not."""
        return _read(shape, self.exchange(method, path, **kwargs))

    def pages(self, shape: type[T], path: str) -> Iterator[T]:
        """Yield the pages of a list."""
        while path:
            answer = self._asked("GET", path)
            yield _read(shape, answer.body)
            path = answer.following

    def exchange(self, method: str, path: str, **kwargs: Any) -> bytes:
        """Return the body of this server's answer to a request of httpx."""
        return self._exchange(method, path, **kwargs).body

    @contextmanager
    def stream(self, path: str, params: Mapping[str, Any]) -> Iterator[Iterator[str]]:
        """Open an answer that is read line by line."""
        url = self.address.url + path
        asked = self._http.stream("GET", url, params=dict(params), timeout=None, extensions=self._extensions)
        with transport(self.address.url), asked as answer:
            if answer.is_error:
                answer.read()
                raise error_of(answer)
            yield answer.iter_lines()

    @property
    def _extensions(self) -> dict[str, Any]:
        """Return what httpx calls between a connection and the first byte that is sent over it."""
        by_certificate = self.address.url.startswith("https:")
        return {} if self.address.user is None or by_certificate else {"trace": self._check}

    def _check(self, what: str, facts: Mapping[str, Any]) -> None:
        """Look who listens at the other end.

        Raises:
            NoServerError: it is another user, who took the port of a server that was killed, and would get the token.
        """
        user = self.address.user
        if what == "connection.connect_tcp.complete" and user is not None:
            line = facts["return_value"]
            if not is_of_user(line.get_extra_info("socket"), user):
                line.close()
                why = f"a process of another user listens at {self.address.url}, where the server was; it got nothing"
                raise NoServerError(why, hint="the server was killed: start it again with `cordee up`")

    def _asked(self, method: str, path: str, **kwargs: Any) -> _Answer:
        """Return the leader's answer; a request that changes something has one key however often it is sent."""
        if method != "GET":
            kwargs["headers"] = {"Idempotency-Key": secrets.token_urlsafe(18)} | kwargs.get("headers", {})
        deadline, lost = time.monotonic() + _TAKEOVER_S, 0
        while True:
            try:
                return self._exchange(method, path, **kwargs)
            except (NoServerError, StandbyError) as error:
                turned = self._turn(error)
                lost += not turned
                if time.monotonic() > deadline or (not turned and (lost > _LOST_MAX or not _is_cut(error))):
                    raise

    def _turn(self, error: NoServerError | StandbyError) -> bool:
        """Turn to the server that the error names as the leader, else to the next; return whether to ask again."""
        now, leader = self.address, error.leader if isinstance(error, StandbyError) else None
        if leader is not None and leader != now.url and (leader in now.others or now.url.startswith("https:")):
            following = leader
        elif now.others:
            following = now.others[0]
        else:
            return isinstance(error, StandbyError) and leader is None
        time.sleep(_RETRY_S)  # each may name another one until one of them has taken over
        others = (*(url for url in now.others if url != following), now.url)
        self.address = replace(now, url=following, others=others)
        return True

    def _exchange(self, method: str, path: str, **kwargs: Any) -> _Answer:
        wanted = f"{self.address.url}{path} {json.dumps(kwargs.get('params'))}" if method == "GET" else ""
        tag, kept = self._kept.get(wanted, ("", _Answer(b"", "")))
        if tag:
            kwargs["headers"] = kwargs.get("headers", {}) | {"If-None-Match": tag}
        with transport(self.address.url):
            answer = self._http.request(method, self.address.url + path, extensions=self._extensions, **kwargs)
        if answer.status_code == 304:
            self._keep(wanted, tag, kept)
            return kept
        if answer.is_error:
            raise error_of(answer)
        following = urlsplit(answer.links.get("next", {}).get("url", ""))
        found = _Answer(answer.content, f"{following.path}?{following.query}" if following.path else "")
        tag = answer.headers.get("ETag", "")
        if wanted and tag and len(found.body) <= _KEPT_BYTES_MAX:
            self._keep(wanted, tag, found)
        return found

    def _keep(self, wanted: str, tag: str, answer: _Answer) -> None:
        self._kept.pop(wanted, None)
        self._kept[wanted] = (tag, answer)  # the newest is the last
        if len(self._kept) > _KEPT_MAX:
            self._kept.popitem(last=False)


def _read(shape: type[T], body: bytes) -> T:
    try:
        return TypeAdapter(shape).validate_json(body, extra="ignore")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the answer"
        raise ServerError(
            f"what answered does not speak as a server of Cordee: {where}: {first['msg']}",
            hint="another program may listen at this address, or the server is of another version",
        ) from error


def _is_cut(error: Exception) -> bool:
    """Return whether a connection ended before the answer had come: the server may have done what was asked."""
    import httpx

    return isinstance(error.__cause__, httpx.RemoteProtocolError | httpx.ReadError | httpx.WriteError)
