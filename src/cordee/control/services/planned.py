"""The plan of one replica of a service, where its model and its kind of GPU are known."""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any

from cordee.control.prices import SLOT
from cordee.control.services.replica_spec import engine_of
from cordee.errors import CordeeError
from cordee.events import Estimate, Node
from cordee.plan.serving.ask import ask
from cordee.plan.serving.estimate import replica_estimate, whole_replica
from cordee.plan.serving.flags import asked_settings, planned_flags
from cordee.plan.serving.judge import ServingCandidate
from cordee.planning import serving_request
from cordee.workload.service import Flag
from cordee.workload.spec import JobSpec

_ENGINES = frozenset({"vllm", "llama.cpp"})  # that the plan knows, of those that a replica may run


def planned_replica(spec: JobSpec, nodes: Iterable[Node]) -> Estimate | None:
    """Return the plan's answer for one replica of a service on all its GPUs; None: it is not planned."""
    found = replica_plan(spec, nodes)
    return None if found is None else replica_estimate(found)


def planned_settings(spec: JobSpec, nodes: Iterable[Node]) -> dict[str, Flag]:
    """Return the settings of the engine with which one replica of a service is as planned; none: it is not planned."""
    found = replica_plan(spec, nodes)
    return {} if found is None else planned_flags(found.case)


def replica_plan(spec: JobSpec, nodes: Iterable[Node]) -> ServingCandidate | None:
    """Return one replica of a service as it is planned: with the settings that the service gives its engine.

    None on CPU slots, on GPUs of several kinds, for a model that is not described here, and where it does not fit:
    the engine itself decides whether it starts.
    """
    section = spec.service
    kinds = {spec.gpu} if spec.gpu else {node.gpu_name for node in nodes}
    if section is None or section.model is None or len(kinds) != 1 or SLOT in kinds:
        return None
    engine = engine_of(spec, section, {str(kind) for kind in kinds})
    if engine not in _ENGINES:
        return None
    model = Path(spec.cwd or ".") / section.model
    where = str(model) if model.exists() else section.model
    latencies = {"ttft": section.slo.ttft_s, "tpot": section.slo.tpot_s}
    given: dict[str, Any] = {name: f"{1000 * each:g}ms" for name, each in latencies.items() if each is not None}
    if section.context is not None:
        given["context"] = str(section.context)
    if engine == "llama.cpp":
        given["kv"] = "fp16"  # Its own default.
    given |= asked_settings(engine, section.flags)
    return _planned(where, f"{spec.gpus}x{min(map(str, kinds))}", engine, tuple(sorted(given.items())))


@lru_cache(maxsize=64)
def _planned(model: str, gpus: str, engine: str, given: tuple[tuple[str, Any], ...]) -> ServingCandidate | None:
    try:
        return whole_replica(ask(serving_request(model, gpus, engine=engine, **dict(given))))
    except CordeeError:
        return None
