"""Artifacts in a store: what is pushed comes back bit by bit or not at all, and versions share what they share."""

import hashlib
import json
import os
import pickle
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from cordee.errors import CheckpointError, InputError
from cordee.storage.files import FileBlobs
from cordee.storage.registry import oci
from cordee.storage.registry.compare import compare
from cordee.storage.registry.manifest import ArtifactManifest
from cordee.storage.registry.pickles import check_pickles
from cordee.storage.registry.signature import is_signed, make_key, public_key, sign
from cordee.storage.registry.store import ArtifactStore, files_below
from cordee.storage.safetensors import write_file
from cordee.units import MiB

Weights = dict[str, np.ndarray]


@pytest.fixture
def store(tmp_path: Path) -> ArtifactStore:
    return ArtifactStore(FileBlobs(tmp_path / "store"))


def weights(seed: int = 0) -> Weights:
    """Return a small model: one large tensor, and several small ones."""
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.normal(0, 0.02, (2048, 256)).astype(np.float32),
        "block.0.w": rng.normal(0, 0.02, (1024, 512)).astype(np.float32),
        "block.0.b": rng.normal(0, 0.02, 512).astype(np.float32),
        "norm": np.ones(512, np.float32),
    }


def save(folder: Path, tensors: Weights, split: int = 1) -> Path:
    """Write a folder as Hugging Face does, in `split` files."""
    folder.mkdir(parents=True)
    names = list(tensors)
    for part in range(split):
        mine = names[part::split]
        table = [(name, "float32", tensors[name].shape, tensors[name].nbytes) for name in mine]
        write_file(folder / f"model-{part}.safetensors", table, (tensors[name].tobytes() for name in mine))
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "sub").mkdir()
    (folder / "sub" / "run.sh").write_text("#!/bin/sh\n")
    (folder / "sub" / "run.sh").chmod(0o755)
    (folder / "empty").touch()
    return folder


def same(one: Path, other: Path) -> bool:
    names = sorted(str(path.relative_to(one)) for path in one.rglob("*"))
    assert names == sorted(str(path.relative_to(other)) for path in other.rglob("*"))
    files = [name for name in names if (one / name).is_file()]
    modes = all(os.access(one / name, os.X_OK) == os.access(other / name, os.X_OK) for name in files)
    return modes and all((one / name).read_bytes() == (other / name).read_bytes() for name in files)


def test_a_folder_comes_back_as_it_was(store: ArtifactStore, tmp_path: Path) -> None:
    source = save(tmp_path / "source", weights(), split=2)
    seen: list[int] = []
    pushed = store.push(files_below(source), "model", facts={"note": "first"}, on_bytes=seen.append)
    assert (
        sum(seen)
        == pushed.manifest.size_bytes
        == sum(path.stat().st_size for path in source.rglob("*") if path.is_file())
    )
    store.pull(store.read(pushed.manifest.digest), tmp_path / "back")
    assert same(source, tmp_path / "back")
    assert store.verify(store.read(pushed.manifest.digest)) == []
    again = store.push(files_below(source), "model", facts={"note": "first"})
    assert again.manifest.digest == pushed.manifest.digest
    assert again.written_bytes == 0


def test_a_fine_tune_is_stored_as_its_difference(store: ArtifactStore, tmp_path: Path) -> None:
    before = weights()
    base = store.push(files_below(save(tmp_path / "base", before)), "model")
    rng = np.random.default_rng(7)
    after = {name: (each + rng.normal(0, 1e-8, each.shape)).astype(np.float32) for name, each in before.items()}
    after["embed"] = before["embed"]  # frozen
    tuned = save(tmp_path / "tuned", after, split=3)  # elsewhere in other files
    pushed = store.push(files_below(tuned), "model", base=store.read(base.manifest.digest))
    assert pushed.manifest.base == base.manifest.digest
    assert pushed.written_bytes < 0.4 * (pushed.manifest.size_bytes - before["embed"].nbytes)
    assert pushed.known_bytes >= before["embed"].nbytes
    store.pull(store.read(pushed.manifest.digest), tmp_path / "back")
    assert same(tuned, tmp_path / "back")


def test_differences_stand_on_differences_up_to_a_limit(store: ArtifactStore, tmp_path: Path) -> None:
    tensors, digest, generations = weights(), "", 0
    rng = np.random.default_rng(3)
    while True:
        tensors = {name: (each + rng.normal(0, 1e-9, each.shape)).astype(np.float32) for name, each in tensors.items()}
        source = save(tmp_path / f"v{generations}", tensors)
        try:
            base = store.read(digest) if digest else None
            digest = store.push(files_below(source), "model", base=base).manifest.digest
        except InputError as error:
            assert "stored over 4 bases" in error.message
            break
        generations += 1
        store.pull(store.read(digest), tmp_path / f"back{generations}")
        assert same(source, tmp_path / f"back{generations}")
    assert generations == 5


