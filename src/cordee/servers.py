"""Where a server is and what it asks for: its URL, a token, the fingerprint of its certificate.

A home is the folder of a server on this machine, or holds `remote.json`, which names one on another machine.
"""

import base64
import errno
import ipaddress
import json
import os
import secrets
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cordee.errors import (
    CertificateError,
    CordeeError,
    HomeUnsuitableError,
    InputError,
    NoServerError,
    ServerError,
    TokenError,
    from_body,
)
from cordee.tls import parse_fingerprint

if TYPE_CHECKING:
    import httpx

_REMOTE = "remote.json"


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The address of a server, with the token that it asks for.

    Attributes:
        url: of its API.
        token: identifies the user.
        fingerprint: of its certificate; None: an authority that the system trusts has signed it, or it has none.
        home: its folder, if that is on this machine.
        others: URLs of the servers that stand by for it, or lead in its place.
        shared: whether other servers may share its database, which do not see its home.
        user: the number of the user whose process the server is, where it has no TLS; None: it is not known.
    """

    url: str
    token: str = field(repr=False)
    fingerprint: str | None = None
    home: Path | None = None
    others: tuple[str, ...] = ()
    shared: bool = False
    user: int | None = None

    @property
    def secrets(self) -> Path | None:
        """The folder of the secrets of jobs; None: they are sent, and the server keeps them."""
        return None if self.home is None or self.shared else self.home / "secrets"


def default_home() -> Path:
    """Return the default home: CORDEE_HOME, else `~/.cordee`."""
    return Path(os.environ.get("CORDEE_HOME") or "~/.cordee").expanduser()


def find_server(home: Path | None = None) -> ServerAddress:
    """Return the server of a home; without one, that of CORDEE_URL, else that of the default home.

    CORDEE_TOKEN replaces the token of a home.

    Raises:
        NoServerError: no server runs for the home.
        TokenError: there is no token, or it cannot be read.
    """
    token = os.environ.get("CORDEE_TOKEN")
    url = os.environ.get("CORDEE_URL")
    if home is None and url:
        if not token:
            raise TokenError(f"CORDEE_URL names {url}, but no token is set", hint="export CORDEE_TOKEN")
        first, *standbys = map(check_url, url.split(","))
        return ServerAddress(first, token, fingerprint_of_environment(), others=tuple(standbys))
    home = (home or default_home()).absolute()
    remote = read_remote(home)
    if remote is not None:
        return replace(remote, token=token or remote.token)
    facts = _announced(home)
    url, servers = str(facts["url"]), [str(each) for each in facts.get("servers", ())]
    return ServerAddress(
        url,
        token or home_token(home),
        facts.get("fingerprint"),
        home,
        others=tuple(each for each in servers if each != url),
        shared="servers" in facts,
        user=home.stat().st_uid,
    )


def is_remote(home: Path | None) -> bool:
    """Return whether `find_server` looks on another machine."""
    elsewhere = home is None and bool(os.environ.get("CORDEE_URL"))
    return elsewhere or ((home or default_home()) / _REMOTE).exists()


def fingerprint_of_environment() -> str | None:
    """Return the fingerprint in CORDEE_FINGERPRINT."""
    text = os.environ.get("CORDEE_FINGERPRINT")
    return parse_fingerprint(text) if text else None


def check_url(url: str) -> str:
    """Return the URL of an API without a slash at its end.

    Raises:
        InputError: it is not a URL of a server, or a token sent there would cross the network unencrypted.
    """
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.path in ("", "/")
        good = good and not parts.query and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    if not good:
        raise InputError(
            f"{url!r} is not the URL of a server", hint="write https://HOST:PORT, as `cordee up` prints it"
        )
    if not is_private(url):
        raise InputError(
            f"{url} would get your token unencrypted, readable by anyone in between",
            hint="a server takes other machines' requests over TLS: write https://",
        )
    return url.rstrip("/")


def is_private(url: str) -> bool:
    """Return whether nobody else can read what is sent there: it is encrypted, or stays on this machine.

    >>> is_private("https://gpu-1:8470"), is_private("http://127.0.0.1:8470"), is_private("http://10.0.0.5:8470")
    (True, True, False)
    """
    parts = urlsplit(url)
    return parts.scheme == "https" or is_loopback(parts.hostname or "")


def check_private(url: str) -> None:
    """Raise InputError if others could read what is sent there, such as a token."""
    if not is_private(url):
        raise InputError(f"{url} is not encrypted, and leads to another machine", hint="give the server's https:// URL")


def is_loopback(host: str) -> bool:
    """Return whether this host is this machine's loopback."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def is_of_user(sock: socket.socket, uid: int) -> bool:
    """Return whether a process of this user listens at the other end of a loopback connection, as far as Linux says.

    Another user may have taken the port of a server that was killed, and must get neither a token nor obedience.
    """
    host, port = sock.getpeername()[:2]
    try:
        return _listens(socket.inet_aton(host), port) == uid
    except OSError:  # a sandbox that has no such sockets
        return _listens_by_table(socket.inet_aton(host), port, uid)


