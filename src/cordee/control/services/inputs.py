"""Inputs of a replica besides its service's spec: the engine for the nodes, a checkpoint to serve, secrets."""

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
    checkpoint, planned = _checkpoint_of(operations, spec), planned_settings(spec, nodes)
    return replica_of(spec, revision=revision, engine=engine, checkpoint=checkpoint, planned=planned)


def _checkpoint_of(operations: Operations, spec: JobSpec) -> str | None:
    """Return the destination of the training job that the model names, or None if it names none."""
    assert spec.service is not None, "only services have replicas"
    name = trained_by(spec.service)
    if name is None:
        return None
    rows = operations.store.jobs(name) or operations.store.jobs(name=name)
    if not rows:
        raise SpecError(
            f"service.model = {spec.service.model}: there is no job {name!r}", hint="`cordee jobs` lists them"
        )
    newest = JobSpec.model_validate_json(rows[0]["spec"])
    if newest.checkpoint.to is None:
        raise SpecError(
            f"service.model = {spec.service.model}: the job {rows[0]['job_id']} has no checkpoint.to",
            hint="train it with --checkpoint-to, or give a folder with the model",
        )
    return below(absolute(newest.checkpoint.to, newest.cwd or "/"), rows[0]["job_id"])


def secrets_of(service: str) -> str:
    """Return the name under which the secrets of a service are kept; no job has such a one.

    >>> secrets_of("chat")
    'service/chat'
    """
    return f"service/{service}"
