"""Samples of formats that others write, and in the order of the elastic sampler."""

import io
import json
import os
import struct
import tarfile

import numpy as np
import pytest
from cache_world import direct, fill
from torch.utils.data import DataLoader

import cordee
from cordee.errors import DataDamagedError, DataError, InputError
from cordee.storage.cache.pieces import PIECE_BYTES
from cordee.storage.cache.samples import _Uses


def mds(folder, shards: list[list[tuple[int, bytes]]], **changes) -> None:
    """Write MDS shards with the columns `id` (int) and `x` (bytes), as mosaicml-streaming 0.13 does."""
    folder.mkdir(parents=True)
    rows = []
    for number, samples in enumerate(shards):
        bodies = [struct.pack("<I", len(x)) + struct.pack("<q", at) + x for at, x in samples]
        config = json.dumps({"column_names": ["id", "x"]}).encode()
        begin = 4 * (len(bodies) + 2) + len(config)
        offsets = begin + np.cumsum([0, *map(len, bodies)])
        data = struct.pack("<I", len(bodies)) + offsets.astype("<u4").tobytes() + config + b"".join(bodies)
        name = f"shard.{number:05}.mds"
        (folder / name).write_bytes(data)
        row = {"column_encodings": ["int", "bytes"], "column_names": ["id", "x"], "column_sizes": [8, None]}
        row |= {"compression": None, "format": "mds", "hashes": [], "samples": len(samples), "version": 2}
        rows.append(row | {"raw_data": {"basename": name, "bytes": len(data), "hashes": {}}} | changes)
    (folder / "index.json").write_text(json.dumps({"shards": rows, "version": 2}))


def test_a_sample_that_is_not_its_columns_is_named(tmp_path) -> None:
    """The table of offsets may be right, and the sample's own sizes wrong."""
    mds(tmp_path / "set", [[(k, b"x" * 50) for k in range(4)]])
    shard = tmp_path / "set" / "shard.00000.mds"
    data = bytearray(shard.read_bytes())
    begin = int(np.frombuffer(data, "<u4", 1, 4 * 3)[0])  # of the third sample
    for size in (49, 51, 2**31):
        data[begin : begin + 4] = struct.pack("<I", size)
        shard.write_bytes(data)
        samples = direct(tmp_path / "set", tmp_path / "cache").data.samples()
        assert samples[1] == {"id": 1, "x": b"x" * 50}
        with pytest.raises(DataDamagedError, match="sample 2 is not what index"):
            samples[2]


