"""The model of a replica as its engine loads it: a folder, a GGUF file, or a name that the engine resolves itself.

A checkpoint of a training job, or a version of an artifact, becomes a folder in a cache, under the hash of its
manifest, and a folder becomes a GGUF file for llama.cpp. What is in the cache is whole; replicas of one node share it,
and one that no replica has started with for a week is removed when another one starts.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cordee.errors import CheckpointError, CorruptError, InputError
from cordee.workload.launcher import ARTIFACTS_ENV
from cordee.workload.service import FROM_ARTIFACT, FROM_JOB, ReplicaSettings

if TYPE_CHECKING:
    from cordee.storage.log import LogEntry

MODELS_ENV = "CORDEE_MODELS"
"""The environment variable that names a folder of models, and of what is made from them."""

KEPT_S, HALF_KEPT_S = 7 * 86_400.0, 86_400.0
"""Time for which a model that was made from another one is kept after its last start, and a half-made one."""

_HALF = ".half-"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")


class FoundModel(NamedTuple):
    """The path or name with which an engine starts, "" if its command knows; and the name of what it then serves.

    That name has the step of a training job's checkpoint, `job:gpt@400`, or the version of an artifact: only replicas
    with the same weights go on with each other's streams.
    """

    path: str
    name: str


def find_model(settings: ReplicaSettings, environ: Mapping[str, str] = os.environ) -> FoundModel:
    """Return the model of a replica.

    Raises:
        InputError: there is no such model, or the engine cannot load it.
        CheckpointError: the training job has no checkpoint that can be read, or the artifact is damaged.
    """
    if settings.model is None:
        return FoundModel("", settings.service)
    models, name = models_folder(environ), settings.model
    found: Path | None
    if name.startswith(FROM_JOB):
        found, step = _from_checkpoint(settings, models)
        name = f"{name}@{step}"
    elif name.startswith(FROM_ARTIFACT):
        found, name = _from_artifact(settings, models, environ)
    else:
        found = _find_local(name, models, environ)
    if found is None:
        return FoundModel(_name_for(settings.engine, name, models), name)
    if settings.engine == "llama.cpp" and found.is_dir():
        return FoundModel(str(_as_gguf(found, models)), name)
    if settings.engine == "transformers" and found.suffix == ".gguf":
        raise InputError(
            f"the engine transformers does not load {found}", hint="use engine: llama.cpp for a .gguf file"
        )
    return FoundModel(str(found), name)


def models_folder(environ: Mapping[str, str]) -> Path:
    """Return the folder of models, and of what is made from them, on this node."""
    return Path(environ.get(MODELS_ENV) or Path.home() / ".cache" / "cordee" / "models")


def _name_for(engine: str, name: str, models: Path) -> str:
    if engine == "llama.cpp" or name.startswith((".", "/", "~")):
        raise InputError(
            f"the model {name} is not here: there is no such file or folder, neither in {Path.cwd()} nor in {models}",
            hint=f"give a .gguf file or a folder of a Hugging Face model, or put it in ${MODELS_ENV}",
        )
    return name  # Of a hub or a cache: the engine's own business.


def _find_local(name: str, models: Path, environ: Mapping[str, str]) -> Path | None:
    """Return a file or folder of this name: here, among the models, or in the Hugging Face cache."""
    for path in (Path(name).expanduser(), models / name):
        if path.exists():
            return path.absolute()
    home = environ.get("HF_HUB_CACHE") or Path(environ.get("HF_HOME") or "~/.cache/huggingface").expanduser() / "hub"
    cached = Path(home) / f"models--{name.replace('/', '--')}"
    try:
        revision = (cached / "refs" / "main").read_text().strip()
    except OSError:
        return None
    folder = cached / "snapshots" / revision
    return folder if (folder / "config.json").exists() else None


# -- a training job's checkpoint -----------------------------------------------------------------------------


def _from_checkpoint(settings: ReplicaSettings, models: Path) -> tuple[Path, int]:
    """Return a folder with the checkpoint to serve, and with config and tokenizer; and the step of the checkpoint."""
    from cordee.storage.audit import meant_for
    from cordee.storage.destination import open_existing
    from cordee.storage.log import live_commits, read_entries
    from cordee.storage.manifest import read_manifest
    from cordee.storage.sealed import Damaged
    from cordee.storage.transfer import export_hf

    assert settings.model is not None, "a model is named"
    job = settings.model.removeprefix(FROM_JOB)
    source = settings.trained.get(settings.model)
    if source is None:
        raise InputError(f"the job {job} has no checkpoint destination", hint="it needs `checkpoint: {to: ...}`")
    blobs = open_existing(source.checkpoint)
    commits = meant_for(blobs, live_commits(read_entries(blobs)))
    if not commits:
        raise CheckpointError(
            f"the job {job} has no checkpoint in {source.checkpoint} yet", hint="wait for its first save"
        )
    problem = ""
    for entry in _in_order(commits, source.step):
        name, step = str(entry.fields["manifest"]), int(entry.fields["step"])
        out = models / "checkpoints" / _digest(name, str(source.like))
        if out.is_dir():
            return _used(out), step
        try:
            whole = read_manifest(blobs, name)
            with _made_whole(out) as half:
                export_hf(blobs, whole, half, of=None, like=_like(source.like, job, whole.values, half.parent))
        except Damaged as damage:
            problem = problem or f"step {step}: {damage}"
            continue
        asked = problem or ("its newest checkpoint" if source.step is None else f"step {source.step} was declared")
        print(f"cordee: the model is step {step} of {job} ({asked})", flush=True)
        return _used(out), step
    raise CorruptError(
        f"none of the {len(commits)} checkpoints of {job} can be read; {problem}",
        hint=f"cordee checkpoint verify {source.checkpoint} --all",
    )


def _in_order(commits: "list[LogEntry]", step: int | None) -> "list[LogEntry]":
    """Return checkpoints in the order in which they are tried: the newest of at most this step first.

    One that is not kept any more has no substitute but a newer one.
    """
    newest = list(reversed(commits))
    return newest if step is None else sorted(newest, key=lambda each: each.fields["step"] > step)


def _like(like: str | None, job: str, values: Mapping[str, Any], scratch: Path) -> Path:
    """Return a folder with config.json and tokenizer: the given one, the job's files, or the state's values."""
    for folder in (Path(like).expanduser(),) if like else (Path.cwd(),):
        if (folder / "config.json").is_file():
            return folder
    if like:
        raise InputError(
            f"service.like = {like} has no config.json on this node", hint="name a folder of a Hugging Face model"
        )
    config = next((values[name] for name in ("config", "model_config") if isinstance(values.get(name), dict)), None)
    if config is None:
        raise InputError(
            f"the checkpoint of {job} holds weights only: the model's config.json and its tokenizer are missing",
            hint="name a folder that has them: service.like, or cordee serve run --from-job JOB --like ./base-model",
        )
    folder = scratch / "like"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- an artifact ---------------------------------------------------------------------------------------------


def _from_artifact(settings: ReplicaSettings, models: Path, environ: Mapping[str, str]) -> tuple[Path, str]:
    """Return a folder with the files of an artifact's version, and the name of that version."""
    from cordee.storage.destination import open_existing
    from cordee.storage.registry.mirror import suspect
    from cordee.storage.registry.store import ArtifactStore

    assert settings.model is not None, "a model is named"
    source = settings.artifacts.get(settings.model)
    if source is None:
        raise InputError(f"no version of {settings.model} was declared", hint="upgrade the server's Cordee")
    out = models / "artifacts" / source.digest[:32]
    if not out.is_dir():
        fetched = environ.get(ARTIFACTS_ENV)
        try:
            store = ArtifactStore(open_existing(fetched or source.store))
            with _made_whole(out) as half:
                store.pull(store.read(source.digest), half)
        except CheckpointError:
            if fetched:
                suspect(
                    Path(fetched), source.digest
                )  # the node verifies what it has before the next attempt, and fetches it again
            raise
        print(f"cordee: the model is {source.ref} ({source.digest[:12]}), verified", flush=True)
    return _used(out), f"{FROM_ARTIFACT}{source.ref}"


