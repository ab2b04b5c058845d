"""The body of a segment of the log: events as lines of JSON, compressed, with their hash. It needs no database."""

import zlib
from hashlib import blake2b

from cordee.errors import StoreError


def checked_lines(first: int, last: int, found: str, body: bytes) -> list[str]:
    """Return the events of a segment as JSON.

    Raises:
        StoreError: it is damaged.
    """
    if digest(body) != found:
        raise StoreError(
            f"the segment of events {first} to {last} is damaged: its {len(body)} bytes do not have its hash",
            hint="restore the newest backup: cordee admin restore",
        )
    lines = zlib.decompress(body).decode().split("\n")
    if len(lines) != last - first + 1:
        raise StoreError(f"the segment of events {first} to {last} holds {len(lines)} events")
    return lines


def digest(body: bytes) -> str:
    """Return the hash of a body."""
    return blake2b(body, digest_size=16).hexdigest()