def _listens(address: bytes, port: int) -> int | None:
    """Return the number of the user that listens there; None: nobody does.

    One question to the kernel about one socket (sock_diag(7)); the table of all takes milliseconds to read.
    """
    wanted = struct.pack("=BBBxI", socket.AF_INET, socket.IPPROTO_TCP, 0, 1 << _LISTEN)
    wanted += struct.pack("!HH16s16s", port, 0, address, b"") + struct.pack("=III", 0, _ANY_COOKIE, _ANY_COOKIE)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _SOCK_DIAG) as asked:
        asked.settimeout(1)
        asked.send(struct.pack("=IHHII", 16 + len(wanted), _BY_FAMILY, _REQUEST, 1, 0) + wanted)
        answer = asked.recv(4096)
    kind, body = struct.unpack_from("=H", answer, 4)[0], answer[16:]
    if kind == _BY_FAMILY:
        return int(struct.unpack_from("=I", body, 64)[0])
    number = -struct.unpack_from("=i", body)[0]
    if number == errno.ENOENT:
        return None
    raise OSError(number, os.strerror(number))


_SOCK_DIAG, _BY_FAMILY, _REQUEST, _LISTEN, _ANY_COOKIE = 4, 20, 1, 10, 0xFFFFFFFF  # linux/sock_diag.h, inet_diag.h


def _listens_by_table(address: bytes, port: int, uid: int) -> bool:
    listens = f": {address[::-1].hex().upper()}:{port:04X} 00000000:0000 0A "
    try:
        lines = Path("/proc/net/tcp").read_text().splitlines()
    except OSError:
        return True
    return uid in [int(line.split()[7]) for line in lines if listens in line]


def own_address() -> str:
    """Return the address of this machine in the network of its default route; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # an address for documentation (RFC 5737)
            return str(probe.getsockname()[0])
        except OSError:  # no route
            return "127.0.0.1"


def read_remote(home: Path) -> ServerAddress | None:
    """Return the remote server to which a home is connected; None: it is not.

    Raises:
        HomeUnsuitableError: its file cannot be read.
    """
    path = home / _REMOTE
    try:
        found = json.loads(path.read_text())
        first, *others = map(str, found["servers"])
        return ServerAddress(first, str(found["token"]), found.get("fingerprint"), others=tuple(others))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HomeUnsuitableError(f"{path} cannot be read: {error}", hint="run `cordee connect` again") from error


def keep_remote(home: Path, address: ServerAddress) -> None:
    """Connect a home to a remote server."""
    servers = [address.url, *address.others]
    body = {"servers": servers, "token": address.token, "fingerprint": address.fingerprint}
    write_private(home / _REMOTE, (json.dumps(body) + "\n").encode())


def forget_remote(home: Path) -> bool:
    """Disconnect a home from its remote server; return whether it was connected."""
    try:
        (home / _REMOTE).unlink()
    except FileNotFoundError:
        return False
    return True


def home_token(home: Path) -> str:
    """Return the token of a home on this machine.

    Raises:
        TokenError: it cannot be read.
    """
    try:
        return (home / "token").read_text().strip()
    except OSError as error:
        raise TokenError(
            f"the token {home / 'token'} cannot be read: {error.strerror}",
            hint="it belongs to the user who started the server",
        ) from error


def write_private(path: Path, content: bytes) -> None:
    """Write a file atomically, readable by its owner only."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    new = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
    new.replace(path)


