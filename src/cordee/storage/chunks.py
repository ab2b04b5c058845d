"""Immutable chunks, addressed by their xxh3-128, which is checked on every read.

A key ends in the save and the epoch that wrote it: `chunks/ab/<xxh3>.<save>.<epoch>`. So a late delete for an older
save never hits a chunk that a newer save has written with the same content.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import xxhash

from cordee.errors import DestinationError
from cordee.storage.base_destination import owner_of
from cordee.storage.files import BLOCK_BYTES, Blobs, Data
from cordee.storage.levels import is_decay, read_intact
from cordee.storage.sealed import Damaged
from cordee.units import MiB

logger = logging.getLogger("cordee.storage")

FOLDER = "chunks"
CHUNK_BYTES_MAX = 64 * MiB
# A tensor of this size or more has its own chunks, so that they are found again if it does not change.
OWN_CHUNK_BYTES = 1 * MiB
SHARED_CHUNK_BYTES_MAX = 8 * MiB
_ALIGN_BYTES = 64


@dataclass(frozen=True)
class Chunk:
    """The key of a chunk, its length and its checksum, by which saves find equal content."""

    key: str
    length_bytes: int
    xxh3: str


@dataclass(frozen=True)
class Piece:
    """Part of a chunk; `chunk` is its index in a list of chunks."""

    chunk: int
    offset: int
    length_bytes: int


@dataclass(frozen=True)
class ChunkLayout:
    """The offset of each shard in staging memory, the cuts of that memory into chunks, and the pieces of each shard."""

    offsets: tuple[int, ...]
    cuts: tuple[tuple[int, int], ...]  # (offset, length) of each chunk
    pieces: tuple[tuple[Piece, ...], ...]
    total_bytes: int


def chunk_key(digest: str, save: int, epoch: int) -> str:
    """Return the key of a chunk written by this save of this attempt.

    >>> chunk_key("ab12", 3, 1)
    'chunks/ab/ab12.3.1'
    """
    return f"{FOLDER}/{digest[:2]}/{digest}.{save}.{epoch}"


def written_by(key: str) -> tuple[int, int] | None:
    """Return (epoch, save) from the key of a chunk or a manifest; None if it is neither.

    >>> written_by("chunks/ab/ab12.3.1")
    (1, 3)
    """
    parts = key.rsplit("/", 1)[-1].split(".")
    if len(parts) != 3 or not (parts[1].isdigit() and parts[2].isdigit()):
        return None
    return int(parts[2]), int(parts[1])


def write_chunk(
    blobs: Blobs,
    data: Data,
    *,
    save: int,
    epoch: int,
    known: dict[str, Chunk],
    durable: bool = True,
    decayed_copies: set[tuple[Blobs, str]] | None = None,
) -> tuple[Chunk, bool]:
    """Store the data unless a `known` chunk (by xxh3) has it; return the chunk, and whether it was written.

    Write the `decayed_copies` (level, key), for which `has_decayed` was true, again, and remove them from the set.
    """
    digest = xxhash.xxh3_128_hexdigest(data)
    chunk = Chunk(chunk_key(digest, save, epoch), memoryview(data).nbytes, digest)
    old = known.get(digest)
    if old and old.length_bytes == chunk.length_bytes and _is_there(blobs, old, data, decayed_copies or set()):
        return old, False
    return chunk, blobs.put_if_absent(chunk.key, data, durable=durable)


def _is_there(blobs: Blobs, old: Chunk, data: Data, decayed_copies: set[tuple[Blobs, str]]) -> bool:
    """Return whether the store has the chunk, after repairing missing and decayed copies; a base is not repaired."""
    owner, key = owner_of(blobs, old.key)
    missing = [level for level in owner.levels if level.size(key) != old.length_bytes]
    if len(missing) == len(owner.levels):
        return False
    bad = [level for level in owner.levels if (level, key) in decayed_copies and level not in missing]
    if owner is not blobs:
        return len(missing) + len(bad) < len(owner.levels)
    for level in (*missing, *bad):  # Chunks are missing on the empty disk of a node that is new to the job.
        level.put(key, data)  # Under the same key, so that every generation that uses it is repaired.
        decayed_copies.discard((level, key))
        if level in bad:
            logger.warning("%s had decayed in %s; written again from memory", key, level)
    return True


def has_decayed(level: Blobs, chunk: Chunk, key: str) -> bool:
    """Return whether the bytes on this level's disk have changed; False if the level cannot be read."""
    check = xxhash.xxh3_128()
    try:
        length_bytes = level.read_blocks(key, check.update, from_disk=True)
    except DestinationError as error:
        return is_decay(error)
    return length_bytes != chunk.length_bytes or check.hexdigest() != chunk.xxh3


