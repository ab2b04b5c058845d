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
from cordee.control.access import Access, queue_of
from cordee.control.api_route import Paged, user_router
from cordee.control.dependencies import By, refuse_exposed_secrets
from cordee.control.roles import Action
from cordee.control.services.operations import ServiceOperations
from cordee.errors import ForbiddenError, NotFoundError
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
def declare(submission: ServiceSubmission, services: Services, by: By, request: Request) -> ServiceView:
    """Create a service or update it, or refuse it and change nothing."""
    refuse_exposed_secrets(request, submission.secrets)
    by.check_submits(submission.spec)
    _check_name(str(submission.spec.get("name") or ""), services, by)
    return by.view(services.declare(submission, by.name))


@router.get("/services")
def list_services(services: Services, by: By, page: Paged) -> list[ServiceView]:
    """Return all services that the token may see, those that have ended last."""
    return by.views(page.of(seen_services(services, by), lambda service: service.name))


@router.get("/services/{name}")
def service(name: str, services: Services, by: By) -> ServiceView:
    """Return one service with its replicas."""
    return by.view(services.service(_seen(name, services, by)))


@router.post("/services/{name}/scale")
def scale(name: str, order: ScaleOrder, services: Services, by: By) -> ServiceView:
    """Set the number of replicas, or their bounds."""
    return by.view(services.scale(_changed(name, services, by), order, by.name))


@router.delete("/services/{name}")
def end(name: str, services: Services, by: By) -> ServiceView:
    """End a service: its replicas answer their open requests and leave."""
    return by.view(services.end(_changed(name, services, by), by.name))


def seen_services(services: ServiceOperations, by: Access) -> list[ServiceView]:
    """Return the services that may be seen, those that have ended last."""
    return [each for each in services.services() if by.may(Action.SEE, each.owner, queue_of(each.spec))]


def _seen(name: str, services: ServiceOperations, by: Access) -> str:
    """Return the name of a service that may be seen; one that may not is as if it were not there."""
    found = services.declared(name)
    if found is not None and not by.sees_spec(found.owner, found.spec):
        raise NotFoundError(f"there is no service {name!r}", hint="`cordee serve list` shows them")
    return name


def _changed(name: str, services: ServiceOperations, by: Access) -> str:
    """Return the name of a service that may be changed.

    Raises:
        NotFoundError: there is none that may be seen.
        ForbiddenError: it is another user's.
    """
    found = services.declared(_seen(name, services, by))
    if found is not None:
        by.check_changes(name, found.owner, found.spec)
    return name


def _check_name(name: str, services: ServiceOperations, by: Access) -> None:
    """Check that a service of this name is new, has ended, or may be changed.

    Raises:
        ForbiddenError: it is another user's.
    """
    found = services.declared(name)
    if found is None or found.ended:
        return
    if not by.sees_spec(found.owner, found.spec):
        raise ForbiddenError(f"the name {name} is taken by another service", hint="choose another name")
    by.check_changes(name, found.owner, found.spec)


@router.get("/gateway/routes")
async def routes(
    services: Services,
    by: By,
    after: Annotated[int, Query(ge=0, le=COUNT_MAX)] = 0,
    wait_s: Annotated[float, Query(ge=0, le=WAIT_S_MAX)] = 0.0,
) -> RoutesView:
    """Return what a gateway needs to know: at once if its version is above `after`, else when it changes."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while services.version <= after and loop.time() < deadline and not services.operations.closing:
        await asyncio.sleep(_LOOK_S)
    found = await asyncio.to_thread(services.routes)
    return found if by.sees_all else await asyncio.to_thread(_seen_routes, found, services, by)


def _seen_routes(found: RoutesView, services: ServiceOperations, by: Access) -> RoutesView:
    names = {each.name for each in seen_services(services, by)}
    routes = [each for each in found.services if each.name in names]
    prices = {name: each for name, each in found.prices.items() if name in names}
    return found.model_copy(update={"services": routes, "prices": prices})


@router.post("/gateways/{name}/reports")
def report(name: GatewayName, report: GatewayReport, services: Services, by: By) -> GatewayAcknowledged:
    """Take a gateway's status, and its usage lines exactly once; usage from the operator's gateways only."""
    if not by.operates:
        services.check_report(report, by.name)
    return services.take_report(name, report)
