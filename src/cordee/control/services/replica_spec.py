"""A replica's JobSpec from that of its service. Pure."""

from collections.abc import Mapping
from types import MappingProxyType

from cordee.control.prices import SLOT
from cordee.workload.service import (
    FROM_JOB,
    SETTINGS_ENV,
    EngineKind,
    Flag,
    ReplicaSettings,
    ServiceSpec,
    flag_name,
)
from cordee.workload.spec import JobSpec

RUN = 'exec "$CORDEE_PYTHON" -m cordee.serve.replica'
"""The command of a replica: the wrapper around its engine, in the interpreter of the node's agent."""


def engine_of(spec: JobSpec, service: ServiceSpec, gpu_names: set[str]) -> EngineKind:
    """Return the engine of a service: the one that it names, or the one that fits its model and the nodes."""
    if service.engine != "auto":
        return service.engine
    if spec.run:
        return "command"
    on_slots = spec.gpu == SLOT or (spec.gpu is None and gpu_names == {SLOT})
    return "llama.cpp" if on_slots or (service.model or "").endswith(".gguf") else "vllm"


def replica_of(
    spec: JobSpec,
    *,
    revision: int,
    engine: EngineKind,
    checkpoints: Mapping[str, str] = MappingProxyType({}),
    planned: Mapping[str, Flag] = MappingProxyType({}),
) -> JobSpec:
    """Return the job of one replica.

    Args:
        spec: the service's.
        revision: of the declaration.
        engine: the engine; never auto.
        checkpoints: by model, the destinations of the training jobs that they name.
        planned: settings of the engine; those that the service gives come first.
    """
    service = spec.service
    assert service is not None, "only services have replicas"
    found = dict(checkpoints)
    settings = ReplicaSettings(
        service=spec.name,
        revision=revision,
        engine=engine,
        model=service.model,
        checkpoint=found.pop(service.model or "", None),
        models=service.models,
        checkpoints=found,
        run=spec.run,
        context=service.context,
        slo=service.slo,
        drain_s=service.drain_s,
        health=service.health,
        flags={**planned, **{flag_name(name): value for name, value in service.flags.items()}},
    )
    # A node's wrapper may be of an earlier version, which knows no settings of several models.
    env = spec.env | {SETTINGS_ENV: settings.model_dump_json(exclude=None if found else {"checkpoints"})}
    return spec.model_copy(update={"run": RUN, "service": None, "env": env})


def trained_by(model: str) -> str | None:
    """Return the training job whose newest checkpoint is the model; None: the model is something else."""
    return model.removeprefix(FROM_JOB) if model.startswith(FROM_JOB) else None


def same_replicas(one: JobSpec, other: JobSpec) -> bool:
    """Return whether two declarations differ in the number of replicas and its rules only."""
    return _without_numbers(one) == _without_numbers(other)


def _without_numbers(spec: JobSpec) -> JobSpec:
    assert spec.service is not None, "only services have replicas"
    fixed = ServiceSpec(model=spec.service.model, engine=spec.service.engine)
    numbers = {name: getattr(fixed, name) for name in ("replicas", "standby", "window_s", "idle_s", "slo")}
    return spec.model_copy(update={"service": spec.service.model_copy(update=numbers)})
