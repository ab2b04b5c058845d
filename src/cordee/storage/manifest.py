"""The manifest of one generation: it maps parts of tensors to bytes of chunks. JSON, never pickle.

Each rank's uploader writes a part; rank 0's joins all parts into one manifest, stored under its own blake3. It never
changes, and its hash checks every byte that it refers to.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from blake3 import blake3

from cordee.errors import CheckpointError, DestinationError
from cordee.storage.chunks import Chunk, Piece, join_pieces, read_chunk
from cordee.storage.files import Blobs
from cordee.storage.levels import read_intact
from cordee.storage.old_keys import renamed
from cordee.storage.sealed import FORMAT, canonical, seal, unseal

FOLDER = "manifests"


@dataclass(frozen=True)
class Shard:
    """A box of a tensor: its offset and size in each dimension, and the pieces that hold it row by row."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Tensor:
    """A whole tensor; `dtype` is torch's name without the prefix, such as bfloat16. Bytes are little-endian."""

    dtype: str
    shape: tuple[int, ...]
    shards: tuple[Shard, ...]


@dataclass(frozen=True)
class RankPart:
    """One rank's part: the pieces of its extras (encoded JSON), and the cost of its save.

    `values`: only of a rank with names that no rank before it has, such as the first rank of a pipeline stage.
    """

    extras: tuple[Piece, ...]
    captured_bytes: int
    written_bytes: int
    stall_us: int
    uploaded_us: int
    values: dict[str, object] | None = None


@dataclass(frozen=True)
class Manifest:
    """One generation."""

    step: int
    epoch: int
    save: int
    world_size: int
    chunks: tuple[Chunk, ...]
    tensors: dict[str, Tensor]
    values: dict[str, Any]
    ranks: tuple[RankPart, ...]

    def to_bytes(self) -> bytes:
        """Return canonical JSON of format 1."""
        return canonical(
            {
                "format": FORMAT,
                "step": self.step,
                "epoch": self.epoch,
                "save": self.save,
                "world_size": self.world_size,
                "chunks": [[c.key, c.length_bytes, c.xxh3] for c in self.chunks],
                "tensors": {
                    fqn: {
                        "dtype": t.dtype,
                        "shape": t.shape,
                        "shards": [[s.offsets, s.sizes, _plain(s.pieces)] for s in t.shards],
                    }
                    for fqn, t in self.tensors.items()
                },
                "values": self.values,
                "ranks": [_rank_plain(r) for r in self.ranks],
            }
        )

    def all_values(self) -> list[dict[str, object]]:
        """Return the values of rank 0, then those of the ranks with more names."""
        return [self.values, *(rank.values for rank in self.ranks if rank.values is not None)]

    @staticmethod
    def from_bytes(data: bytes) -> "Manifest":
        """Read what `to_bytes` wrote; unknown fields are ignored.

        Raises:
            CheckpointError: a newer Cordee wrote it.
        """
        body = json.loads(data)
        if body["format"] > FORMAT:
            raise CheckpointError(
                f"a manifest has format {body['format']}, and this Cordee reads up to {FORMAT}",
                hint="install a newer Cordee",
            )
        return Manifest(
            body["step"],
            body["epoch"],
            body["save"],
            body["world_size"],
            tuple(Chunk(*c) for c in body["chunks"]),
            {
                fqn: Tensor(
                    t["dtype"],
                    tuple(t["shape"]),
                    tuple(Shard(tuple(o), tuple(s), pieces_of(p)) for o, s, p in t["shards"]),
                )
                for fqn, t in body["tensors"].items()
            },
            body["values"],
            tuple(_rank_part(rank, pieces_of(rank["extras"])) for rank in map(renamed, body["ranks"])),
        )


def write_manifest(blobs: Blobs, manifest: Manifest) -> str:
    """Store a manifest and return its name, `<blake3>.<save>.<epoch>`."""
    data = manifest.to_bytes()
    name = f"{blake3(data).hexdigest()}.{manifest.save}.{manifest.epoch}"
    blobs.put_if_absent(f"{FOLDER}/{name}", data)
    return name


def read_manifest(blobs: Blobs, name: str) -> Manifest:
    """Return the manifest with this name.

    Raises:
        Damaged: missing, or its bytes have another hash.
    """

    def problem(data: bytes | None) -> str | None:
        if data is None:
            return f"manifest {name} is missing"
        if blake3(data).hexdigest() != name.split(".", maxsplit=1)[0]:
            return f"manifest {name} does not match its hash over {len(data)} bytes"
        return None

    return Manifest.from_bytes(read_intact(blobs, f"{FOLDER}/{name}", problem))


def read_extras(blobs: Blobs, manifest: Manifest, rank: int) -> object:
    """Return the extras that this rank saved, as encoded JSON.

    Raises:
        Damaged: their chunk does not verify.
    """
    pieces = manifest.ranks[rank].extras
    contents = [read_chunk(blobs, manifest.chunks[piece.chunk]) for piece in pieces]
    return json.loads(bytes(join_pieces(contents, pieces)))


# Parts: written by each uploader for rank 0's, at parts/<epoch>-<nonce>/<save>.*


