"""The verbs about checkpoints, on destinations that a real trainer has written."""

import json
import shutil
from pathlib import Path

import jsonschema
import numpy as np
import pytest
import torch
from pydantic import TypeAdapter

from cordee.cli.checkpoint_document import (
    CollectedDocument,
    DiffDocument,
    ExportDocument,
    GenerationDocument,
    ImportDocument,
    PinDocument,
    VerificationDocument,
)
from cordee.cli.main import main
from cordee.storage import transfer
from cordee.storage.destination import open_blobs
from cordee.storage.log import live_commits, read_entries
from cordee.storage.manifest import read_manifest
from cordee.storage.safetensors import open_file
from cordee.train.checkpoint.checkpointer import Checkpointer

STEPS = (10, 20, 30)


SCHEMAS = json.loads((Path(__file__).parent / "checkpoint_schemas.json").read_text())
DOCUMENTS: dict[str, TypeAdapter] = {
    "ls": TypeAdapter(list[GenerationDocument]),
    "verify": TypeAdapter(list[VerificationDocument]),
    "diff": TypeAdapter(DiffDocument),
    "pin": TypeAdapter(PinDocument),
    "gc": TypeAdapter(CollectedDocument),
    "export": TypeAdapter(ExportDocument),
    "import": TypeAdapter(ImportDocument),
}


def test_the_schemas_are_those_of_the_documents() -> None:
    """After a change that is meant: write these schemas to checkpoint_schemas.json."""
    assert {verb: document.json_schema(mode="serialization") for verb, document in DOCUMENTS.items()} == SCHEMAS


def model() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(800, 800), torch.nn.Linear(800, 3)).to(torch.bfloat16)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, dict[int, dict[str, torch.Tensor]]]:
    """A destination with three generations in which only the last layer changes; the weights of each."""
    to = tmp_path_factory.mktemp("run")
    net = model()
    checkpointer = Checkpointer(str(to), rank=0, world_size=1, keep=3)
    checkpointer.open()
    weights = {}
    for step in STEPS:
        with torch.no_grad():
            net[1].weight.fill_(step)
        weights[step] = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        checkpointer.save({"model": net, "seen": step}, step=step, extras={})
        checkpointer.wait(60)
    checkpointer.close()
    return to, weights


@pytest.fixture
def run(written, tmp_path) -> Path:
    """A copy of it, to be changed."""
    return Path(shutil.copytree(written[0], tmp_path / "run"))


def said(capsys: pytest.CaptureFixture[str], verb: str, *words: object) -> str:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", verb, *map(str, words)])
    assert left.value.code == 0
    return capsys.readouterr().out


def told(capsys: pytest.CaptureFixture[str], verb: str, *words: object):
    found = json.loads(said(capsys, verb, *words, "--json"))
    jsonschema.validate(found, SCHEMAS[verb])
    return found


def refused(capsys: pytest.CaptureFixture[str], verb: str, *words: object) -> tuple[int, str]:
    with pytest.raises(SystemExit) as left:
        main(["checkpoint", verb, *map(str, words)])
    return left.value.code, capsys.readouterr().err


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def largest_of_newest(to: str) -> str:
    blobs = open_blobs(to)
    whole = read_manifest(blobs, live_commits(read_entries(blobs))[-1].record.fields["manifest"])
    return max(whole.chunks, key=lambda chunk: chunk.length_bytes).key


def test_ls(run, capsys) -> None:
    found = told(capsys, "ls", run)
    assert [each["step"] for each in found] == [10, 20, 30] and all(each["verified"] for each in found)
    assert found[1]["stored_bytes"] < 0.05 * found[0]["stored_bytes"], "what did not change is not stored again"
    lines = said(capsys, "ls", run).splitlines()
    assert lines[0].split() == ["GEN", "STEP", "AGE", "SIZE", "ADDED", "RANKS", "VERIFIED", "PIN"]
    assert [line.split()[0] for line in lines[1:]] == [f"g{each['generation']}" for each in found]


def test_what_is_not_there_is_said(tmp_path, capsys) -> None:
    assert refused(capsys, "ls", tmp_path / "no")[0] == 53 and not (tmp_path / "no").exists()
    (tmp_path / "empty").mkdir()
    assert told(capsys, "ls", tmp_path / "empty") == []
    assert "there is no checkpoint" in refused(capsys, "verify", tmp_path / "empty")[1]


def test_verify_and_what_it_finds(run, capsys) -> None:
    (found,) = told(capsys, "verify", run)
    assert (found["step"], found["intact"], found["bad"]) == (30, True, [])
    flip(run / largest_of_newest(str(run)))
    code, err = refused(capsys, "verify", run, "--all")
    assert code == 52 and "3 of 3 generations" in err, "they share that chunk"


def test_verify_repairs_one_level_from_the_other(run, tmp_path, capsys) -> None:
    shutil.copytree(run, tmp_path / "home")
    to = f"{run},{tmp_path / 'home'}"
    key = largest_of_newest(to)
    flip(run / key)
    (found,) = told(capsys, "verify", to)
    assert found["intact"] and [bad["level"] for bad in found["bad"]] == [str(run)]
    assert "1 bad copy (--repair writes them again)" in said(capsys, "verify", to, 30)
    assert "1 bad copy repaired" in said(capsys, "verify", to, "--repair")
    assert told(capsys, "verify", to)[0]["bad"] == []


