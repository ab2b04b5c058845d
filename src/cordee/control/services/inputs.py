"""Inputs of a replica besides its service's spec: the engine for the nodes, a checkpoint to serve, secrets."""

from pathlib import Path

from cordee.control.operations import Operations
from cordee.control.services.planned import planned_settings
from cordee.control.services.replica_spec import engine_of, replica_of, trained_by
from cordee.errors import SpecError
from cordee.storage.destination import absolute, below
from cordee.workload.spec import JobSpec


def replica_spec(operations: Operations, spec: JobSpec, revision: int) -> JobSpec:
    """Return the job of one replica of this service on the nodes that are known.

    Raises:
        SpecError: the model is that of a training job which is not there or has no checkpoint destination.
    """
    assert spec.service is not None, "only services have replicas"
    with operations.control.changed:
        nodes = [record.node for record in operations.control.state.nodes.records.values()]
    engine = engine_of(spec, spec.service, {node.gpu_name for node in nodes})
    named = (spec.service.model, *spec.service.models)
    jobs = {model: job for model in named if model is not None and (job := trained_by(model)) is not None}
    checkpoints = {model: _checkpoint_of(operations, model, job) for model, job in jobs.items()}
    # A plan is of one model: what it says of memory need not fit another one.
    planned = {} if spec.service.models else planned_settings(spec, nodes)
    return replica_of(spec, revision=revision, engine=engine, checkpoints=checkpoints, planned=planned)


def _checkpoint_of(operations: Operations, model: str, name: str) -> str:
    """Return the destination of the training job that a model names."""
    rows = operations.store.jobs(name) or operations.store.jobs(name=name)
    if not rows:
        raise SpecError(f"the model {model} of the service: there is no job {name!r}", hint="`cordee jobs` lists them")
    newest = JobSpec.model_validate_json(rows[0]["spec"])
    if newest.checkpoint.to is None:
        raise SpecError(
            f"the model {model} of the service: the job {rows[0]['job_id']} has no checkpoint.to",
            hint="train it with --checkpoint-to, or give a folder with the model",
        )
    return below(absolute(newest.checkpoint.to, newest.cwd or "/"), rows[0]["job_id"])


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