def read_chunk(blobs: Blobs, chunk: Chunk) -> bytes:
    """Return the verified content, from the nearest level where it is intact; nearer ones are repaired.

    Raises:
        Damaged: missing, of another length, or with another checksum.
    """

    def problem(data: bytes | None) -> str | None:
        if data is None:
            return f"{chunk.key} is missing"
        if len(data) != chunk.length_bytes:
            return f"{chunk.key} has {len(data)} bytes and should have {chunk.length_bytes}"
        if xxhash.xxh3_128_hexdigest(data) != chunk.xxh3:
            return f"{chunk.key} does not match its checksum over {len(data)} bytes"
        return None

    return read_intact(*owner_of(blobs, chunk.key), problem)


def check_chunk(blobs: Blobs, chunk: Chunk, into: memoryview | None = None, *, from_disk: bool = False) -> None:
    """Read and verify a chunk without allocating memory for it, into the given memory if there is any.

    Raises:
        Damaged: no level has it intact; the memory holds no valid content.
    """
    owner, key = owner_of(blobs, chunk.key)
    check = xxhash.xxh3_128()
    try:
        length_bytes = owner.levels[0].read_blocks(key, check.update, into, from_disk=from_disk)
    except DestinationError:
        length_bytes = None
    if length_bytes == chunk.length_bytes and check.hexdigest() == chunk.xxh3:
        return
    data = read_chunk(blobs, chunk)  # Finds it in another level, or raises.
    if from_disk:
        raise Damaged(f"{chunk.key} is not on the disk as it was written")
    if into is not None:
        into[:] = data


def lay_out(lengths_bytes: Iterable[int]) -> ChunkLayout:
    """Place shards one after the other and cut chunks: large shards alone in pieces of 64 MiB, small ones together.

    >>> lay_out([100, 3 * MiB, 50]).cuts
    ((0, 100), (4096, 3145728), (3149824, 50))
    """
    offsets: list[int] = []
    cuts: list[tuple[int, int]] = []
    pieces: list[tuple[Piece, ...]] = []
    end = 0
    shared = False  # whether more small shards may join the last cut
    for length in lengths_bytes:
        if length == 0:
            offsets.append(end)
            pieces.append(())
            continue
        start = _up(end, _ALIGN_BYTES)
        joins = shared and length < OWN_CHUNK_BYTES and start + length - cuts[-1][0] <= SHARED_CHUNK_BYTES_MAX
        if joins:
            cut_start = cuts[-1][0]
            cuts[-1] = (cut_start, start + length - cut_start)
            pieces.append((Piece(len(cuts) - 1, start - cut_start, length),))
        else:
            start = _up(end, BLOCK_BYTES)
            parts = [
                (at, min(CHUNK_BYTES_MAX, start + length - at)) for at in range(start, start + length, CHUNK_BYTES_MAX)
            ]
            pieces.append(tuple(Piece(len(cuts) + i, 0, size) for i, (_, size) in enumerate(parts)))
            cuts += parts
            shared = length < OWN_CHUNK_BYTES
        offsets.append(start)
        end = start + length
    return ChunkLayout(tuple(offsets), tuple(cuts), tuple(pieces), _up(end, BLOCK_BYTES))


def join_pieces(contents: Sequence[bytes], pieces: Sequence[Piece]) -> bytearray:
    """Join the bytes of the pieces; `contents[i]` is the chunk of `pieces[i]`."""
    joined = bytearray(sum(piece.length_bytes for piece in pieces))
    at = 0
    for content, piece in zip(contents, pieces, strict=True):
        joined[at : at + piece.length_bytes] = memoryview(content)[piece.offset : piece.offset + piece.length_bytes]
        at += piece.length_bytes
    return joined


def _up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
