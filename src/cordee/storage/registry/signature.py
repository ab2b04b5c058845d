"""Signatures of artifacts by a local key: Ed25519 over a digest that covers every byte of every file.

The digest of a manifest covers the digests of all chunks, so there is nothing else to hash.
"""

from pathlib import Path
from typing import Any

from cordee.errors import InputError, MissingExtraError

_CONTEXT = b"cordee artifact\0"
_KEY_MODE = 0o600


def make_key(path: Path) -> str:
    """Write a new private key, readable by its owner only, and return the public key in hex.

    Raises:
        InputError: the file exists.
    """
    ed25519, serialization = _cryptography()
    key = ed25519.Ed25519PrivateKey.generate()
    text = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        path.touch(mode=_KEY_MODE, exist_ok=False)
    except FileExistsError:
        raise InputError(
            f"{path} exists", hint="a key that signed something is still needed: name a new file"
        ) from None
    path.write_bytes(text)
    return public_key(path)


def public_key(path: Path) -> str:
    """Return the public key in hex of a private key's file."""
    _, serialization = _cryptography()
    public = _private(path).public_key()
    return str(public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw).hex())


def sign(path: Path, digest: str) -> str:
    """Return the signature in hex of an artifact's digest by the private key in a file."""
    return str(_private(path).sign(_CONTEXT + digest.encode()).hex())


def is_signed(digest: str, signature: str, key: str) -> bool:
    """Return whether a signature of a digest is that of a public key, both in hex."""
    ed25519, _ = _cryptography()
    from cryptography.exceptions import InvalidSignature

    try:
        public = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(signature), _CONTEXT + digest.encode())
    except (InvalidSignature, ValueError):
        return False
    return True


def _private(path: Path) -> Any:
    ed25519, serialization = _cryptography()
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise InputError(f"the key {path} cannot be read: {error.strerror}") from error
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise InputError(f"{path} is no Ed25519 key without a password", hint="make one: cordee artifact key FILE")
    return key


def _cryptography() -> tuple[Any, Any]:
    """Return the modules of Ed25519 and of its files; the library is an extra."""
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise MissingExtraError(
            "artifacts are signed with cryptography, which is not installed", hint='pip install "cordee[artifacts]"'
        ) from None
    return ed25519, serialization
