"""Services as people and gateways see them: the directory's records as answers of the API. Pure."""

import json
from collections import Counter
from collections.abc import Iterable, Sequence

from cordee.account.measured import service_comparisons
from cordee.answers.jobs import ComparisonView
from cordee.answers.services import (
    EndpointState,
    EndpointView,
    GatewayStatus,
    ModelView,
    ReplicaState,
    ReplicaView,
    RouteView,
    ServedView,
    ServiceState,
    ServiceView,
)
from cordee.control.directory import Replica, Service
from cordee.control.services.gateways import served
from cordee.control.services.rollout import in_reserve
from cordee.events import Estimate
from cordee.ids import JobId, attempt_name
from cordee.units import US_PER_S
from cordee.workload.service import ServiceSpec
from cordee.workload.spec import JobSpec


def replica_view(replica: Replica, *, reserve: bool) -> ReplicaView:
    """Return one replica; `reserve`: it is ready, and gets no requests as long as others do."""
    ready = replica.ready
    return ReplicaView(
        job_id=replica.job_id,
        epoch=replica.epoch,
        revision=replica.revision,
        state=_state(replica, reserve),
        address=None if ready is None else ready.address,
        node=replica.node,
        engine=None if ready is None else ready.engine,
        model=replica.order.model if replica.order is not None else None if ready is None else ready.model,
        kv_tokens=None if ready is None else ready.kv_tokens,
        slots=None if ready is None else ready.slots,
        since_us=replica.since_us,
        why=replica.unready or replica.why or _swap_reason(replica),
    )


def _swap_reason(replica: Replica) -> str:
    """Return why a replica of several models loads the one that it loads."""
    return replica.order.why if replica.order is not None and (replica.ready is None or replica.swaps) else ""


def _state(replica: Replica, reserve: bool) -> ReplicaState:
    if replica.draining or (replica.ready is not None and not replica.swaps):
        return _reported_state(replica, reserve)
    return "waiting" if replica.node is None else "loading"


def _reported_state(replica: Replica, reserve: bool) -> EndpointState:
    if replica.draining:
        return "draining"
    if replica.unready is not None:
        return "unready"
    return "standby" if reserve else "ready"


def service_view(
    service: Service,
    *,
    statuses: Sequence[GatewayStatus],
    urls: Sequence[str],
    estimate: Estimate | None,
    problem: str,
    limit: str,
    micro_usd_per_hour: int,
    notes: Sequence[str] = (),
) -> ServiceView:
    """Return a service with its replicas.

    Args:
        service: as the log has it.
        statuses: of the gateways.
        urls: of the gateways.
        estimate: the plan of a replica.
        problem: the refusal of its next replica.
        limit: the price that keeps it from more replicas.
        micro_usd_per_hour: the price of a replica.
        notes: for the user who declared it.
    """
    reserve = in_reserve(service)
    replicas = [replica_view(each, reserve=each.job_id in reserve) for each in service.replicas.values()]
    measured = served(service, statuses)
    ready = [each for each in replicas if each.revision == service.revision and each.state in ("ready", "standby")]
    return ServiceView(
        name=service.name,
        owner=service.owner,
        revision=service.revision,
        state=_service_state(service),
        wanted=service.wanted,
        min=service.fewest,
        max=service.most,
        standby=service.standby,
        micro_usd_per_hour=micro_usd_per_hour,
        why=problem or _failing(service) or "; ".join(filter(None, (service.why, limit))),
        replicas=replicas,
        models=_models(service, statuses),
        estimate=estimate,
        measured=measured,
        compared=_compared(estimate, measured, ready),
        urls=list(urls),
        spec=json.loads(service.spec),
        declared_us=service.declared_us,
        notes=list(notes),
    )


