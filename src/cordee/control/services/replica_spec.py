"""A replica's JobSpec from that of its service. Pure."""

from collections.abc import Mapping
from types import MappingProxyType

from cordee.control.prices import SLOT
from cordee.errors import SpecError, TooLargeError
from cordee.serve.engines.known import find_engine
from cordee.workload.service import (
    SETTINGS_ENV,
    WHOLE_MILLI,
    ArtifactModel,
    EngineKind,
    Flag,
    ReplicaSettings,
    ServiceSpec,
    TrainedModel,
    flag_name,
)
from cordee.workload.spec import JobSpec, Place

MEMORY_FRACTION = 0.9
"""The fraction of its part of a GPU's memory that an engine takes."""

RUN = 'exec "$CORDEE_PYTHON" -m cordee.serve.replica'
"""The command of a replica: the wrapper around its engine, in the interpreter of the node's agent."""


def engine_of(spec: JobSpec, service: ServiceSpec, gpu_names: set[str]) -> EngineKind:
    """Return the engine of a service: the one that it names, or the one that fits its model and the nodes."""
    if service.engine != "auto":
        return service.engine
    if spec.run:
        return "command"
    on_slots = spec.gpu == SLOT or (spec.gpu is None and gpu_names == {SLOT})
    version = service.versions.get(service.model or "")
    model = service.model or "" if version is None else version.file
    return "llama.cpp" if on_slots or model.endswith(".gguf") else "vllm"


def place_of(spec: JobSpec, engine: EngineKind, node_gpus: int) -> Place:
    """Return the placement of one replica: on one node if it fits one, else with the same number of GPUs on each.

    Args:
        spec: the service's; the placement that it gives an engine for several nodes stays.
        engine: the engine; never auto.
        node_gpus: GPUs of the largest node that it may get; 0: none is known.

    Raises:
        TooLargeError: the engine starts on one node, and none is as large.
        SpecError: the GPUs cannot be the same on each node.
    """
    spans = find_engine(engine).spans_nodes
    if spec.gpus == 1 or (spans and spec.place != Place()):
        return spec.place
    nodes = -(-spec.gpus // node_gpus) if node_gpus else 1
    if not spans and nodes > 1:
        raise TooLargeError(
            f"a replica has {spec.gpus} GPUs, and the engine {engine} starts on one node: the largest has {node_gpus}",
            hint="give it fewer (gpus:), or use engine: vllm",
        )
    if not spans or spec.gpus <= node_gpus:
        return spec.place if spec.place.within in ("island", "node") else Place(within="node")
    if spec.gpus % nodes and engine == "vllm":
        sizes = sorted({nodes * (spec.gpus // nodes), nodes * -(-spec.gpus // nodes)})
        raise SpecError(
            f"a replica has {spec.gpus} GPUs on {nodes} nodes of {node_gpus}, and vLLM takes the same number on each",
            hint=f"use gpus: {' or '.join(map(str, sizes))}",
        )
    return Place(unit=spec.gpus // nodes) if node_gpus and spec.gpus % nodes == 0 else spec.place


def replica_of(
    spec: JobSpec,
    *,
    revision: int,
    engine: EngineKind,
    trained: Mapping[str, TrainedModel] = MappingProxyType({}),
    artifacts: Mapping[str, ArtifactModel] = MappingProxyType({}),
    planned: Mapping[str, Flag] = MappingProxyType({}),
) -> JobSpec:
    """Return the job of one replica.

    Args:
        spec: the service's.
        revision: of the declaration.
        engine: the engine; never auto.
        trained: the weights of its models that are `job:NAME`.
        artifacts: the versions of those that are `artifact:REF`.
        planned: settings of the engine; those that the service gives come first.
    """
    service = spec.service
    assert service is not None, "only services have replicas"
    found = {
        model: each.model_copy(update={"step": service.steps.get(model), "like": service.like or each.like})
        for model, each in trained.items()
    }
    settings = ReplicaSettings(
        service=spec.name,
        revision=revision,
        engine=engine,
        model=service.model,
        models=service.models,
        trained=found,
        artifacts=dict(artifacts),
        run=spec.run,
        context=service.context,
        slo=service.slo,
        drain_s=service.drain_s,
        health=service.health,
        flags={
            **planned,
            **part_flags(engine, spec.gpu_milli),
            **{flag_name(name): value for name, value in service.flags.items()},
        },
    )
    # A node's wrapper may be of an earlier version, which knows no such settings.
    unused = {name for name, value in (("trained", found), ("artifacts", artifacts)) if not value}
    env = spec.env | {SETTINGS_ENV: settings.model_dump_json(exclude=unused)}
    from cordee.storage.destination import is_remote, level_urls  # their hashes are not in every extra

    # What only the server's disk has comes over the agent's connection; an object store is open to every node.
    stores = {each.store for each in artifacts.values()}
    is_here = not any(is_remote(place) for store in stores for place in level_urls(store))
    fetched = tuple(dict.fromkeys(each.digest for each in artifacts.values())) if is_here else ()
    return spec.model_copy(update={"run": RUN, "service": None, "env": env, "artifacts": fetched})


def part_flags(engine: EngineKind, gpu_milli: int) -> dict[str, Flag]:
    """Return the settings that keep an engine within its part of a GPU's memory; none for a whole GPU.

    >>> part_flags("vllm", 250), part_flags("vllm", 1000)
    ({'--gpu-memory-utilization': 0.225}, {})
    """
    part = gpu_milli / WHOLE_MILLI
    if part == 1:
        return {}
    # llama.cpp takes what its weights and its cache need: as planned.
    flags: dict[EngineKind, dict[str, Flag]] = {
        "vllm": {"--gpu-memory-utilization": round(MEMORY_FRACTION * part, 3)},
        "transformers": {"--memory-fraction": part},
    }
    return flags.get(engine, {})


def same_replicas(one: JobSpec, other: JobSpec) -> bool:
    """Return whether two declarations differ in the number of replicas and its rules only."""
    return _without_numbers(one) == _without_numbers(other)


def _without_numbers(spec: JobSpec) -> JobSpec:
    assert spec.service is not None, "only services have replicas"
    fixed = ServiceSpec(model=spec.service.model, engine=spec.service.engine)
    rules = ("replicas", "standby", "window_s", "idle_s", "max_micro_usd_per_hour", "slo")
    numbers = {name: getattr(fixed, name) for name in rules}
    return spec.model_copy(update={"service": spec.service.model_copy(update=numbers)})
