"""Artifacts over the API: versions, tags, stages, lineage, collections; on this machine and over the network alone."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from api_scene import OTHER, SPEC, Api

from cordee.answers.artifacts import CollectRequest, Committed, PushCommit
from cordee.artifacts import ArtifactClient, PushWanted, ServerBlobs
from cordee.client import Client
from cordee.control.artifacts import pushes
from cordee.control.fold import Fold
from cordee.control.snapshot import loaded, taken
from cordee.errors import BusyError, CheckpointError, CordeeError, ForbiddenError, InputError, NotFoundError
from cordee.events import ArtifactPushed
from cordee.schedule.policy import Policy
from cordee.storage.registry.signature import make_key
from cordee.storage.safetensors import write_file


def model(folder: Path, seed: int = 0, nudge: float = 0.0) -> Path:
    """Write a small model; `nudge` is the size of the updates since the one of the same seed."""
    rng = np.random.default_rng(seed)
    values = rng.normal(0, 0.02, (512, 512)).astype(np.float32)
    values = (values + nudge * rng.normal(0, 1, values.shape)).astype(np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    write_file(folder / "model.safetensors", [("w", "float32", values.shape, values.nbytes)], iter([values.tobytes()]))
    (folder / "config.json").write_text("{}")
    return folder


@dataclass
class World:
    """A server with artifacts, and two users: ada, the operator, on its machine, and bob, who has only the network."""

    api: Api
    folder: Path

    @property
    def ada(self) -> ArtifactClient:
        return ArtifactClient(self.api.client)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    (tmp_path / "home").mkdir()
    api = Api(tmp_path / "home")
    yield World(api, tmp_path)
    api.close()


@pytest.fixture
def bob(world: World) -> Iterator[ArtifactClient]:
    with Client(url=world.api.url, token=OTHER) as client:
        assert client.home is None
        yield ArtifactClient(client)


def same(one: Path, other: Path) -> bool:
    names = sorted(path.name for path in one.iterdir())
    assert names == sorted(path.name for path in other.iterdir())
    return all((one / name).read_bytes() == (other / name).read_bytes() for name in names)


def test_versions_are_counted_and_found(world: World) -> None:
    first = world.ada.push(model(world.folder / "one"), "team/gpt", PushWanted(note="the first", tag="best"))
    assert (first.version.ref, first.is_new, first.version.kind) == ("team/gpt:1", True, "model")
    again = world.ada.push(world.folder / "one", "team/gpt", PushWanted(base="none"))
    assert (again.version.ref, again.is_new) == ("team/gpt:1", False)
    second = world.ada.push(model(world.folder / "two", nudge=1e-7), "team/gpt", PushWanted())
    assert second.version.base == first.version.digest
    assert second.written_bytes < 0.6 * second.version.size_bytes
    for ref, version in (
        ("team/gpt", 2),
        ("team/gpt:latest", 2),
        ("team/gpt:1", 1),
        ("team/gpt:best", 1),
        (f"team/gpt@{first.version.digest[:12]}", 1),
    ):
        assert world.ada.show(ref).version == version
    assert [each.ref for each in world.ada.versions()] == ["team/gpt:2"]
    assert [each.ref for each in world.ada.versions("team/gpt")] == ["team/gpt:2", "team/gpt:1"]
    world.ada.pull("team/gpt", world.folder / "back")
    assert same(world.folder / "two", world.folder / "back")
    assert world.ada.verify("team/gpt") == []


def test_over_the_network_it_is_the_same(world: World, bob: ArtifactClient) -> None:
    world.ada.push(model(world.folder / "one"), "base", PushWanted())
    made = bob.push(model(world.folder / "two", nudge=1e-7), "bobs", PushWanted(base="base", parents=("base",)))
    assert made.version.by == "bob"
    assert made.written_bytes < 0.6 * made.version.size_bytes
    store, artifact = bob.read("bobs")
    assert isinstance(store.blobs, ServerBlobs)
    assert len(artifact.bases) == 1
    bob.pull("bobs", world.folder / "back")
    assert same(world.folder / "two", world.folder / "back")
    with pytest.raises(InputError, match="does not list"):
        store.sizes()
    with pytest.raises(NotFoundError, match="not open any more"):
        store.blobs.put("chunks/00/" + "0" * 64, b"x")


def test_a_chunk_with_another_content_is_refused(world: World, bob: ArtifactClient) -> None:
    with bob._opened() as opened:
        blobs = ServerBlobs(bob.client, opened.push)
        with pytest.raises(InputError, match="do not have the digest"):
            blobs.put("chunks/ab/" + "ab" * 32, b"something else")
        assert blobs.size("chunks/ab/" + "ab" * 32) is None


def test_names_have_owners(world: World, bob: ArtifactClient) -> None:
    world.ada.push(model(world.folder / "one"), "adas", PushWanted(tag="best"))
    bob.push(model(world.folder / "two", seed=1), "bobs", PushWanted())
    for attempt in (
        lambda: bob.push(model(world.folder / "three", seed=2), "adas", PushWanted()),
        lambda: bob.tag("adas", "worst"),
        lambda: bob.tag("adas", "best", remove=True),
        lambda: bob.stage("adas", "production"),
        lambda: bob.remove("adas"),
    ):
        with pytest.raises(ForbiddenError, match="adas is ada's"):
            attempt()
    assert world.ada.stage("bobs", "production").stage == "production"  # the operator may
    assert [each.version for each in world.ada.versions("adas")] == [1]


def test_tags_and_stages_have_a_history(world: World) -> None:
    for seed in range(2):
        world.ada.push(model(world.folder / str(seed), seed=seed), "gpt", PushWanted())
    world.ada.tag("gpt:1", "best")
    world.ada.tag("gpt:2", "best")
    world.ada.tag("gpt:2", "best")  # nothing changes
    world.ada.stage("gpt:1", "staging")
    world.ada.stage("gpt:2", "staging")
    shown = world.ada.show("gpt:best")
    assert (shown.version, shown.tags, shown.stage) == (2, ["best"], "staging")
    assert [each.what for each in shown.history][:4] == [
        "version 2 is in staging",
        "version 1 is in staging",
        "tag best is version 2, before 1",
        "tag best is version 1",
    ]
    world.ada.tag("gpt", "best", remove=True)
    with pytest.raises(NotFoundError, match="has no version 'best'"):
        world.ada.show("gpt:best")
    with pytest.raises(InputError, match="has no tag"):
        world.ada.tag("gpt", "best", remove=True)


def test_names_and_tags_that_are_none_are_refused(world: World) -> None:
    source = model(world.folder / "one")
    for name in ("", "Upper", "a b", "a:1", "../a", "a/", "-a", "x" * 64, "a/b/c/d/e"):
        with pytest.raises(InputError, match="is no name of an artifact"):
            world.ada.push(source, name, PushWanted(base="none"))
    assert world.ada.versions() == []
    world.ada.push(source, "gpt", PushWanted())
    for tag in ("", "latest", "1", "a b", "a/b"):
        with pytest.raises(CordeeError, match=r"should match pattern|always names the newest"):
            world.ada.tag("gpt", tag)


def test_what_is_not_there_is_named(world: World) -> None:
    world.ada.push(model(world.folder / "one"), "llama-sft", PushWanted(tag="best"))
    with pytest.raises(NotFoundError, match="no artifact 'lama-sft'") as unknown:
        world.ada.show("lama-sft")
    assert unknown.value.hint is not None
    assert "llama-sft" in unknown.value.hint
    with pytest.raises(NotFoundError, match="no version '7'") as version:
        world.ada.show("llama-sft:7")
    assert version.value.hint == "it has 1, best"
    with pytest.raises(NotFoundError, match="no artifact 'other'"):
        world.ada.push(model(world.folder / "two"), "x", PushWanted(base="other"))
    with pytest.raises(NotFoundError, match="no artifact 'parent'"):
        world.ada.push(model(world.folder / "three"), "x", PushWanted(parents=("parent",)))
    with pytest.raises(NotFoundError):
        world.ada.push(model(world.folder / "four"), "x", PushWanted(job="nobody"))
    assert [each.name for each in world.ada.versions()] == ["llama-sft"]


def test_a_job_that_pulls_and_pushes_is_in_the_lineage(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.ada.push(model(world.folder / "data"), "corpus", PushWanted(kind="dataset"))
    job = world.api.client.submit(SPEC, unprotected=True).job
    monkeypatch.setenv("CORDEE_JOB", job.job_id)  # as in an attempt
    world.ada.pull("corpus", world.folder / "in")
    made = world.ada.push(model(world.folder / "out", seed=3), "gpt", PushWanted(base="none"))
    assert made.version.job_id == job.job_id
    shown = world.ada.show("gpt")
    assert shown.maker is not None
    assert (shown.maker.job_id, shown.maker.owner, shown.maker.name) == (job.job_id, "ada", "gpt")
    assert [(each.ref, each.how) for each in shown.lineage] == [("corpus:1", "made from")]
    data = world.ada.show("corpus")
    assert data.used_by == [job.job_id]
    assert [(each.ref, each.how) for each in data.lineage] == [("gpt:1", "parent of")]


def test_signatures_are_checked_where_they_are_made_and_where_they_are_used(world: World) -> None:
    key = make_key(world.folder / "key.pem")
    made = world.ada.push(model(world.folder / "one"), "gpt", PushWanted(key=world.folder / "key.pem"))
    assert made.version.signed
    world.ada.pull("gpt", world.folder / "back", key=key)
    other = make_key(world.folder / "other.pem")
    with pytest.raises(InputError, match="was signed by the key"):
        world.ada.pull("gpt", world.folder / "other", key=other)
    world.ada.push(model(world.folder / "two", seed=5), "plain", PushWanted())
    with pytest.raises(InputError, match="is not signed"):
        world.ada.pull("plain", world.folder / "plain", key=key)
    manifest = world.ada.read("gpt")[1].manifest.encode().decode()
    with world.ada._opened() as opened, pytest.raises(InputError, match="signature is not that of"):
        body = PushCommit(name="x", manifest=manifest, stored_bytes=0, key=key, signature="00" * 64)
        world.api.client.ask(Committed, "POST", f"/v1/artifacts/pushes/{opened.push}/commit", json=body.model_dump())


def test_a_commit_names_the_chunks_that_are_missing(world: World) -> None:
    world.ada.push(model(world.folder / "one"), "gpt", PushWanted())
    store, artifact = world.ada.read("gpt")
    chunks = [path for path in (world.folder / "home" / "artifacts" / "chunks").rglob("*") if path.is_file()]
    for path in chunks:
        path.unlink()
    body = PushCommit(name="copy", manifest=artifact.manifest.encode().decode(), stored_bytes=0)
    with world.ada._opened() as opened:
        path_ = f"/v1/artifacts/pushes/{opened.push}/commit"
        answer = world.api.client.ask(Committed, "POST", path_, json=body.model_dump())
    assert answer.version is None
    assert sorted(answer.missing) == sorted(path.name for path in chunks) == sorted(artifact.manifest.stored_sizes())
    with pytest.raises(CheckpointError, match="missing"):
        world.ada.pull("gpt", world.folder / "back")
    world.ada.push(world.folder / "one", "gpt", PushWanted(base="none"))  # mends it
    assert store.verify(artifact) == []


def test_old_versions_go_and_those_in_use_stay(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(5):
        world.ada.push(model(world.folder / str(seed), seed=seed), "gpt", PushWanted(base="none"))
    world.ada.tag("gpt:1", "best")
    world.ada.stage("gpt:2", "production")
    would = world.ada.collect(CollectRequest(keep=1))
    assert [each.version for each in would.versions] == [3, 4]
    assert would.dry
    assert len(world.ada.versions("gpt")) == 5
    with pytest.raises(BusyError, match="the server has just started"):
        world.ada.collect(CollectRequest(keep=1, dry=False))
    monkeypatch.setattr(pushes, "LEASE_S", 0.0)  # as if the server had run for a lease
    with world.ada._opened() as opened:
        assert opened.lease_s > 0
        world.api.artifacts.pushes._ends_s[opened.push] += 60.0
        with pytest.raises(BusyError, match="1 are open"):
            world.ada.collect(CollectRequest(dry=False))
    done = world.ada.collect(CollectRequest(dry=False))
    assert (done.freed_bytes, done.chunks) == (would.freed_bytes, would.chunks) != (0, 0)
    assert [each.version for each in world.ada.versions("gpt")] == [5, 2, 1]
    for version in (1, 2, 5):
        assert world.ada.verify(f"gpt:{version}") == []


def test_a_base_stays_while_another_version_needs_it(world: World) -> None:
    world.ada.push(model(world.folder / "one"), "base", PushWanted())
    world.ada.push(model(world.folder / "two", nudge=1e-7), "tuned", PushWanted(base="base"))
    with pytest.raises(InputError, match="is the base of tuned:1"):
        world.ada.remove("base")
    world.ada.remove("tuned", "a mistake")
    world.ada.remove("base")
    assert world.ada.versions() == []
    again = world.ada.push(world.folder / "one", "base", PushWanted())
    assert again.version.ref == "base:2"  # a number is given once


def test_a_restart_knows_the_same(world: World) -> None:
    world.ada.push(model(world.folder / "one"), "gpt", PushWanted(tag="best"))
    world.ada.push(model(world.folder / "two", seed=4), "gpt", PushWanted())
    world.ada.stage("gpt:2", "staging")
    control, store = world.api.scene.control, world.api.scene.store
    replayed = Fold(Policy())
    assert replayed.apply(store.events(0)) == []
    assert replayed.artifacts.saved() == control.fold.artifacts.saved()
    restored = loaded(taken(control.fold), control.state.policy, control.number)
    assert restored.artifacts.saved() == control.fold.artifacts.saved()
    assert any(isinstance(event, ArtifactPushed) for _, event in store.events(0))