def _models(service: Service, statuses: Sequence[GatewayStatus]) -> list[ModelView]:
    """Return the models among which the replicas swap."""
    failures = service.load_failures
    ready = (each.ready for each in service.replicas.values() if each.is_ready and not each.swaps)
    holding = Counter(each.model for each in ready if each is not None)
    return [
        ModelView(
            name=model,
            replicas=holding[model],
            queued=sum(each.queued for each in statuses if each.model == model),
            load_us=service.load_us.get(model),
            why=f"it did not load: {failures[model].why}" if model in failures else "",
        )
        for model in _section(service).all_models
    ]


def _section(service: Service) -> ServiceSpec:
    section = JobSpec.model_validate_json(service.spec).service
    assert section is not None, "the directory holds services only"
    return section


def _compared(estimate: Estimate | None, measured: ServedView, ready: Sequence[ReplicaView]) -> list[ComparisonView]:
    """Return the plan beside what was measured: by gateways, and by the replica with the smallest cache."""
    rows = service_comparisons(
        estimate,
        kv_tokens=min((each.kv_tokens for each in ready if each.kv_tokens is not None), default=None),
        sequences=min((each.slots for each in ready if each.slots is not None), default=None),
        ttft_us=measured.ttft_p99_us,
        tpot_us=measured.tpot_p99_us,
    )
    return [ComparisonView.of(row) for row in rows]


def _failing(service: Service) -> str:
    failures = service.failures
    if not failures.number or any(each.is_ready for each in service.staying if each.revision == service.revision):
        return ""
    times = "" if failures.number == 1 else f" ({failures.number} replicas in a row)"
    return f"its last replica failed{times}: {failures.why}"


def _service_state(service: Service) -> ServiceState:
    if service.ended:
        return "ended"
    staying = service.staying
    ready = sum(each.is_ready or each.swaps for each in staying)
    if any(each.revision != service.revision for each in staying):
        return "updating"
    if service.wanted == 0:
        return "idle"
    if ready >= service.wanted:
        return "ready"
    return "degraded" if any(each.was_ready for each in service.replicas.values()) else "starting"


def route_views(service: Service) -> list[RouteView]:
    """Return a service as a gateway sees it: one route, or one for each of the models among which replicas swap."""
    spec, reserve = _section(service), in_reserve(service)
    return [
        RouteView(
            name=service.name,
            model=model,
            models=names,
            context=spec.context,
            ttft_us=_us(spec.slo.ttft_s),
            tpot_us=_us(spec.slo.tpot_s),
            drain_us=round(spec.drain_s * US_PER_S),
            wanted=service.wanted,
            endpoints=[*_endpoints(service.replicas.values(), reserve, model)],
        )
        for model, names in model_names(service.name, spec).items()
    ]


def _endpoints(replicas: Iterable[Replica], reserve: set[JobId], model: str) -> Iterable[EndpointView]:
    """Yield the replicas that hold this model, "" for all; one that swaps gets no new requests, then is none."""
    for each in replicas:
        if each.ready is None or model not in ("", each.ready.model) or (each.swaps and each.unready is not None):
            continue
        yield EndpointView(
            id=attempt_name(each.job_id, each.epoch),
            address=each.ready.address,
            engine=each.ready.engine,
            model=each.ready.model,
            state="draining" if each.swaps else _reported_state(each, each.job_id in reserve),
            kv_tokens=each.ready.kv_tokens,
            slots=each.ready.slots,
            revision=each.revision,
        )


def model_names(name: str, spec: ServiceSpec) -> dict[str, list[str]]:
    """Return by model the names that requests may give it: of the first one the service's, then all others."""
    names = {model: [_short(model), f"{name}/{_short(model)}", model] for model in spec.all_models}
    if not names:
        model = spec.model
        return {"": list(dict.fromkeys([name] if model is None else [name, _short(model), model]))}
    names[spec.all_models[0]].insert(0, name)
    return {model: list(dict.fromkeys(each)) for model, each in names.items()}


def _short(model: str) -> str:
    return model.rstrip("/").rpartition("/")[2].removesuffix(".gguf")


def _us(seconds: float | None) -> int | None:
    return None if seconds is None else round(seconds * US_PER_S)
