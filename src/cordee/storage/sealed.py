"""Canonical JSON, and sealed records, which carry their own checksum: `{"body": {...}, "xxh3": "..."}`.

Canonical: keys sorted, no spaces, UTF-8, no NaN. The checksum is xxh3-128 of the canonical body, in hex.
"""

import json
from typing import Any

import xxhash

FORMAT = 1


class Damaged(Exception):
    """The bytes are not those that were written."""


def canonical(value: object) -> bytes:
    """Return the one encoding of a JSON value.

    >>> canonical({"b": 1, "a": [1.5, None]})
    b'{"a":[1.5,null],"b":1}'
    """
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode()


def seal(body: dict[str, object]) -> bytes:
    """Return the body with its checksum."""
    return canonical({"body": body, "xxh3": xxhash.xxh3_128_hexdigest(canonical(body))})


def unseal(data: bytes) -> dict[str, Any]:
    """Return the body of sealed bytes.

    Raises:
        Damaged: they are torn, flipped, or were never sealed.
    """
    try:
        outer = json.loads(data)
        body, check = outer["body"], outer["xxh3"]
        intact = isinstance(body, dict) and xxhash.xxh3_128_hexdigest(canonical(body)) == check
    except (ValueError, TypeError, KeyError) as error:
        raise Damaged(f"{len(data)} bytes that are not a sealed record") from error
    if not intact:
        raise Damaged(f"checksum does not match over {len(data)} bytes")
    return dict(body)
