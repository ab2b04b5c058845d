"""Chunks and manifests: every byte in its place, and none that changed goes unseen."""

import json
import math
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cordee.errors import CheckpointError
from cordee.storage.chunks import (
    CHUNK_BYTES_MAX,
    OWN_CHUNK_BYTES,
    Chunk,
    Piece,
    check_chunk,
    join_pieces,
    lay_out,
    read_chunk,
    write_chunk,
)
from cordee.storage.files import FileBlobs
from cordee.storage.manifest import (
    Manifest,
    RankPart,
    Shard,
    Tensor,
    join_parts,
    read_manifest,
    read_part,
    write_manifest,
    write_part,
)
from cordee.storage.sealed import Damaged

LENGTHS = st.lists(
    st.one_of(st.integers(0, 5000), st.integers(OWN_CHUNK_BYTES - 2, OWN_CHUNK_BYTES + 2), st.just(200 * 2**20 + 3)),
    max_size=30,
)


@given(LENGTHS)
def test_a_layout_gives_every_shard_its_own_bytes(lengths) -> None:
    layout = lay_out(lengths)
    assert len(layout.offsets) == len(layout.pieces) == len(lengths)
    end = 0
    for start, length in layout.cuts:
        assert start >= end and 0 < length <= CHUNK_BYTES_MAX and start % 4096 == 0
        end = start + length
    assert end <= layout.total_bytes
    taken = 0
    for offset, pieces, length in zip(layout.offsets, layout.pieces, lengths, strict=True):
        assert sum(piece.length_bytes for piece in pieces) == length
        at = offset
        for piece in pieces:
            start, size = layout.cuts[piece.chunk]
            assert start + piece.offset == at and piece.offset + piece.length_bytes <= size
            at += piece.length_bytes
        assert length == 0 or offset >= taken
        taken = max(taken, at)
        if length >= OWN_CHUNK_BYTES:
            assert all(piece.offset == 0 and layout.cuts[piece.chunk][1] == piece.length_bytes for piece in pieces)


def test_pieces_are_joined_in_order() -> None:
    assert join_pieces([b"abcdef", b"xyz"], [Piece(0, 2, 3), Piece(4, 0, 2)]) == b"cdexy"


