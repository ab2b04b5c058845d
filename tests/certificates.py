"""Certificates for tests: of an authority, of a server that it signed, expired ones."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, as files."""

    path: Path
    key_path: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def make(folder: Path, name: str, *, names: tuple[str, ...] = (), by: Pair | None = None, days: int = 2) -> Pair:
    """Write NAME.pem and NAME.key; signed `by` an authority, else by itself. It ends in `days`."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(by.certificate.subject if by else subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=9))
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.BasicConstraints(ca=by is None, path_length=None), critical=True)
    )
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName(each) for each in names]), False)
    made = builder.sign(by.key if by else key, hashes.SHA256())
    pem = serialization.Encoding.PEM
    pair = Pair(folder / f"{name}.pem", folder / f"{name}.key", made, key)
    pair.path.write_bytes(made.public_bytes(pem))
    plain = serialization.NoEncryption()
    pair.key_path.write_bytes(key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain))
    return pair
