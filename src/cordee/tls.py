"""TLS to a server whose certificate is known by its fingerprint, or signed by an authority that the system trusts."""

import hashlib
import hmac
import ipaddress
import ssl
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from cordee.errors import CertificateError, InputError

_HEX_DIGITS = 64
_SELF_MADE_FOR = timedelta(days=3653)
_CLOCK_SKEW = timedelta(days=1)


def fingerprint_of(der: bytes) -> str:
    """Return the SHA-256 fingerprint of a certificate in DER, in hexadecimal."""
    return hashlib.sha256(der).hexdigest()


def parse_fingerprint(text: str) -> str:
    """Return a fingerprint as `fingerprint_of` writes it; also read openssl's spelling.

    Raises:
        InputError: it is not a SHA-256 fingerprint.

    >>> parse_fingerprint("sha256:" + "AB:" * 31 + "AB") == "ab" * 32
    True
    """
    digits = text.strip().lower().removeprefix("sha256").lstrip(":=").replace(":", "")
    if len(digits) != _HEX_DIGITS or not set(digits) <= set("0123456789abcdef"):
        raise InputError(
            f"{text!r} is not a fingerprint: a certificate's SHA-256 in {_HEX_DIGITS} hexadecimal digits",
            hint="the server's operator finds it in the output of `cordee up` and `cordee nodes token`",
        )
    return digits


def self_signed(names: Iterable[str], addresses: Iterable[str] = ()) -> tuple[bytes, bytes]:
    """Return a new certificate that signs itself, and its key, both as PEM; it holds for ten years."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    own = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "cordee")])
    now = datetime.now(UTC)
    reached: list[x509.GeneralName] = [x509.DNSName(each) for each in dict.fromkeys(names)]
    reached += [x509.IPAddress(ipaddress.ip_address(each)) for each in dict.fromkeys(addresses)]
    made = (
        x509.CertificateBuilder()
        .subject_name(own)
        .issuer_name(own)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _SELF_MADE_FOR)
        .add_extension(x509.SubjectAlternativeName(reached), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    plain = serialization.NoEncryption()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain)
    return made.public_bytes(serialization.Encoding.PEM), pem


def client_context(fingerprint: str | None) -> ssl.SSLContext:
    """Return the context for connections to a server with this fingerprint; None: the system's authorities decide."""
    return ssl.create_default_context() if fingerprint is None else _PinnedContext(parse_fingerprint(fingerprint))


class _PinnedContext(ssl.SSLContext):
    """A client's context that accepts one certificate: name, dates and issuer of a self-made one prove nothing."""

    def __new__(cls, fingerprint: str) -> "_PinnedContext":
        return super().__new__(cls, ssl.PROTOCOL_TLS_CLIENT)

    def __init__(self, fingerprint: str) -> None:
        self.fingerprint = fingerprint
        self.check_hostname = False
        self.verify_mode = ssl.CERT_NONE
        self.minimum_version = ssl.TLSVersion.TLSv1_2
        self.sslsocket_class = _PinnedSocket
        self.sslobject_class = _PinnedObject


class _PinnedSocket(ssl.SSLSocket):
    def do_handshake(self, block: bool = False) -> None:
        super().do_handshake(block)
        try:
            _check(self)
        except CertificateError:
            self.close()
            raise


class _PinnedObject(ssl.SSLObject):
    def do_handshake(self) -> None:
        super().do_handshake()
        try:
            _check(self)
        except CertificateError as error:
            raise ssl.SSLCertVerificationError(ssl.SSL_ERROR_SSL, str(error)) from error  # asyncio expects an SSLError


def _check(peer: ssl.SSLSocket | ssl.SSLObject) -> None:
    """Raise CertificateError unless the peer shows the expected certificate; nothing has been sent to it yet."""
    assert isinstance(peer.context, _PinnedContext), "no other context makes these sockets"
    expected, found = peer.context.fingerprint, fingerprint_of(peer.getpeercert(binary_form=True) or b"")
    if not hmac.compare_digest(expected, found):
        raise CertificateError(
            f"the server shows another certificate than expected: its fingerprint is {found}, not {expected}",
            hint="ask the server's operator whether the certificate was replaced; if it was not, "
            "another machine answers in the server's place",
        )
