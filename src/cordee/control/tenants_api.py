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
from cordee.control.api_route import Paged, user_router
from cordee.control.budgets import AskedBudgets
from cordee.control.cluster_counts import cluster_counts
from cordee.control.dependencies import Asked, By
from cordee.control.metrics import CONTENT_TYPE, Measures, metrics_text
from cordee.control.roles import Action
from cordee.control.services.routes import Services, seen_services
from cordee.control.tenants import Tenants
from cordee.control.usage import lines_view, usage_view
from cordee.reports import COUNT_MAX

_MONEY = "change tenants and keys: they spend this cluster's money"

router = user_router("/v1")
metrics_router = user_router("")


def _tenants(services: Services) -> Tenants:
    return services.tenants


AskedTenants = Annotated[Tenants, Depends(_tenants)]
TenantName = Annotated[str, Path(pattern=TENANT)]
Moment = Annotated[int, Query(ge=0, le=COUNT_MAX)]


@router.post("/keys", status_code=201)
def create_key(request: KeyRequest, tenants: AskedTenants, by: By) -> NewKeyView:
    """Make a key of a tenant; this answer alone has its secret."""
    by.check(Action.ADMINISTER, _MONEY)
    return tenants.create_key(request, by.name)


@router.get("/keys")
def keys(tenants: AskedTenants, by: By, page: Paged) -> list[KeyView]:
    """Return all keys without their secrets, oldest first, revoked ones as well."""
    by.check(Action.SEE, "see the keys of all tenants")
    return page.of(tenants.keys(), lambda key: key.id)


@router.delete("/keys/{key}")
def revoke_key(key: str, tenants: AskedTenants, by: By) -> KeyView:
    """Make a key void; gateways refuse it within seconds."""
    by.check(Action.ADMINISTER, _MONEY)
    return tenants.revoke_key(key, by.name)


@router.get("/tenants")
def all_tenants(tenants: AskedTenants, by: By, page: Paged) -> list[TenantView]:
    """Return all tenants by name, with what each has spent."""
    by.check(Action.SEE, "see all tenants")
    return page.of(tenants.tenants(), lambda tenant: tenant.name)


@router.put("/tenants/{name}")
def set_tenant(name: TenantName, rules: TenantRules, tenants: AskedTenants, by: By) -> TenantView:
    """Add a tenant, or replace its rules."""
    by.check(Action.ADMINISTER, _MONEY)
    return tenants.set_tenant(name, rules, by.name)


@router.get("/usage")
def usage(operations: Asked, asks: By, by: UsageBy = "service") -> UsageView:
    """Return tokens and cost of services, beside the cost of all other jobs."""
    asks.check(Action.SEE, "see the usage of all services")
    now_us = operations.clock.now_us()
    with operations.control.changed:
        return usage_view(operations.control.ledger, by, now_us)


@router.get("/usage/lines")
def usage_lines(operations: Asked, by: By, from_us: Moment = 0, to_us: Moment | None = None) -> CostLinesView:
    """Return tokens and cost by day, service, tenant, key and model: lines that begin within a stretch of time."""
    by.check(Action.SEE, "see the usage of all services")
    now_us = operations.clock.now_us()
    with operations.control.changed:
        lines = operations.control.ledger.usage(now_us)
    return lines_view(lines, now_us, from_us, to_us)


@metrics_router.get("/metrics", response_class=Response)
def metrics(operations: Asked, services: Services, budgets: AskedBudgets, by: By) -> PlainTextResponse:
    """Return metrics for Prometheus; services and tenants are named to those who may see them."""
    now_us, found = operations.clock.now_us(), seen_services(services, by)
    limits = services.tenants.tenants() if by.sees_all else []
    with operations.control.changed:
        accounts, lines = operations.control.ledger.at(now_us), operations.control.ledger.usage(now_us)
    jobs, totals = accounts.cost("service"), accounts.totals()
    if not by.sees_all:
        names = {each.name for each in found}
        lines = [line for line in lines if line.key.service in names]
        jobs = tuple(row for row in jobs if row.key in names)
    measures = Measures(
        jobs=jobs,
        totals=totals,
        lines=lines,
        services=found,
        tenants=limits,
        cluster=cluster_counts(operations),
        ticks=operations.ticks,
        budgets=budgets.budgets(by),
    )
    return PlainTextResponse(metrics_text(measures), media_type=CONTENT_TYPE)