def test_a_chunk_is_written_once_per_save_and_known_ones_never(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    first, new = write_chunk(blobs, b"abc", save=1, epoch=1, known={})
    assert new and first.key.endswith(f"{first.xxh3}.1.1")
    again, new = write_chunk(blobs, b"abc", save=2, epoch=1, known={first.xxh3: first})
    assert not new and again == first
    later, new = write_chunk(blobs, b"abc", save=2, epoch=1, known={})
    assert new and later.key != first.key, "a late delete for save 1 must not hit what save 2 wrote"
    blobs.delete(first.key)
    rewritten, new = write_chunk(blobs, b"abc", save=3, epoch=1, known={first.xxh3: first})
    assert new and rewritten.key.endswith(".3.1"), "a chunk that has vanished is written again"


@pytest.mark.parametrize("harm", ["flip", "truncate", "append", "remove"])
def test_a_harmed_chunk_is_found(tmp_path, harm) -> None:
    blobs = FileBlobs(tmp_path)
    chunk, _ = write_chunk(blobs, b"x" * 1000, save=1, epoch=1, known={})
    memory = memoryview(bytearray(1000))
    check_chunk(blobs, chunk, memory)
    assert read_chunk(blobs, chunk) == memory == b"x" * 1000
    path = tmp_path / chunk.key
    data = path.read_bytes()
    changed = {"flip": b"y" + data[1:], "truncate": data[:-1], "append": data + b"x", "remove": None}[harm]
    path.unlink() if changed is None else path.write_bytes(changed)
    for read in (read_chunk, check_chunk, partial(check_chunk, into=memory), partial(check_chunk, from_disk=True)):
        with pytest.raises(Damaged, match=chunk.xxh3):
            read(blobs, chunk)


def a_manifest() -> Manifest:
    piece = (Piece(0, 0, 24),)
    return Manifest(
        step=7,
        epoch=2,
        save=3,
        world_size=1,
        chunks=(Chunk("chunks/ab/ab.3.2", 30, "cd"),),
        tensors={"model/w": Tensor("float32", (2, 3), (Shard((0, 0), (2, 3), piece),))},
        values={"model": {"w": {"$": "tensor", "name": "model/w"}}},
        ranks=(RankPart((Piece(0, 24, 6),), 30, 30, 11, 12),),
    )


def test_a_manifest_is_format_1_byte_by_byte_and_found_by_its_hash(tmp_path) -> None:
    """Format 1 is fixed: these bytes must stay readable, and be what is written, for ever."""
    stored = (
        b'{"chunks":[["chunks/ab/ab.3.2",30,"cd"]],"epoch":2,"format":1,'
        b'"ranks":[{"captured_bytes":30,"extras":[[0,24,6]],"stall_us":11,"uploaded_us":12,"written_bytes":30}],'
        b'"save":3,"step":7,'
        b'"tensors":{"model/w":{"dtype":"float32","shape":[2,3],"shards":[[[0,0],[2,3],[[0,0,24]]]]}},'
        b'"values":{"model":{"w":{"$":"tensor","name":"model/w"}}},"world_size":1}'
    )
    assert a_manifest().to_bytes() == stored
    assert Manifest.from_bytes(stored) == a_manifest()
    assert Manifest.from_bytes(stored.replace(b"uploaded_us", b"drained_us")) == a_manifest(), "of version 0.1.0"
    assert Manifest.from_bytes(json.dumps(json.loads(stored) | {"later": 1}).encode()) == a_manifest()
    blobs = FileBlobs(tmp_path)
    digest = write_manifest(blobs, a_manifest())
    assert digest.endswith(".3.2")
    assert read_manifest(blobs, digest) == a_manifest()
    path = tmp_path / "manifests" / digest
    path.write_bytes(stored.replace(b'"step":7', b'"step":8'))
    with pytest.raises(Damaged, match="does not match its hash"):
        read_manifest(blobs, digest)
    path.unlink()
    with pytest.raises(Damaged, match="missing"):
        read_manifest(blobs, digest)
    with pytest.raises(CheckpointError, match="format 2"):
        Manifest.from_bytes(stored.replace(b'"format":1', b'"format":2'))


def a_part(rank: int, **changes) -> dict:
    rows = 2
    shard = ["w", "float32", [4, 3], [rank * rows, 0], [rows, 3], [[0, 0, 24]]]
    return {
        "save": 1,
        "step": 5,
        "plan": "p",
        "world_size": 2,
        "since": None,
        "chunks": [[f"chunks/ab/ab{rank}.1.1", 30, "cd"], ["chunks/ff/ff.1.1", 1, "ee"]],
        "shards": [shard],
        "values": {"w": 1} if rank == 0 else None,
        "extras": [[0, 24, 6]],
        "captured_bytes": 30,
        "written_bytes": 30,
        "stall_us": 1,
        "uploaded_us": 2,
    } | changes


def test_parts_join_to_one_manifest(tmp_path) -> None:
    blobs = FileBlobs(tmp_path)
    for rank in range(2):
        write_part(blobs, "parts/1-n/000001", rank, a_part(rank))
    parts = [read_part(blobs, "parts/1-n/000001", rank) for rank in range(2)]
    whole = join_parts(parts, epoch=1, save=1)
    assert [chunk.key for chunk in whole.chunks] == ["chunks/ab/ab0.1.1", "chunks/ff/ff.1.1", "chunks/ab/ab1.1.1"]
    assert [shard.pieces[0].chunk for shard in whole.tensors["w"].shards] == [0, 2]
    assert whole.ranks[1].extras == (Piece(2, 24, 6),)
    assert sum(math.prod(shard.sizes) for shard in whole.tensors["w"].shards) == 12
    assert read_part(blobs, "parts/1-n/000001", 2) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step": 6}, "differ in step: 5, 6"),
        ({"plan": "q"}, "differ in plan"),
        ({"shards": []}, "hold 6 of the 12 elements of w"),
        ({"shards": [["w", "float16", [4, 3], [2, 0], [2, 3], [[0, 0, 12]]]]}, "float32.* on one rank, float16"),
    ],
)
def test_parts_that_do_not_belong_together_make_no_manifest(changes, message) -> None:
    with pytest.raises(CheckpointError, match=message):
        join_parts([a_part(0), a_part(1, **changes)], epoch=1, save=1)