def _announced(home: Path) -> dict[str, Any]:
    """Return what the server of a home has announced: its URL, those of all servers of its database, and so on."""
    path = home / "server.json"
    try:
        facts = dict(json.loads(path.read_text()))
    except FileNotFoundError:
        raise NoServerError(
            f"no server runs on {home}",
            hint="start one with `cordee up`, or use one on another machine: cordee connect URL TOKEN",
        ) from None
    except (OSError, ValueError, TypeError) as error:
        raise NoServerError(f"{path} cannot be read: {error}", hint="start a server again") from error
    if facts.get("url") is None:
        raise NoServerError(f"the server on {home} is starting and takes no jobs yet", hint="ask again in a moment")
    return facts


def write_join_token(secret: str, fingerprint: str | None) -> str:
    """Return a join token: its secret and, if a fingerprint is to be pinned, that too.

    >>> read_join_token(write_join_token("s3cret", "ab" * 32)) == ("s3cret", "ab" * 32)
    True
    """
    if fingerprint is None:
        return secret
    return f"{secret}.{base64.urlsafe_b64encode(bytes.fromhex(fingerprint)).decode().rstrip('=')}"


def read_join_token(token: str) -> tuple[str, str | None]:
    """Return secret and fingerprint of a join token.

    Raises:
        InputError: it is no join token.
    """
    secret, dot, pinned = token.strip().partition(".")
    if secret and not dot:
        return secret, None
    try:
        fingerprint = base64.urlsafe_b64decode(pinned + "=").hex()
        if secret and len(fingerprint) == 64:
            return secret, fingerprint
    except ValueError:
        pass
    raise InputError("this is not a join token, or not all of it", hint="copy the whole line of `cordee nodes token`")


@contextmanager
def secrets_kept(folder: Path, names: Iterable[str], environ: Mapping[str, str]) -> Iterator[None]:
    """Write the named secrets for the agent; restore the folder if the job is refused."""
    names = list(names)
    before = {name: (folder / name).read_bytes() if (folder / name).exists() else None for name in names}
    for name in names:
        write_private(folder / name, environ[name].encode())
    try:
        yield
    except CordeeError:
        for name, old in before.items():
            if old is None:
                (folder / name).unlink(missing_ok=True)
            else:
                write_private(folder / name, old)
        raise


@contextmanager
def transport(url: str) -> Iterator[None]:
    """Say in our words why a request to this URL found no server.

    Raises:
        CertificateError: its certificate is not trusted.
        NoServerError: nothing answers.
    """
    import httpx

    try:
        yield
    except httpx.HTTPError as error:
        if "CERTIFICATE_VERIFY_FAILED" in str(error):
            raise CertificateError(
                f"the certificate of {url} is not trusted: {error}",
                hint="a self-made one is accepted by its fingerprint (CORDEE_FINGERPRINT, or `cordee connect URL TOKEN "
                "--fingerprint F`; a whole join token has it), one of your own authority by SSL_CERT_FILE",
            ) from error
        raise NoServerError(
            f"no server answers at {url}: {error or type(error).__name__}",
            hint="start one with `cordee up`; for one on another machine, check that its port is open",
        ) from error


def error_of(answer: "httpx.Response") -> CordeeError:
    """Return the error that a server answered with."""
    try:
        found = from_body(answer.json())
    except ValueError:
        found = None
    return found or ServerError(f"the server answered {answer.status_code} to {answer.request.url.path}")
