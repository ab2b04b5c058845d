"""The HTTP face of services: what people declare, what gateways ask for and report."""

import asyncio
from typing import Annotated

from fastapi import Depends, Path, Query, Request

from cordee.answers.services import (
    GatewayAcknowledged,
    GatewayReport,
    RoutesView,
    ScaleOrder,
    ServiceSubmission,
    ServiceView,
)
from cordee.control.dependencies import Owner, refuse_exposed_secrets, user_router
from cordee.control.services.operations import ServiceOperations
from cordee.reports import COUNT_MAX

WAIT_S_MAX, _LOOK_S = 60.0, 0.05

router = user_router("/v1")


async def _services(request: Request) -> ServiceOperations:
    services = request.app.state.services
    assert isinstance(services, ServiceOperations), "create_app put it there"
    return services


Services = Annotated[ServiceOperations, Depends(_services)]
GatewayName = Annotated[str, Path(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]


@router.post("/services", status_code=201)
def declare(submission: ServiceSubmission, services: Services, owner: Owner, request: Request) -> ServiceView:
    """Create a service or update it, or refuse it and change nothing."""
    refuse_exposed_secrets(request, submission.secrets)
    return services.declare(submission, owner)


@router.get("/services")
def list_services(services: Services) -> list[ServiceView]:
    """Return all services, those that have ended last."""
    return services.services()


@router.get("/services/{name}")
def service(name: str, services: Services) -> ServiceView:
    """Return one service with its replicas."""
    return services.service(name)


@router.post("/services/{name}/scale")
def scale(name: str, order: ScaleOrder, services: Services, owner: Owner) -> ServiceView:
    """Set the number of replicas, or their bounds."""
    return services.scale(name, order, owner)


@router.delete("/services/{name}")
def end(name: str, services: Services, owner: Owner) -> ServiceView:
    """End a service: its replicas answer their open requests and leave."""
    return services.end(name, owner)


@router.get("/gateway/routes")
async def routes(
    services: Services,
    after: Annotated[int, Query(ge=0, le=COUNT_MAX)] = 0,
    wait_s: Annotated[float, Query(ge=0, le=WAIT_S_MAX)] = 0.0,
) -> RoutesView:
    """Return what a gateway needs to know: at once if its version is above `after`, else when it changes."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while services.version <= after and loop.time() < deadline and not services.operations.closing:
        await asyncio.sleep(_LOOK_S)
    return await asyncio.to_thread(services.routes)


@router.post("/gateways/{name}/reports")
def report(name: GatewayName, report: GatewayReport, services: Services, owner: Owner) -> GatewayAcknowledged:
    """Take a gateway's status, and its usage lines exactly once; usage from the operator's gateways only."""
    services.check_report(report, owner)
    return services.take_report(name, report)
