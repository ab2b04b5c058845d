"""The plan of one replica of a service, where its model and its kind of GPU are known."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from cordee.control.directory import Service
from cordee.control.prices import SLOT
from cordee.control.services.replica_spec import MEMORY_FRACTION, engine_of
from cordee.errors import CordeeError, DoesNotFitError
from cordee.events import Estimate, Node
from cordee.ids import JobId
from cordee.plan.serving.ask import ask
from cordee.plan.serving.estimate import replica_estimate, whole_replica
from cordee.plan.serving.flags import asked_settings, planned_flags
from cordee.plan.serving.judge import ServingCandidate
from cordee.plan.serving.levers.time_slice import time_slice
from cordee.planning import serving_request
from cordee.schedule.state.records import JobRecord
from cordee.workload.service import WHOLE_MILLI, Flag
from cordee.workload.spec import JobSpec

_ENGINES = frozenset({"vllm", "llama.cpp"})  # that the plan knows, of those that a replica may run


def estimate_of(service: Service, jobs: Mapping[JobId, JobRecord]) -> Estimate | None:
    """Return the plan of a service's newest replica; None: it has no replica, or no plan."""
    newest = next((jobs[job_id].job for job_id in reversed(service.replicas) if job_id in jobs), None)
    return None if newest is None else newest.estimate_on(newest.gpus)


def planned_replica(spec: JobSpec, nodes: Iterable[Node]) -> Estimate | None:
    """Return the plan's answer for one replica of a service on all its GPUs; None: it is not planned."""
    found = replica_plan(spec, nodes)
    return None if found is None else replica_estimate(found)


def planned_settings(spec: JobSpec, nodes: Iterable[Node]) -> dict[str, Flag]:
    """Return the settings of the engine with which one replica of a service is as planned; none: it is not planned."""
    found = replica_plan(spec, nodes)
    return {} if found is None else planned_flags(found.case)


def check_part(spec: JobSpec, nodes: Iterable[Node]) -> None:
    """Refuse a replica whose part of a GPU is too small: what it took more, other jobs would lack.

    Raises:
        DoesNotFitError: the plan knows that it does not fit.
    """
    refusal = _plan_of(spec, nodes).refusal if spec.gpu_milli < WHOLE_MILLI or spec.mig else ""
    if refusal and spec.service is not None:
        part = f"a MIG instance {spec.mig}" if spec.mig else f"{spec.gpu_milli / WHOLE_MILLI:g} of a GPU"
        raise DoesNotFitError(
            f"{spec.service.model} does not fit {part}: {refusal}",
            hint="give a replica a larger part (`gpus`), or a shorter service.context",
        )


def replica_plan(spec: JobSpec, nodes: Iterable[Node]) -> ServingCandidate | None:
    """Return one replica of a service as it is planned: with the settings that the service gives its engine.

    None on CPU slots, on GPUs of several kinds, for a model that is not described here, and where it does not fit:
    the engine itself decides whether it starts.
    """
    return _plan_of(spec, nodes).replica


class _Plan(NamedTuple):
    """The replica, or why it does not fit; neither where nothing is known."""

    replica: ServingCandidate | None = None
    refusal: str = ""


def _plan_of(spec: JobSpec, nodes: Iterable[Node]) -> _Plan:
    section = spec.service
    kinds = {spec.gpu} if spec.gpu else {node.gpu_name for node in nodes}
    if section is None or section.model is None or len(kinds) != 1 or SLOT in kinds:
        return _Plan()
    engine = engine_of(spec, section, {str(kind) for kind in kinds})
    if engine not in _ENGINES:
        return _Plan()
    version, model = section.versions.get(section.model), Path(spec.cwd or ".") / section.model
    where = str(model) if model.exists() else section.model
    latencies = {"ttft": section.slo.ttft_s, "tpot": section.slo.tpot_s}
    given: dict[str, Any] = {name: f"{1000 * each:g}ms" for name, each in latencies.items() if each is not None}
    if section.context is not None:
        given["context"] = str(section.context)
    if engine == "llama.cpp":
        given["kv"] = "fp16"  # Its own default.
    given |= asked_settings(engine, section.flags)
    if "memory_fraction" in given:  # Of the whole GPU, as engines take it.
        given["memory_fraction"] = min(1.0, given["memory_fraction"] * WHOLE_MILLI / spec.gpu_milli)
    gpus = f"{spec.gpus}x{min(map(str, kinds))}" + (f" {spec.mig}" if spec.mig else "")
    per_node = spec.place.unit if spec.place.unit is not None and spec.place.unit < spec.gpus else None
    return _planned(
        where,
        gpus,
        (spec.gpu_milli, per_node),
        engine,
        tuple(sorted(given.items())),
        "" if version is None else version.config,
    )


@lru_cache(maxsize=64)
def _planned(
    model: str, gpus: str, parts: tuple[int, int | None], engine: str, given: tuple[tuple[str, Any], ...], config: str
) -> _Plan:
    """Return the plan of a model, which is read from `config`, the text of its config.json, where that is not empty."""
    milli, per_node = parts
    try:
        with TemporaryDirectory(prefix="cordee-model-") as folder:
            if config:
                (Path(folder) / "config.json").write_text(config)
            request = serving_request(folder if config else model, gpus, engine=engine, **dict(given))
            request = replace(request, model=model)
        if per_node is not None:  # It is placed on several nodes.
            gpu = request.gpu
            island = gpu.island_gpus if gpu.island_gpus > gpu.gpus_per_node else min(gpu.island_gpus, per_node)
            request = replace(request, gpu=replace(gpu, gpus_per_node=per_node, island_gpus=island))
        if milli < WHOLE_MILLI:
            part = time_slice(request.gpu, milli)
            if engine == "llama.cpp":  # It takes all that it is planned with.
                part = replace(part, memory_bytes=round(MEMORY_FRACTION * part.memory_bytes))
            request = replace(request, gpu=part)
        answer = ask(request)
    except CordeeError:
        return _Plan()
    replica, refusals = whole_replica(answer), (each.memory.refusal for each in answer.candidates)
    return _Plan(replica, "" if replica else next(filter(None, refusals), "") or "")