def test_diff(run, capsys) -> None:
    found = told(capsys, "diff", run, 10, 30)
    assert (found["first"], found["second"], found["changed"], found["same"]) == (10, 30, ["model/1.weight"], 3)
    assert found["shared_bytes"] > 0.95 * found["second_bytes"]
    assert "~ model/1.weight" in said(capsys, "diff", run, 10)
    assert "there is no checkpoint '11'" in refused(capsys, "diff", run, 11)[1]


def test_a_pin_outlives_retention_and_can_be_named(run, capsys) -> None:
    assert told(capsys, "pin", run, 10, "--name", "base")["pin"] == "base"
    assert told(capsys, "gc", run, "--keep", "2", "--dry-run")["retired"] == []
    assert told(capsys, "verify", run, "base")[0]["step"] == 10
    assert told(capsys, "pin", run, "base", "--remove")["pin"] is None
    before = told(capsys, "gc", run, "--keep", "2", "--dry-run")
    after = told(capsys, "gc", run, "--keep", "2")
    assert len(after["retired"]) == 1 and after == {**before, "dry_run": False}
    assert told(capsys, "gc", run)["deleted"] == 0
    assert all(each["intact"] for each in told(capsys, "verify", run, "--all"))
    for bad in ("12", "g7", "a/b"):
        assert "cannot name a pin" in refused(capsys, "pin", run, "--name", bad)[1]


def test_export_holds_the_weights_bit_by_bit(written, tmp_path, capsys) -> None:
    to, weights = written
    done = told(capsys, "export", to, 20, "--out", tmp_path / "all.safetensors")
    assert done["step"] == 20
    raw = (tmp_path / "all.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    for name, tensor in weights[20].items():
        entry = header[f"model/{name}"]
        begin, end = entry["data_offsets"]
        bits = np.frombuffer(raw[8 + length + begin : 8 + length + end], np.int16)
        assert entry["dtype"] == "BF16" and entry["shape"] == list(tensor.shape)
        assert np.array_equal(bits, tensor.view(torch.int16).numpy().ravel())
    assert "exists" in refused(capsys, "export", to, "--out", tmp_path / "all.safetensors")[1]
    assert "has no 'nothing'" in refused(capsys, "export", to, "--object", "nothing", "--out", tmp_path / "x")[1]


def test_export_to_hugging_face_and_back(written, tmp_path, capsys, monkeypatch) -> None:
    to, weights = written
    like = tmp_path / "like"
    like.mkdir()
    (like / "config.json").write_text("{}")
    (like / "pytorch_model.bin").write_text("old weights")
    write = transfer.export_hf
    monkeypatch.setattr(transfer, "export_hf", lambda *a, **k: write(*a, **k, file_bytes_max=10_000))
    told(capsys, "export", to, "--to", "hf", "--out", tmp_path / "hf", "--like", like)
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    files = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]
    assert names == ["config.json", *files, "model.safetensors.index.json"]
    index = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.numel() * 2 for t in weights[30].values())
    for file in files:
        with open_file(tmp_path / "hf" / file) as held:
            assert sorted(held) == sorted(name for name, where in index["weight_map"].items() if where == file)

    back = told(capsys, "import", tmp_path / "base", tmp_path / "hf", "--step", 5, "--pin", "base")
    assert (back["step"], back["pin"]) == (5, "base")
    net = model()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.zero_()
    checkpointer = Checkpointer(str(tmp_path / "base"), rank=0, world_size=1)
    loaded = checkpointer.load({"model": net}, checkpointer.open())
    checkpointer.close()
    assert (loaded.step, loaded.extras) == (5, None)
    assert all(torch.equal(tensor, weights[30][name]) for name, tensor in net.state_dict().items())
    assert "has a log already" in refused(capsys, "import", tmp_path / "base", tmp_path / "hf")[1]


@pytest.mark.parametrize("cut", [0, 7, 40, -1])
def test_a_file_that_is_cut_off_is_refused_and_imports_nothing(written, tmp_path, capsys, cut) -> None:
    file = tmp_path / "w.safetensors"
    said(capsys, "export", written[0], "--out", file)
    file.write_bytes(file.read_bytes()[:cut])
    assert refused(capsys, "import", tmp_path / "base", file)[0] == 10
    assert told(capsys, "ls", tmp_path / "base") == []


def test_damage_is_not_exported(run, tmp_path, capsys) -> None:
    flip(run / largest_of_newest(str(run)))
    code, err = refused(capsys, "export", run, "--out", tmp_path / "x.safetensors")
    assert code == 52 and "does not match its checksum" in err
    assert list(tmp_path.glob("*x.safetensors*")) == []


def test_a_tensor_in_shards_is_put_together(tmp_path) -> None:
    """Shards of a two-dimensional tensor, cut along both dimensions."""
    from cordee.storage.chunks import Piece, write_chunk
    from cordee.storage.files import FileBlobs
    from cordee.storage.manifest import Manifest, Shard, Tensor

    blobs = FileBlobs(tmp_path)
    whole = np.arange(6 * 10, dtype=np.float32).reshape(6, 10)
    chunks, shards = [], []
    for rows in (slice(0, 4), slice(4, 6)):
        for columns in (slice(0, 3), slice(3, 10)):
            box = np.ascontiguousarray(whole[rows, columns])
            chunks.append(write_chunk(blobs, memoryview(box).cast("B"), save=1, epoch=1, known={})[0])
            shards.append(Shard((rows.start, columns.start), box.shape, (Piece(len(chunks) - 1, 0, box.nbytes),)))
    tensor = Tensor("float32", whole.shape, tuple(shards))
    manifest = Manifest(1, 1, 1, 4, tuple(chunks), {"w": tensor}, {}, ())
    assert transfer.read_tensor(blobs, manifest, tensor) == whole.tobytes()
