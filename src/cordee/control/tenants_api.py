"""Routes of tenants, their keys, their tokens and dollars, and of the server's metrics."""

from typing import Annotated

from fastapi import Depends, Path, Query
from fastapi.responses import PlainTextResponse, Response

from cordee.account.usage import UsageBy
from cordee.answers.services import (
    TENANT,
    CostLinesView,
    KeyRequest,
    KeyView,
    NewKeyView,
    TenantRules,
    TenantView,
    UsageView,
)
from cordee.control.cluster_counts import cluster_counts
from cordee.control.dependencies import Asked, Owner, user_router
from cordee.control.metrics import CONTENT_TYPE, Measures, metrics_text
from cordee.control.services.routes import Services
from cordee.control.tenants import Tenants
from cordee.control.usage import lines_view, usage_view
from cordee.reports import COUNT_MAX

router = user_router("/v1")
metrics_router = user_router("")


def _tenants(services: Services) -> Tenants:
    return services.tenants


AskedTenants = Annotated[Tenants, Depends(_tenants)]
TenantName = Annotated[str, Path(pattern=TENANT)]
Moment = Annotated[int, Query(ge=0, le=COUNT_MAX)]


@router.post("/keys", status_code=201)
def create_key(request: KeyRequest, tenants: AskedTenants, owner: Owner) -> NewKeyView:
    """Make a key of a tenant; this answer alone has its secret."""
    return tenants.create_key(request, owner)


@router.get("/keys")
def keys(tenants: AskedTenants) -> list[KeyView]:
    """Return all keys without their secrets, oldest first, revoked ones as well."""
    return tenants.keys()


@router.delete("/keys/{key}")
def revoke_key(key: str, tenants: AskedTenants, owner: Owner) -> KeyView:
    """Make a key void; gateways refuse it within seconds."""
    return tenants.revoke_key(key, owner)


@router.get("/tenants")
def all_tenants(tenants: AskedTenants) -> list[TenantView]:
    """Return all tenants by name, with what each has spent."""
    return tenants.tenants()


@router.put("/tenants/{name}")
def set_tenant(name: TenantName, rules: TenantRules, tenants: AskedTenants, owner: Owner) -> TenantView:
    """Add a tenant, or replace its rules."""
    return tenants.set_tenant(name, rules, owner)


@router.get("/usage")
def usage(operations: Asked, by: UsageBy = "service") -> UsageView:
    """Return tokens and cost of services, beside the cost of all other jobs."""
    now_us = operations.clock.now_us()
    with operations.control.changed:
        return usage_view(operations.control.ledger, by, now_us)


@router.get("/usage/lines")
def usage_lines(operations: Asked, from_us: Moment = 0, to_us: Moment | None = None) -> CostLinesView:
    """Return tokens and cost by day, service, tenant, key and model: lines that begin within a stretch of time."""
    now_us = operations.clock.now_us()
    with operations.control.changed:
        lines = operations.control.ledger.usage(now_us)
    return lines_view(lines, now_us, from_us, to_us)


@metrics_router.get("/metrics", response_class=Response)
def metrics(operations: Asked, services: Services) -> PlainTextResponse:
    """Return metrics for Prometheus."""
    now_us, found, limits = operations.clock.now_us(), services.services(), services.tenants.tenants()
    with operations.control.changed:
        ledger = operations.control.ledger
        jobs, totals, lines = ledger.cost("service", now_us), ledger.totals(now_us), ledger.usage(now_us)
    measures = Measures(
        jobs=jobs, totals=totals, lines=lines, services=found, tenants=limits, cluster=cluster_counts(operations)
    )
    return PlainTextResponse(metrics_text(measures), media_type=CONTENT_TYPE)