def test_what_is_read_next_is_fetched_in_runs_of_neighbours(tmp_path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("a.bin", "b.bin"):
        (folder / name).write_bytes(bytes(30 * PIECE_BYTES))
    uses = _Uses(direct(folder, tmp_path / "cache").data)
    spans = [(1, PIECE_BYTES * at, PIECE_BYTES * at + 10) for at in (5, 3, 4)]
    spans += [(0, 0, 20 * PIECE_BYTES), (1, 4 * PIECE_BYTES + 100, 6 * PIECE_BYTES + 1)]
    assert uses.fresh(spans) == [(1, 3, 7), (0, 0, 16), (0, 16, 20)]
    assert uses.fresh(spans) == []


def tar(path, members: dict[str, bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as file:
        for name, data in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            file.addfile(info, io.BytesIO(data))


def test_shards_of_mosaicml(tmp_path) -> None:
    shards = [[(n * 10 + k, os.urandom(9000 + k)) for k in range(100)] for n in range(3)]
    mds(tmp_path / "set", shards)
    world = direct(tmp_path / "set", tmp_path / "cache")
    samples = world.data.samples()
    line = [sample for shard in shards for sample in shard]
    assert len(samples) == 300 and samples.counts == [100] * 3
    for index in (0, 99, 100, 250, 299):
        assert samples[index] == {"id": line[index][0], "x": line[index][1]}
    assert [each["id"] for each in samples.__getitems__([299, 0, 150])] == [line[i][0] for i in (299, 0, 150)]
    with pytest.raises(IndexError):
        samples[300]
    assert world.data.samples("mds", decode=lambda each: each["id"])[5] == line[5][0]


def test_a_shard_that_was_cut_off_or_begins_otherwise_is_named(tmp_path) -> None:
    mds(tmp_path / "set", [[(1, b"x" * 100)], [(2, b"y" * 100)]])
    path = tmp_path / "set" / "shard.00001.mds"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(DataDamagedError, match=r"00001\.mds has \d+ bytes, and index\.json says"):
        direct(tmp_path / "set", tmp_path / "cache").data.samples()
    path.write_bytes(b"\xff" * len(whole))
    samples = direct(tmp_path / "set", tmp_path / "cache").data.samples()
    assert samples[0]["id"] == 1
    with pytest.raises(DataDamagedError, match="does not begin with the offsets of its 1 samples"):
        samples[1]
    (tmp_path / "set" / "index.json").write_text("{}")
    with pytest.raises(DataError, match="is no index of MDS shards"):
        direct(tmp_path / "set", tmp_path / "cache").data.samples()


def test_shards_whose_digest_the_index_has_are_held_against_it(tmp_path) -> None:
    import xxhash

    mds(tmp_path / "set", [[(1, b"x" * 100)]])
    path, index = tmp_path / "set" / "shard.00000.mds", tmp_path / "set" / "index.json"
    found = json.loads(index.read_text())
    found["shards"][0]["raw_data"]["hashes"] = {"xxh128": xxhash.xxh128(path.read_bytes()).hexdigest()}
    index.write_text(json.dumps(found))
    direct(tmp_path / "set", tmp_path / "cache").data.samples().verify()
    path.write_bytes(path.read_bytes()[:-1] + b"y")
    with pytest.raises(DataDamagedError, match="its xxh128 is"):
        direct(tmp_path / "set", tmp_path / "cache").data.samples().verify()


def test_tars_of_webdataset(tmp_path) -> None:
    members = {f"d/{k:04}.{end}": os.urandom(700 + k) for k in range(50) for end in ("left.png", "json")}
    tar(tmp_path / "set" / "0.tar", members)
    tar(tmp_path / "set" / "1.tar", {"z.txt": b"last"})
    world = direct(tmp_path / "set", tmp_path / "cache")
    samples = world.data.samples()
    assert len(samples) == 51
    assert samples[7] == {"__key__": "d/0007", "left.png": members["d/0007.left.png"], "json": members["d/0007.json"]}
    assert samples[50] == {"__key__": "z", "txt": b"last"}
    assert world.source.read_bytes == world.data.size_bytes
    again = direct(tmp_path / "set", tmp_path / "cache").data.samples()
    assert again[7] == samples[7], "from the kept table"


@pytest.mark.parametrize("left", [600, 512 + 700 + 30])
def test_a_tar_that_was_cut_off_is_named(tmp_path, left) -> None:
    tar(tmp_path / "set" / "0.tar", {"a.bin": os.urandom(700), "b.bin": os.urandom(700)})
    path = tmp_path / "set" / "0.tar"
    path.write_bytes(path.read_bytes()[:left])
    with pytest.raises(DataDamagedError, match=r"0\.tar"):
        direct(tmp_path / "set", tmp_path / "cache").data.samples()


def test_rows_of_parquet(tmp_path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    table = pyarrow.table({"n": list(range(1000)), "text": [f"row {n}" for n in range(1000)]})
    (tmp_path / "set").mkdir()
    parquet.write_table(table, tmp_path / "set" / "0.parquet", row_group_size=300)
    world = direct(tmp_path / "set", tmp_path / "cache")
    samples = world.data.samples()
    assert len(samples) == 1000 and samples.counts == [300, 300, 300, 100]
    assert samples.__getitems__([999, 0, 300]) == [{"n": n, "text": f"row {n}"} for n in (999, 0, 300)]
    assert parquet.read_table("0.parquet", filesystem=world.data.fs()).equals(table)
    (tmp_path / "set" / "0.parquet").write_bytes(b"PAR1 and not more")
    with pytest.raises(DataDamagedError, match="is no Parquet file"):
        direct(tmp_path / "set", tmp_path / "cache").data.samples()


def test_records_and_files(tmp_path) -> None:
    contents = fill(tmp_path / "set", {"a.bin": 1000, "b.bin": 90})
    world = direct(tmp_path / "set", tmp_path / "cache")
    records = world.data.samples(record_bytes=40, dtype="uint16")
    assert len(records) == 25 + 2 and records[26].tobytes() == contents["b.bin"][40:80]
    files = world.data.samples()
    assert len(files) == 2 and files[1] == ("b.bin", contents["b.bin"])
    with pytest.raises(InputError, match="samples of 'csv' are not known"):
        world.data.samples("csv")


def epoch(samples, batch: int, size: int, start: int = 0, end: int | None = None, **options) -> list[list[bytes]]:
    """Return each global batch that ranks of one size read of an epoch from a step on, as a sorted list."""
    found: dict[int, list[bytes]] = {}
    for rank in range(size):
        sampler = cordee.ElasticBatchSampler(samples, batch, dp=(rank, size), **options)
        sampler.position = start * batch
        loader = DataLoader(samples, batch_sampler=sampler, collate_fn=lambda each: each)
        for step, part in zip(range(start, end or sampler.steps_in(1)), sampler.batches(loader), strict=False):
            found.setdefault(step, []).extend(part)
    return [sorted(found[step]) for step in sorted(found)]


@pytest.mark.parametrize("window", [None, (8, 6)])
def test_resume_and_resize_within_an_epoch_are_exact_while_objects_leave(tmp_path, window) -> None:
    """Another job fills the cache in between, whose limit is a third of the dataset."""
    fill(tmp_path / "set", {f"{number}.bin": 2 * PIECE_BYTES for number in range(6)})
    fill(tmp_path / "other", {f"{number}.bin": 2 * PIECE_BYTES for number in range(4)}, seed=1)
    record = PIECE_BYTES // 16

    def samples(name: str = "set"):
        world = direct(tmp_path / name, tmp_path / "cache", limit_bytes=4 * PIECE_BYTES)
        return world.data.samples(record_bytes=record)

    straight = epoch(samples(), 12, 2, window=window)
    parts = epoch(samples(), 12, 4, end=5, window=window)
    for each in range(len(samples("other"))):
        samples("other")[each] if each % 32 == 0 else None
    parts += epoch(samples(), 12, 3, start=5, window=window)
    assert parts == straight and sum(map(len, straight)) == 6 * 32 // 12 * 12
    assert len({each for part in straight for each in part}) == sum(map(len, straight)), "none twice"
    everything = {(tmp_path / "set" / f"{n}.bin").read_bytes()[at : at + record]
                  for n in range(6) for at in range(0, 2 * PIECE_BYTES, record)}  # fmt: skip
    assert {each for part in straight for each in part} <= everything


def test_what_is_read_next_is_fetched_ahead_in_its_order(tmp_path) -> None:
    fill(tmp_path / "set", {f"{number}.bin": 4 * PIECE_BYTES for number in range(3)})
    world = direct(tmp_path / "set", tmp_path / "cache")
    samples = world.data.samples(record_bytes=PIECE_BYTES)
    samples.fetch_ahead([[11, 3], [5]])
    samples._follower.join()
    while world.source.read_bytes < 3 * PIECE_BYTES:
        pass  # bounded by the test's time-out
    assert world.data.read(2, 3 * PIECE_BYTES, 4 * PIECE_BYTES) and world.source.read_bytes == 3 * PIECE_BYTES
    reads = json.loads(next((tmp_path / "cache" / "hints").glob("*.json")).read_text())["reads"]
    assert reads == [world.data.pins[number].object_id for number in (2, 0, 1)]
    world.data.close()
