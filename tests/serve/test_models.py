"""Models for replicas: folders, files, names, and what the SDK has just trained."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engines_world import RunningEngine, running_llama

from cordee.errors import CheckpointError, CorruptError, InputError
from cordee.serve.engines.gguf_file import convert
from cordee.serve.models import MODELS_ENV, find_model
from cordee.storage.destination import open_existing
from cordee.storage.files import FileBlobs
from cordee.storage.log import LogEntry, live_commits, read_entries
from cordee.storage.manifest import read_manifest
from cordee.storage.registry.store import ArtifactStore, files_below
from cordee.workload.service import ReplicaSettings

TRAIN = Path(__file__).parent / "train_tiny.py"


def settings(
    model: str,
    engine: str = "llama.cpp",
    checkpoint: Path | None = None,
    like: Path | None = None,
    step: int | None = None,
) -> ReplicaSettings:
    weights = {"checkpoint": str(checkpoint), "step": step, "like": None if like is None else str(like)}
    trained = {} if checkpoint is None else {model: weights}
    return ReplicaSettings.model_validate(
        {"service": "chat", "revision": 1, "engine": engine, "model": model, "trained": trained}
    )


def greedy(engine: RunningEngine, tokens: int) -> list[int]:
    asked = {"prompt": "def main", "n_predict": tokens, "temperature": 0, "return_tokens": True}
    status, answer = engine.ask("/completion", asked)
    assert status == 200
    return list(json.loads(answer)["tokens"])


def chunks_of(to: Path, entry: LogEntry) -> set[str]:
    return {chunk.key for chunk in read_manifest(open_existing(str(to)), entry.fields["manifest"]).chunks}


@pytest.mark.gang
def test_what_the_sdk_trained_is_served(
    tiny_folder: Path, llama: RunningEngine, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    to, out = tmp_path / "gpt", tmp_path / "steps"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CORDEE_QUIET": "1"}
    subprocess.run([sys.executable, TRAIN, tiny_folder, to, out], env=env, check=True)
    capfd.readouterr()
    for step in ("2", "4"):
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(tiny_folder / name, out / step)
        convert(out / step, out / step / "model.gguf")

    environ = {MODELS_ENV: str(tmp_path / "models")}
    gpt = settings("job:gpt", checkpoint=to, like=tiny_folder)
    made, name = find_model(gpt, environ)
    assert (made, name) == find_model(gpt, environ) and name == "job:gpt@4"
    assert capfd.readouterr().out.count("step 4 of gpt (its newest checkpoint)") == 1, "the second time it is there"
    assert Path(made).read_bytes() == (out / "4" / "model.gguf").read_bytes()
    with running_llama(Path(made), tmp_path) as engine:
        assert greedy(engine, 40) != greedy(llama, 40), "it has learned"
    folder = Path(find_model(settings("job:gpt", "vllm", to, tiny_folder), environ).path)
    assert (folder / "model.safetensors").is_file() and (folder / "tokenizer.json").is_file()
    # A revision keeps the step that it was declared with; one that is not kept any more has a newer one in its place.
    for step, served in ((3, "job:gpt@2"), (1, "job:gpt@4")):
        assert find_model(settings("job:gpt", checkpoint=to, like=tiny_folder, step=step), environ).name == served

    older, newer = (chunks_of(to, entry) for entry in live_commits(read_entries(open_existing(str(to)))))
    for key in newer - older:
        (to / key).write_bytes(b"")
    fresh = {MODELS_ENV: str(tmp_path / "others")}
    made, name = find_model(gpt, fresh)
    assert Path(made).read_bytes() == (out / "2" / "model.gguf").read_bytes() and name == "job:gpt@2"
    assert "step 2 of gpt (step 4: " in capfd.readouterr().out
    with pytest.raises(InputError, match="holds weights only"):
        find_model(settings("job:gpt", checkpoint=to), {MODELS_ENV: str(tmp_path / "more")})
    with pytest.raises(InputError, match="/nowhere has no config"):
        find_model(settings("job:gpt", checkpoint=to, like=Path("/nowhere")), {MODELS_ENV: str(tmp_path / "more")})
    for key in older:
        (to / key).write_bytes(b"")
    with pytest.raises(CorruptError, match="none of the 2 checkpoints of gpt"):
        find_model(gpt, {MODELS_ENV: str(tmp_path / "last")})


def test_a_job_without_a_checkpoint_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the job gpt has no checkpoint destination"):
        find_model(settings("job:gpt"), {})
    (tmp_path / "log").mkdir()
    with pytest.raises(CheckpointError, match=r"has no checkpoint in .* yet"):
        find_model(settings("job:gpt", checkpoint=tmp_path), {})


def test_a_version_of_an_artifact_becomes_a_folder_once(tiny_folder: Path, tmp_path: Path) -> None:
    store = ArtifactStore(FileBlobs(tmp_path / "store"))
    digest = store.push(files_below(tiny_folder / "tiny.gguf"), "model").manifest.digest
    version = {"ref": "tiny:3", "digest": digest, "store": str(tmp_path / "store")}
    named = settings("artifact:tiny:best").model_dump() | {"artifacts": {"artifact:tiny:best": version}}
    tiny, environ = ReplicaSettings.model_validate(named), {MODELS_ENV: str(tmp_path / "models")}
    with pytest.raises(InputError, match=r"no version of artifact:tiny:best was declared"):
        find_model(settings("artifact:tiny:best"), environ)
    found = find_model(tiny, environ)
    assert found.name == "artifact:tiny:3" and Path(found.path).read_bytes() == (tiny_folder / "tiny.gguf").read_bytes()
    shutil.copytree(tmp_path / "store", tmp_path / "node")
    for chunk in (tmp_path / "store" / "chunks").rglob("*"):
        if chunk.is_file():
            chunk.unlink()
    assert find_model(tiny, environ) == found, "it is there"
    # Another node has fetched the chunks; a damaged one is left out, and said to be so.
    other = {MODELS_ENV: str(tmp_path / "others"), "CORDEE_ARTIFACTS": str(tmp_path / "node")}
    assert find_model(tiny, other).name == found.name
    broken = next(path for path in (tmp_path / "node" / "chunks").rglob("*") if path.is_file())
    broken.write_bytes(b"")
    with pytest.raises(CheckpointError, match="was altered"):
        find_model(tiny, other | {MODELS_ENV: str(tmp_path / "last")})
    assert (tmp_path / "node" / "suspect" / digest).exists()


def test_a_model_is_a_folder_a_file_or_a_name(tiny_folder: Path, tmp_path: Path) -> None:
    environ = {MODELS_ENV: str(tmp_path), "HF_HOME": str(tmp_path / "hf")}
    gguf = str(tiny_folder / "tiny.gguf")
    assert find_model(settings(gguf), environ).path == gguf
    assert find_model(settings(str(tiny_folder)), environ).path == gguf, "a folder with one .gguf file"
    assert find_model(settings(str(tiny_folder), "vllm"), environ).path == str(tiny_folder)
    assert find_model(settings("some/model", "vllm"), environ).path == "some/model"
    shutil.copytree(tiny_folder, tmp_path / "kept", ignore=shutil.ignore_patterns("*.gguf"))
    assert find_model(settings("kept", "vllm"), environ).path == str(tmp_path / "kept")
    made = Path(find_model(settings("kept"), environ).path)
    assert made.read_bytes() == (tiny_folder / "tiny.gguf").read_bytes()
    cached = tmp_path / "hf" / "hub" / "models--some--model"
    (cached / "refs").mkdir(parents=True)
    (cached / "refs" / "main").write_text("abc")
    shutil.copytree(tmp_path / "kept", cached / "snapshots" / "abc")
    assert find_model(settings("some/model", "vllm"), environ).path == str(cached / "snapshots" / "abc")


def test_what_was_made_and_is_not_used_any_more_is_removed(tiny_folder: Path, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for path in tiny_folder.iterdir():
        if path.suffix != ".gguf":
            shutil.copy(path, folder)
    environ = {"CORDEE_MODELS": str(tmp_path / "models")}
    of = ReplicaSettings(service="chat", revision=1, model=str(folder), engine="llama.cpp")
    made = Path(find_model(of, environ).path)
    old, recent, half = (made.parent / name for name in ("old.gguf", "recent.gguf", ".half-x"))
    old.touch()
    recent.touch()
    half.mkdir()
    (half / "part").touch()
    for path, age_s in ((old, 8 * 86_400), (recent, 6 * 86_400), (half, 2 * 86_400), (made, 30 * 86_400)):
        os.utime(path, (time.time() - age_s,) * 2)
    assert Path(find_model(of, environ).path) == made
    assert sorted(made.parent.iterdir()) == sorted([made, recent])


@pytest.mark.parametrize(
    ("model", "engine", "message"),
    [
        ("nowhere/at-all", "llama.cpp", "is not here"),
        ("./nowhere", "vllm", "is not here"),
        ("{tiny}/tiny.gguf", "transformers", "does not load"),
        ("{tmp}/other", "llama.cpp", "the architecture MambaForCausalLM"),
        ("{tmp}/many", "llama.cpp", "has 2 .gguf files: a.gguf, b.gguf"),
        ("{tmp}/bare", "llama.cpp", "has no tokenizer"),
    ],
)
def test_a_model_that_cannot_be_served_says_so(
    tiny_folder: Path, tmp_path: Path, model: str, engine: str, message: str
) -> None:
    for name in ("other", "many", "bare"):
        (tmp_path / name).mkdir()
    (tmp_path / "many" / "a.gguf").touch()
    (tmp_path / "many" / "b.gguf").touch()
    (tmp_path / "other" / "tokenizer.json").write_text("{}")
    (tmp_path / "other" / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    named = model.format(tiny=tiny_folder, tmp=tmp_path)
    with pytest.raises(InputError, match=message):
        find_model(settings(named, engine), {MODELS_ENV: str(tmp_path / "models")})