def test_whatever_was_altered_is_found_before_it_is_handed_on(store: ArtifactStore, tmp_path: Path) -> None:
    source = save(tmp_path / "source", weights())
    digest = store.push(files_below(source), "model").manifest.digest
    chunks = sorted((tmp_path / "store" / "chunks").rglob("*"))
    for path in [path for path in chunks if path.is_file()]:
        kept = path.read_bytes()
        for damaged in (kept[:-1] + bytes([kept[-1] ^ 1]), kept[: len(kept) // 2], b"", None):
            path.unlink(missing_ok=True) if damaged is None else path.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=r"altered|missing"):
                store.pull(store.read(digest), tmp_path / "back")
            assert not (tmp_path / "back").exists()
            assert len(store.verify(store.read(digest))) >= 1
        path.write_bytes(kept)
    assert not list(tmp_path.glob(".*half"))
    store.pull(store.read(digest), tmp_path / "back")


def test_a_chunk_that_was_cut_off_is_mended_by_the_next_push(store: ArtifactStore, tmp_path: Path) -> None:
    source = save(tmp_path / "source", weights())
    manifest = store.push(files_below(source), "model").manifest
    path = max(
        (path for path in (tmp_path / "store" / "chunks").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size
    )
    path.write_bytes(path.read_bytes()[:100])
    assert store.absent(manifest) == [path.name]
    store.push(files_below(source), "model")
    assert store.absent(manifest) == []
    assert store.verify(store.read(manifest.digest)) == []


def test_a_manifest_that_was_altered_is_refused(store: ArtifactStore, tmp_path: Path) -> None:
    digest = store.push(files_below(save(tmp_path / "source", weights())), "model").manifest.digest
    path = tmp_path / "store" / "manifests" / digest
    path.write_bytes(path.read_bytes().replace(b"config.json", b"konfig.json"))
    with pytest.raises(CheckpointError, match="was altered"):
        store.read(digest)
    path.unlink()
    with pytest.raises(CheckpointError, match="is not in"):
        store.read(digest)


@pytest.mark.parametrize("path", ["../out", "/etc/passwd", "a/../b", "", "a\0b", "config.json/x"])
def test_no_manifest_leads_out_of_its_folder(store: ArtifactStore, tmp_path: Path, path: str) -> None:
    manifest = store.push(files_below(save(tmp_path / "source", weights())), "model").manifest
    data = manifest.encode().replace(
        b'"path":"sub/run.sh"', f'"path":{path!r}'.replace("'", '"').replace("\\x00", "\\u0000").encode()
    )
    with pytest.raises(InputError, match=r"not lie in its folder|is a folder too|twice"):
        ArtifactManifest.decode(data)


def test_unneeded_chunks_go_and_shared_ones_stay(store: ArtifactStore, tmp_path: Path) -> None:
    first = store.push(files_below(save(tmp_path / "one", weights())), "model").manifest
    changed = weights() | {"norm": np.zeros(512, np.float32)}
    second = store.push(files_below(save(tmp_path / "two", changed)), "model", base=store.read(first.digest)).manifest
    live = {second.digest, *([second.base] if second.base else [])}
    counted = store.remove_unneeded({first.digest, second.digest}, dry=False)
    assert counted == (0, 0)
    assert store.remove_unneeded(live, dry=True) == store.remove_unneeded(live, dry=False)
    store.pull(store.read(second.digest), tmp_path / "back")
    assert store.remove_unneeded(set(), dry=False)[0] > 0
    assert store.sizes() == {}


def test_what_cannot_be_pushed_is_named(store: ArtifactStore, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        files_below(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has 0 files"):
        files_below(tmp_path / "empty")
    source = save(tmp_path / "source", weights())
    model = source / "model-0.safetensors"
    model.write_bytes(model.read_bytes()[: 2 * MiB])
    with pytest.raises(InputError, match="cut off"):
        store.push(files_below(source), "model")
    (source / "dangling").symlink_to("nowhere")
    with pytest.raises(InputError, match="link to nothing"):
        files_below(source)


def test_links_of_a_hugging_face_cache_are_followed(store: ArtifactStore, tmp_path: Path) -> None:
    source = save(tmp_path / "blobs", weights())
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for name in ("config.json", "model-0.safetensors"):
        (snapshot / name).symlink_to(Path("..") / "blobs" / name)
    digest = store.push(files_below(snapshot), "model").manifest.digest
    store.pull(store.read(digest), tmp_path / "back")
    assert (tmp_path / "back" / "config.json").read_bytes() == (source / "config.json").read_bytes()
    assert not (tmp_path / "back" / "config.json").is_symlink()


def test_pull_needs_an_empty_folder(store: ArtifactStore, tmp_path: Path) -> None:
    source = save(tmp_path / "source", weights())
    artifact = store.read(store.push(files_below(source), "model").manifest.digest)
    with pytest.raises(InputError, match="is not empty"):
        store.pull(artifact, source)
    (tmp_path / "empty").mkdir()
    store.pull(artifact, tmp_path / "empty")
    assert same(source, tmp_path / "empty")


class _Calls:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


def test_pickles_are_refused_and_dangerous_ones_in_any_case(tmp_path: Path) -> None:
    (tmp_path / "weights.safetensors").write_bytes(b"x")
    (tmp_path / "state.bin").write_bytes(pickle.dumps({"a": [1.0]}))
    files = files_below(tmp_path)
    with pytest.raises(InputError, match=r"1 file would run code when it is loaded: state\.bin"):
        check_pickles(files, allowed=False)
    assert [each.name for each in check_pickles(files, allowed=True)] == ["state.bin"]
    (tmp_path / "evil.pkl").write_bytes(pickle.dumps(_Calls()))
    with pytest.raises(InputError, match=r"evil\.pkl would call \w+.system"):
        check_pickles(files_below(tmp_path), allowed=True)


def test_a_file_that_torch_saved_is_a_pickle(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.ones(3)}, tmp_path / "model.whatever")
    assert check_pickles(files_below(tmp_path), allowed=True)[0].calls == ()
    with pytest.raises(InputError, match="safetensors"):
        check_pickles(files_below(tmp_path), allowed=False)


def test_a_signature_holds_for_its_digest_and_its_key_only(tmp_path: Path) -> None:
    key = make_key(tmp_path / "key.pem")
    assert key == public_key(tmp_path / "key.pem")
    assert (tmp_path / "key.pem").stat().st_mode & 0o077 == 0
    signature = sign(tmp_path / "key.pem", "ab" * 32)
    assert is_signed("ab" * 32, signature, key)
    assert not is_signed("ac" * 32, signature, key)
    assert not is_signed("ab" * 32, signature, make_key(tmp_path / "other.pem"))
    assert not is_signed("ab" * 32, "no hex", key)
    with pytest.raises(InputError, match="exists"):
        make_key(tmp_path / "key.pem")
    (tmp_path / "text").write_text("no key")
    with pytest.raises(InputError, match="no Ed25519 key"):
        sign(tmp_path / "text", "ab" * 32)


def test_two_artifacts_are_compared_tensor_by_tensor(store: ArtifactStore, tmp_path: Path) -> None:
    before = weights()
    first = store.push(files_below(save(tmp_path / "one", before, split=2)), "model").manifest.digest
    after = before | {"norm": np.zeros(512, np.float32), "head": np.ones((4, 4), np.float32)}
    del after["block.0.b"]
    (source := save(tmp_path / "two", after)).joinpath("config.json").write_text("{}")
    second = store.push(files_below(source), "model").manifest.digest
    found = compare(store, store.read(first), store.read(second))
    assert found.tensors.added == ("head",)
    assert found.tensors.removed == ("block.0.b",)
    assert found.tensors.changed == ("norm",)
    assert found.tensors.same == 2
    assert found.files.changed == ("config.json",)
    assert found.shared_bytes >= before["embed"].nbytes + before["block.0.w"].nbytes


@pytest.fixture(autouse=True)
def _no_halves(tmp_path: Path) -> Iterator[None]:
    """A push or a pull leaves no temporary folder, whatever happens."""
    yield
    assert not list(tmp_path.glob(".*.half"))
    shutil.rmtree(tmp_path / "store", ignore_errors=True)


def test_an_oci_layout_holds_the_same_files(tmp_path: Path) -> None:
    source = save(tmp_path / "source", weights())
    shutil.copytree(source, tmp_path / "used")
    oci.write_layout(tmp_path / "used", tmp_path / "layout", "1", {"a": "b"})
    assert oci.is_layout(tmp_path / "layout")
    index = json.loads((tmp_path / "layout" / "index.json").read_bytes())
    manifest = json.loads(_blob(tmp_path / "layout", index["manifests"][0]["digest"]))
    assert manifest["mediaType"] == "application/vnd.oci.image.manifest.v1+json"
    assert _blob(tmp_path / "layout", manifest["config"]["digest"]) == b"{}"
    found = {each.name: each.path for each in oci.files_of_layout(tmp_path / "layout")}
    assert {name: path.read_bytes() for name, path in found.items()} == {
        path.relative_to(source).as_posix(): path.read_bytes() for path in source.rglob("*") if path.is_file()
    }
    found["config.json"].write_bytes(b"altered")
    with pytest.raises(InputError, match="missing or was altered"):
        oci.files_of_layout(tmp_path / "layout")


@pytest.mark.parametrize("name", ["../out", "/etc/passwd", "", "a/../../b"])
def test_no_layout_leads_out_of_its_folder(tmp_path: Path, name: str) -> None:
    source = save(tmp_path / "source", weights())
    oci.write_layout(source, tmp_path / "layout", "1", {})
    index = json.loads((tmp_path / "layout" / "index.json").read_bytes())
    path = tmp_path / "layout" / "blobs" / "sha256" / index["manifests"][0]["digest"].partition(":")[2]
    changed = path.read_bytes().replace(b'"config.json"', json.dumps(name).encode())
    digest = hashlib.sha256(changed).hexdigest()
    path.with_name(digest).write_bytes(changed)
    index["manifests"][0]["digest"] = f"sha256:{digest}"
    (tmp_path / "layout" / "index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="is called"):
        oci.files_of_layout(tmp_path / "layout")


def _blob(layout: Path, digest: str) -> bytes:
    return (layout / "blobs" / "sha256" / digest.partition(":")[2]).read_bytes()
