"""The plan of one replica of a service, where its model and its kind of GPU are known."""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

from cordee.control.prices import SLOT
from cordee.control.services.replica_spec import engine_of
from cordee.errors import CordeeError
from cordee.events import Estimate, Node
from cordee.plan.serving.ask import ask
from cordee.plan.serving.estimate import service_estimate
from cordee.planning import serving_request
from cordee.workload.spec import JobSpec

_ENGINES = frozenset({"vllm", "llama.cpp"})  # that the plan knows, of those that a replica may run


def planned_replica(spec: JobSpec, nodes: Iterable[Node]) -> Estimate | None:
    """Return the plan's answer for one replica of a service on all its GPUs.

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
    slo = (section.slo.ttft_s, section.slo.tpot_s)
    return _planned(where, f"{spec.gpus}x{min(map(str, kinds))}", engine, section.context, slo)


@lru_cache(maxsize=64)
def _planned(
    model: str, gpus: str, engine: str, context: int | None, slo: tuple[float | None, float | None]
) -> Estimate | None:
    ttft, tpot = (None if each is None else f"{1000 * each:g}ms" for each in slo)
    limit = None if context is None else str(context)
    try:
        request = serving_request(model, gpus, engine=engine, context=limit, ttft=ttft, tpot=tpot)
        return service_estimate(ask(request))
    except CordeeError:
        return None
