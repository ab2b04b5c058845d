"""Inputs of a replica besides its service's spec: the engine for the nodes, a checkpoint to serve, secrets."""

from pathlib import Path, PurePosixPath

from cordee.control.eligible import kind_of, may_get
from cordee.control.home import artifact_store
from cordee.control.operations import Operations
from cordee.control.services.planned import planned_settings
from cordee.control.services.replica_spec import engine_of, place_of, replica_of
from cordee.errors import SpecError
from cordee.storage.destination import absolute, below, open_blobs
from cordee.workload.service import (
    CONFIG_CHARS_MAX,
    SETTINGS_ENV,
    ArtifactModel,
    ArtifactVersion,
    ServiceSpec,
    TrainedModel,
)
from cordee.workload.spec import JobSpec

_SERVED = ("model", "checkpoint", "other")
"""Kinds of artifacts that may be models."""


def replica_spec(operations: Operations, spec: JobSpec, revision: int) -> JobSpec:
    """Return the job of one replica of this service on the nodes that are known.

    Raises:
        SpecError: the model is that of a training job which is not there or has no checkpoint destination; or a replica
            cannot be divided among the nodes.
        TooLargeError: no node is as large as a replica, and its engine starts on one.
    """
    assert spec.service is not None, "only services have replicas"
    with operations.control.changed:
        nodes = [record.node for record in operations.control.state.nodes.records.values()]
    engine = engine_of(spec, spec.service, {node.gpu_name for node in nodes})
    named = spec.service.trained_by
    weights = {model: _weights_of(operations, model, job) for model, job in named.items()}
    kind = kind_of(spec, nodes, operations.catalogue)
    largest = max((node.gpus for node in nodes if may_get(node, kind, spec)), default=0)
    placed = spec.model_copy(update={"place": place_of(spec, engine, largest)})
    # A plan is of one model: what it says of memory need not fit another one.
    planned = {} if spec.service.models else planned_settings(placed, nodes)
    artifacts = _artifacts_of(operations, spec.service)
    return replica_of(placed, revision=revision, engine=engine, trained=weights, artifacts=artifacts, planned=planned)


def pinned(operations: Operations, spec: JobSpec) -> JobSpec:
    """Return the spec of a service with the weights that its models name by now, unless it says which.

    Those are the newest checkpoints of jobs, and the versions that the references of artifacts name.

    Raises:
        SpecError: such a job is not there or has no checkpoint destination, or there is no such version, or it is no
            model.
        CheckpointError: the version is damaged.
    """
    section = spec.service
    if section is None:
        return spec
    update: dict[str, object] = {}
    if section.trained_by and not section.steps:
        newest = {model: _weights_of(operations, model, job).step for model, job in section.trained_by.items()}
        update["steps"] = {model: step for model, step in newest.items() if step is not None}
    if section.artifacts and not section.versions:
        update["versions"] = {model: _version_of(operations, ref) for model, ref in section.artifacts.items()}
    return spec.model_copy(update={"service": section.model_copy(update=update)}) if update else spec


def _version_of(operations: Operations, ref: str) -> ArtifactVersion:
    with operations.control.changed:
        found = operations.control.fold.artifacts.find(ref)
    if found is None:
        raise SpecError(f"there is no artifact {ref}", hint="`cordee artifact ls` shows them")
    named, version = found
    made, name = version.pushed, f"{named.name}:{version.pushed.version}"
    if made.artifact_kind not in _SERVED:
        raise SpecError(
            f"{name} is of the kind {made.artifact_kind}, and a service serves a model",
            hint="push a folder of a Hugging Face model or a .gguf file; merge an adapter into its base before",
        )
    from cordee.storage.registry.store import ArtifactStore  # it needs an extra, as whoever pushed it knows

    artifact = (store := ArtifactStore(open_blobs(artifact_store(operations.home)))).read(made.digest)
    files = {each.path: each for each in artifact.manifest.files}
    config = files.get("config.json")
    text = ""
    if config is not None and config.size_bytes <= CONFIG_CHARS_MAX:
        text = b"".join(store.content(artifact, chunk) for chunk in config.chunks).decode(errors="replace")
    return ArtifactVersion(ref=name, digest=made.digest, config=text, file=next(iter(files)) if len(files) == 1 else "")


def _artifacts_of(operations: Operations, section: ServiceSpec) -> dict[str, ArtifactModel]:
    """Return by model the version of an artifact that replicas read, with the destination of its chunks."""
    store = absolute(artifact_store(operations.home), str(Path.cwd()))
    return {
        model: ArtifactModel(ref=each.ref, digest=each.digest, store=store) for model, each in section.versions.items()
    }


def _weights_of(operations: Operations, model: str, name: str) -> TrainedModel:
    """Return where a training job writes its weights, with the step of its newest durable checkpoint."""
    rows = operations.store.jobs(name) or operations.store.jobs(name=name)
    # A service of that name has replicas of that name.
    jobs = ((row, JobSpec.model_validate_json(row["spec"])) for row in rows)
    row, newest = next(((row, each) for row, each in jobs if SETTINGS_ENV not in each.env), (None, None))
    if row is None or newest is None:
        raise SpecError(f"the model {model} of the service: there is no job {name!r}", hint="`cordee jobs` lists them")
    if newest.checkpoint.to is None:
        raise SpecError(
            f"the model {model} of the service: the job {row['job_id']} has no checkpoint.to",
            hint="train it with --checkpoint-to, or give a folder with the model",
        )
    config = PurePosixPath(newest.cwd or "/", (newest.model and newest.model.config) or "none")
    return TrainedModel(
        checkpoint=below(absolute(newest.checkpoint.to, newest.cwd or "/"), row["job_id"]),
        step=row["checkpoint_step"],
        like=str(config.parent) if config.name == "config.json" and newest.files is None else None,
    )


def check_models(spec: JobSpec) -> None:
    """Check that the models that lie in the service's folder are there, where this machine has that folder.

    Raises:
        SpecError: one is not.
    """
    assert spec.service is not None, "only services have models"
    folder = Path(spec.cwd or "")
    if spec.cwd is None or spec.files is not None or not folder.is_dir():
        return
    for model in (spec.service.model, *spec.service.models):
        if model is not None and model.startswith(("./", "../")) and not (folder / model).exists():
            raise SpecError(
                f"the model {model} of the service: there is no such file or folder in {folder}",
                hint="give a folder of a Hugging Face model or a .gguf file",
            )


def secrets_of(service: str) -> str:
    """Return the name under which the secrets of a service are kept; no job has such a one.

    >>> secrets_of("chat")
    'service/chat'
    """
    return f"service/{service}"