# -- GGUF ----------------------------------------------------------------------------------------------------


def _as_gguf(folder: Path, models: Path) -> Path:
    """Return the GGUF file of a folder: one that lies in it, else one made from it."""
    from cordee.serve.engines.gguf_file import SCRIPT_HINT, convert  # It imports numpy.

    lying = sorted(folder.glob("*.gguf"))
    if len(lying) == 1:
        return lying[0]
    if lying:
        names = ", ".join(path.name for path in lying[:4])
        raise InputError(f"{folder} has {len(lying)} .gguf files: {names}", hint="name one of them as the model")
    if not any((folder / name).is_file() for name in _TOKENIZERS):
        raise InputError(f"{folder} has no tokenizer ({', '.join(_TOKENIZERS)})", hint=SCRIPT_HINT)
    files = [path for path in sorted(folder.iterdir()) if path.is_file()]
    stamps = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
    out = models / "gguf" / f"{_digest(str(folder.resolve()), *stamps)}.gguf"
    if not out.is_file():
        with _made_whole(out) as half:
            convert(folder, half)
        print(f"cordee: wrote {folder} as GGUF: {out.stat().st_size:,} bytes", flush=True)
    return _used(out)


def _used(path: Path) -> Path:
    """Note that a made file or folder is used now, and remove those beside it that were not used for long."""
    os.utime(path)
    now_s = time.time()
    for other in path.parent.iterdir():
        kept_s = HALF_KEPT_S if other.name.startswith(_HALF) else KEPT_S
        try:
            if other != path and now_s - other.stat().st_mtime > kept_s:
                shutil.rmtree(other) if other.is_dir() else other.unlink()
        except OSError:
            continue  # another replica removes it, or it is not ours
    return path


@contextmanager
def _made_whole(path: Path) -> Iterator[Path]:
    """Yield a path beside `path` that takes its name when the block ends well; another process may be first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=_HALF, dir=path.parent))
    try:
        half = scratch / path.name
        yield half
        if not path.exists():
            half.rename(path)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _digest(*parts: str) -> str:
    return sha256("\0".join(parts).encode()).hexdigest()[:32]
