"""The stored form of a chunk: its bytes by significance, each plane compressed where that pays, as it is or as the
difference from another chunk.

The exponents of weights are alike and their low bits are noise, so planes compress where rows of elements do not; a
fine-tuned model differs from its base in few bits. Measured on a bf16 fine-tune: content-defined chunks save 0 to 3 %,
the difference in planes 83 %.
"""

import struct
from typing import Literal

import numpy as np
import zstandard

from cordee.storage.files import Data
from cordee.storage.sealed import Damaged

Codec = Literal["raw", "planes", "delta"]
"""The bytes themselves, their planes, or the planes of their exclusive or with a base."""

LEVEL = 1
# Less saved is not worth the time that each later read takes.
WORTH = 0.9
# Whether a plane compresses shows in a part of it; noise costs no more than that part.
_SAMPLE_BYTES = 1 << 16
_HEAD = struct.Struct("<BQ")
_AS_IS, _ZSTD = 0, 1
WIDTH_MAX = 16


def encode_chunk(data: Data, width: int, base: Data | None = None) -> tuple[Codec, bytes]:
    """Return the shortest stored form that is worth it.

    Args:
        data: of the chunk.
        width: bytes of an element.
        base: as many bytes that are probably alike.

    >>> codec, stored = encode_chunk(bytes(4096), 2)
    >>> codec, len(stored) < 100, decode_chunk(stored, codec, 2, 4096) == bytes(4096)
    ('planes', True, True)
    """
    whole = np.frombuffer(data, np.uint8)
    if base is not None and len(base) == whole.size:
        stored = _planes(whole ^ np.frombuffer(base, np.uint8), width)
        if len(stored) <= WORTH * whole.size:
            return "delta", stored
    stored = _planes(whole, width)
    return ("planes", stored) if len(stored) <= WORTH * whole.size else ("raw", bytes(data))


def decode_chunk(stored: Data, codec: str, width: int, length_bytes: int, base: Data | None = None) -> bytes:
    """Return the bytes of a chunk from its stored form.

    Raises:
        Damaged: they cannot be what was stored.
    """
    if codec == "raw":
        return bytes(stored)
    whole = _joined(memoryview(stored), width, length_bytes)
    if codec == "delta":
        if base is None or len(base) != length_bytes:
            raise Damaged(f"a difference of {length_bytes} bytes has no base of that length")
        whole ^= np.frombuffer(base, np.uint8)
    elif codec != "planes":
        raise Damaged(f"{codec!r} is no stored form that this version knows")
    return whole.tobytes()


def _planes(whole: np.ndarray, width: int) -> bytes:
    """Return the planes of the elements, and after them the bytes that fill no element."""
    rows = whole.size // width
    squeeze = zstandard.ZstdCompressor(level=LEVEL).compress
    parts: list[bytes] = []
    for plane in (*whole[: rows * width].reshape(rows, width).T, whole[rows * width :]):
        body = np.ascontiguousarray(plane).tobytes()
        shorter = squeeze(body) if _compresses(body, squeeze) else body
        how = _ZSTD if len(shorter) < len(body) else _AS_IS
        kept = shorter if how == _ZSTD else body
        parts += [_HEAD.pack(how, len(kept)), kept]
    return b"".join(parts)


def _compresses(body: bytes, squeeze: object) -> bool:
    if len(body) < 4 * _SAMPLE_BYTES:
        return bool(body)
    middle = len(body) // 2
    sample = body[middle : middle + _SAMPLE_BYTES]
    assert callable(squeeze), "zstandard's method"
    return len(squeeze(sample)) < 0.97 * _SAMPLE_BYTES


def _joined(stored: memoryview, width: int, length_bytes: int) -> np.ndarray:
    if not 1 <= width <= WIDTH_MAX:
        raise Damaged(f"elements of {width} bytes")
    rows = length_bytes // width
    whole = np.empty(length_bytes, np.uint8)
    table = whole[: rows * width].reshape(rows, width)
    at = 0
    for index in range(width + 1):
        plane = table[:, index] if index < width else whole[rows * width :]
        if at + _HEAD.size > len(stored):
            raise Damaged("the planes of a chunk end early")
        how, size_bytes = _HEAD.unpack_from(stored, at)
        at += _HEAD.size
        body = stored[at : at + size_bytes]
        at += size_bytes
        plane[:] = _plane(body, how, plane.size)
    return whole


def _plane(body: memoryview, how: int, size_bytes: int) -> np.ndarray:
    try:
        content = body if how == _AS_IS else zstandard.ZstdDecompressor().decompress(body, max_output_size=size_bytes)
    except zstandard.ZstdError as error:
        raise Damaged(f"a plane cannot be read: {error}") from None
    found = np.frombuffer(content, np.uint8)
    if found.size != size_bytes:
        raise Damaged(f"a plane has {found.size} bytes, and not {size_bytes}")
    return found