def parts_prefix(epoch: int, nonce: str, save: int) -> str:
    """Return the prefix of the parts of one save.

    >>> parts_prefix(1, "n", 3)
    'parts/1-n/000003'
    """
    return f"parts/{epoch}-{nonce}/{save:06d}"


def part_key(prefix: str, rank: int) -> str:
    """Return the key of one rank's part.

    >>> part_key("parts/1-n/000003", 12)
    'parts/1-n/000003.rank-000012'
    """
    return f"{prefix}.rank-{rank:06d}"


def verified_key(prefix: str, rank: int) -> str:
    """Return the key by which a rank declares that its chunks were read back intact."""
    return f"{prefix}.verified-{rank:06d}"


def failed_key(prefix: str) -> str:
    """Return the key by which a rank declares that this save cannot succeed."""
    return f"{prefix}.failed"


def write_failed(blobs: Blobs, prefix: str, reason: str) -> None:
    """Declare that this save cannot succeed; without the reason if the disk is full."""
    try:
        blobs.put_if_absent(failed_key(prefix), seal({"format": FORMAT, "reason": reason}))
    except DestinationError:
        blobs.put_if_absent(failed_key(prefix), b"")  # A full disk has room for a key without content.


def read_failed(blobs: Blobs, prefix: str) -> str | None:
    """Return why this save cannot succeed; None if no rank has declared it."""
    data = blobs.get(failed_key(prefix))
    if data == b"":
        return "another rank failed, and storage had no room for its reason: see that rank's log"
    return None if data is None else str(unseal(data)["reason"])


def write_part(blobs: Blobs, prefix: str, rank: int, body: dict[str, object]) -> None:
    """Store one rank's part, sealed."""
    blobs.put_if_absent(part_key(prefix, rank), seal({"format": FORMAT, "rank": rank, **body}))


def read_part(blobs: Blobs, prefix: str, rank: int) -> dict[str, object] | None:
    """Return one rank's part, or None if it is not there yet.

    Raises:
        Damaged: the bytes are not those that the rank wrote.
    """
    data = blobs.get(part_key(prefix, rank))
    return None if data is None else unseal(data)


def join_parts(parts: Sequence[dict[str, Any]], *, epoch: int, save: int) -> Manifest:
    """Join the parts of all ranks, in the order of ranks, into one manifest.

    Raises:
        CheckpointError: the parts are of different steps or plans, or do not cover a tensor.
    """
    for name in ("step", "plan", "world_size", "save"):
        found = {part[name] for part in parts}
        if len(found) != 1:
            raise CheckpointError(f"the ranks' parts differ in {name}: {', '.join(map(str, sorted(found)))}")
    place: dict[str, int] = {}
    chunks: list[Chunk] = []
    tensors: dict[str, Tensor] = {}
    ranks: list[RankPart] = []
    for part in parts:
        mine = [Chunk(*c) for c in part["chunks"]]
        for chunk in mine:
            if chunk.key not in place:
                place[chunk.key] = len(chunks)
                chunks.append(chunk)
        moved = [place[chunk.key] for chunk in mine]
        for fqn, dtype, shape, offsets, sizes, pieces in part["shards"]:
            shard = Shard(tuple(offsets), tuple(sizes), pieces_of(pieces, moved))
            old = tensors.get(fqn, Tensor(dtype, tuple(shape), ()))
            if (old.dtype, old.shape) != (dtype, tuple(shape)):
                raise CheckpointError(f"{fqn} is {old.dtype}{list(old.shape)} on one rank, {dtype}{shape} on another")
            tensors[fqn] = Tensor(dtype, old.shape, (*old.shards, shard))
        values = part["values"] if ranks else None
        ranks.append(_rank_part({**part, "values": values}, pieces_of(part["extras"], moved)))
    for fqn, tensor in tensors.items():
        covered, whole = sum(math.prod(s.sizes) for s in tensor.shards), math.prod(tensor.shape)
        if covered != whole:
            raise CheckpointError(f"the parts hold {covered} of the {whole} elements of {fqn}")
    first = parts[0]
    return Manifest(
        first["step"], epoch, save, first["world_size"], tuple(chunks), tensors, first["values"], tuple(ranks)
    )


def pieces_of(plain: Sequence[Sequence[int]], moved: Sequence[int] | None = None) -> tuple[Piece, ...]:
    """Return pieces from JSON; `moved[i]` is the new index of chunk i."""
    return tuple(Piece(moved[chunk] if moved else chunk, offset, length) for chunk, offset, length in plain)


def _rank_part(plain: dict[str, Any], extras: tuple[Piece, ...]) -> RankPart:
    costs = {name: plain[name] for name in ("captured_bytes", "written_bytes", "stall_us", "uploaded_us")}
    return RankPart(extras=extras, values=plain.get("values"), **costs)


def _rank_plain(rank: RankPart) -> dict[str, object]:
    plain = {**asdict(rank), "extras": _plain(rank.extras)}
    if rank.values is None:
        del plain["values"]
    return plain


def _plain(pieces: Sequence[Piece]) -> list[list[int]]:
    return [[p.chunk, p.offset, p.length_bytes] for p in pieces]
