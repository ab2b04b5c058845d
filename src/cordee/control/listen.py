"""The address at which other machines reach the server, over TLS with a given or a self-made certificate.

Clients and agents of this machine use loopback without TLS, whether or not the server listens for others.
"""

import socket
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization

from cordee.control.home import Home
from cordee.errors import CertificateError, InputError, ServerError
from cordee.servers import own_address, write_private
from cordee.tls import fingerprint_of, self_signed

PORT = 8470
OFF = "off"


@dataclass(frozen=True, slots=True)
class Certificate:
    """A certificate with its key; `fingerprint` is None if an authority signed it, which clients then check instead.

    A certificate of an authority is renewed every few weeks, so a pinned fingerprint of it would not last.
    """

    path: Path
    key: Path
    names: tuple[str, ...]
    fingerprint: str | None

    @classmethod
    def read(cls, path: Path, key: Path) -> "Certificate":
        """Read a certificate.

        Raises:
            CertificateError: it cannot be read, or has expired.
        """
        try:
            found = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError) as error:
            raise CertificateError(
                f"{path} is not a certificate: {getattr(error, 'strerror', None) or error}",
                hint="give PEM files with --certificate and --key",
            ) from error
        if found.not_valid_after_utc < datetime.now(UTC):
            raise CertificateError(
                f"the certificate {path} expired on {found.not_valid_after_utc:%Y-%m-%d}", hint="renew it"
            )
        try:
            names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            dns = tuple(names.get_values_for_type(x509.DNSName))
        except x509.ExtensionNotFound:
            dns = ()
        signs_itself = found.issuer == found.subject
        der = found.public_bytes(serialization.Encoding.DER)
        return cls(path, key, dns, fingerprint_of(der) if signs_itself else None)

    def context(self) -> ssl.SSLContext:
        """Return the server's context.

        Raises:
            CertificateError: the key cannot be read, or is not the certificate's.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            context.load_cert_chain(self.path, self.key)
        except OSError as error:
            raise CertificateError(
                f"{self.key} cannot be used as the key of {self.path}: {error.strerror or error}",
                hint="give the two PEM files that belong together with --certificate and --key",
            ) from error
        return context


class Listener:
    """An open port for other machines."""

    def __init__(self, address: tuple[str, int], certificate: Certificate) -> None:
        """Open the port.

        Raises:
            ServerError: it cannot be opened.
            CertificateError: the certificate cannot be used.
        """
        host, port = address
        self.context, self.fingerprint = certificate.context(), certificate.fingerprint
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            self.socket = socket.create_server((host, port), family=family)
        except OSError as error:
            raise ServerError(
                f"cannot listen at {host}:{port}: {error.strerror or error}",
                hint="give another address or port with --listen, or none with --listen off",
            ) from error
        self.url = f"https://{_reachable(host, certificate)}:{self.socket.getsockname()[1]}"

    @classmethod
    def of(cls, home: Home, listen: str | None, certificate: Path | None, key: Path | None) -> "Listener | None":
        """Open the port of these options of `up`; without any, that of the last `up`.

        Raises:
            InputError: an option cannot be used.
            ServerError, CertificateError: the port or the certificate cannot be used.
        """
        if (certificate is None) != (key is None):
            raise InputError("--certificate and --key belong together", hint="give both, or neither")
        last = home.settings()
        if listen is None and certificate is None:
            certificate, key = (Path(last[name]) if last.get(name) else None for name in ("certificate", "key"))
        listen = listen or last.get("listen", OFF)
        if listen == OFF:
            if certificate is not None:
                hint = f"cordee up --listen 0.0.0.0:{PORT} --certificate {certificate} --key {key}"
                raise InputError("--certificate needs --listen", hint=hint)
            listener = None
        else:
            pair = Certificate.read(certificate, key) if certificate and key else self_made(home.path)
            listener = cls(parse_listen(listen), pair)
        paths = {
            name: str(path.absolute()) if path else "" for name, path in (("certificate", certificate), ("key", key))
        }
        home.keep_settings({"listen": listen} | paths)
        return listener


def parse_listen(text: str) -> tuple[str, int]:
    """Return host and port of an address; the port is 8470 unless it is given.

    Raises:
        InputError: it is not an address.

    >>> parse_listen("0.0.0.0:9000"), parse_listen("10.0.0.5"), parse_listen("[::]:9000")
    (('0.0.0.0', 9000), ('10.0.0.5', 8470), ('::', 9000))
    """
    host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
    if not colon:
        host, port = text, str(PORT)
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise InputError(
            f"{text!r} is not an address to listen at",
            hint=f"write --listen 0.0.0.0:{PORT} for all networks of this machine, one of its addresses, or off",
        )
    return host, int(port)


def self_made(home: Path) -> Certificate:
    """Return the home's own certificate; make it the first time."""
    path, key_path = home / "certificate.pem", home / "certificate.key"
    if not (path.exists() and key_path.exists()):
        certificate, key = self_signed([socket.gethostname(), "localhost"], ["127.0.0.1", own_address()])
        write_private(key_path, key)
        write_private(path, certificate)
    return Certificate.read(path, key_path)


def _reachable(host: str, certificate: Certificate) -> str:
    """Return the name or address by which other machines reach the server."""
    names = [name for name in certificate.names if not name.startswith("*")]
    if certificate.fingerprint is None and names:
        return names[0]  # the one that the authority vouches for
    address = own_address() if host in ("0.0.0.0", "::") else host
    return f"[{address}]" if ":" in address else address
